"""Plans between two versions of a shard map."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import reshard
from kvsp.protocol.records import Shard, ShardMap
from kvsp.protocol.reshard import TRANSITIONS, Event, Phase

MEMBERS = [f"https://ii{n}.example/kvsp/" for n in range(1, 6)]


@st.composite
def shard_maps(draw: st.DrawFn, tokens: int, version: int) -> ShardMap:
    cuts = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=6)))
    edges = [0, *cuts, tokens]
    shards = [Shard((first, end), draw(st.sampled_from(MEMBERS))) for first, end in pairwise(edges)]
    return ShardMap("m", version, shards)


@st.composite
def steps(draw: st.DrawFn) -> tuple[ShardMap, ShardMap]:
    tokens = draw(st.integers(2, 60))
    return draw(shard_maps(tokens, 4)), draw(shard_maps(tokens, 5))


def owners(shard_map: ShardMap) -> dict[int, str]:
    return {token: shard.instance for shard in shard_map.shards for token in range(*shard.tokens)}


def tokens_of(ranges: list[tuple[int, int]]) -> list[int]:
    return [token for first, end in ranges for token in range(first, end)]


@pytest.mark.spec("R-190", "R-191")
@given(steps())
def test_every_member_keeps_what_stays_and_fetches_only_what_it_lacks(step: tuple[ShardMap, ShardMap]) -> None:
    old, new = step
    before, after = owners(old), owners(new)
    plans = reshard.plans(old, new, 200)
    assert set(plans) == set(before.values()) | set(after.values())
    for instance, plan in plans.items():
        had = {token for token, owner in before.items() if owner == instance}
        gets = {token for token, owner in after.items() if owner == instance}
        assert tokens_of(plan.retain) == sorted(had & gets)
        assert tokens_of(plan.release) == sorted(had - gets)
        assert sorted(tokens_of([each.tokens for each in plan.fetch])) == sorted(gets - had)
        for each in plan.fetch:
            assert {before[token] for token in range(*each.tokens)} == {each.source}


@pytest.mark.spec("R-191")
@given(steps())
def test_nothing_is_in_more_ranges_than_needed(step: tuple[ShardMap, ShardMap]) -> None:
    for plan in reshard.plans(*step, 200).values():
        for ranges in (plan.retain, plan.release):
            assert ranges == reshard.merged(ranges)


def test_only_the_next_version_of_the_same_tokens_can_be_planned() -> None:
    first = ShardMap("m", 1, [Shard((0, 8), MEMBERS[0])])
    for other in (
        ShardMap("n", 2, [Shard((0, 8), MEMBERS[0])]),
        ShardMap("m", 3, [Shard((0, 8), MEMBERS[0])]),
        ShardMap("m", 2, [Shard((0, 9), MEMBERS[0])]),
    ):
        with pytest.raises(ValueError, match="not the next version"):
            reshard.plans(first, other, 200)


def test_a_map_grows_at_its_last_member() -> None:
    shard_map = ShardMap("m", 1, [Shard((0, 8), MEMBERS[0]), Shard((8, 12), MEMBERS[1])])
    assert reshard.grown(shard_map, 16).shards == [Shard((0, 8), MEMBERS[0]), Shard((8, 16), MEMBERS[1])]
    with pytest.raises(ValueError, match="shrink"):
        reshard.grown(shard_map, 8)


@pytest.mark.spec("R-193", "R-194", "R-195")
def test_commit_needs_an_acknowledged_plan_and_abort_always_leads_back() -> None:
    assert [phase for phase, event in TRANSITIONS if event is Event.COMMIT] == [Phase.PREPARED]
    assert {TRANSITIONS[phase, Event.ABORT] for phase in (Phase.LOADING, Phase.PREPARED)} == {Phase.STEADY}
    assert [phase for phase, event in TRANSITIONS if event is Event.PLAN] == [Phase.STEADY]
