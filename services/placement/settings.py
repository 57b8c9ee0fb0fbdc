"""How the controller decides. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.placement.quota import Rate


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Times are in milliseconds.

    `service_ms` is the mean service time before any was observed (U-45). An instance may sleep when
    `sleep_allowed` and `active_min` others stay active. Above `acceptable_cost_ms` one more instance is asked
    for; None: never. Who refused a session is asked again after `retry_ms`.

    Bounds (D13): `sessions_max` of one identity or instance; `session_rate` and `instance_rate` of checkpoints,
    `octet_rate` of what an instance writes with them. A session without a sign of life for `session_idle_ms` is
    forgotten; of one that has ended the epoch is remembered for `ended_ms`.
    """

    service_ms: int = 2_000
    sleep_allowed: bool = False
    active_min: int = 1
    acceptable_cost_ms: int | None = None
    prefetch_deadline_ms: int = 5_000
    prefetch_lease_ms: int = 10_000
    retry_ms: int = 1_000
    sessions_max: int = 10_000
    session_idle_ms: int = 3_600_000
    ended_ms: int = 600_000
    session_rate: Rate = field(default=Rate(500))
    instance_rate: Rate = field(default=Rate(5_000))
    octet_rate: Rate = field(default=Rate(64 << 20))


@dataclass
class Totals:
    """What has happened since start; only ever read by metrics and operators."""

    assignments: int = 0
    refusals: int = 0
    migrations: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    checkpoints: int = 0
    directives: int = 0
