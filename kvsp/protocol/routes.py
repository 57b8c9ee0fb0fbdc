"""Every resource of KVSP as data: role x method x path x RPC (R-069).

The gateway dispatches on this table, the client builds URLs from it, docs/openapi.json and the
conformance page are generated from it. HEAD is served wherever GET is (R-072).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvsp.protocol import records, registry
from kvsp.protocol.names import PARTY_ID, UUID
from kvsp.protocol.registry import MEDIA_BLOCK, MEDIA_JSON, index_rows

# Who may call (D1). Blocks and leases: scope decides, not role; only the index, which has no
# scopes, is never a caller there.
ANY_CALLER: Final = frozenset({"placement", "instance", "holder", "frontend", "client"})
# "owner, anyone else 404", the index too: whoever names a lease that is not its own learns nothing (U-17).
LEASE_CALLERS: Final = ANY_CALLER | {"index"}
PLACEMENT: Final = frozenset({"placement"})
INSTANCE: Final = frozenset({"instance"})
# "grant only" for the placement side and other holders: `publish_for` / `withdraw_for` decide.
PUBLISHERS: Final = frozenset({"placement", "instance", "holder", "frontend", "client"})

_HEX16: Final = re.compile(r"[0-9a-f]{32}")
_HEX32: Final = re.compile(r"[0-9a-f]{64}")
_ANY_CASE_UUID: Final = re.compile(UUID.pattern, re.IGNORECASE | re.ASCII)

SEGMENTS: Final[Mapping[str, re.Pattern[str]]] = {
    "{compat}": _HEX32,
    "{scope}": _HEX16,
    "{block_key}": _HEX32,
    "{holder_id}": PARTY_ID,
    "{instance_id}": PARTY_ID,
    "{lease}": _ANY_CASE_UUID,
    "{directive}": _ANY_CASE_UUID,
    "{session}": _ANY_CASE_UUID,
}


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one resource.

    `roles` are the roles whose base URI serves it, `rpc` the internal method that carries it,
    `request`/`reply` the record types of JSON bodies (None: no body, or block octets),
    `request_media`/`reply_media` the media types of bodies, `statuses` the successful statuses.
    """

    roles: frozenset[str]
    method: str
    path: str
    rpc: str
    callers: frozenset[str]
    summary: str
    statuses: tuple[int, ...]
    request: type | None = None
    reply: type | None = None
    request_media: str | None = None
    reply_media: str | None = None
    query: tuple[str, ...] = ()
    problems: tuple[registry.ProblemType, ...] = ()

    def __post_init__(self) -> None:
        for record, name in ((self.request, "request_media"), (self.reply, "reply_media")):
            if record is not None:
                object.__setattr__(self, name, MEDIA_JSON)


_INDEX: Final = frozenset({"index"})
_HOLDER: Final = frozenset({"holder", "instance"})  # "every II is normally also a holder"

ROUTES: Final = tuple(
    index_rows(
        (
            Route(
                _INDEX, "POST", "lookup", "kvsp.v1.Index/Lookup", ANY_CALLER,
                "Longest-prefix lookup", (200,),
                request=records.LookupRequest, reply=records.LookupReply,
                problems=(registry.SCOPE_DENIED,),
            ),
            Route(
                _INDEX, "PUT", "replicas/{holder_id}/{block_key}", "kvsp.v1.Index/PutReplica", PUBLISHERS,
                "Publish or refresh a replica record", (201, 200),
                request=records.ReplicaRecord, reply=records.Granted,
                problems=(registry.SCOPE_DENIED, registry.INCOMPATIBLE, registry.DIGEST_MISMATCH),
            ),
            Route(
                _INDEX, "DELETE", "replicas/{holder_id}/{block_key}", "kvsp.v1.Index/DeleteReplica", PUBLISHERS,
                "Withdraw a replica record", (204,),
                problems=(registry.NOT_FOUND, registry.SCOPE_DENIED),
            ),
            Route(
                _HOLDER, "GET", "blocks/{compat}/{scope}/{block_key}", "kvsp.v1.Holder/Transfer", ANY_CALLER,
                "Retrieve a block, or a layer range of it", (200, 304),
                reply_media=MEDIA_BLOCK, query=("layers", "codec"),
                problems=(registry.NOT_FOUND, registry.SCOPE_DENIED, registry.LAYERS_UNAVAILABLE),
            ),
            Route(
                _HOLDER, "PUT", "blocks/{compat}/{scope}/{block_key}", "kvsp.v1.Holder/Transfer", ANY_CALLER,
                "Store a block", (201,), request_media=MEDIA_BLOCK,
                problems=(registry.SCOPE_DENIED, registry.INCOMPATIBLE, registry.DIGEST_MISMATCH),
            ),
            Route(
                _HOLDER, "POST", "leases", "kvsp.v1.Holder/CreateLease", ANY_CALLER,
                "Protect blocks from eviction", (201,),
                request=records.LeaseRequest, reply=records.LeaseReply,
                problems=(registry.NOT_FOUND, registry.SCOPE_DENIED, registry.LEASE_QUOTA),
            ),
            Route(
                _HOLDER, "PUT", "leases/{lease}", "kvsp.v1.Holder/RenewLease", LEASE_CALLERS,
                "Renew a lease", (200,), request=records.LeaseRenewal, reply=records.LeaseReply,
                problems=(registry.NOT_FOUND, registry.LEASE_QUOTA),
            ),
            Route(
                _HOLDER, "DELETE", "leases/{lease}", "kvsp.v1.Holder/ReleaseLease", LEASE_CALLERS,
                "Release a lease", (204,), problems=(registry.NOT_FOUND,),
            ),
            Route(
                PLACEMENT, "PUT", "instances/{instance_id}/status", "kvsp.v1.Placement/PutStatus", INSTANCE,
                "Report instance status", (200,),
                request=records.InstanceStatus, reply=records.StateChange, problems=(registry.STALE_EPOCH,),
            ),
            Route(
                PLACEMENT, "PUT", "sessions/{session}/checkpoint", "kvsp.v1.Placement/PutCheckpoint", INSTANCE,
                "Record a session checkpoint", (201, 200),
                request=records.SessionCheckpoint, reply=records.CheckpointReply,
                problems=(registry.SCOPE_DENIED, registry.INCOMPATIBLE, registry.STALE_EPOCH),
            ),
            Route(
                INSTANCE, "POST", "prefetch", "kvsp.v1.Instance/Prefetch", PLACEMENT,
                "Direct an instance to load blocks", (202,),
                request=records.PrefetchDirective, reply=records.DirectiveStatus,
                problems=(registry.SCOPE_DENIED, registry.INCOMPATIBLE, registry.INVALID_STATE),
            ),
            Route(
                INSTANCE, "GET", "prefetch/{directive}", "kvsp.v1.Instance/GetDirective", PLACEMENT,
                "Read the state of a directive", (200,), reply=records.DirectiveStatus,
                problems=(registry.NOT_FOUND,),
            ),
            Route(
                INSTANCE, "POST", "sessions/{session}/resume", "kvsp.v1.Instance/Resume", PLACEMENT,
                "Continue a session from its checkpoint", (202,),
                request=records.ResumeRequest, reply=records.ResumeReply,
                problems=(
                    registry.SCOPE_DENIED, registry.INCOMPATIBLE, registry.STALE_EPOCH, registry.INVALID_STATE,
                ),
            ),
            Route(
                INSTANCE, "POST", "reshard", "kvsp.v1.Instance/Reshard", PLACEMENT,
                "Plan, commit or abort a reshard", (200,),
                request=records.ReshardRequest, reply=records.ReshardReply,
                problems=(registry.PLAN_CONFLICT,),
            ),
            Route(
                INSTANCE, "PUT", "state", "kvsp.v1.Instance/PutState", PLACEMENT,
                "Change the state of an instance", (200,),
                request=records.StateChange, reply=records.StateChange, problems=(registry.INVALID_STATE,),
            ),
        ),
        lambda route: (route.method, route.path),
    ).values()
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Match:
    """A path below a base URI that names a resource: its methods, and its segment values."""

    methods: Mapping[str, Route]
    segments: Mapping[str, str]

    @property
    def allow(self) -> str:
        """The complete `Allow` field (R-072)."""
        names = set(self.methods)
        if "GET" in names:
            names.add("HEAD")
        return ", ".join(sorted(names))


def _resources(role: str) -> dict[tuple[str, ...], dict[str, Route]]:
    table: dict[tuple[str, ...], dict[str, Route]] = {}
    for route in ROUTES:
        if role in route.roles:
            table.setdefault(tuple(route.path.split("/")), {})[route.method] = route
    return table


_BY_ROLE: Final = {role: _resources(role) for role in ("index", "holder", "placement", "instance")}


def match(role: str, path: str) -> Match | None:
    """Match a raw path relative to the base URI. None: no such resource.

    A template that fits but for the syntax of a variable segment gives a Match whose `segments`
    is empty: the caller answers kvsp-not-found (U-05) after the method check.
    """
    parts = path.split("/")
    for template, methods in _BY_ROLE[role].items():
        if len(template) != len(parts):
            continue
        values: dict[str, str] = {}
        fits = well_formed = True
        for name, part in zip(template, parts, strict=True):
            pattern = SEGMENTS.get(name)
            if pattern is None:
                fits = fits and name == part
            else:
                well_formed = well_formed and pattern.fullmatch(part) is not None
                values[name[1:-1]] = part
        if fits:
            return Match(methods, values if well_formed else {})
    return None


def is_malformed(matched: Match) -> bool:
    """True when a variable segment has bad syntax (U-05). Resources without variables never are."""
    some_route = next(iter(matched.methods.values()))
    return "{" in some_route.path and not matched.segments


def path(template: str, **segments: str) -> str:
    """Fill in a route's path template, for clients."""
    return template.format(**segments)
