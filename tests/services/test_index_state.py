"""The index's rules on a virtual clock, against a dumb model."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import UNSET, structs

from kvsp.protocol import jsonio, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import LookupReply, ReplicaRecord, Residency, TargetEstimate
from services.index.state import BEHALF_BURST, BEHALF_PER_S, IndexState, render_targets
from tests.services.index_records import (
    COMPAT,
    H1,
    H2,
    NO_SCOPE,
    OTHER_COMPAT,
    OTHER_SCOPE,
    SCOPE,
    key,
    record,
    status,
)

II7 = "https://ii7.example/kvsp/"
MANY = 10**6


def lookup(
    state: IndexState, keys: Sequence[int], now_ms: int, scope: str = SCOPE, compat: str = COMPAT
) -> LookupReply:
    found = state.lookup(bytes.fromhex(scope), bytes.fromhex(compat), list(map(key, keys)), now_ms)
    reply = jsonio.decode(b"".join([*found.pieces, b"}"]), LookupReply)
    assert reply.matched == found.matched
    return reply


def refusal(call: Any, *arguments: Any) -> KvspError:
    with pytest.raises(KvspError) as caught:
        call(*arguments)
    return caught.value


@pytest.fixture
def state() -> IndexState:
    return IndexState(replica_ttl_ms_max=600_000, block_tokens={bytes.fromhex(COMPAT): 16})


class TestPublish:
    @pytest.mark.spec("R-080", "R-085", "U-12")
    def test_first_is_created_then_refreshed(self, state: IndexState) -> None:
        assert state.publish(record(0), MANY, 0) == (True, 600_000)
        assert state.publish(record(0), MANY, 10) == (False, 600_000)
        assert [len(each) for each in lookup(state, [0], 10).replicas] == [1]

    @pytest.mark.spec("R-083", "U-11")
    def test_expires_exactly_ttl_after_receipt(self, state: IndexState) -> None:
        state.publish(record(0, ttl_ms=200), MANY, 1000)
        assert lookup(state, [0], 1000).replicas[0][0].ttl_ms == 200
        assert lookup(state, [0], 1199).replicas[0][0].ttl_ms == 1
        assert lookup(state, [0], 1200).matched == 0
        assert len(state.table) == 0

    @pytest.mark.spec("R-085")
    def test_a_refresh_restarts_the_ttl_longer_or_shorter(self, state: IndexState) -> None:
        state.publish(record(0, ttl_ms=200), MANY, 0)
        state.publish(record(0, ttl_ms=200), MANY, 150)
        assert lookup(state, [0], 349).matched == 1
        state.publish(record(0, ttl_ms=10), MANY, 349)
        assert lookup(state, [0], 359).matched == 0

    @pytest.mark.spec("R-084")
    def test_ttl_is_capped(self, state: IndexState) -> None:
        assert state.publish(record(0, ttl_ms=10**12), MANY, 0) == (True, 600_000)
        assert lookup(state, [0], 599_999).replicas[0][0].ttl_ms == 1
        assert lookup(state, [0], 600_000).matched == 0

    @pytest.mark.spec("U-13", "R-017")
    def test_a_key_keeps_its_scope_and_compat(self, state: IndexState) -> None:
        state.publish(record(0), MANY, 0)
        for changes, problem in (
            ({"compat_id": OTHER_COMPAT}, registry.INCOMPATIBLE),
            ({"scope_id": OTHER_SCOPE}, registry.CONFLICT),
            ({"scope_id": OTHER_SCOPE, "compat_id": OTHER_COMPAT}, registry.CONFLICT),
        ):
            error = refusal(state.publish, record(0, **changes), MANY, 1)
            assert (error.problem, error.detail) == (problem, "")
        assert lookup(state, [0], 1).replicas == [[record(0, ttl_ms=599_999)]]
        state.publish(record(0, holder=H2, compat_id=OTHER_COMPAT), MANY, 1)  # another holder, another record

    @pytest.mark.spec("U-13")
    def test_an_expired_record_binds_nothing(self, state: IndexState) -> None:
        state.publish(record(0, ttl_ms=5), MANY, 0)
        assert state.publish(record(0, scope_id=OTHER_SCOPE), MANY, 5) == (True, 600_000)

    @pytest.mark.spec("U-24", "R-036")
    def test_layer_digests_must_make_the_digest(self, state: IndexState) -> None:
        good = record(0)
        wrong = structs.replace(good, layer_digests=record(1).layer_digests)
        assert refusal(state.publish, wrong, MANY, 0).problem is registry.DIGEST_MISMATCH
        assert len(state.table) == 0
        state.publish(good, MANY, 0)
        assert refusal(state.publish, wrong, MANY, 1).problem is registry.DIGEST_MISMATCH
        assert lookup(state, [0], 0).replicas == [[good]]
        state.publish(structs.replace(good, layer_digests=UNSET), MANY, 0)

    @pytest.mark.spec("U-13", "R-044", "R-092")
    def test_a_refresh_replaces_and_holders_may_differ(self, state: IndexState) -> None:
        split = [Residency("device", (0, 1)), Residency("host", (2, 3), 400_000)]
        state.publish(record(0), MANY, 0)
        state.publish(record(0, seed=9, residency=split), MANY, 0)
        state.publish(record(0, holder=H2, seed=5), MANY, 0)
        assert lookup(state, [0], 0).replicas == [
            [record(0, seed=9, residency=split), record(0, holder=H2, seed=5)]
        ]

    @pytest.mark.spec("D13", "R-214")
    def test_records_are_capped_per_holder(self, state: IndexState) -> None:
        for i in range(3):
            state.publish(record(i, ttl_ms=100 + i), 3, 0)
        error = refusal(state.publish, record(3), 3, 0)
        assert error.problem is registry.TOO_MANY_REQUESTS
        assert error.retry_after_s
        assert state.publish(record(1), 3, 0)[0] is False, "a refresh is no new record"
        assert state.publish(record(3, holder=H2), 3, 0)[0]
        assert state.publish(record(3), 3, 100)[0], "what has expired does not count"

    @pytest.mark.spec("U-13", "D8")
    def test_conflicts_come_before_digest_before_quota(self, state: IndexState) -> None:
        state.publish(record(0), 1, 0)
        wrong = structs.replace(record(0, compat_id=OTHER_COMPAT), layer_digests=record(1).layer_digests)
        assert refusal(state.publish, wrong, 1, 0).problem is registry.INCOMPATIBLE
        wrong = structs.replace(record(1), layer_digests=record(0).layer_digests)
        assert refusal(state.publish, wrong, 1, 0).problem is registry.DIGEST_MISMATCH


class TestWithdraw:
    @pytest.mark.spec("R-086", "U-12")
    def test_withdraw_then_unknown(self, state: IndexState) -> None:
        state.publish(record(0), MANY, 0)
        state.publish(record(0, holder=H2), MANY, 0)
        state.withdraw(party_id(H1), key(0), 0)
        assert lookup(state, [0], 0).replicas == [[record(0, holder=H2)]]
        for holder_id, block_key in ((party_id(H1), key(0)), (party_id(H2), key(1)), ("x" * 43, key(0))):
            error = refusal(state.withdraw, holder_id, block_key, 0)
            assert error.problem is registry.NOT_FOUND

    @pytest.mark.spec("U-47", "D1")
    def test_on_behalf_needs_the_records_scope_and_tells_nothing(self, state: IndexState) -> None:
        state.publish(record(0), MANY, 0)
        foreign = refusal(state.withdraw_on_behalf, "pc", {OTHER_SCOPE}, party_id(H1), key(0), 0)
        unknown = refusal(state.withdraw_on_behalf, "pc", {OTHER_SCOPE}, party_id(H1), key(1), 0)
        assert foreign.to_problem() == unknown.to_problem()
        assert foreign.problem is registry.NOT_FOUND
        assert state.withdraw_on_behalf("pc", {SCOPE}, party_id(H1), key(0), 0) == (H1, SCOPE)

    @pytest.mark.spec("U-47")
    def test_on_behalf_is_rate_limited_per_identity(self, state: IndexState) -> None:
        for i in range(BEHALF_BURST + 10):
            state.publish(record(i), MANY, 0)
        for i in range(BEHALF_BURST):
            state.withdraw_on_behalf("pc", {SCOPE}, party_id(H1), key(i), 0)
        error = refusal(state.withdraw_on_behalf, "pc", {SCOPE}, party_id(H1), key(BEHALF_BURST), 0)
        assert (error.problem, error.retry_after_s) == (registry.TOO_MANY_REQUESTS, 1)
        state.withdraw_on_behalf("other", {SCOPE}, party_id(H1), key(BEHALF_BURST), 0)
        later = 1000 // BEHALF_PER_S
        state.withdraw_on_behalf("pc", {SCOPE}, party_id(H1), key(BEHALF_BURST + 1), later)
        error = refusal(state.withdraw_on_behalf, "pc", {SCOPE}, party_id(H1), key(BEHALF_BURST + 2), later)
        assert error.problem is registry.TOO_MANY_REQUESTS
        state.withdraw(party_id(H1), key(BEHALF_BURST + 2), later)

    @pytest.mark.spec("D13")
    def test_publishing_and_withdrawing_forever_keeps_memory_level(self, state: IndexState) -> None:
        for now_ms in range(5000):
            state.publish(record(0), MANY, now_ms)
            state.withdraw(party_id(H1), key(0), now_ms)
        assert len(state.table._deadlines) < 2000


class TestLookup:
    @pytest.mark.spec("R-090", "R-091")
    def test_stops_at_the_first_gap(self, state: IndexState) -> None:
        for i in (0, 1, 3):
            state.publish(record(i), MANY, 0)
        assert lookup(state, [0, 1, 2, 3], 0).replicas == [[record(0)], [record(1)]]
        assert lookup(state, [2, 0], 0) == LookupReply(0, [])

    @pytest.mark.spec("U-10")
    def test_empty_and_duplicate_keys(self, state: IndexState) -> None:
        state.publish(record(0), MANY, 0)
        assert lookup(state, [], 0) == LookupReply(0, [])
        assert lookup(state, [0, 0], 0).replicas == [[record(0)], [record(0)]]

    @pytest.mark.spec("R-017", "R-024", "R-094")
    def test_scopes_and_descriptors_never_mix(self, state: IndexState) -> None:
        state.publish(record(0), MANY, 0)
        assert lookup(state, [0], 0, scope=OTHER_SCOPE).matched == 0
        assert lookup(state, [0], 0, scope=NO_SCOPE).matched == 0
        assert lookup(state, [0], 0, compat=OTHER_COMPAT).matched == 0

    @pytest.mark.spec("U-42")
    def test_a_partial_replica_counts(self, state: IndexState) -> None:
        state.publish(record(0, residency=[Residency("host", (2, 2))]), MANY, 0)
        assert lookup(state, [0], 0).matched == 1

    @pytest.mark.spec("R-045")
    def test_a_moqt_replica_returns_as_it_was(self, state: IndexState) -> None:
        moqt = record(0, holder="moqt://relay.example/", moqt_namespace="AWEBYgFjAWQBZQ")
        state.publish(moqt, MANY, 0)
        assert lookup(state, [0], 0).replicas == [[moqt]]

    @pytest.mark.spec("R-217", "D8")
    def test_tallies_are_kept_per_scope(self, state: IndexState) -> None:
        state.publish(record(0, ttl_ms=10), MANY, 0)
        state.publish(record(1), MANY, 0)
        state.publish(record(1), MANY, 0)
        state.publish(record(2, scope_id=OTHER_SCOPE), MANY, 0)
        lookup(state, [0, 1, 2], 0)
        lookup(state, [0, 1], 10)
        state.withdraw(party_id(H1), key(1), 10)
        tally = state.table.tallies[bytes.fromhex(SCOPE)]
        assert (tally.lookups, tally.looked_up_keys, tally.matched_keys) == (2, 5, 2)
        assert (tally.created, tally.refreshed, tally.withdrawn, tally.expired) == (2, 1, 1, 1)
        assert tally.replicas == 0
        assert state.table.tallies[bytes.fromhex(OTHER_SCOPE)].replicas == 1


class TestEstimates:
    def estimate(
        self, state: IndexState, keys: Sequence[int], now_ms: int, compat: str = COMPAT
    ) -> TargetEstimate:
        found = state.lookup(
            bytes.fromhex(SCOPE), bytes.fromhex(compat), list(map(key, keys)), now_ms, survey=True
        )
        return state.estimate(found, II7, now_ms)

    @pytest.mark.spec("R-093", "R-115", "R-116", "U-44")
    def test_the_texts_numbers(self, state: IndexState) -> None:
        state.publish(record(0), MANY, 0)
        state.observe(status(II7, {H1: (200_000, 12)}), 0)
        assert self.estimate(state, [0], 0) == TargetEstimate(II7, 96, 381)

    @pytest.mark.spec("R-093", "U-41", "U-42")
    def test_what_is_unknown_is_absent(self, state: IndexState) -> None:
        state.publish(record(0), MANY, 0)
        nothing = TargetEstimate(II7)
        assert self.estimate(state, [0], 0) == nothing
        state.observe(status(II7, {H2: (200_000, 12)}), 0)
        assert self.estimate(state, [0], 0) == TargetEstimate(II7, UNSET, 381), "no link to the only source"
        assert self.estimate(state, [0], 2999) == TargetEstimate(II7, UNSET, 381)
        assert self.estimate(state, [0], 3000) == nothing, "the status lapsed"
        state.observe(status(II7, {H1: (200_000, 12)}, prefill_tokens_per_s=0), 3000)
        assert self.estimate(state, [0], 3000) == TargetEstimate(II7, 96)
        state.publish(record(1, compat_id=OTHER_COMPAT), MANY, 3000)
        state.observe(status(II7, {H1: (200_000, 12)}), 3000)
        assert self.estimate(state, [1], 3000, OTHER_COMPAT) == TargetEstimate(II7, 96), "no descriptor"

    @pytest.mark.spec("U-43")
    def test_nothing_to_fetch_is_0(self, state: IndexState) -> None:
        state.publish(record(0, holder=II7), MANY, 0)
        state.observe(status(II7, {}), 0)
        assert self.estimate(state, [0], 0) == TargetEstimate(II7, 0, 381)
        assert self.estimate(state, [1], 0) == TargetEstimate(II7, 0, 0)

    @pytest.mark.spec("R-103")
    def test_the_highest_epoch_outlives_its_status(self, state: IndexState) -> None:
        assert state.observe(status(II7, {}, epoch=12, ttl_ms=10), 0)
        assert not state.observe(status(II7, {}, epoch=11), 5)
        # Once it has expired it counts no more: an operator may have reset the epoch at the controller (D12).
        assert state.observe(status(II7, {}, epoch=11), 10)
        assert self.estimate(state, [], 5000) == TargetEstimate(II7)
        assert state.observe(status(II7, {}, epoch=12), 5000)

    @pytest.mark.spec("U-37")
    def test_a_status_ttl_is_capped(self, state: IndexState) -> None:
        state.observe(status(II7, {}, ttl_ms=10**9), 0)
        assert self.estimate(state, [], 59_999) == TargetEstimate(II7, 0, 0)
        assert self.estimate(state, [], 60_000) == TargetEstimate(II7)

    @pytest.mark.spec("U-11")
    def test_members_are_omitted_in_json(self) -> None:
        text = render_targets([TargetEstimate(II7), TargetEstimate(H1, 0, 7)])
        assert text == (
            b',"targets":[{"instance":"%b"},{"instance":"%b","fetch_us":0,"recompute_us":7}]'
            % (II7.encode(), H1.encode())
        )


class AgainstModel(RuleBasedStateMachine):
    """Publish, refresh, withdraw, expire and look up, against a dict that is searched from end to end."""

    holders = st.sampled_from([H1, H2, II7])
    blocks = st.integers(0, 5)

    @initialize()
    def begin(self) -> None:
        self.now_ms = 0
        self.state = IndexState(replica_ttl_ms_max=50, block_tokens={})
        self.model: dict[tuple[str, int], tuple[ReplicaRecord, int]] = {}

    def live(self) -> dict[tuple[str, int], tuple[ReplicaRecord, int]]:
        return {name: kept for name, kept in self.model.items() if kept[1] > self.now_ms}

    @rule(
        holder=holders,
        block=blocks,
        scope=st.sampled_from([SCOPE, SCOPE, SCOPE, OTHER_SCOPE]),
        compat=st.sampled_from([COMPAT, COMPAT, COMPAT, OTHER_COMPAT]),
        ttl_ms=st.integers(1, 60),
        seed=st.integers(0, 1),
        records_max=st.sampled_from([2, 100, 100]),
    )
    def publish(
        self, holder: str, block: int, scope: str, compat: str, ttl_ms: int, seed: int, records_max: int
    ) -> None:
        made = record(block, holder, seed=seed, scope_id=scope, compat_id=compat, ttl_ms=ttl_ms)
        self.model = self.live()
        old = self.model.get((holder, block))
        problem = None
        if old is not None and old[0].scope_id != scope:
            problem = registry.CONFLICT
        elif old is not None and old[0].compat_id != compat:
            problem = registry.INCOMPATIBLE
        elif old is None and sum(name[0] == holder for name in self.model) >= records_max:
            problem = registry.TOO_MANY_REQUESTS
        if problem is not None:
            assert refusal(self.state.publish, made, records_max, self.now_ms).problem is problem
            return
        granted = min(ttl_ms, 50)
        assert self.state.publish(made, records_max, self.now_ms) == (old is None, granted)
        self.model[holder, block] = made, self.now_ms + granted

    @rule(holder=holders, block=blocks)
    def withdraw(self, holder: str, block: int) -> None:
        if (holder, block) in self.live():
            self.state.withdraw(party_id(holder), key(block), self.now_ms)
            del self.model[holder, block]
        else:
            error = refusal(self.state.withdraw, party_id(holder), key(block), self.now_ms)
            assert error.problem is registry.NOT_FOUND

    @rule(elapsed_ms=st.integers(1, 30))
    def wait(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms

    @rule(
        blocks=st.lists(blocks, max_size=6),
        scope=st.sampled_from([SCOPE, OTHER_SCOPE]),
        compat=st.sampled_from([COMPAT, OTHER_COMPAT]),
    )
    def look_up(self, blocks: list[int], scope: str, compat: str) -> None:
        expected = []
        for block in blocks:
            here = {
                name[0]: structs.replace(kept, ttl_ms=expires_ms - self.now_ms)
                for name, (kept, expires_ms) in self.live().items()
                if name[1] == block and (kept.scope_id, kept.compat_id) == (scope, compat)
            }
            if not here:
                break
            expected.append(here)
        reply = lookup(self.state, blocks, self.now_ms, scope, compat)
        assert [{each.holder: each for each in replicas} for replicas in reply.replicas] == expected

    @invariant()
    def nothing_is_left_behind(self) -> None:
        if not hasattr(self, "state"):
            return
        table = self.state.table
        table.expire(self.now_ms)
        assert len(table) == len(self.live())
        assert sum(tally.replicas for tally in table.tallies.values()) == len(table)
        assert sum(len(replicas) for each in table._tables.values() for replicas in each.blocks.values()) == len(
            table
        )
        assert all(each.blocks for each in table._tables.values())


@pytest.mark.spec("R-083", "R-085", "R-090", "R-092", "U-13")
class TestAgainstModel(AgainstModel.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.spec("R-092")
def test_a_replica_takes_at_most_1_5_kib_besides_its_layer_digests(state: IndexState) -> None:
    """As the index keeps a record, each of 32 layer digests is 64 hex digits, quotes and a comma."""
    count, layers = 5000, 32
    digest_octets = len(msgspec.json.encode(record(0, layers=layers).layer_digests))
    state.publish(record(count, layers=layers), MANY, 0)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for i in range(count):
        state.publish(record(i, layers=layers), MANY, i)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    octets = (after - before) / count - digest_octets
    print(f"{octets:.0f} octets a replica, and {digest_octets} of layer digests")
    assert octets <= 1536
