"""How fast the ways to one peer have been lately. Pure: durations come in, estimates go out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WEIGHT: Final = 0.25
"""Of the newest sample, in the moving average."""
SAMPLES_MIN: Final = 4
"""Fewer say nothing about a scheme."""
SAMPLE_OCTETS_MIN: Final = 256 << 10
"""What a smaller transfer took is round trips rather than a rate."""
ANSWERS_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What instance status says of the way to a holder: 10^6 bits a second, and microseconds there and back."""

    mbit_per_s: float
    rtt_us: float


class Rates:
    """Moving averages by scheme, and the quickest of the last answers on the control channel."""

    def __init__(self) -> None:
        self._octets_per_s: dict[str, float] = {}
        self._samples: dict[str, int] = {}
        self._measured: dict[str, int] = {}
        self._serial = 0
        self._answers: deque[float] = deque(maxlen=ANSWERS_KEPT)

    def moved(self, scheme: str, octets: int, seconds: float) -> None:
        """A transfer took so long."""
        if octets < SAMPLE_OCTETS_MIN or seconds <= 0:
            return
        sample = octets / seconds
        known = self._octets_per_s.get(scheme, sample)
        self._octets_per_s[scheme] = known + WEIGHT * (sample - known)
        self._samples[scheme] = self._samples.get(scheme, 0) + 1
        self._serial += 1
        self._measured[scheme] = self._serial

    def answered(self, seconds: float) -> None:
        """A control request took so long. Some wait for the holder's work; the quickest is the round trip."""
        self._answers.append(seconds)

    def rate(self, scheme: str) -> float | None:
        """Octets a second; None until there are enough samples."""
        return self._octets_per_s[scheme] if self._samples.get(scheme, 0) >= SAMPLES_MIN else None

    def age(self, scheme: str) -> int:
        """Orders schemes by their newest sample, those without any first."""
        return self._measured.get(scheme, 0)

    @property
    def rtt_s(self) -> float | None:
        """Seconds there and back; None before the first answer."""
        return min(self._answers, default=None)
