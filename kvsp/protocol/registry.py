"""The KVSP registries as rows (spec: "KVSP Registries"; problem types: "Error Handling").

A name registered twice is an error at import: two rows for one name would make two
implementations of the same registry disagree silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, TypeVar

Row = TypeVar("Row")
Key = TypeVar("Key", bound=Hashable)


def index_rows(rows: Iterable[Row], key: Callable[[Row], Key]) -> Mapping[Key, Row]:
    """Index `rows` by `key`. Raises ValueError when two rows share one."""
    table: dict[Key, Row] = {}
    for row in rows:
        name = key(row)
        if name in table:
            raise ValueError(f"registered twice: {name!r}")
        table[name] = row
    return MappingProxyType(table)


# --- Problem types (R-200, R-201, U-01) -----------------------------------------------

PROBLEM_URI_BASE: Final = "https://iana.org/assignments/kvsp#"
ABOUT_BLANK: Final = "about:blank"


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One row: what went wrong, its HTTP status, and the name of the gRPC code that carries it.

    `suffix` is empty for the plain `about:blank` problems, whose title is the HTTP phrase.
    """

    suffix: str
    title: str
    status: int
    grpc_code: str

    @property
    def uri(self) -> str:
        """The absolute type URI (RFC 9457 `type`)."""
        return PROBLEM_URI_BASE + self.suffix if self.suffix else ABOUT_BLANK


def _plain(status: HTTPStatus, grpc_code: str) -> ProblemType:
    return ProblemType("", status.phrase, int(status), grpc_code)


# Phrases are RFC 9110's; Python 3.11's http module still has RFC 7231's for two of them.
BAD_REQUEST = _plain(HTTPStatus.BAD_REQUEST, "INVALID_ARGUMENT")
FORBIDDEN = _plain(HTTPStatus.FORBIDDEN, "PERMISSION_DENIED")
NO_ROUTE = _plain(HTTPStatus.NOT_FOUND, "UNIMPLEMENTED")
METHOD_NOT_ALLOWED = _plain(HTTPStatus.METHOD_NOT_ALLOWED, "UNIMPLEMENTED")
CONFLICT = _plain(HTTPStatus.CONFLICT, "ABORTED")
PRECONDITION_FAILED = _plain(HTTPStatus.PRECONDITION_FAILED, "ALREADY_EXISTS")
CONTENT_TOO_LARGE = ProblemType("", "Content Too Large", 413, "OUT_OF_RANGE")
URI_TOO_LONG = ProblemType("", "URI Too Long", 414, "INVALID_ARGUMENT")
UNSUPPORTED_MEDIA_TYPE = _plain(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "INVALID_ARGUMENT")
PRECONDITION_REQUIRED = _plain(HTTPStatus.PRECONDITION_REQUIRED, "FAILED_PRECONDITION")
TOO_MANY_REQUESTS = _plain(HTTPStatus.TOO_MANY_REQUESTS, "RESOURCE_EXHAUSTED")
HEADERS_TOO_LARGE = _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "INVALID_ARGUMENT")
INTERNAL = _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL")
UNAVAILABLE = _plain(HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE")
GATEWAY_TIMEOUT = _plain(HTTPStatus.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED")

NOT_FOUND = ProblemType("kvsp-not-found", "Block, lease, session, or directive unknown", 404, "NOT_FOUND")
SCOPE_DENIED = ProblemType("kvsp-scope-denied", "Client not authorized for the scope", 403, "PERMISSION_DENIED")
INCOMPATIBLE = ProblemType("kvsp-incompatible", "Compatibility ID mismatch", 409, "FAILED_PRECONDITION")
LEASE_QUOTA = ProblemType("kvsp-lease-quota", "Lease quota exceeded", 429, "RESOURCE_EXHAUSTED")
STALE_EPOCH = ProblemType("kvsp-stale-epoch", "Epoch older than current", 409, "ABORTED")
INVALID_STATE = ProblemType(
    "kvsp-invalid-state", "Operation not allowed in the instance state", 409, "FAILED_PRECONDITION"
)
DIGEST_MISMATCH = ProblemType("kvsp-digest-mismatch", "Stored data does not match its digest", 422, "DATA_LOSS")
PLAN_CONFLICT = ProblemType(
    "kvsp-plan-conflict", "Reshard plan does not match the current map version", 409, "ABORTED"
)
LAYERS_UNAVAILABLE = ProblemType("kvsp-layers-unavailable", "Requested layers not held", 404, "NOT_FOUND")

PROBLEMS: Final = index_rows(
    (
        NOT_FOUND, SCOPE_DENIED, INCOMPATIBLE, LEASE_QUOTA, STALE_EPOCH, INVALID_STATE,
        DIGEST_MISMATCH, PLAN_CONFLICT, LAYERS_UNAVAILABLE,
    ),
    lambda row: row.suffix,
)  # fmt: skip

PLAIN_PROBLEMS: Final = index_rows(
    (
        BAD_REQUEST, FORBIDDEN, NO_ROUTE, METHOD_NOT_ALLOWED, CONFLICT, PRECONDITION_FAILED,
        CONTENT_TOO_LARGE, URI_TOO_LONG, UNSUPPORTED_MEDIA_TYPE, PRECONDITION_REQUIRED,
        TOO_MANY_REQUESTS, HEADERS_TOO_LARGE, INTERNAL, UNAVAILABLE, GATEWAY_TIMEOUT,
    ),
    lambda row: row.status,
)  # fmt: skip


# --- Codecs (R-032, R-221) ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Codec:
    """One codec row: 16-bit value and name."""

    value: int
    name: str


CODEC_RESERVED: Final = 0
CODEC_MAX: Final = 0xFFFF
CODEC_PRIVATE_FIRST: Final = 0xFF00
RAW: Final = Codec(0x0001, "raw")
CODECS: Final = index_rows((RAW,), lambda row: row.value)
CODEC_NAME: Final = re.compile(r"[a-z0-9-]{1,32}")
if any(not CODEC_NAME.fullmatch(row.name) for row in CODECS.values()):
    raise ValueError("codec names are lowercase ASCII letters, digits and '-', at most 32 (R-221)")


# --- Element types, positional encodings, tiers, states (R-010, R-014, R-043, U-08) ---


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type row: name and octets per element."""

    name: str
    octets: int


ELEMENT_TYPES: Final = index_rows(
    (
        ElementType("bf16", 2),
        ElementType("fp16", 2),
        ElementType("fp32", 4),
        ElementType("fp8-e4m3", 1),
        ElementType("fp8-e5m2", 1),
    ),
    lambda row: row.name,
)


@dataclass(frozen=True, slots=True)
class PositionalEncoding:
    """One positional encoding row: name and the pattern of what may follow ';' (None: nothing)."""

    name: str
    parameters: re.Pattern[str] | None


POSITIONAL_ENCODINGS: Final = index_rows(
    (
        PositionalEncoding(
            "rope", re.compile(r"theta=[1-9][0-9]*(,scaling=[A-Za-z0-9._-]+)?|,scaling=[A-Za-z0-9._-]+")
        ),
        PositionalEncoding("none", None),
    ),
    lambda row: row.name,
)

LAYOUTS: Final = frozenset({"kvsp-layout-1"})

TOKEN: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
"""Syntax of tier, state and element type names, registered or not (U-08)."""

TIERS: Final = frozenset({"device", "host", "local-storage", "remote-memory", "remote-storage"})
INSTANCE_STATES: Final = frozenset({"active", "draining", "sleeping", "failed"})

# --- Media types (R-064, R-065, R-150) ------------------------------------------------

MEDIA_JSON: Final = "application/kvsp+json"
MEDIA_BLOCK: Final = "application/kvsp-block"
MEDIA_PROBLEM: Final = "application/problem+json"
