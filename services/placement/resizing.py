"""Which tokens of a context go to whom, at first and when members come or leave (R-190, R-191). Pure.

Each member has one range; the last one, behind which output is appended, is the home's. Nothing moves but what a
leaving member held and what a joining one gets.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsp.protocol.records import Shard, ShardMap


def first_shards(end: int, members: Sequence[str], block_tokens: int) -> list[Shard]:
    """Tokens [0, end) in equal ranges of whole blocks, the longer ones first, in the order of `members`.

    Raises ValueError when there are fewer blocks than members, or `end` is not the end of a block.
    """
    blocks, rest = divmod(end, block_tokens)
    if rest or not 0 < len(members) <= blocks:
        raise ValueError("not at least one whole block for each member")
    each, longer = divmod(blocks, len(members))
    shards: list[Shard] = []
    first = 0
    for number, instance in enumerate(members):
        last = first + (each + (number < longer)) * block_tokens
        shards.append(Shard((first, last), instance))
        first = last
    return shards


def resized(shard_map: ShardMap, members: int, candidates: Sequence[str], block_tokens: int) -> list[Shard]:
    """The shards of the next version with so many members, one at least, or as many as there can be.

    Who has the shortest range leaves first, and its neighbour towards the home takes it. Each of `candidates` that
    joins, in their order, gets the first half of the longest range.
    """
    shards = list(shard_map.shards)
    leaving = sorted(shards[:-1], key=_tokens)[: max(0, len(shards) - members)]
    if leaving:
        return _without(shards, {each.instance for each in leaving})
    present = {each.instance for each in shards}
    for instance in candidates:
        if len(shards) >= members:
            break
        longest = max(range(len(shards)), key=lambda number: _tokens(shards[number]))
        blocks = _tokens(shards[longest]) // block_tokens
        if blocks < 2:
            break
        if instance in present:
            continue
        (first, end), holder = shards[longest].tokens, shards[longest].instance
        middle = first + blocks // 2 * block_tokens
        shards[longest : longest + 1] = [Shard((first, middle), instance), Shard((middle, end), holder)]
        present.add(instance)
    return shards


def _without(shards: Sequence[Shard], leaving: set[str]) -> list[Shard]:
    kept: list[Shard] = []
    first = shards[0].tokens[0]
    for shard in shards:
        if shard.instance not in leaving:
            kept.append(Shard((first, shard.tokens[1]), shard.instance))
            first = shard.tokens[1]
    return kept


def _tokens(shard: Shard) -> int:
    return shard.tokens[1] - shard.tokens[0]
