"""Token buckets: what may come at once, and how fast it comes back (D13). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError


@dataclass(frozen=True, slots=True)
class Rate:
    """So many a second, and for `burst_s` seconds more at once."""

    per_s: float
    burst_s: float = 2.0


class Bucket:
    """One caller's allowance."""

    __slots__ = ("_left", "_rate", "_since_ms")

    def __init__(self, rate: Rate, now_ms: int) -> None:
        self._rate = rate
        self._left = rate.per_s * rate.burst_s
        self._since_ms = now_ms

    def take(self, amount: float, now_ms: int) -> None:
        """Use up `amount`; more than a burst passes when all of it is there. Raises KvspError (429)."""
        rate = self._rate
        full = rate.per_s * rate.burst_s
        self._left = min(full, self._left + rate.per_s * (now_ms - self._since_ms) / 1000)
        self._since_ms = now_ms
        missing = min(amount, full) - self._left
        if missing > 0:
            wait_s = math.ceil(missing / rate.per_s)
            raise KvspError(registry.TOO_MANY_REQUESTS, "too fast", retry_after_s=wait_s)
        self._left -= amount
