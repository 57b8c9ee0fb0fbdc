"""Groups and sessions together: formed, resized, and how wide (A15, U-38)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvsp.protocol import registry, reshard
from kvsp.rpc.config import ConfigError, load
from services.placement.config import PlacementConfig
from services.placement.grouping import ABORTED_MS
from services.placement.groups import LIFETIME_MS, RETRY_MS, MapRow, Settled
from services.placement.instructions import SendPrefetch, Survey
from services.placement.settings import GroupSettings
from services.placement.widths import ByTokens, View
from tests.services.placement_groups import GROUPS, INSTANCES, PROMPT, Grouped, S, formed, kinds, leaves
from tests.services.placement_records import (
    BLOCK_TOKENS,
    H1,
    SCOPE,
    A,
    B,
    C,
    keys,
    refused,
    run,
    source,
)

END = 8 * BLOCK_TOKENS


# --- begin ----------------------------------------------------------------------------


@pytest.mark.spec("R-190", "U-38")
def test_a_long_prompt_is_sharded_over_members_that_have_all_joined() -> None:
    pc = Grouped(groups=replace(GROUPS, tokens=PROMPT - BLOCK_TOKENS))
    held = run(1, source(H1))  # what could be loaded is computed
    assert pc.ask(runs=[held]) == (B, C, A)
    assert not pc.take(SendPrefetch)
    assert len(pc.state.groups) == 0  # not before they have joined
    assert pc.form() == (B, C, A)
    made = pc.map()
    assert made.version == 1
    assert [shard.instance for shard in made.shards] == [B, C, A]
    assert reshard.covered(made) == (0, END)
    assert not leaves(pc)
    assert pc.state.totals.groups_formed == 1


def test_a_prompt_that_can_be_loaded_gets_no_group() -> None:
    pc = Grouped()
    assert pc.ask(runs=[run(8, source(H1))]) == ()
    assert pc.take(SendPrefetch)


@pytest.mark.parametrize("tokens", [PROMPT + 1, PROMPT])
def test_a_prompt_shorter_than_configured_gets_no_group(tokens: int) -> None:
    pc = Grouped(groups=replace(GROUPS, tokens=tokens))
    assert bool(pc.ask()) == (tokens == PROMPT)


def test_without_configured_instances_there_are_no_groups() -> None:
    assert Grouped(3, groups=GroupSettings()).ask() == ()
    others = replace(GROUPS, instances=frozenset({B, C}))  # the home has no internal address
    assert Grouped(3, groups=others).ask() == ()


def test_only_active_instances_that_can_compute_and_are_trusted_join() -> None:
    pc = Grouped(3)
    pc.report(B, prefill_tokens_per_s=0)
    assert pc.ask() == (C, A)
    pc = Grouped(3)
    pc.report(C, state="draining")
    assert pc.ask() == (B, A)
    pc = Grouped(3)
    pc.serves = lambda scope, _: {A, C} if scope == SCOPE else set()
    pc.restart()
    for uri in INSTANCES:
        pc.report(uri)
    assert pc.ask() == (C, A)


def test_there_are_never_more_members_than_blocks_or_than_configured() -> None:
    assert len(Grouped(9).ask()) == 3
    assert len(Grouped(9, groups=replace(GROUPS, members_max=2)).ask()) == 2
    pc = Grouped(9)
    made = pc.assign(1, [], tokens=BLOCK_TOKENS, prompt_blocks=keys(1), prompt_tail=[])
    assert made.members == ()
    assert Grouped(-5).ask() == ()  # whatever a policy says


def test_groups_are_configured_in_a_table_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "placement.toml"
    lines = [
        'listen = "unix:/a"', 'principal = "spiffe://t/pc"', 'policy = "p"', 'state_dir = "s"',
        "[index]", 'address = "unix:/b"',
        "[[instances]]", f'base_uri = "{A}"', 'address = "unix:/c"',
        "[[instances]]", f'base_uri = "{B}"',
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    assert load(path, PlacementConfig).settings().groups == GroupSettings()
    path.write_text("\n".join([*lines, "[groups]", "tokens = 5", "members_max = 2", "groups_max = 3"]))
    made = load(path, PlacementConfig).settings().groups
    # B has no internal address.
    assert made == GroupSettings(instances=frozenset({A}), tokens=5, members_max=2, groups_max=3)
    for bad in ("tokens = 0", "deadline_ms = -1", "groups_max = 0", "group_max = 1", 'tokens = "5"'):
        path.write_text("\n".join([*lines, "[groups]", bad]))
        with pytest.raises(ConfigError, match="groups"):
            load(path, PlacementConfig)


@pytest.mark.spec("D13")
def test_there_are_at_most_so_many_groups() -> None:
    pc = Grouped(2, groups=replace(GROUPS, groups_max=2))
    assert pc.ask(1)
    assert pc.form()
    assert pc.ask(2)
    assert not pc.ask(3)
    pc.form()
    pc.end(1)
    assert pc.ask(4)


def test_a_session_is_an_ordinary_one_when_a_member_does_not_join() -> None:
    pc = Grouped(3)
    pc.ask()
    assert pc.form(ok=False) == ()
    assert not leaves(pc)  # the shell had them leave before it said so
    assert len(pc.state.groups) == 0
    pc.output(1)
    assert not pc.plans()
    with refused(registry.NOT_FOUND):
        pc.resize(2)


@pytest.mark.spec("R-119")
@pytest.mark.parametrize("how", ["not joined", "begun anew", "ended"])
def test_a_session_that_gets_no_group_after_all_loads_what_it_can(how: str) -> None:
    pc = Grouped(3)
    assert pc.ask(runs=[run(8, source(H1))]) == (B, C, A)
    assert not pc.take(SendPrefetch)
    if how == "begun anew":
        pc.report(B, epoch=11)
    elif how == "ended":
        pc.end()
    assert pc.form(ok=how == "begun anew") == ()
    sent = pc.take(SendPrefetch)
    assert [(each.instance, each.directive.request_ref) for each in sent] == [(A, S)] * (how != "ended")


@pytest.mark.parametrize("member", [A, B])
def test_members_that_join_what_was_given_up_meanwhile_leave_again(member: str) -> None:
    pc = Grouped(3)
    pc.ask()
    pc.report(member, epoch=11)
    leaves(pc)
    assert pc.form() == ()
    assert leaves(pc) == {A, B, C}
    assert len(pc.state.groups) == 0
    assert bool(pc.take(Survey)) == (member == A)  # only the home's own restart costs the session anything


# --- resize ---------------------------------------------------------------------------


@pytest.mark.spec("R-190", "R-191", "R-193")
def test_a_step_goes_through_plans_and_commits_over_all_complete_blocks() -> None:
    pc = formed(3, offset=0)
    pc.policy.wanted = 2
    pc.output(0)
    assert not pc.plans()  # "never before the first output token"
    pc.output(BLOCK_TOKENS)
    plans = pc.plans()
    assert set(plans) == {A, B, C}
    end = (PROMPT + BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for send in plans.values():
        assert send.context is not None
        assert send.context.map == pc.map()
        assert reshard.covered(pc.map()) == (0, end)
        assert len(send.context.next) == 2
        assert send.context.next[-1].tokens[1] == end
        assert send.context.checkpoint.output_offset == BLOCK_TOKENS
    pc.policy.wanted = 3
    pc.output(BLOCK_TOKENS + 1)
    assert not pc.plans()  # one step at a time
    for uri in (C, A):
        pc.answer(plans[uri])
    assert pc.map().version == 1
    assert not pc.decisions()
    pc.answer(plans[B])
    assert pc.map().version == 2
    commits = pc.decisions()
    assert kinds(commits) == {"commit"}
    assert not leaves(pc)
    for send in commits.values():
        pc.answer(send)
    (settled,) = pc.take(Settled)
    assert settled.committed
    assert leaves(pc) == {A, B, C} - {shard.instance for shard in pc.map().shards}
    pc.output(BLOCK_TOKENS + 2)
    assert not pc.plans()  # who has left may be told so a little later, and would leave again
    with refused(registry.PLAN_CONFLICT):
        pc.resize(3)
    pc.now_ms += LIFETIME_MS
    pc.output(BLOCK_TOKENS + 3)
    assert kinds(pc.plans()) == {"plan"}  # what the policy wanted meanwhile


def test_who_has_been_told_to_leave_may_join_again_at_once() -> None:
    pc = formed(3)
    pc.resize(1)
    pc.settle()
    for uri in (B, C):
        with refused(registry.PLAN_CONFLICT):
            pc.resize(3)
        pc.state.groups.left(S, uri)
    pc.resize(3)
    assert kinds(pc.plans()) == {"plan"}


@pytest.mark.spec("R-194", "U-38")
@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_is_not_acknowledged_by_all_in_time_is_aborted_at_all(late: bool) -> None:
    pc = formed(2)
    pc.policy.wanted = 3
    pc.output(2)
    plans = pc.plans()
    pc.answer(plans[A])
    if late:
        pc.tick(GROUPS.deadline_ms)
    else:
        pc.answer(plans[C], ok=False)
    aborts = pc.decisions()
    assert set(aborts) == {A, B, C}
    assert kinds(aborts) == {"abort"}
    assert pc.map().version == 1
    pc.answer(plans[B])  # too late; it may have taken the plan after its abort, so that one is sent again
    assert {uri: kinds({uri: send}) for uri, send in pc.decisions().items()} == {B: {"abort"}}
    for send in aborts.values():
        pc.answer(send)
    (settled,) = pc.take(Settled)
    assert not settled.committed
    assert leaves(pc) == {C}
    with refused(registry.PLAN_CONFLICT):
        pc.resize(3)  # messages of the step may still be on their way
    pc.now_ms += LIFETIME_MS
    pc.output(3)
    assert not pc.plans()  # the policy waits longer than an operator has to
    if late:
        pc.resize(3)
    else:
        pc.tick(pc.now_ms + ABORTED_MS)
        pc.output(4)
    assert kinds(pc.plans()) == {"plan"}


def test_a_decision_is_told_until_it_is_answered() -> None:
    pc = formed(2)
    pc.policy.wanted = 1
    pc.output(2)
    for send in pc.plans().values():
        pc.answer(send)
    first = pc.decisions()
    pc.answer(first[A])
    pc.tick(pc.now_ms + RETRY_MS)
    again = pc.decisions()
    assert set(again) == {B}
    assert again[B].request == first[B].request
    assert pc.state.next_deadline() <= pc.now_ms + RETRY_MS
    pc.answer(again[B])
    assert not pc.state.groups.next_deadline()


def test_an_operator_fixes_the_width_until_the_session_ends() -> None:
    pc = formed(2)
    pc.policy.wanted = 2
    wanted = pc.resize(3)
    assert not pc.state.groups.is_settled(wanted)
    pc.settle()
    assert pc.state.groups.is_settled(wanted)
    assert len(pc.map().shards) == 3
    pc.output(2)
    assert not pc.plans()
    assert pc.resize(3) is pc.map()  # nothing to do
    pc.restart()
    for uri in INSTANCES:
        pc.report(uri)
    pc.output(3)
    assert not pc.plans()  # nor does a restart let the policy have it back
    pc.now_ms += LIFETIME_MS
    pc.resize(1)
    pc.settle()
    assert [shard.instance for shard in pc.map().shards] == [A]


@pytest.mark.parametrize("how", ["refused", "restart"])
def test_a_step_of_an_operator_that_is_aborted_fixes_nothing(how: str) -> None:
    pc = formed(2)
    pc.policy.wanted = 2
    pc.resize(3)
    if how == "refused":
        pc.answer(pc.plans()[C], ok=False)
    else:
        pc.restart()
        for uri in INSTANCES:
            pc.report(uri)
    pc.settle()
    pc.now_ms += LIFETIME_MS + ABORTED_MS
    assert [shard.instance for shard in pc.map().shards] == [B, A]
    row = pc.disk["map", S]
    assert isinstance(row, MapRow)
    assert not row.fixed
    pc.policy.wanted = 1
    pc.output(2)
    assert kinds(pc.plans()) == {"plan"}


def test_what_an_operator_has_fixed_stays_so_when_the_next_step_is_aborted() -> None:
    pc = formed(2)
    pc.resize(2)  # so it is
    pc.resize(3)
    pc.answer(pc.plans()[C], ok=False)
    pc.settle()
    pc.now_ms += LIFETIME_MS + ABORTED_MS
    pc.policy.wanted = 1
    pc.output(2)
    assert not pc.plans()


@pytest.mark.spec("D8")
def test_what_an_operator_cannot_have_is_refused_and_changes_nothing() -> None:
    pc = formed(2, offset=0)
    with refused(registry.NOT_FOUND):
        pc.resize(2, session=2)
    with refused(registry.PLAN_CONFLICT):
        pc.resize(3)  # no output yet
    pc.output(1)
    for members in (0, END // BLOCK_TOKENS + 1, 1 << 31):
        with refused(registry.BAD_REQUEST):
            pc.resize(members)
    with refused(registry.UNAVAILABLE):
        pc.resize(4)
    pc.report(C, state="draining")
    with refused(registry.UNAVAILABLE):
        pc.resize(3)
    assert not pc.plans()
    pc.resize(1)
    with refused(registry.PLAN_CONFLICT):
        pc.resize(2)
    assert kinds(pc.plans()) == {"plan"}
    pc.end()
    with refused(registry.NOT_FOUND):
        pc.resize(2)


# --- the policy -----------------------------------------------------------------------


def view(**changes: object) -> View:
    return View(prompt_tokens=100, tokens=100, has_output=False, members=1, kv_utilization=0.0)._replace(**changes)  # type: ignore[arg-type]


def test_the_default_is_wide_at_first_then_narrow_then_as_wide_as_memory_asks() -> None:
    policy = ByTokens(GroupSettings(tokens=50, prefill_tokens=30, decode_tokens=200))
    assert policy.width(view(prompt_tokens=49, kv_utilization=1.0)) == 1
    assert policy.width(view()) == 4
    assert policy.width(view(prompt_tokens=90)) == 3
    assert policy.width(view(cached_tokens=50)) == 4
    assert policy.width(view(cached_tokens=51)) == 1  # loaded sooner than computed by many
    decoding = {"has_output": True, "members": 4}
    assert policy.width(view(tokens=101, **decoding)) == 1
    assert policy.width(view(tokens=200, **decoding)) == 1
    assert policy.width(view(tokens=201, **decoding)) == 2
    assert policy.width(view(tokens=601, **decoding)) == 4
    pressed = {"has_output": True, "tokens": 101}
    assert policy.width(view(**pressed, members=1, kv_utilization=0.9)) == 1
    assert policy.width(view(**pressed, members=1, kv_utilization=0.91)) == 2
    assert policy.width(view(**pressed, members=2, kv_utilization=0.8)) == 2  # it does not come and go
    assert policy.width(view(**pressed, members=2, kv_utilization=0.7)) == 1


def test_the_default_grows_and_shrinks_a_group_as_it_generates() -> None:
    pc = Grouped()
    pc.ask()
    assert len(pc.form()) == 3
    pc.output(1)
    pc.settle()
    assert [shard.instance for shard in pc.map().shards] == [A]  # early decode
    pc.now_ms += LIFETIME_MS
    pc.report(A, kv_utilization=0.95)
    pc.output(2)
    pc.settle()
    assert len(pc.map().shards) == 2
    pc.report(A, kv_utilization=0.5)
    pc.output(3)
    pc.settle()
    assert len(pc.map().shards) == 1
    pc.now_ms += LIFETIME_MS
    pc.output(200 - PROMPT + 1)
    pc.settle()
    assert len(pc.map().shards) == 2  # by what it has grown to
    assert pc.state.totals.reshards == 4
    assert pc.state.totals.reshards_aborted == 0
