"""placement.toml."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field, structs

from kvsp.protocol import limits
from kvsp.protocol.policy import Policy
from kvsp.rpc.config import ConfigError, Party, Peer, ServiceConfig, Tls
from services.placement.quota import Rate
from services.placement.settings import GroupSettings, Settings

Ms = Annotated[int, Meta(ge=1, le=limits.INT_MAX)]
Count = Annotated[int, Meta(ge=1, le=limits.INT_MAX)]
_RULES = Settings()
_GROUPS = GroupSettings()


class GroupsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[groups]: contexts may be sharded over instances with an internal address; see GroupSettings."""

    tokens: Count = _GROUPS.tokens
    prefill_tokens: Count = _GROUPS.prefill_tokens
    decode_tokens: Count = _GROUPS.decode_tokens
    members_max: Count = _GROUPS.members_max
    deadline_ms: Ms = _GROUPS.deadline_ms
    groups_max: Count = _GROUPS.groups_max


class PlacementConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ServiceConfig, and what a controller needs besides.

    `state_dir` keeps epochs, sessions and checkpoints; `index` is where it looks up and reports to; `instances`
    are those it directs, over `https` (PEM files) where they have no address. `descriptors` are files of the
    Compatibility Descriptors in use: with any, others are refused. `scopes` are key files by name: with its
    scope's key a session that moves finds its generated blocks too. `want_instance` is a command that starts one
    more instance. All else: see services/placement/settings.py; times in milliseconds.
    """

    state_dir: str
    index: Peer
    instances: tuple[Party, ...] = ()
    https: Tls | None = None
    descriptors: tuple[str, ...] = ()
    scopes: dict[str, str] = field(default_factory=dict)
    want_instance: tuple[str, ...] = ()
    groups: GroupsConfig | None = None
    service_time_ms: Ms = _RULES.service_ms
    sleep_allowed: bool = _RULES.sleep_allowed
    active_min: Annotated[int, Meta(ge=0)] = _RULES.active_min
    acceptable_cost_ms: Ms | None = None
    prefetch_deadline_ms: Ms = _RULES.prefetch_deadline_ms
    prefetch_lease_ms: Annotated[int, Meta(ge=1, le=limits.LEASE_TTL_MS_MAX)] = _RULES.prefetch_lease_ms
    session_idle_ms: Ms = _RULES.session_idle_ms
    unfollowed_ms: Ms = _RULES.unfollowed_ms
    sessions_max: Count = _RULES.sessions_max
    kept_octets_max: Count = _RULES.kept_octets_max
    session_checkpoints_per_s: Count = int(_RULES.session_rate.per_s)
    instance_checkpoints_per_s: Count = int(_RULES.instance_rate.per_s)
    instance_octets_per_s: Count = int(_RULES.octet_rate.per_s)

    def settings(self) -> Settings:
        """How the state is to decide."""
        return Settings(
            service_ms=self.service_time_ms,
            sleep_allowed=self.sleep_allowed,
            active_min=self.active_min,
            acceptable_cost_ms=self.acceptable_cost_ms,
            prefetch_deadline_ms=self.prefetch_deadline_ms,
            prefetch_lease_ms=self.prefetch_lease_ms,
            sessions_max=self.sessions_max,
            kept_octets_max=self.kept_octets_max,
            session_idle_ms=self.session_idle_ms,
            unfollowed_ms=self.unfollowed_ms,
            session_rate=Rate(self.session_checkpoints_per_s),
            instance_rate=Rate(self.instance_checkpoints_per_s),
            octet_rate=Rate(self.instance_octets_per_s),
            groups=self._group_settings(),
        )

    def _group_settings(self) -> GroupSettings:
        if self.groups is None:
            return GroupSettings()
        inside = frozenset(each.base_uri for each in self.instances if each.peer is not None)
        return GroupSettings(instances=inside, **structs.asdict(self.groups))


def check_config(config: PlacementConfig, policy: Policy) -> None:
    """Raises ConfigError unless the policy lets this be a placement controller of these instances."""
    own = policy.identities.get(config.principal)
    if own is None or "placement" not in own.roles:
        raise ConfigError(f"principal {config.principal}: not a placement controller in {config.policy}")
    for peer in config.instances:
        if not policy.is_party(peer.base_uri):
            raise ConfigError(f"instance {peer.base_uri}: not in {config.policy}")
        if peer.peer is None and config.https is None:
            raise ConfigError(f"instance {peer.base_uri}: needs an address, or [https] to be called at")
