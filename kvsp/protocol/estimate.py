"""Placement estimates (R-115 ... R-118, U-42 ... U-45). Times are whole microseconds, rounded up.

Fetching is judged per target, but what can be fetched is the same for all: `survey` reduces the
replicas once to runs of blocks with equal sources, `fetch_us_of` then judges one target.
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


Run = tuple[tuple[Source, ...], int]
"""Sources of a block, ascending by holder, and how many consecutive blocks have just these."""


def survey(matched: Sequence[Sequence[Replica]]) -> list[Run]:
    """Runs of consecutive blocks with equal sources; `matched[i]` holds the replicas of key i."""
    blocks = (tuple(sorted(map(_source, replicas))) for replicas in matched)
    return [(sources, sum(1 for _ in group)) for sources, group in groupby(blocks)]


def fetch_us(target: str, matched: Sequence[Sequence[Replica]], links: Mapping[str, Link]) -> int | None:
    """Time to make the matched blocks resident at `target`; `links` are its own, by holder (R-115).

    None when the sources that the target has links to, and the target itself, do not cover all layers
    of every block (U-42). 0 when nothing is to be fetched.
    """
    return fetch_us_of(survey(matched), target, links)


def fetch_us_of(runs: Iterable[Run], target: str, links: Mapping[str, Link]) -> int | None:
    """`fetch_us` for a survey made once for many targets."""
    plan = _Plan(links)
    for sources, blocks in runs:
        resident = [source.tiers for source in sources if source.holder == target]
        missing = _missing(max((source.layer_count for source in sources), default=0), resident)
        usable = [source for source in sources if source.holder != target and source.holder in links]
        if not sources or not plan.add(usable, missing, blocks):
            return None
    return _whole(plan.latest)


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


class _Plan:
    """When each source would be done; sources work in parallel, each takes its blocks in turn (U-43)."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self._done: dict[str, float] = {}
        self.latest = 0.0

    def add(self, sources: Sequence[Source], missing: Sequence[Span], blocks: int) -> bool:
        """Assign the missing layers of `blocks` equal blocks. False when the sources lack some."""
        if not missing:
            return True
        whole = [source for source in sources if _covers(source, missing)]
        if len(whole) == 1:
            self._take(whole[0].holder, blocks * self._time(whole[0], missing))
            return True
        # "layers may be taken from several holders only if none has all" (U-43)
        pieces = [list(missing)] if whole else [[span] for span in _cut(missing, sources)]
        choices = [
            [(source.holder, self._time(source, piece)) for source in sources if _covers(source, piece)]
            for piece in pieces
        ]
        if not all(choices):
            return False
        for _ in range(blocks):
            for choice in choices:
                self._take(*min(choice, key=self._result))
        return True

    def _result(self, choice: tuple[str, float]) -> tuple[float, str]:
        """The maximum that the choice leads to; of equal ones the lower URI wins."""
        holder, time = choice
        return max(self.latest, self._start(holder) + time), holder

    def _start(self, holder: str) -> float:
        return self._done.get(holder, self._links[holder].rtt_us)

    def _take(self, holder: str, time: float) -> None:
        self._done[holder] = self._start(holder) + time
        self.latest = max(self.latest, self._done[holder])

    def _time(self, source: Source, spans: Sequence[Span]) -> float:
        """Microseconds on the link: Mbit/s are bits per microsecond. Tiers add up (R-118)."""
        rate = self._links[source.holder].mbit_per_s
        return sum(
            source.layer_bits * max(0, min(end, last) - max(first, start)) / min(rate, read)
            for start, last, read in source.tiers
            for first, end in spans
        )


def _source(replica: Replica) -> Source:
    spans = sorted(
        (entry.layers[0], entry.layers[1] + 1, _read_rate(entry.read_mbit_per_s)) for entry in replica.residency
    )
    resident = sum(end - first for first, end, _ in spans)
    return Source(replica.holder, replica.layer_count, 8 * replica.size / resident, tuple(spans))


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


def _covers(source: Source, spans: Sequence[Span]) -> bool:
    """True when the source has every layer of the spans."""
    held = sum(
        max(0, min(end, last) - max(first, start)) for start, last, _ in source.tiers for first, end in spans
    )
    return held == sum(end - first for first, end in spans)


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
