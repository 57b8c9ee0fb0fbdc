"""The rules of a holder, one by one, on a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest

from kvsp.protocol import container, limits, registry
from kvsp.protocol.descriptor import Descriptor
from services.holder.allocator import ALIGN
from services.holder.blocks import Block
from services.holder.state import HolderState, Publish, Settled, Withdraw
from tests.services.holder_states import (
    COMPAT,
    OTHER,
    SCOPE,
    TTL,
    A,
    B,
    digested,
    identity,
    kinds,
    name,
    put,
    refused,
    state_of,
)  # fmt: skip

# --- reading ---


@pytest.mark.spec("R-150", "R-151", "U-22")
def test_open_finds_a_block_and_the_slice_of_a_layer_range() -> None:
    state = state_of(4)
    block = put(state, 1)
    whole = state.open(1, A, name(1), 0, codec=1)
    assert whole.offset == block.offset + whole.header.header_octets
    last = state.open(1, A, name(1), 0, layers=(1, 1))
    assert last.header.layers == (1, 1)
    assert last.offset == whole.offset + sum(block.digested.header.sections[0])
    refused(registry.NOT_FOUND, state.open, 1, A, name(2), 0)
    refused(registry.NOT_FOUND, state.open, 1, A, name(1, scope=OTHER), 0)
    refused(registry.NOT_FOUND, state.open, 1, A, name(1), 0, codec=2)
    refused(registry.LAYERS_UNAVAILABLE, state.open, 1, A, name(1), 0, layers=(1, 2))


def test_a_pin_is_its_owners_and_its_streams() -> None:
    state = state_of(4)
    put(state, 1)
    pin = state.open(1, A, name(1), 0)
    assert state.pin(pin.id, A.uri) is pin
    refused(registry.NOT_FOUND, state.pin, pin.id, B.uri)
    refused(registry.NOT_FOUND, state.reservation, pin.id, A.uri)
    state.close(2, pin.id)
    assert state.pin(pin.id, A.uri) is pin
    state.close(1, pin.id)
    refused(registry.NOT_FOUND, state.pin, pin.id, A.uri)
    state.close(1, pin.id)


# --- writing ---


@pytest.mark.spec("R-157", "R-159", "U-21")
def test_the_second_writer_hears_the_outcome_of_the_first() -> None:
    state = state_of(4)
    made = digested(1)
    octets = made.header.total_octets
    first = state.reserve(1, A, name(1), octets, 0)
    assert first is not None
    assert state.reserve(2, B, name(1), octets, 0) is None
    state.commit(first, made)
    assert kinds(state) == [Settled, Publish]
    refused(registry.PRECONDITION_FAILED, state.reserve, 2, B, name(1), octets, 0)
    refused(registry.PRECONDITION_FAILED, state.check_reserve, name(1), 0)


@pytest.mark.spec("R-159")
def test_when_the_first_writer_gives_up_the_second_may_write() -> None:
    state = state_of(4)
    first = state.reserve(1, A, name(1), 100, 0)
    assert first is not None
    assert state.abort(2, first.id) is None  # another's stream
    assert state.abort(1, first.id) is first
    assert kinds(state) == [Settled]
    assert state.reserve(2, B, name(1), 100, 0) is not None


@pytest.mark.spec("U-10", "R-214")
def test_bounds_come_before_room() -> None:
    state = state_of(4)
    refused(registry.CONTENT_TOO_LARGE, state.reserve, 1, A, name(1), 4 * ALIGN + 1, 0)
    big = HolderState(limits.BLOCK_OCTETS_MAX * 2, publish_ttl_ms=TTL)
    refused(registry.CONTENT_TOO_LARGE, big.reserve, 1, A, name(1), limits.BLOCK_OCTETS_MAX + 1, 0)


@pytest.mark.spec("U-25")
def test_a_container_must_be_whole_and_fit_its_descriptor() -> None:
    digest = "sha-256:" + "00" * 32
    descriptor = Descriptor(
        model="m", model_digest=digest, tokenizer_digest=digest, layers=2, kv_heads=1, head_dim=8,
        kv_dtype="bf16", positional="rope;theta=10000", block_tokens=16, layout="kvsp-layout-1",
    )  # fmt: skip
    state = state_of(8, descriptors={COMPAT: descriptor})
    section = descriptor.section_octets
    sections = ((section, section),) * 2

    def attempt(compat: bytes = COMPAT, length: int | None = None, **members: Any) -> Block:
        made = digested(1, **({"sections": sections} | members))
        reservation = state.reserve(1, A, name(1, compat=compat), length or made.header.total_octets, 0)
        assert reservation is not None
        try:
            return state.commit(reservation, made)
        finally:
            state.abort(1, reservation.id)

    refused(registry.INCOMPATIBLE, attempt, token_count=15)
    refused(registry.INCOMPATIBLE, attempt, sections=sections[:1])
    refused(registry.INCOMPATIBLE, attempt, sections=((section, section), (section, section - 1)))
    refused(registry.INCOMPATIBLE, attempt, compat=b"\x22" * 32, first_layer=1)
    refused(registry.BAD_REQUEST, attempt, length=4 * ALIGN)
    assert attempt(compat=b"\x22" * 32, token_count=15).name.compat_id == b"\x22" * 32
    assert attempt().octets == container.FIXED_OCTETS + 32 + 4 * section
    strict = state_of(8, descriptors={COMPAT: descriptor}, require_known_compat=True)
    refused(registry.INCOMPATIBLE, strict.reserve, 1, A, name(1, compat=b"\x22" * 32), 100, 0)


def test_a_writer_past_its_deadline_keeps_its_extent_but_stores_nothing() -> None:
    state = state_of(2)
    made = digested(1)
    reservation = state.reserve(1, A, name(1), made.header.total_octets, 0, shared=True)
    assert reservation is not None
    assert reservation.deadline_ms == limits.transfer_ms(made.header.total_octets)
    assert state.tick(reservation.deadline_ms) == []
    assert kinds(state) == [Settled]
    assert state.store.used_octets == ALIGN  # its writer may be writing still
    refused(registry.NOT_FOUND, state.commit, reservation, made)
    refused(registry.NOT_FOUND, state.reservation, reservation.id, A.uri)
    put(state, 1, now=reservation.deadline_ms, stream=2)
    state.end_stream(1)
    assert state.store.used_octets == ALIGN
    assert kinds(state) == [Settled, Publish]


@pytest.mark.spec("D4")
def test_room_that_only_the_holder_writes_to_is_free_at_the_deadline() -> None:
    state = state_of(2)
    reservation = state.reserve(1, A, name(1), 2 * ALIGN, 0)
    assert reservation is not None
    assert state.tick(reservation.deadline_ms - 1) == []
    assert state.tick(reservation.deadline_ms) == [reservation]
    assert state.store.used_octets == 0
    refused(registry.NOT_FOUND, state.commit, reservation, digested(1, 2))
    assert state.end_stream(1) == []


@pytest.mark.spec("D4")
def test_a_slow_transfer_of_the_largest_block_has_a_quarter_of_an_hour_and_a_small_one_seconds() -> None:
    assert 900_000 <= limits.transfer_ms(limits.BLOCK_OCTETS_MAX) == limits.PIN_DEADLINE_MS < 1_000_000
    assert limits.transfer_ms(2 << 20) < 20_000
    state = state_of(4)
    put(state, 1, pages=2)
    whole, part = state.open(1, A, name(1), 7), state.open(1, A, name(1), 7, layers=(0, 0))
    assert whole.deadline_ms == 7 + limits.transfer_ms(2 * ALIGN - 1)
    assert part.deadline_ms < whole.deadline_ms


@pytest.mark.spec("D4", "D13", "R-214")
def test_room_has_a_quota_and_nothing_is_evicted_for_what_is_refused() -> None:
    state = state_of(8)
    blocks = [put(state, i, pages=2) for i in range(4)]
    small = identity("spiffe://t/small", reserved_octets=3 * ALIGN)
    error = refused(registry.TOO_MANY_REQUESTS, state.reserve, 1, small, name(5), 3 * ALIGN + 1, 0)
    assert error.retry_after_s == 1
    assert set(state.store.all()) == set(blocks)
    first = state.reserve(1, small, name(5), 2 * ALIGN, 0)
    assert first is not None
    refused(registry.TOO_MANY_REQUESTS, state.reserve, 2, small, name(6), ALIGN + 1, 0)
    assert state.reserve(2, B, name(6), 2 * ALIGN, 0) is not None  # another client is unaffected
    state.abort(1, first.id)
    made = digested(7, 3)
    whole = state.reserve(1, small, name(7), made.header.total_octets, 0)
    assert whole is not None
    state.commit(whole, made)
    assert state.reserve(1, small, name(8), 3 * ALIGN, 0) is not None


@pytest.mark.spec("D13", "R-214")
def test_readers_have_a_quota_that_counts_a_block_once() -> None:
    state = state_of(8)
    for i in range(2):
        put(state, i, pages=2)
    small = identity("spiffe://t/small", pinned_octets=3 * ALIGN)
    pins = [state.open(1, small, name(0), 0) for _ in range(3)]
    assert refused(registry.TOO_MANY_REQUESTS, state.open, 1, small, name(1), 0).retry_after_s == 1
    state.open(1, B, name(1), 0)
    for pin in pins:
        state.close(1, pin.id)
    assert state.open(1, small, name(1), 0) is not None
    state.tick(limits.PIN_DEADLINE_MS)
    assert state.open(1, small, name(0), 0) is not None


# --- eviction ---


@pytest.mark.spec("R-087", "U-32")
def test_what_is_evicted_are_neighbours_and_nothing_when_none_would_do() -> None:
    """Two small leases in the way must not cost the whole arena its blocks."""
    state = state_of(12)
    blocks = [put(state, i) for i in range(12)]
    assert [block.offset for block in blocks] == [i * ALIGN for i in range(12)]
    state.lease(A, "l1", [name(3).block_key, name(8).block_key], 1000, 0)
    state.instructions()
    error = refused(registry.UNAVAILABLE, state.reserve, 1, A, name(20), 5 * ALIGN, 0)
    assert error.retry_after_s == 1
    assert len(state.store) == 12
    assert state.instructions() == []
    state.close(1, state.open(1, A, name(1), 0).id)  # the coldest run of four is the middle one
    assert state.reserve(1, A, name(20), 4 * ALIGN, 0) is not None
    assert [each.block for each in state.instructions() if isinstance(each, Withdraw)] == blocks[4:8]
    assert state.evictions == 4


@pytest.mark.spec("R-087")
def test_no_more_is_evicted_than_makes_room() -> None:
    state = state_of(6)
    blocks = [put(state, i) for i in range(6)]
    for i in (0, 2, 4, 5, 1, 3):  # from the coldest
        state.close(1, state.open(1, A, name(i), 0).id)
    state.instructions()
    assert state.reserve(1, A, name(20), 2 * ALIGN, 0) is not None
    gone = [each.block for each in state.instructions() if isinstance(each, Withdraw)]
    assert gone == [blocks[4], blocks[5]]  # 0 and 2 are colder, but their neighbours are not


@pytest.mark.spec("R-086")
def test_eviction_takes_the_least_recently_used_and_withdraws_first() -> None:
    state = state_of(3)
    blocks = [put(state, i) for i in range(3)]
    state.close(1, state.open(1, A, name(0), 0).id)
    state.instructions()
    put(state, 3)
    assert state.instructions()[0] == Withdraw(blocks[1])
    refused(registry.NOT_FOUND, state.open, 1, A, name(1), 0)
    assert state.evictions == 1


@pytest.mark.spec("R-087", "R-141", "U-32")
def test_leased_and_pinned_blocks_stay_and_the_refusal_says_when_to_return() -> None:
    state = state_of(3)
    for i in range(3):
        put(state, i)
    state.lease(A, "l1", [name(0).block_key], 10_500, 0)
    state.lease(B, "l2", [name(1).block_key], 10_500, 0)
    pin = state.open(1, A, name(2), 0)
    error = refused(registry.UNAVAILABLE, state.reserve, 1, A, name(3), 100, 0)
    assert error.retry_after_s == 11
    state.close(1, pin.id)
    put(state, 3)
    error = refused(registry.UNAVAILABLE, state.reserve, 1, A, name(4), 2 * ALIGN, 0)
    assert name(3) in state.store  # nothing is evicted that would not help
    put(state, 4, pages=2, now=10_500)  # leases lapse at their expiry, ticked or not
    assert name(1) not in state.store
    assert name(3) not in state.store


@pytest.mark.spec("R-143", "D11")
def test_a_purged_block_goes_at_once_but_its_extent_waits_for_readers() -> None:
    state = state_of(2)
    block = put(state, 0)
    state.lease(A, "l1", [name(0).block_key], 1000, 0)
    pin = state.open(1, A, name(0), 0)
    state.instructions()
    state.drop(block)
    assert state.instructions() == [Withdraw(block)]
    assert state.store.used_octets == ALIGN
    refused(registry.NOT_FOUND, state.open, 1, A, name(0), 0)
    assert state.leases.octets(A.uri) == 0
    state.drop(block)
    state.close(1, pin.id)
    assert state.instructions() == []
    assert state.store.used_octets == 0
    state.release_lease(A, "l1", 0)


# --- leases ---


@pytest.mark.spec("R-142", "U-17", "D13")
def test_quotas_are_per_identity_and_count_a_block_once() -> None:
    state = state_of(8)
    octets = [put(state, i).extent_octets for i in range(3)]
    keys = [name(i).block_key for i in range(3)]
    small = identity("spiffe://t/small", leased_octets=octets[0] + octets[1], leases=2, lease_ttl_ms=5000)
    state.lease(small, "l1", keys[:2], 4000, 0)
    error = refused(registry.LEASE_QUOTA, state.lease, small, "l2", keys[1:], 5000, 1500)
    assert error.retry_after_s == 3
    state.lease(small, "l2", keys[:2], 5000, 1500)
    assert state.leases.octets(small.uri) == octets[0] + octets[1]
    refused(registry.LEASE_QUOTA, state.lease, small, "l3", keys[:1], 1, 1500)
    refused(registry.LEASE_QUOTA, state.leases.renew, "l1", small, 5001, 1500)
    assert refused(registry.LEASE_QUOTA, state.lease, small, "l3", keys[:1], 5001, 1500).retry_after_s is None
    state.lease(B, "b1", keys, 5000, 1500)  # another client is unaffected
    state.release_lease(small, "l1", 1500)
    state.tick(6500)
    assert state.leases.octets(small.uri) == 0
    assert len(state.leases) == 0


@pytest.mark.spec("R-142", "U-32")
def test_leases_count_whole_extents_and_leave_half_of_the_arena() -> None:
    state = state_of(8)
    for i in range(6):
        put(state, i)
    keys = [name(i).block_key for i in range(6)]
    refused(registry.LEASE_QUOTA, state.lease, A, "l1", keys[:5], 1000, 0)
    state.lease(A, "l1", keys[:4], 1000, 0)
    assert state.leases.octets(A.uri) == 4 * ALIGN
    refused(
        registry.LEASE_QUOTA,
        state.lease,
        identity("spiffe://t/c", leased_octets=ALIGN - 1),
        "l2",
        keys[:1],
        1000,
        0,
    )
    state.lease(B, "l3", keys[4:], 1000, 0)


@pytest.mark.spec("U-16", "U-15")
def test_a_lease_is_all_or_nothing_and_names_what_is_missing() -> None:
    state = state_of(8)
    put(state, 0)
    put(state, 1, scope=OTHER)
    keys = [name(i).block_key for i in range(3)]
    error = refused(registry.NOT_FOUND, state.lease, A, "l1", [*keys, keys[2]], 1000, 0)
    assert error.extensions == {"block_keys": [keys[1].hex(), keys[2].hex()]}  # another scope's is as absent
    assert len(state.leases) == 0
    both = identity("spiffe://t/both", (SCOPE, OTHER))
    mislabelled = put(state, 0, scope=OTHER)
    assert len(state.lease(both, "l1", keys[:1], 1000, 0).blocks) == 2
    assert state.lease(both, "l2", keys[:1], 1000, 0, scope_id=OTHER).blocks == [mislabelled]
    assert state.lease(both, "l3", [keys[0], keys[0]], 1000, 0, compat_id=COMPAT, scope_id=OTHER).blocks == [
        mislabelled
    ]
    refused(registry.NOT_FOUND, state.lease, both, "l4", keys[:1], 1000, 0, compat_id=b"\x22" * 32)


@pytest.mark.spec("R-140", "U-17", "D8")
def test_unknown_expired_and_foreign_leases_are_one_answer() -> None:
    state = state_of(8)
    put(state, 0)
    state.lease(A, "l1", [name(0).block_key], 1000, 0)
    foreign = refused(registry.NOT_FOUND, state.leases.renew, "l1", B, 1000, 0)
    unknown = refused(registry.NOT_FOUND, state.leases.renew, "l2", A, 1000, 0)
    assert foreign.to_problem() == unknown.to_problem()
    refused(registry.NOT_FOUND, state.release_lease, B, "l1", 0)
    assert state.leases.renew("l1", A, 500, 800).expires_ms == 1300  # counted from receipt
    refused(registry.NOT_FOUND, state.leases.renew, "l1", A, 1000, 1300)
    refused(registry.NOT_FOUND, state.release_lease, A, "l1", 1300)


# --- publication ---


@pytest.mark.spec("R-085", "R-218", "R-154", "U-31")
def test_records_are_refreshed_at_a_third_of_the_granted_ttl() -> None:
    state = state_of(8)
    block = put(state, 0)
    assert state.instructions()[-1] == Publish(block)
    assert state.max_age_s(block, 0) == TTL // 1000
    state.published(block, 9_000, 1_000)
    assert state.max_age_s(block, 5_001) == 4
    state.tick(3_999)
    assert state.instructions() == []
    state.tick(4_000)
    assert state.instructions() == [Publish(block)]
    state.refused(block, 4_000)
    state.tick(4_000 + TTL // 3)
    assert state.instructions() == [Publish(block)]
    assert state.max_age_s(block, 20_000) == 0


@pytest.mark.spec("U-15", "U-13")
def test_of_blocks_that_share_a_key_the_first_is_listed_and_then_the_next() -> None:
    state = state_of(8)
    first = put(state, 0)
    second = put(state, 0, scope=OTHER)
    third = put(state, 0, compat=b"\x22" * 32)
    assert [each for each in state.instructions() if isinstance(each, Publish)] == [Publish(first)]
    assert state.store.listed(name(0).block_key) is first
    state.drop(second)
    assert state.instructions() == []  # it was not listed
    state.drop(first)
    assert state.instructions() == [Withdraw(first)]
    assert state.store.listed(name(0).block_key) is third


@pytest.mark.spec("R-086")
def test_what_drains_lists_nothing_but_can_be_read() -> None:
    state = state_of(8)
    block = put(state, 0)
    state.published(block, 9_000, 0)
    writing = state.reserve(1, A, name(1), digested(1).header.total_octets, 0)
    assert writing is not None
    state.instructions()
    state.drain()
    assert state.instructions() == [Withdraw(block)]
    late = state.commit(writing, digested(1))
    assert kinds(state) == [Settled]
    for each in (block, late):
        state.open(1, A, each.name, 0)
        state.published(each, 9_000, 0)
    state.tick(10_000)
    state.drop(block)
    assert state.instructions() == []


def test_a_block_that_is_gone_is_not_refreshed() -> None:
    state = state_of(8)
    block = put(state, 0)
    state.published(block, 9_000, 0)
    state.drop(block)
    state.published(block, 9_000, 0)
    state.refused(block, 0)
    state.instructions()
    state.tick(10 * TTL)
    assert state.instructions() == []
