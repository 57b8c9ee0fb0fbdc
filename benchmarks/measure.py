"""Fair ratios on a noisy machine: contenders take turns, medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call, and how far the middle half of the calls spreads."""

    seconds: float
    spread: float


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1) -> dict[str, Timing]:
    """Time each contender `rounds` times, `calls` calls each time, taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():  # warm connections, caches and code
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            started = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - started) / calls)
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> Timing:
    """Of the times of one contender's turns."""
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, (high - low) / median)


@dataclass(frozen=True)
class Row:
    """One line of the table: ours beside the peer's, and the ratio of rates (above 1: we are faster)."""

    what: str
    ours: str
    our_figure: str
    peer: str
    peer_figure: str
    ratio: float
    spread: float

    @classmethod
    def rate(cls, what: str, ours: str, our: Timing, peer: str, their: Timing, octets: int) -> Row:
        """Rates of moving `octets` octets."""
        return cls.of(what, ours, our, peer, their, octets / 1e9, "GB/s")

    @classmethod
    def of(cls, what: str, ours: str, our: Timing, peer: str, their: Timing, units: float, unit: str) -> Row:
        """Rates of `units` units per call."""
        figures = [f"{units / timing.seconds:.3g} {unit}" for timing in (our, their)]
        spread = max(our.spread, their.spread)
        return cls(what, ours, figures[0], peer, figures[1], their.seconds / our.seconds, spread)
