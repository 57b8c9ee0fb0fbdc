"""holder.toml."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from kvsp.bulk.source import SCHEMES
from kvsp.protocol import limits
from kvsp.protocol.policy import HOLDER_ROLES, Identity, Policy
from kvsp.rpc.config import ConfigError, Peer, ServiceConfig, own_identity


class HolderConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a holder needs besides.

    `base_uri` is its public name; `arena_octets` in `arena_dir` are claimed at start; `index` is
    where it publishes, for `publish_ttl_ms` at a time; `descriptors` are files that say what blocks
    must look like, blocks of others are refused with `require_known_compat`; uploads without a digest
    are with `require_put_digest`; `state_dir` keeps what must be withdrawn after a restart;
    `bulk.NAME` configures and enables the transport NAME, such as "ucx", which says what it takes.
    """

    base_uri: str
    arena_octets: Annotated[int, Meta(ge=1)]
    index: Peer
    arena_dir: str = "/dev/shm"  # noqa: S108
    publish_ttl_ms: Annotated[int, Meta(ge=1, le=limits.INT_MAX)] = 600_000
    descriptors: tuple[str, ...] = ()
    require_known_compat: bool = False
    require_put_digest: bool = False
    schemes: tuple[str, ...] = SCHEMES
    bulk: dict[str, dict[str, Any]] = field(default_factory=dict)
    state_dir: str = ""


def check_identity(config: HolderConfig, policy: Policy) -> Identity:
    """The holder's own identity. Raises ConfigError unless the policy lets it be this holder."""
    unknown = set(config.schemes) - set(SCHEMES)
    if unknown or not config.schemes:
        raise ConfigError(f"schemes: {', '.join(sorted(unknown)) or 'empty'}; known are {', '.join(SCHEMES)}")
    # "Every inference instance is normally also a holder": the one beside it has its identity.
    return own_identity(config, policy, HOLDER_ROLES, "holder", config.base_uri)
