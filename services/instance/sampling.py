"""How the next token is chosen from logits: greedy, top-k, top-p; the state is (method, params, seed, step).

"restores the sampler with the given method, parameters, seed, and step" (R-180): the random number of a step is a
function of seed and step alone, from a counter-based generator, so there is nothing else to restore.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvsp.protocol.errors import bad_request
from kvsp.protocol.records import Sampler

Logits = npt.NDArray[np.floating[Any]]

METHODS: Final = ("greedy", "top-k", "top-p")
_KEY_MASK: Final = (1 << 128) - 1


@dataclass(frozen=True)
class Choice:
    """A parsed sampler, without its step."""

    method: Literal["greedy", "top-k", "top-p"]
    seed: int = 0
    temperature: float = 1.0
    k: int = 0
    p: float = 1.0

    def pick(self, logits: Logits, step: int) -> int:
        """The token of output index `step`. `logits` is one row over the vocabulary. Raises ValueError on NaN."""
        if np.isnan(logits).any():
            raise ValueError("the model's logits are not numbers")
        if self.method == "greedy":
            return int(logits.argmax())  # of equal ones the first
        scaled = logits.astype(np.float64) / self.temperature
        order = _top(scaled, self.k) if self.method == "top-k" else _descending(scaled)
        cumulative = np.cumsum(np.exp(scaled[order] - scaled[order[0]]))
        if self.method == "top-p":
            # The fewest tokens whose probabilities sum to p.
            cumulative = cumulative[: int(np.searchsorted(cumulative, self.p * cumulative[-1])) + 1]
        at = int(np.searchsorted(cumulative, uniform(self.seed, step) * cumulative[-1], side="right"))
        return int(order[min(at, len(cumulative) - 1)])


def parse(sampler: Sampler) -> Choice:
    """The choice that a sampler record describes; other params than the method's own are passed over.

    Raises KvspError (400) for an unknown method and for params out of their bounds: `temperature` > 0 (default 1),
    `k` >= 1 for top-k, 0 < `p` <= 1 for top-p.
    """
    params = sampler.params
    if sampler.method == "greedy":
        return Choice("greedy")
    if sampler.method not in METHODS:
        raise bad_request("sampler method is not known")
    temperature = _number(params.get("temperature", 1.0), "temperature")
    if sampler.method == "top-p":
        p = _number(params.get("p"), "p")
        if p > 1:
            raise bad_request("sampler p is above 1")
        return Choice("top-p", sampler.seed, temperature, p=p)
    k = params.get("k")
    if type(k) is not int or k < 1:
        raise bad_request("sampler k is not a positive integer")
    return Choice("top-k", sampler.seed, temperature, k=k)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) with 53 random bits, from seed and step alone.

    Raw output of Philox-4x64 (key: seed as a 128-bit two's complement, counter: step), which numpy keeps the same
    across versions, as it does not for what its Generator derives from it.
    """
    raw = int(np.random.Philox(key=seed & _KEY_MASK, counter=step).random_raw())
    return (raw >> 11) * 2.0**-53


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise bad_request(f"sampler {name} is not a positive number")
    return float(value)


def _descending(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Token ids, the likeliest first, of equal ones the lower id first."""
    return np.argsort(-logits, kind="stable")


def _top(logits: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.intp]:
    """The first k of `_descending`, without sorting the whole vocabulary."""
    if k >= len(logits):
        return _descending(logits)
    least = np.partition(logits, len(logits) - k)[len(logits) - k]
    above = np.flatnonzero(logits > least)
    equal = np.flatnonzero(logits == least)[: k - len(above)]
    chosen = np.concatenate([above, equal])
    chosen.sort()
    return chosen[_descending(logits[chosen])]
