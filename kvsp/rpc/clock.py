"""The clock of every role: TTLs are durations, so no wall clock is involved (R-003)."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000
