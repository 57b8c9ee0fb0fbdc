"""How a transfer fails."""

from __future__ import annotations

from kvsp.protocol.errors import KvspError, unavailable


def lost(detail: str) -> KvspError:
    """The error of every transfer that does not come to its end: another source, or another try, may do better."""
    return unavailable(f"ucx: {detail}")
