"""Who the client is, whom it may talk to, and how patiently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.names import check_base_uri


@dataclass(frozen=True, slots=True)
class Credentials:
    """PEM files: the CA that signs the peers, and this party's certificate and key (R-062)."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The registered base URIs; the client connects to no others, whatever a record says (D10).

    `trusted` narrows the holders per scope id (hex16): "publication and service of blocks restricted
    to holders trusted for the scope" (R-211). A scope that it does not name trusts nobody; without it
    every registered holder is trusted for every scope. `placement` is where an instance reports,
    `instances` are those that a placement controller directs; most parties need neither. Raises
    ValueError for a malformed base URI.
    """

    index: str | None = None
    holders: frozenset[str] = frozenset()
    trusted: Mapping[str, frozenset[str]] | None = None
    placement: str | None = None
    instances: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        single = (uri for uri in (self.index, self.placement) if uri is not None)
        for uri in (*self.holders, *self.instances, *single):
            check_base_uri(uri)

    def is_trusted(self, holder: str, scope_id: str | None) -> bool:
        """May blocks of this scope be exchanged with this holder? None: any scope."""
        if holder not in self.holders:
            return False
        return self.trusted is None or scope_id is None or holder in self.trusted.get(scope_id, ())

    def require_index(self) -> str:
        """The index's base URI. Raises KvspError (400) when there is none."""
        if self.index is None:
            raise bad_request("no index is configured")
        return self.index

    def require_placement(self) -> str:
        """The placement controller's base URI. Raises KvspError (400) when there is none."""
        if self.placement is None:
            raise bad_request("no placement controller is configured")
        return self.placement

    def require_instance(self, instance: str) -> str:
        """The instance's base URI itself. Raises KvspError (403) unless it is registered."""
        if instance not in self.instances:
            raise KvspError(registry.FORBIDDEN, "not a registered instance, not contacted")
        return instance

    def require_holder(self, holder: str, scope_id: str | None) -> None:
        """Raises KvspError (403) unless the holder is trusted."""
        if not self.is_trusted(holder, scope_id):
            raise KvspError(registry.FORBIDDEN, "not a trusted holder, not contacted")


@dataclass(frozen=True, slots=True)
class Options:
    """Behaviour of a client.

    `connect_s` bounds the TCP and TLS handshakes; `stall_s` (watched once a second) is how long
    nothing may move before the next replica is tried; `total_s` bounds a call with all its replicas. `pool_size`
    connections are kept alive. `verify=False` skips digests and is for benchmarks alone.
    `http2` is for control calls, `http2_blocks` for block bodies, which HTTP/1.1 moves a sixth faster.
    `pinned` maps block keys to the only replica digest accepted (R-212). `report_mismatch` withdraws
    a replica that failed its digest, where the index lets us (R-162).
    """

    connect_s: float = 5.0
    stall_s: float = 10.0
    total_s: float = 120.0
    pool_size: int = 8
    http2: bool = True
    http2_blocks: bool = False
    verify: bool = True
    report_mismatch: bool = True
    pinned: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """What `endpoints.json` of a running stack tells one of its parties."""

    credentials: Credentials
    endpoints: Endpoints
    placement: str | None
    scopes: Mapping[str, str]
    scope_keys: Mapping[str, Path]
    holders: Mapping[str, str]
    descriptor: Path | None


def load_stack(path: Path, identity: str) -> Stack:
    """Read `endpoints.json` as `identity`. Raises KvspError (400) when it does not say enough."""
    try:
        body = json.loads(path.read_bytes())
        return _stack(body, path.absolute().parent.parent, identity)
    except OSError as error:
        raise bad_request(f"cannot read {path}: {error.strerror}") from None
    except KeyError as error:
        raise bad_request(f"{path} has no {error}") from None
    except (ValueError, TypeError, AttributeError):
        raise bad_request(f"{path} is not an endpoints file") from None


def _stack(body: dict[str, Any], root: Path, identity: str) -> Stack:
    own, roles = body["identities"][identity], body["roles"]
    instances, placement = roles.get("instances", {}), roles.get("placement")
    holders = {**roles.get("holders", {}), **instances}
    scopes = {name: row for name, row in body.get("scopes", {}).items() if row}
    return Stack(
        # Relative paths in the file are relative to the directory that holds `.kvsp/`.
        Credentials(root / body["ca"], root / own["cert"], root / own["key"]),
        Endpoints(
            roles["index"],
            frozenset(holders.values()),
            placement=placement,
            instances=frozenset(instances.values()),
        ),
        placement,
        {name: row["scope_id"] for name, row in scopes.items()},
        {name: root / row["key_file"] for name, row in scopes.items() if "key_file" in row},
        holders,
        root / body["descriptor"] if body.get("descriptor") else None,
    )
