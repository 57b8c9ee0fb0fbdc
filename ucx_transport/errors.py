"""How a transfer fails."""

from __future__ import annotations

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError


def lost(detail: str) -> KvspError:
    """The error of every transfer that does not come to its end: another source, or another try, may do better."""
    return KvspError(registry.UNAVAILABLE, f"ucx: {detail}", retry_after_s=1)
