"""holder.toml."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from kvsp.protocol import limits
from kvsp.protocol.descriptor import Descriptor, compat_id
from kvsp.protocol.descriptor import load as load_descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity, Policy
from kvsp.rpc.config import ConfigError, Peer, ServiceConfig

SCHEMES: Final = ("shm", "grpc")
"""What the host tier can offer."""


class HolderConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a holder needs besides.

    `base_uri` is its public name; `arena_octets` in `arena_dir` are claimed at start; `index` is
    where it publishes, for `publish_ttl_ms` at a time; `descriptors` are files that say what blocks
    must look like, blocks of others are refused with `require_known_compat`; uploads without a digest
    are with `require_put_digest`; `state_dir` keeps what must be withdrawn after a restart.
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
    state_dir: str = ""


def check_identity(config: HolderConfig, policy: Policy) -> Identity:
    """The holder's own identity. Raises ConfigError unless the policy lets it be this holder."""
    unknown = set(config.schemes) - set(SCHEMES)
    if unknown or not config.schemes:
        raise ConfigError(f"schemes: {', '.join(sorted(unknown)) or 'empty'}; known are {', '.join(SCHEMES)}")
    identity = policy.identities.get(config.principal)
    if identity is None or "holder" not in identity.roles or config.base_uri not in identity.base_uris:
        raise ConfigError(f"{config.policy}: {config.principal} is not the holder {config.base_uri}")
    return identity


def load_descriptors(paths: Iterable[str]) -> dict[bytes, Descriptor]:
    """Descriptor files by compat_id. Raises ConfigError."""
    found: dict[bytes, Descriptor] = {}
    for path in paths:
        try:
            descriptor = load_descriptor(Path(path).read_bytes())
        except (OSError, KvspError) as error:
            raise ConfigError(f"{path}: {error}") from None
        found[compat_id(descriptor)] = descriptor
    return found
