"""Instances and assignment: epochs, lifecycle, choice, prefetch."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvsp.protocol import limits, registry
from kvsp.protocol.records import Link
from services.placement.instructions import (
    Feed,
    InstanceRow,
    Persist,
    SendPrefetch,
    SendState,
    Survey,
    WantInstance,
)
from services.placement.settings import Settings
from tests.services.placement_records import (
    BLOCK_TOKENS,
    COMPAT,
    H1,
    H2,
    MIB,
    OTHER_COMPAT,
    OWNER,
    PROMPT_TOKENS,
    SCOPE,
    A,
    B,
    C,
    Driven,
    checkpoint,
    keys,
    refused,
    run,
    session_id,
    source,
    status,
)

# --- status (A9) ----------------------------------------------------------------------


@pytest.mark.spec("R-103", "R-104")
def test_a_lower_epoch_is_discarded_and_an_equal_one_is_not() -> None:
    pc = Driven()
    assert pc.status(status(epoch=12)) == "active"
    assert pc.status(status(epoch=12, queued=3)) == "active"
    with refused(registry.STALE_EPOCH):
        pc.status(status(epoch=11))
    assert [each.status.epoch for each in pc.take(Feed)] == [12, 12]


@pytest.mark.spec("R-103", "R-101")
def test_the_highest_epoch_outlives_the_record_and_the_controller() -> None:
    pc = Driven()
    pc.status(status(epoch=12, ttl_ms=100))
    pc.tick(10_000)
    with refused(registry.STALE_EPOCH):
        pc.status(status(epoch=11))
    pc.restart()
    with refused(registry.STALE_EPOCH):
        pc.status(status(epoch=11))
    assert pc.status(status(epoch=12)) == "active"


@pytest.mark.spec("R-103")
def test_a_new_epoch_is_persisted_before_anything_is_done_with_it() -> None:
    pc = Driven()
    pc.state.status(status(epoch=12, ttl_ms=1_000), 0)
    first, second = pc.state.instructions()
    assert first == Persist((InstanceRow(A, 12, 1_000),))
    assert isinstance(second, Feed)
    pc.state.status(status(epoch=12, ttl_ms=1_000), 1)
    assert [type(each) for each in pc.state.instructions()] == [Feed]


@pytest.mark.spec("D12")
def test_an_absurd_epoch_locks_out_its_own_instance_alone() -> None:
    pc = Driven()
    assert pc.status(status(epoch=limits.INT_MAX)) == "active"
    with refused(registry.STALE_EPOCH):
        pc.status(status(epoch=12))
    assert pc.status(status(B, epoch=12)) == "active"


@pytest.mark.spec("R-101", "R-108")
def test_an_expired_instance_gets_nothing_until_it_reports() -> None:
    pc = Driven()
    pc.status(status(ttl_ms=1_000))
    assert pc.state.next_deadline() == 1_000
    pc.now_ms = 999
    pc.assign(1)
    pc.now_ms = 1_000
    with refused(registry.UNAVAILABLE):
        pc.assign(2)
    pc.status(status())
    pc.assign(2)


@pytest.mark.spec("U-37")
def test_the_ttl_of_a_status_is_capped() -> None:
    pc = Driven()
    pc.status(status(ttl_ms=10**9))
    pc.now_ms = limits.STATUS_TTL_MS_MAX
    with refused(registry.UNAVAILABLE):
        pc.assign()


@pytest.mark.spec("R-108", "U-08")
@pytest.mark.parametrize(
    ("state", "view"),
    [("draining", "draining"), ("sleeping", "sleeping"), ("failed", "failed"), ("warming-up", "draining")],
)
def test_only_an_active_instance_is_chosen(state: str, view: str) -> None:
    pc = Driven()
    assert pc.status(status(A, state=state)) == view
    with refused(registry.UNAVAILABLE):
        pc.assign(1)
    pc.status(status(B, queued=50))
    assert pc.assign(2).binding.instance == B
    assert not pc.state.is_active(A)


@pytest.mark.spec("R-105", "R-106", "U-37")
def test_sleep_is_granted_by_policy_and_drains_at_once() -> None:
    pc = Driven(Settings(sleep_allowed=True, active_min=1))
    assert pc.status(status(A, requested_state="sleeping")) == "active"  # the only one
    pc.status(status(B))
    assert pc.status(status(A, requested_state="sleeping")) == "draining"
    for n in range(5):
        assert pc.assign(n).binding.instance == B
    assert pc.status(status(B, requested_state="sleeping")) == "active"  # the only one left
    assert pc.status(status(A)) == "active"  # the answer was lost: it never drained


@pytest.mark.spec("R-106")
def test_sleep_is_refused_by_default() -> None:
    pc = Driven()
    pc.status(status(B))
    assert pc.status(status(A, requested_state="sleeping")) == "active"
    assert pc.status(status(A, requested_state="draining")) == "active"
    assert {pc.assign(n).binding.instance for n in range(4)} == {A, B}


# --- orders (R-107, U-36) -------------------------------------------------------------


@pytest.mark.spec("R-107", "R-108", "U-36")
def test_a_drained_instance_gets_nothing_from_the_order_on() -> None:
    pc = Driven()
    pc.status(status(A))
    pc.state.order(A, "draining", pc.now_ms)
    pc.drain()
    assert pc.take(SendState) == [SendState(A, "draining")]
    with refused(registry.UNAVAILABLE):
        pc.assign()
    # A report that was sent before the order arrived changes nothing, nor is it ordered twice at a time.
    assert pc.status(status(A)) == "draining"
    assert pc.take(SendState) == []
    pc.state.ordered(A, "draining", pc.now_ms)
    assert pc.status(status(A)) == "draining"
    assert pc.take(SendState) == [SendState(A, "draining")]
    pc.state.ordered(A, "sleeping", pc.now_ms)
    assert pc.status(status(A, state="sleeping")) == "sleeping"
    assert pc.take(SendState) == []


@pytest.mark.spec("R-107", "R-110", "U-36")
def test_an_order_is_repeated_until_it_arrives_unless_it_is_refused() -> None:
    pc = Driven()
    pc.status(status(A, state="sleeping"))
    pc.state.order(A, "active", pc.now_ms)
    pc.drain()
    pc.state.order_failed(A, refused=False)
    assert pc.take(SendState) == [SendState(A, "active")]
    assert pc.status(status(A, state="sleeping")) == "sleeping"
    assert pc.take(SendState) == [SendState(A, "active")]
    pc.state.ordered(A, "active", pc.now_ms)
    assert pc.assign().binding.instance == A
    assert pc.status(status(A)) == "active"
    pc.state.order(A, "draining", pc.now_ms)
    pc.drain()
    pc.state.order_failed(A, refused=True)
    assert pc.assign(2).binding.instance == A


@pytest.mark.spec("R-107", "U-36", "R-102")
def test_a_restarted_instance_knows_of_no_orders() -> None:
    pc = Driven()
    pc.status(status(A, epoch=1))
    pc.state.order(A, "draining", pc.now_ms)
    assert pc.status(status(A, epoch=2)) == "active"


@pytest.mark.spec("R-107", "U-36")
def test_orders_that_cannot_be_given() -> None:
    pc = Driven()
    with refused(registry.NOT_FOUND):
        pc.state.order(A, "draining", 0)
    pc.status(status(A, state="failed"))
    with refused(registry.INVALID_STATE):
        pc.state.order(A, "active", 0)
    pc.status(status(B))
    for state in ("sleeping", "failed", "", "warm"):
        with refused(registry.BAD_REQUEST):
            pc.state.order(B, state, 0)


# --- assignment (A10) -----------------------------------------------------------------


@pytest.mark.spec("R-119", "R-117")
def test_the_cheapest_active_instance_is_bound_and_persisted_first() -> None:
    pc = Driven()
    pc.status(status(A))
    pc.status(status(B))
    start = checkpoint(1, 0)
    made = pc.state.assign(OWNER, start, PROMPT_TOKENS, [run(2, B)], 0)
    assert (made.binding.instance, made.binding.epoch, made.matched) == (B, 1, 2)
    assert [each.instance for each in made.candidates] == [B, A]
    assert made.candidates[0].cost_us == 300  # three of 35 tokens at 10,000/s
    first = pc.state.instructions()[0]
    assert isinstance(first, Persist)
    (row,) = first.rows
    assert (row.session, row.epoch, row.instance, row.bound, row.checkpoint) == (start.session, 1, B, True, start)
    assert pc.state.sessions == 1


@pytest.mark.spec("R-119", "R-117")
def test_equal_instances_take_turns_between_two_reports() -> None:
    pc = Driven()
    for uri in (A, B, C):
        pc.status(status(uri))
    chosen = [pc.assign(n).binding.instance for n in range(9)]
    assert chosen[:3] == [A, B, C]
    assert [chosen.count(uri) for uri in (A, B, C)] == [3, 3, 3]
    pc.status(status(C))  # it reports that it has nothing to do any more
    assert pc.assign(9).binding.instance == C


@pytest.mark.spec("R-119", "R-117", "U-45")
def test_a_full_batch_makes_what_was_just_assigned_wait() -> None:
    pc = Driven(Settings(service_ms=1_000))
    pc.status(status(A, batch_size=2))
    pc.status(status(B, prefill_tokens_per_s=1_000))
    # A computes ten times faster, but has two places: behind a third request, one waits for a second there.
    assert [pc.assign(n).binding.instance for n in range(5)] == [A, A, A, B, B]


@pytest.mark.spec("U-45", "R-117")
def test_the_mean_service_time_follows_what_is_observed() -> None:
    pc = Driven(Settings(service_ms=1_000))
    pc.status(status(A, queued=1, ttl_ms=60_000))
    assert pc.assign(0).candidates[0].wait_us == 1_000_000
    pc.status(status(A, queued=1, ttl_ms=60_000))
    pc.checkpoint(A, checkpoint(0, 1, 16))
    pc.now_ms = 6_000
    pc.end(0)
    assert pc.assign(1).candidates[0].wait_us == 2_000_000  # a fifth of the way from 1 s to 6 s
    pc.status(status(A, queued=1))
    pc.end(1)  # given up before it ran: tells nothing
    assert pc.assign(2).candidates[0].wait_us == 2_000_000


@pytest.mark.spec("U-45")
def test_an_instance_without_prefill_rate_is_not_eligible() -> None:
    pc = Driven()
    pc.status(status(A, prefill_tokens_per_s=0))
    with refused(registry.UNAVAILABLE):
        pc.assign(1, [run(2, A)])
    pc.status(status(B, queued=9))
    made = pc.assign(2, [run(2, A)])
    assert [(each.instance, each.cost_us is None) for each in made.candidates] == [(B, False), (A, True)]


@pytest.mark.spec("R-211", "R-017")
def test_only_instances_that_may_have_the_scope_are_chosen() -> None:
    pc = Driven(serves=lambda scope, compat: {B} if (scope, compat) == (SCOPE, COMPAT) else set())
    pc.status(status(A))
    pc.status(status(B, queued=9))
    assert pc.assign(1).binding.instance == B
    with refused(registry.UNAVAILABLE):
        pc.assign(2, scope_id="cc" * 16)


@pytest.mark.spec("R-051", "R-119", "U-20")
def test_the_chosen_instance_is_directed_to_load_what_it_lacks() -> None:
    pc = Driven(Settings(prefetch_deadline_ms=70, prefetch_lease_ms=900))
    pc.status(status(A))
    made = pc.assign(1, [run(1, A, H1), run(1, source(H1, MIB // 64), source(H2, MIB // 64))])
    (sent,) = pc.take(SendPrefetch)
    directive = sent.directive
    assert (sent.instance, directive.directive) == (A, made.directive)
    assert [(each.block_key, each.sources) for each in directive.blocks] == [(keys(2)[1], [H1, H2])]
    assert (directive.scope_id, directive.compat_id, directive.request_ref) == (SCOPE, COMPAT, session_id(1))
    assert (directive.deadline_ms, directive.lease_ms, directive.layer_order) == (70, 900, "ascending")


@pytest.mark.spec("R-117", "R-127")
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([run(2, A)], id="it has all"),
        pytest.param([], id="nobody has any"),
        pytest.param([run(2, source(H1, 64 * MIB))], id="computing is faster than loading"),
        pytest.param([run(2, C)], id="the only source is out of reach"),
    ],
)
def test_nothing_is_directed_where_nothing_is_gained(runs: list) -> None:  # type: ignore[type-arg]
    pc = Driven()
    pc.status(status(A))
    assert pc.assign(1, runs).directive == ""
    assert pc.take(SendPrefetch) == []


@pytest.mark.spec("R-119")
def test_without_an_active_instance_one_is_asked_for_now_and_then() -> None:
    pc = Driven()
    for n in range(3):
        with refused(registry.UNAVAILABLE):
            pc.assign(n)
    assert pc.take(WantInstance) == [WantInstance(COMPAT, SCOPE)]
    pc.now_ms = 60_000
    with refused(registry.UNAVAILABLE):
        pc.assign()
    assert len(pc.take(WantInstance)) == 1
    assert pc.state.sessions == 0


@pytest.mark.spec("R-110", "R-119")
def test_an_instance_that_sleeps_is_woken_rather() -> None:
    pc = Driven()
    pc.status(status(A, state="sleeping"))
    for n in range(3):
        with refused(registry.UNAVAILABLE):
            pc.assign(n)
    assert pc.take(SendState) == [SendState(A, "active")]
    assert pc.take(WantInstance) == []


@pytest.mark.spec("R-119")
def test_a_request_that_is_too_dear_is_placed_and_one_more_instance_wanted() -> None:
    pc = Driven(Settings(service_ms=1_000, acceptable_cost_ms=500))
    pc.status(status(A))
    pc.assign(1)
    assert pc.take(WantInstance) == []
    pc.status(status(A, queued=1))
    assert pc.assign(2).binding.instance == A
    assert pc.take(WantInstance) == [WantInstance(COMPAT, SCOPE)]


@pytest.mark.spec("R-119", "R-108")
def test_who_comes_then_loads_at_once_what_was_waiting() -> None:
    """ "... SHOULD send it a prefetch directive at once, so that cache loading overlaps the instance start." """
    pc = Driven()
    with refused(registry.UNAVAILABLE):
        pc.assign(1, [run(2, source(H1, 1000))])
    pc.status(status(A, state="sleeping"))
    assert pc.take(SendPrefetch) == []
    pc.status(status(A))
    (sent,) = pc.take(SendPrefetch)
    assert [each.block_key for each in sent.directive.blocks] == keys(2)
    pc.status(status(B))
    assert pc.take(SendPrefetch) == []


def test_what_waits_for_an_instance_is_bounded_and_lapses() -> None:
    pc = Driven()
    for n in range(100):
        with refused(registry.UNAVAILABLE):
            pc.assign(n, [run(2, source(H1, 1000))])
    pc.status(status(A))
    assert len(pc.take(SendPrefetch)) == 16
    pc.tick(10_000)
    with refused(registry.UNAVAILABLE):
        pc.assign(200, [run(2, source(H1, 1000))])
    pc.now_ms += 120_000
    pc.status(status(A))
    assert pc.take(SendPrefetch) == []


@pytest.mark.spec("R-047", "R-017", "U-34", "D13")
def test_what_cannot_be_assigned() -> None:
    pc = Driven(block_tokens={COMPAT: BLOCK_TOKENS})
    pc.status(status(A))
    bad = [
        ({"epoch": 1}, 0),
        ({"generated": [1], "output_offset": 1}, 0),
        ({}, PROMPT_TOKENS + 1),
        ({}, 2),
        ({"prompt_tail": list(range(16))}, 32 + 16),
        ({"prompt_blocks": []}, PROMPT_TOKENS),
        ({"prompt_blocks": keys(1)}, 8 + 3),  # 8 tokens a block, where the descriptor says 16
    ]
    for changes, tokens in bad:
        with refused(registry.BAD_REQUEST):
            pc.state.assign(OWNER, structs.replace(checkpoint(1, 0), **changes), tokens or PROMPT_TOKENS, [], 0)
    with refused(registry.INCOMPATIBLE):
        pc.assign(1, compat_id=OTHER_COMPAT)
    pc.assign(1)
    with refused(registry.CONFLICT):
        pc.assign(1)
    pc.end(1)
    with refused(registry.CONFLICT):
        pc.assign(1)
    with refused(registry.CONTENT_TOO_LARGE):
        pc.assign(2, prompt_blocks=keys(limits.LOOKUP_KEYS_MAX + 1))


def test_without_descriptors_the_prompt_itself_tells_how_long_a_block_is() -> None:
    pc = Driven()
    pc.status(status(A))
    made = pc.assign(1, [run(1, A)], tokens=2 * 50 + 3)
    assert made.candidates[0].cost_us == 5_300  # 53 of 103 tokens
    with refused(registry.BAD_REQUEST):
        pc.assign(2, tokens=2 * 3 + 3)  # the tail would be a whole block
    pc.assign(3, prompt_blocks=[], tokens=3)


@pytest.mark.spec("D13")
def test_sessions_of_one_identity_are_bounded() -> None:
    pc = Driven(Settings(sessions_max=3))
    pc.status(status(A))
    for n in range(3):
        pc.assign(n)
    with refused(registry.TOO_MANY_REQUESTS):
        pc.assign(3)
    pc.assign(4, owner="spiffe://t/other")
    pc.end(0)
    pc.assign(5)


@pytest.mark.spec("U-41", "R-103")
def test_every_accepted_status_is_fed_to_the_index() -> None:
    pc = Driven()
    made = status(A, links=[Link(H1, 5, 5)])
    pc.status(made)
    with refused(registry.STALE_EPOCH):
        pc.status(status(A, epoch=1))
    assert [each.status for each in pc.take(Feed)] == [made]
    assert pc.take(Survey) == []


def test_the_overview_shows_the_controllers_view() -> None:
    pc = Driven()
    pc.status(status(A, epoch=5, running=2))
    pc.status(status(B, ttl_ms=10))
    pc.state.order(A, "draining", 0)
    pc.tick(20)
    first, second = pc.state.overview()
    assert (first.instance, first.state, first.running, first.epoch) == (A, "draining", 2, 5)
    assert (second.instance, second.state, second.epoch) == (B, "failed", 10)
