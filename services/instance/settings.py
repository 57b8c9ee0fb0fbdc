"""What an instance is, for its rules. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvsp.protocol import limits


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an instance is. Times are milliseconds; 0 for `sleep_after_ms`: it never asks to sleep.

    `batch_invariant` as the engine is: without it no session here is deterministic, whatever its sampler says.
    """

    base_uri: str
    epoch: int
    compat_id: str
    block_tokens: int
    positions_max: int
    batch_invariant: bool = True
    batch_size: int = 16
    queue_max: int = 64
    status_ttl_ms: int = 1_500
    sleep_after_ms: int = 0
    keep_output_ms: int = 60_000
    prompt_wait_ms: int = 10_000
    directives_pending_max: int = limits.DIRECTIVES_PENDING_MAX
