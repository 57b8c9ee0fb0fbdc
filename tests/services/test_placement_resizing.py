"""Which tokens of a context go to whom: properties over all maps that first shards and resizes lead to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import reshard
from kvsp.protocol.records import Shard, ShardMap
from services.placement.resizing import first_shards, resized

INSTANCES = [f"https://ii{n}.example/kvsp/" for n in range(8)]
HOME = INSTANCES[0]
BLOCK = 4

widths = st.integers(1, 6)
blocks = st.integers(1, 40)


@st.composite
def maps(draw: st.DrawFn) -> ShardMap:
    """A map after some resizes, each by other candidates and after some growth."""
    width, count = draw(widths), draw(blocks)
    members = [*draw(st.permutations(INSTANCES[1:]))[: min(width, count) - 1], HOME]
    made = ShardMap("m", 1, first_shards(count * BLOCK, members, BLOCK))
    for wanted, more in draw(st.lists(st.tuples(widths, st.integers(0, 9)), max_size=4)):
        made = reshard.grown(made, reshard.covered(made)[1] + more * BLOCK)
        shards = resized(made, wanted, draw(st.permutations(INSTANCES)), BLOCK)
        made = ShardMap("m", made.version + 1, shards)
    return made


def tokens(shard: Shard) -> int:
    return shard.tokens[1] - shard.tokens[0]


def check(shards: list[Shard], end: int) -> None:
    """What holds of every version: ShardMap says that it is contiguous."""
    made = ShardMap("m", 1, shards)
    assert reshard.covered(made) == (0, end)
    assert all(bound % BLOCK == 0 for shard in shards for bound in shard.tokens)
    assert shards[-1].instance == HOME
    assert len({shard.instance for shard in shards}) == len(shards)


@pytest.mark.spec("R-190", "U-38")
@given(width=widths, count=blocks)
def test_the_first_shards_are_equal_whole_blocks_with_the_home_last(width: int, count: int) -> None:
    members = [*INSTANCES[1:width], HOME]
    if width > count:
        with pytest.raises(ValueError, match="one whole block"):
            first_shards(count * BLOCK, members, BLOCK)
        return
    shards = first_shards(count * BLOCK, members, BLOCK)
    check(shards, count * BLOCK)
    assert [shard.instance for shard in shards] == members
    lengths = [tokens(shard) for shard in shards]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= BLOCK


@pytest.mark.parametrize("end", [0, 3, 6])
def test_tokens_of_no_whole_block_have_no_shards(end: int) -> None:
    with pytest.raises(ValueError, match="one whole block"):
        first_shards(end, [HOME], BLOCK)
    with pytest.raises(ValueError, match="one whole block"):
        first_shards(BLOCK, [], BLOCK)


@pytest.mark.spec("R-190", "R-191", "R-196")
@given(old=maps(), width=widths, candidates=st.permutations(INSTANCES))
def test_a_resize_moves_what_leaves_and_what_joins_and_nothing_else(
    old: ShardMap, width: int, candidates: list[str]
) -> None:
    new = ShardMap("m", old.version + 1, resized(old, width, candidates, BLOCK))
    end = reshard.covered(old)[1]
    check(new.shards, end)
    assert len(new.shards) == min(width, end // BLOCK)
    before = {shard.instance: shard for shard in old.shards}
    after = {shard.instance: shard for shard in new.shards}
    leaving = [shard for name, shard in before.items() if name not in after]
    joining = [shard for name, shard in after.items() if name not in before]
    assert not (leaving and joining)
    plans = reshard.plans(old, new, 1_000)
    fetched = sum(
        entry.tokens[1] - entry.tokens[0]
        for plan in plans.values()
        for entry in plan.fetch  # type: ignore[union-attr]
    )
    assert fetched == sum(map(tokens, leaving)) + sum(map(tokens, joining))
    # No other members that might leave hold less.
    others = sorted(tokens(shard) for shard in old.shards[:-1])
    assert sum(map(tokens, leaving)) == sum(others[: len(leaving)])
    for name in before.keys() & after.keys():
        held, kept = [before[name].tokens], [after[name].tokens]
        assert reshard.common(held, kept) == (
            held if leaving else kept
        )  # who stays loses nothing but to who joins


@pytest.mark.spec("R-190")
@given(old=maps(), width=widths)
def test_a_leaving_range_goes_towards_the_home(old: ShardMap, width: int) -> None:
    new = resized(old, width, [], BLOCK)
    stay = [shard for shard in old.shards if shard.instance in {each.instance for each in new}]
    assert [shard.tokens[1] for shard in new] == [shard.tokens[1] for shard in stay]
    assert [shard.instance for shard in new] == [shard.instance for shard in stay]


@given(width=st.integers(2, 6), count=st.integers(6, 40))
def test_who_joins_comes_in_the_order_of_the_candidates_and_takes_the_first_half_of_the_longest(
    width: int, count: int
) -> None:
    old = ShardMap("m", 1, first_shards(count * BLOCK, [HOME], BLOCK))
    new = resized(old, width, INSTANCES, BLOCK)
    assert {shard.instance for shard in new} == set(INSTANCES[:width])
    (first, second) = resized(old, 2, INSTANCES, BLOCK)
    assert (first.instance, second.instance) == (INSTANCES[1], HOME)
    assert 0 <= tokens(second) - tokens(first) <= BLOCK
    lengths = [tokens(shard) // BLOCK for shard in new]
    assert max(lengths) <= 2 * min(lengths) + 1


def test_without_candidates_nothing_grows() -> None:
    old = ShardMap("m", 1, first_shards(40, [INSTANCES[1], HOME], BLOCK))
    for candidates in ([], [HOME, INSTANCES[1]]):
        assert resized(old, 4, candidates, BLOCK) == old.shards


def test_a_resize_there_and_back_restores_a_cover_of_all_tokens() -> None:
    made = ShardMap("m", 1, first_shards(48, [INSTANCES[1], INSTANCES[2], HOME], BLOCK))
    for width in itertools.chain(*[(2, 1, 3)] * 3):
        made = ShardMap("m", made.version + 1, resized(made, width, INSTANCES, BLOCK))
        check(made.shards, 48)
        assert len(made.shards) == width
