"""Which instance a request costs least on, and what that one has to load (R-115 ... R-119). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from kvsp.protocol import estimate, limits
from kvsp.protocol.estimate import Link, Run, Source, Survey
from kvsp.protocol.keys import ZERO, ScopeKey, block_keys
from kvsp.protocol.records import DirectiveBlock, SessionCheckpoint

EXPLAINED: Final = 4
"""So many are estimated in full whatever their bound: an operator sees what the choice was between."""

RUNS_MAX: Final = 1024
"""Runs that are planned for one request: what a decision may take is bounded. A prompt has as many runs as there
are places in it where holders begin or end. Where each block has other sources, not all instances are estimated
that might be the cheapest, but those with the least bounds."""

SOURCES_MAX: Final = 4
"""Sources that a directive names for a block: the fastest, and some to turn to."""


class Offer(NamedTuple):
    """What an instance reports of itself, as far as its cost depends on it.

    `wait_us` is the time until its queue is served, `load` breaks ties, `links` are its own, by holder.
    """

    instance: str
    wait_us: int
    load: int
    prefill_tokens_per_s: float
    links: Mapping[str, Link]


class Candidate(NamedTuple):
    """An instance and its estimates, in microseconds; None: unknown, or it was clear that others are cheaper.

    `usable` are the leading blocks that it would load or has, `fetches` tells whether that is its cheapest way.
    """

    instance: str
    wait_us: int
    fetch_us: int | None
    recompute_all_us: int | None
    cost_us: int | None
    usable: int
    fetches: bool


@dataclass(frozen=True)
class Request:
    """What is to be computed: `runs` of the leading blocks held somewhere, of `tokens` in all (U-44)."""

    runs: Sequence[Run]
    tokens: int
    block_tokens: int

    @cached_property
    def survey(self) -> Survey:
        """The runs, prepared."""
        return Survey(self.runs)


def rank(request: Request, offers: Iterable[Offer]) -> list[Candidate]:
    """The offers as candidates, the cheapest first, then those without a known cost.

    Within RUNS_MAX an offer is passed over only when even its least possible cost is above one that is known.
    """
    bounds = _Bounds(request)
    order = [(bounds.least_us(offer), offer.load, offer.instance, offer) for offer in offers]
    order.sort()
    best, left, judged = math.inf, RUNS_MAX, 0
    known: list[tuple[int, int, str, Candidate]] = []
    unknown: list[Candidate] = []
    for least, load, instance, offer in order:
        if judged and (left <= 0 or (judged >= EXPLAINED and least > best)):
            break
        candidate = _judge(request, offer)
        judged += 1
        left -= len(request.survey)
        if candidate.cost_us is None:
            unknown.append(candidate)
        else:
            best = min(best, candidate.cost_us)
            known.append((candidate.cost_us, load, instance, candidate))
    known.sort()
    passed_over = [Candidate(each[2], each[3].wait_us, None, None, None, 0, False) for each in order[judged:]]
    return [each[3] for each in known] + unknown + passed_over


def _judge(request: Request, offer: Offer) -> Candidate:
    """cost(i) = wait_us(i) + min(fetch_us(i) + recompute_us_of_unmatched(i), recompute_us_of_all(i))."""
    usable, fetch = request.survey.load(offer.instance, offer.links)
    rate = offer.prefill_tokens_per_s
    everything = estimate.recompute_us(request.tokens, rate)
    unmatched = estimate.recompute_us(max(0, request.tokens - usable * request.block_tokens), rate)
    cost = estimate.cost_us(offer.wait_us, fetch, unmatched, everything)
    if everything is None:  # "prefill 0 -> estimate omitted, instance not eligible" (U-45)
        cost = None
    fetches = fetch is not None and unmatched is not None and cost == offer.wait_us + fetch + unmatched
    return Candidate(offer.instance, offer.wait_us, fetch, everything, cost, usable, fetches)


class _Bounds:
    """The least that a request can cost on an instance, without planning its transfers."""

    def __init__(self, request: Request) -> None:
        self._tokens = request.tokens
        self._survey = request.survey
        self._unmatched = max(0, request.tokens - request.block_tokens * request.survey.blocks)

    def least_us(self, offer: Offer) -> float:
        """Not above the cost that `_judge` finds; infinite for who is not eligible."""
        rate = offer.prefill_tokens_per_s
        if rate <= 0:
            return math.inf
        fetched = 1e6 * self._unmatched / rate + self._fetch_us(offer)
        least = offer.wait_us + min(1e6 * self._tokens / rate, fetched)
        return math.floor(least) if least <= limits.INT_MAX else math.inf

    def _fetch_us(self, offer: Offer) -> float:
        """All links busy all the time. 0 where the usable prefix may be capped and less be loaded (U-42)."""
        survey = self._survey
        rates = 0.0
        for holder in survey.held_bits:
            if holder != offer.instance:
                link = offer.links.get(holder)
                if link is None:
                    return 0.0
                rates += link.mbit_per_s
        missing = survey.bits - survey.held_bits.get(offer.instance, 0.0)
        return missing / rates if survey.is_whole and rates and missing > 0 else 0.0


def blocks_to_load(
    keys: Sequence[str], request: Request, usable: int, instance: str, links: Mapping[str, Link]
) -> list[DirectiveBlock]:
    """The usable blocks that an instance lacks, in prefix order, each with its sources, the fastest first."""
    blocks: list[DirectiveBlock] = []
    at = 0
    for sources, count in request.runs:
        end = min(at + count, usable)
        if at >= end or len(blocks) >= limits.DIRECTIVE_BLOCKS_MAX:
            break
        if not any(source.holder == instance and source.layers_held >= source.layer_count for source in sources):
            names = _fastest(sources, instance, links)
            blocks.extend(DirectiveBlock(key, names) for key in keys[at:end])
        at = end
    return blocks[: limits.DIRECTIVE_BLOCKS_MAX]


def _fastest(sources: Sequence[Source], instance: str, links: Mapping[str, Link]) -> list[str]:
    reachable = [each.holder for each in sources if each.holder != instance and each.holder in links]
    reachable.sort(key=lambda holder: (-links[holder].mbit_per_s, holder))
    return reachable[:SOURCES_MAX]


def checkpoint_keys(checkpoint: SessionCheckpoint, block_tokens: int, scope_key: ScopeKey | None) -> list[str]:
    """The keys of a session's complete blocks; those of generated ones take the scope's key (U-33, U-40)."""
    keys = list(checkpoint.prompt_blocks)
    if scope_key is not None and block_tokens > 0:
        parent = bytes.fromhex(keys[-1]) if keys else ZERO
        tokens = checkpoint.prompt_tail + checkpoint.generated
        chained = block_keys(scope_key, bytes.fromhex(checkpoint.compat_id), tokens, block_tokens, parent)
        keys += [key.hex() for key in chained]
    return keys[: limits.LOOKUP_KEYS_MAX]
