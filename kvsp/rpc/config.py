"""One TOML file per process, read strictly: an unknown key is an error, not a surprise later."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from kvsp.protocol import descriptor
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.names import check_base_uri
from kvsp.protocol.policy import Identity, Policy

T = TypeVar("T")


class ConfigError(Exception):
    """The configuration cannot be used; the text says which file and why, in one line."""


class Tls(Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of PEM files for mutual TLS between hosts."""

    ca: str
    cert: str
    key: str


class Peer(Struct, frozen=True, forbid_unknown_fields=True):
    """Another role: `unix:/path`, or `host:port` with mutual TLS."""

    address: str
    tls: Tls | None = None


class Party(Struct, frozen=True, forbid_unknown_fields=True):
    """Another party: its public name, and where it takes internal calls; no `address`: over HTTPS."""

    base_uri: str
    address: str = ""
    tls: Tls | None = None

    def __post_init__(self) -> None:
        check_base_uri(self.base_uri)

    @property
    def peer(self) -> Peer | None:
        """Its internal address, if it has one."""
        return Peer(self.address, self.tls) if self.address else None


class ProcessConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every process needs.

    `listen` is where it listens; `principal` its own URI in the policy; `admin` a `host:port` for
    metrics, empty for none.
    """

    listen: str
    principal: str
    admin: str = ""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"


class ServiceConfig(ProcessConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every role needs: it listens on `unix:/path` or `host:port` (then `tls` is required)."""

    policy: str
    tls: Tls | None = None


def load(path: Path, kind: type[T]) -> T:
    """Read a TOML file into `kind`. Raises ConfigError."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def load_policy(path: str) -> Policy:
    """Read the policy file. Raises ConfigError."""
    try:
        return Policy.load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def own_identity(
    config: ServiceConfig, policy: Policy, roles: Collection[str], role: str, base_uri: str
) -> Identity:
    """The process's own identity. Raises ConfigError unless the policy gives it a role of `roles` and its URI."""
    identity = policy.identities.get(config.principal)
    if identity is None or identity.roles.isdisjoint(roles) or base_uri not in identity.base_uris:
        raise ConfigError(f"{config.policy}: {config.principal} is not the {role} {base_uri}")
    return identity


def load_descriptors(paths: Iterable[str]) -> dict[bytes, Descriptor]:
    """Compatibility Descriptor files by compat_id, which is computed (R-018). Raises ConfigError."""
    found: dict[bytes, Descriptor] = {}
    for path in paths:
        try:
            loaded = descriptor.load(Path(path).read_bytes())
        except (OSError, KvspError) as error:
            raise ConfigError(f"descriptor {path}: {error}") from None
        found[descriptor.compat_id(loaded)] = loaded
    return found


def load_scope_keys(files: Mapping[str, str]) -> dict[str, ScopeKey]:
    """Scope keys by name, from files that only their owner may read (D15). Raises ConfigError."""
    found: dict[str, ScopeKey] = {}
    for name, path in files.items():
        try:
            if Path(path).stat().st_mode & 0o077:
                raise ConfigError(f"scope {name}: {path}: others may read it; its mode must be 0600")
            found[name] = ScopeKey.parse(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"scope {name}: {path}: {error}") from None
    return found
