"""Resharding: who keeps, fetches and releases which tokens, and the two phases of a member (R-190 ... R-196).

All ranges are half-open token ranges [first, end) (R-005); a list of them is ascending and disjoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from kvsp.protocol.records import ReshardFetch, ReshardRequest, SessionCheckpoint, Shard, ShardMap

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What a member of a group has to know of the context, inside: "how an instance first learns a map" (U-38).

    `checkpoint` names the blocks, those of its prompt and those that its tokens complete. `next` are the shards of
    the version that a plan is about to prepare, or none.
    """

    map: ShardMap
    checkpoint: SessionCheckpoint
    prompt_tokens: int
    block_tokens: int
    next: tuple[Shard, ...] = ()


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same tokens in as few ranges as there can be. The ranges must not overlap."""
    result: list[Range] = []
    for first, end in sorted(ranges):
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], end)
        else:
            result.append((first, end))
    return result


def common(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Tokens in both."""
    found: list[Range] = []
    at = 0
    for first, end in some:
        while at < len(others) and others[at][1] <= first:
            at += 1
        within = at
        while within < len(others) and others[within][0] < end:
            found.append((max(first, others[within][0]), min(end, others[within][1])))
            within += 1
    return found


def without(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Tokens of `some` that are not in `others`."""
    found: list[Range] = []
    for first, end in some:
        at = first
        for start, stop in common([(first, end)], others):
            if start > at:
                found.append((at, start))
            at = stop
        if at < end:
            found.append((at, end))
    return found


def held(shard_map: ShardMap) -> dict[str, list[Range]]:
    """The ranges of each member."""
    ranges: dict[str, list[Range]] = {}
    for shard in shard_map.shards:
        ranges.setdefault(shard.instance, []).append(shard.tokens)
    return {instance: merged(each) for instance, each in ranges.items()}


def covered(shard_map: ShardMap) -> Range:
    """All tokens of the map: "Token ranges are half-open, contiguous, and non-overlapping."."""
    return shard_map.shards[0].tokens[0], shard_map.shards[-1].tokens[1]


def grown(shard_map: ShardMap, end: int) -> ShardMap:
    """The same map once its last member has appended tokens up to `end`: who generates holds what it generates.

    Raises ValueError when the map already reaches further.
    """
    *others, last = shard_map.shards
    if end < last.tokens[1]:
        raise ValueError("a map does not shrink")
    return msgspec.structs.replace(shard_map, shards=[*others, Shard((last.tokens[0], end), last.instance)])


def plans(old: ShardMap, new: ShardMap, deadline_ms: int) -> dict[str, ReshardRequest]:
    """The plan for "each instance in either version": retain = old ∩ new, fetch = new ∖ old, release = old ∖ new.

    "A token range assigned to the same instance in both versions MUST appear in "retain" for that instance and
    MUST NOT be transferred" (R-191). What is fetched comes from the member that holds it in the old version.
    Raises ValueError unless `new` is the next version of the same map over the same tokens.
    """
    if new.map != old.map or new.version != old.version + 1 or covered(new) != covered(old):
        raise ValueError("not the next version of the same map over the same tokens")
    before, after = held(old), held(new)
    return {
        instance: ReshardRequest(
            map=old.map,
            old=old.version,
            new=new.version,
            deadline_ms=deadline_ms,
            retain=common(before.get(instance, []), after.get(instance, [])),
            fetch=_fetches(without(after.get(instance, []), before.get(instance, [])), old),
            release=without(before.get(instance, []), after.get(instance, [])),
        )
        for instance in sorted(before.keys() | after.keys())
    }


def _fetches(missing: Sequence[Range], old: ShardMap) -> list[ReshardFetch]:
    """The missing ranges cut at the borders of the old shards, each from the member that holds it."""
    return [
        ReshardFetch(tokens=tokens, source=shard.instance)
        for shard in old.shards
        for tokens in common(missing, [shard.tokens])
    ]


class Phase(StrEnum):
    """Where a member of a map stands. Version v is authoritative in all but the moment of COMMIT (R-193)."""

    STEADY = "steady"  # serves version v, knows of no other
    LOADING = "loading"  # takes the ranges of v+1 that it lacks
    PREPARED = "prepared"  # has them all and has acknowledged


class Event(StrEnum):
    """What moves a member on."""

    PLAN = "plan"
    LOADED = "loaded"
    FAILED = "failed"  # a range could not be had, or the deadline has passed
    COMMIT = "commit"
    ABORT = "abort"


TRANSITIONS: Final[Mapping[tuple[Phase, Event], Phase]] = {
    (Phase.STEADY, Event.PLAN): Phase.LOADING,
    (Phase.LOADING, Event.LOADED): Phase.PREPARED,  # answered with 200
    (Phase.LOADING, Event.FAILED): Phase.LOADING,  # answered with 503; what was fetched goes on abort (U-38)
    (Phase.LOADING, Event.ABORT): Phase.STEADY,  # cancels what is in flight (U-38)
    (Phase.PREPARED, Event.COMMIT): Phase.STEADY,  # of v+1; releases `release`
    (Phase.PREPARED, Event.ABORT): Phase.STEADY,  # of v; discards what was fetched
}
"""What is not here is kvsp-plan-conflict (R-195), but for repeats, which are answered as before (U-38)."""
