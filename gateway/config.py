"""gateway.toml: which base URI is served by which role's process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from kvsp.bulk.source import SCHEMES
from kvsp.protocol.names import check_base_uri
from kvsp.rpc import config
from kvsp.rpc.config import ConfigError, Peer, ProcessConfig


class RoleConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One base URI: the role it serves, and where that role's process listens.

    `blocks`, of an instance alone, is the holder beside it: an instance "is normally also a holder" (R-074).
    """

    role: str
    base_uri: str
    backend: Peer
    blocks: Peer | None = None

    @property
    def path(self) -> str:
        """The path of the base URI, ending in '/'."""
        return urlsplit(self.base_uri).path


class GatewayConfig(ProcessConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`listen` is `unix:/path`, opened by Envoy alone; services on other hosts know the gateway as `principal`.

    Blocks move by `schemes`, as far as holders have them.
    """

    roles: list[RoleConfig]
    schemes: Annotated[tuple[str, ...], Meta(min_length=1)] = SCHEMES


def load(path: Path, served: frozenset[str]) -> GatewayConfig:
    """Read and check gateway.toml; `served` are the roles this gateway can serve. Raises ConfigError."""
    loaded = config.load(path, GatewayConfig)
    try:
        _check(loaded, served)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return loaded


def _check(loaded: GatewayConfig, served: frozenset[str]) -> None:
    # Identity comes from Envoy; whoever else could open the socket could claim any (D2).
    if not loaded.listen.startswith("unix:/"):
        raise ValueError("listen must be unix:/path: without Envoy in front there is no identity")
    if not loaded.roles:
        raise ValueError("no [[roles]]")
    paths: set[str] = set()
    for entry in loaded.roles:
        if entry.role not in served:
            raise ValueError(f"role {entry.role!r} is not one of {', '.join(sorted(served))}")
        try:
            check_base_uri(entry.base_uri)
        except ValueError as error:
            raise ValueError(f"base_uri {entry.base_uri}: {error}") from None
        if (entry.role == "instance") != (entry.blocks is not None):
            raise ValueError(f"base_uri {entry.base_uri}: blocks goes with role instance, and with no other")
        if entry.path in paths:
            raise ValueError(f"base_uri {entry.base_uri}: its path is served twice")
        paths.add(entry.path)
