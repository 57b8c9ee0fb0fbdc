"""Placement estimates (R-115 ... R-118, U-42 ... U-45). Times are whole microseconds, rounded up.

Fetching is judged per target, but what can be fetched is the same for all: `survey` reduces the
replicas once to runs of blocks with equal sources, a `Survey` of these then judges one target after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, Protocol

from kvsp.protocol import limits

Span = tuple[int, int]
"""Layers [first, end)."""


class Residency(Protocol):
    """A range of layers in one tier; a rate that is no number means that the tier states none."""

    @property
    def layers(self) -> tuple[int, int]:
        """First and last layer, inclusive."""

    @property
    def read_mbit_per_s(self) -> Any:
        """Rate at which the holder reads the tier."""


class Replica(Protocol):
    """What an estimate needs of a replica; `records.ReplicaRecord` is one."""

    @property
    def holder(self) -> str:
        """Base URI."""

    @property
    def size(self) -> int:
        """Payload octets of the resident layers (U-26)."""

    @property
    def layer_count(self) -> int:
        """All layers of the block."""

    @property
    def residency(self) -> Sequence[Residency]:
        """Non-overlapping ranges."""


class Link(Protocol):
    """What a target measured of its path to a source; `records.Link` is one."""

    @property
    def mbit_per_s(self) -> float:
        """Rate."""

    @property
    def rtt_us(self) -> float:
        """Round trip."""


class Source(NamedTuple):
    """A replica reduced to what decides its cost; equal ones are interchangeable."""

    holder: str
    layer_count: int
    layer_bits: float
    tiers: tuple[tuple[int, int, float], ...]  # first, end, read rate (infinite when none is stated)

    @property
    def layers_held(self) -> int:
        """How many of the layers it has."""
        return sum(end - first for first, end, _ in self.tiers)

    def covers(self, spans: Sequence[Span]) -> bool:
        """True when it has every layer of the spans."""
        held = sum(max(0, min(end, last) - max(first, at)) for at, last, _ in self.tiers for first, end in spans)
        return held == sum(end - first for first, end in spans)

    def time_us(self, mbit_per_s: float, spans: Sequence[Span] = ((0, limits.LAYER_MAX + 1),)) -> float:
        """Time of the spans on a link: Mbit/s are bits per microsecond. Tiers add up (R-118)."""
        return sum(
            self.layer_bits * max(0, min(end, last) - max(first, at)) / min(mbit_per_s, read)
            for at, last, read in self.tiers
            for first, end in spans
        )


Run = tuple[tuple[Source, ...], int]
"""Sources of a block, ascending by holder, and how many consecutive blocks have just these."""


def survey(matched: Sequence[Sequence[Replica]]) -> list[Run]:
    """Runs of consecutive blocks with equal sources; `matched[i]` holds the replicas of key i."""
    blocks = (tuple(sorted(map(source_of, replicas))) for replicas in matched)
    return [(sources, sum(1 for _ in group)) for sources, group in groupby(blocks)]


def source_of(replica: Replica) -> Source:
    """A replica reduced to what decides its cost."""
    spans = sorted(
        (entry.layers[0], entry.layers[1] + 1, _read_rate(entry.read_mbit_per_s)) for entry in replica.residency
    )
    resident = sum(end - first for first, end, _ in spans)
    return Source(replica.holder, replica.layer_count, 8 * replica.size / resident, tuple(spans))


def fetch_us(target: str, matched: Sequence[Sequence[Replica]], links: Mapping[str, Link]) -> int | None:
    """Time to make the matched blocks resident at `target`; `links` are its own, by holder (R-115).

    None when the sources that the target has links to, and the target itself, do not cover all layers
    of every block (U-42). 0 when nothing is to be fetched.
    """
    return Survey(survey(matched)).fetch_us(target, links)


class Survey:
    """Runs of blocks, prepared once to be judged for many targets.

    `blocks` are all of them; `bits` what they take at the least; `held_bits` how much of that each holder has;
    `is_whole` tells whether some source has every layer, of each block.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        kinds: dict[int, _Kind] = {}  # by identity: to compare costs more, and only spares work
        self._steps = [
            (blocks, kinds.get(id(sources)) or kinds.setdefault(id(sources), _Kind(sources)))
            for sources, blocks in runs
        ]
        self.held_bits: dict[str, float] = {}
        self.blocks, self.bits, self.is_whole = 0, 0.0, True
        for blocks, kind in self._steps:
            kind.blocks += blocks
        for kind in kinds.values():
            self.blocks += kind.blocks
            self.bits += kind.blocks * kind.layer_bits * kind.layer_count
            self.is_whole = self.is_whole and bool(kind.whole)
            for source in kind.sources:
                held = kind.blocks * kind.layer_bits * source.layers_held
                self.held_bits[source.holder] = self.held_bits.get(source.holder, 0.0) + held

    def __len__(self) -> int:
        """How many runs."""
        return len(self._steps)

    def fetch_us(self, target: str, links: Mapping[str, Link]) -> int | None:
        """See `fetch_us` above."""
        usable, fetch = self.load(target, links)
        return fetch if usable == self.blocks else None

    def load(self, target: str, links: Mapping[str, Link]) -> tuple[int, int | None]:
        """The leading blocks that `target` can load or has, and the time that loading them takes.

        "The PC then caps its usable prefix" (U-42): at the first block of which a layer can be had nowhere.
        """
        transfers = _Transfers({holder: links[holder] for holder in self.held_bits if holder in links})
        usable = 0
        for blocks, kind in self._steps:
            if target not in kind.complete and not transfers.add(kind, blocks, target):
                break
            usable += blocks
        return usable, _whole(transfers.latest)


def recompute_us(tokens: int, prefill_tokens_per_s: float) -> int | None:
    """Time to prefill `tokens` (R-116). None when the instance reports no rate (U-45)."""
    if prefill_tokens_per_s <= 0:
        return None
    return _whole(1e6 * tokens / prefill_tokens_per_s)


def wait_us(queued: int, mean_service_us: float) -> int | None:
    """Time until the queue before a new request is served (R-117)."""
    return _whole(queued * mean_service_us)


def cost_us(
    wait: int, fetch: int | None, recompute_unmatched: int | None, recompute_all: int | None
) -> int | None:
    """wait + min(fetch + recompute of the unmatched tokens, recompute of all) (R-117).

    An unknown alternative is left out; None when neither is known: the instance is not eligible.
    """
    ways = [] if recompute_all is None else [recompute_all]
    if fetch is not None and recompute_unmatched is not None:
        ways.append(fetch + recompute_unmatched)
    return wait + min(ways) if ways else None


class _Kind:
    """Blocks with the same sources.

    `whole` are the sources of all layers and the bits that each sends, None where a tier states a rate: the link
    decides then. `complete` are their holders, `holders` those of any layers; `layer_bits` the least of a layer.
    """

    __slots__ = ("blocks", "complete", "holders", "layer_bits", "layer_count", "sources", "whole")

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self.blocks = 0
        self.sources = sources
        self.layer_count = max([source.layer_count for source in sources], default=0)
        self.layer_bits = min([source.layer_bits for source in sources], default=0.0)
        self.whole = [(source, _link_bits(source)) for source in sources if source.layers_held == self.layer_count]
        self.holders = {source.holder for source in sources}
        self.complete = {source.holder for source, _ in self.whole}


class _Transfers:
    """When each source would be done; sources work in parallel, each takes its blocks in turn (U-43)."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._rates = {holder: link.mbit_per_s for holder, link in links.items()}
        self._done = {holder: link.rtt_us for holder, link in links.items()}
        self._choices: dict[_Kind, list[tuple[str, float]]] = {}
        self.latest = 0.0

    def add(self, kind: _Kind, blocks: int, target: str) -> bool:
        """Assign what `target` lacks of so many blocks. False when a part of that is out of its reach."""
        if target not in kind.holders:
            choices = self._choices.get(kind)
            if choices is None:
                choices = self._choices[kind] = self._whole(kind)
            if choices:
                self._take(choices, blocks)
                return True
        return bool(kind.sources) and self._add_parts(kind, blocks, target)

    def _whole(self, kind: _Kind) -> list[tuple[str, float]]:
        """Who of those that have all layers can be reached, and the time that a block takes from each."""
        rates = self._rates
        return [
            (source.holder, source.time_us(rates[source.holder]) if bits is None else bits / rates[source.holder])
            for source, bits in kind.whole
            if source.holder in rates
        ]

    def _add_parts(self, kind: _Kind, blocks: int, target: str) -> bool:
        """As `add`, where the target has some layers, or nobody has all."""
        resident = [source.tiers for source in kind.sources if source.holder == target]
        missing = _missing(kind.layer_count, resident)
        usable = [each for each in kind.sources if each.holder != target and each.holder in self._rates]
        # "layers may be taken from several holders only if none has all" (U-43)
        able = any(source.covers(missing) for source in usable)
        pieces = [missing] if able else [[span] for span in _cut(missing, usable)]
        choices_of = [
            [
                (source.holder, source.time_us(self._rates[source.holder], piece))
                for source in usable
                if source.covers(piece)
            ]
            for piece in pieces
        ]
        if not all(choices_of):
            return False
        if len(choices_of) == 1:
            self._take(choices_of[0], blocks)
        else:
            for _ in range(blocks):
                for choices in choices_of:
                    self._take(choices, 1)
        return True

    def _take(self, choices: Sequence[tuple[str, float]], blocks: int) -> None:
        """So many equal pieces one after the other, each from the source that leads to the least maximum.

        Of equal ones the lower URI wins: `choices` ascend by holder.
        """
        if len(choices) == 1:
            ((holder, time),) = choices
            self._assign(holder, time, blocks)
            return
        if blocks > len(choices):
            blocks -= self._fill(choices, self.latest, blocks)
            blocks -= self._fill(choices, self._level(choices, blocks), blocks)
        for _ in range(blocks):
            self._take_one(choices)

    def _level(self, choices: Sequence[tuple[str, float]], blocks: int) -> float:
        """When all sources would be done at once, were blocks divisible: at most the least possible maximum.

        Whoever takes pieces by the least maximum fills every source with what fits below, before it goes above.
        """
        level, speed = 0.0, 0.0
        work = float(blocks)
        for done, time in sorted((self._done[holder], time) for holder, time in choices):
            if speed and level <= done:
                break
            work += done / time
            speed += 1 / time
            level = work / speed if speed else math.inf
        return level

    def _fill(self, choices: Sequence[tuple[str, float]], level: float, blocks: int) -> int:
        """Assign what fits below the level, the lower URI first; how many pieces that were."""
        left = blocks
        for holder, time in choices:
            room = (level - self._done[holder]) / time
            if room >= 1:
                count = int(min(room, left))
                self._assign(holder, time, count)
                left -= count
        return blocks - left

    def _take_one(self, choices: Sequence[tuple[str, float]]) -> None:
        done, latest = self._done, self.latest
        least, best, until = math.inf, "", 0.0
        for holder, time in choices:
            end = done[holder] + time
            maximum = end if end > latest else latest
            if maximum < least or not best:
                least, best, until = maximum, holder, end
        done[best] = until
        self.latest = least

    def _assign(self, holder: str, time: float, blocks: int) -> None:
        done = self._done[holder] = self._done[holder] + blocks * time
        self.latest = max(self.latest, done)


def _link_bits(source: Source) -> float | None:
    """All bits of a source, if the link alone decides how long they take."""
    if all(math.isinf(read) for _, _, read in source.tiers):
        return source.layer_bits * source.layers_held
    return None


def _read_rate(stated: Any) -> float:
    return float(stated) if isinstance(stated, int | float) else math.inf


def _missing(layer_count: int, resident: Sequence[tuple[tuple[int, int, float], ...]]) -> list[Span]:
    """The layers of a block that are in no tier of the target."""
    spans: list[Span] = []
    at = 0
    for first, end, _ in sorted(tier for tiers in resident for tier in tiers):
        if first > at:
            spans.append((at, first))
        at = max(at, end)
    if at < layer_count:
        spans.append((at, layer_count))
    return spans


def _cut(missing: Sequence[Span], sources: Sequence[Source]) -> list[Span]:
    """The missing layers, cut wherever a tier of some source begins or ends."""
    edges = {edge for source in sources for tier in source.tiers for edge in tier[:2]}
    pieces: list[Span] = []
    for first, end in missing:
        inside = sorted({first, end, *(edge for edge in edges if first < edge < end)})
        pieces.extend(pairwise(inside))
    return pieces


def _whole(time_us: float) -> int | None:
    """Rounded up, without the dust of float sums; None beyond what JSON carries exactly."""
    if not time_us <= limits.INT_MAX:
        return None
    return math.ceil(round(time_us, 6))
