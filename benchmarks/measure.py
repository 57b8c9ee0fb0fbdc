"""Fair ratios on a noisy machine: every contender runs once per round, rounds are interleaved, medians compared."""

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
    for name, call in contenders.items():  # warm connections, caches and code
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            started = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - started) / calls)
    return {name: _timing(values) for name, values in samples.items()}


def _timing(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, (high - low) / median)
