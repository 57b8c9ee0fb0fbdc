"""How the controller decides. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.placement.quota import Rate


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """When the context of a session is sharded over several instances.

    `instances` are the base URIs of those that can be members; none: there are no groups. A prompt of `tokens` or
    more gets one member per `prefill_tokens` of it, and during output one per `decode_tokens` of the context, at
    most `members_max`. A plan must be acknowledged within `deadline_ms`. There are at most `groups_max` (D13).
    """

    instances: frozenset[str] = frozenset()
    tokens: int = 32_768
    prefill_tokens: int = 16_384
    decode_tokens: int = 131_072
    members_max: int = 4
    deadline_ms: int = 10_000
    groups_max: int = 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Times are in milliseconds.

    `service_ms` is the mean service time before any was observed (U-45). An instance may sleep when
    `sleep_allowed` and `active_min` others stay active. Above `acceptable_cost_ms` one more instance is asked
    for; None: never. Who refused a session is asked again after `retry_ms`.

    Bounds (D13): `sessions_max` of one identity or instance, and `kept_octets_max` of their checkpoints;
    `session_rate` and `instance_rate` of checkpoints, `octet_rate` of what an instance writes with them. A session
    that gives no sign of life for `session_idle_ms`, or that nobody follows for `unfollowed_ms`, ends.

    Of a session that has ended the epoch is remembered for `ended_ms`: twice as long as an instance that is cut
    off keeps a session whose checkpoints nobody answers (SILENCE_MS_MAX in services/instance/session.py). A late
    one of them would otherwise be taken for the first of a new session (U-34).
    """

    service_ms: int = 2_000
    sleep_allowed: bool = False
    active_min: int = 1
    acceptable_cost_ms: int | None = None
    prefetch_deadline_ms: int = 5_000
    prefetch_lease_ms: int = 10_000
    retry_ms: int = 1_000
    sessions_max: int = 10_000
    kept_octets_max: int = 512 << 20
    session_idle_ms: int = 3_600_000
    unfollowed_ms: int = 120_000
    ended_ms: int = 600_000
    session_rate: Rate = field(default=Rate(500))
    instance_rate: Rate = field(default=Rate(5_000))
    octet_rate: Rate = field(default=Rate(64 << 20))
    groups: GroupSettings = GroupSettings()


@dataclass
class Totals:
    """What has happened since start; only ever read by metrics and operators."""

    assignments: int = 0
    refusals: int = 0
    migrations: int = 0
    lost: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    checkpoints: int = 0
    directives: int = 0
    groups_formed: int = 0
    reshards: int = 0
    reshards_aborted: int = 0
