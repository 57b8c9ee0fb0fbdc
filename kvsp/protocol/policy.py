"""Who may do what: one registry of identities, read from TOML (U-39, D1, R-210, R-211).

    [identities."spiffe://example/h1"]
    roles = ["holder"]
    base_uris = ["https://h1.example/kvsp/"]     # https or moqt
    scopes = ["6d1c6481cd428737da312c089db3832a"]
    publish_for = []                             # base URIs, or "*"
    withdraw_for = "*"

    [identities."spiffe://example/h1".quotas]    # each optional
    leased_octets = 4294967296
    leases = 1024
    lease_ttl_ms = 60000
    reserved_octets = 1073741824                 # of the arena, for uploads under way
    pinned_octets = 4294967296                   # of the arena, by blocks being read
    records = 100000

Errors of the file are ValueError and name the identity; refusals are KvspError.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import check_hex16, check_holder_uri, party_id

ROLES: Final = frozenset({"index", "holder", "placement", "instance", "frontend", "client", "gateway"})
HOLDER_ROLES: Final = frozenset({"holder", "instance"})
FRONTEND: Final = frozenset({"frontend"})
ANY: Final = "*"

# An absolute URI of visible ASCII, without the characters that delimit an XFCC element (D2).
_IDENTITY_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*:[A-Za-z0-9._~:/?@!$&'()*+=%-]+")


class Quotas(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one identity (R-142, R-214, D4, D13); the key is the identity, not the connection.

    Octets are those of the arena: a block takes whole pages. Leased, pinned and reserved count apart.
    """

    leased_octets: Annotated[int, Meta(ge=0, le=limits.INT_MAX)] = limits.LEASED_OCTETS_DEFAULT
    leases: Annotated[int, Meta(ge=0, le=limits.LEASE_COUNT_MAX)] = limits.LEASE_COUNT_MAX
    lease_ttl_ms: Annotated[int, Meta(ge=1, le=limits.LEASE_TTL_MS_MAX)] = limits.LEASE_TTL_MS_MAX
    reserved_octets: Annotated[int, Meta(ge=0, le=limits.INT_MAX)] = limits.RESERVED_OCTETS_DEFAULT
    pinned_octets: Annotated[int, Meta(ge=0, le=limits.INT_MAX)] = limits.PINNED_OCTETS_DEFAULT
    records: Annotated[int, Meta(ge=0, le=limits.RECORDS_PER_HOLDER_MAX)] = limits.RECORDS_PER_HOLDER_MAX


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    roles: list[str]
    base_uris: list[str] = []
    scopes: list[str] = []
    publish_for: list[str] | Literal["*"] = []
    withdraw_for: list[str] | Literal["*"] = []
    quotas: Quotas = Quotas()


@dataclass(frozen=True, slots=True)
class Identity:
    """One authenticated party. Grants hold party ids, or ANY alone."""

    uri: str
    roles: frozenset[str]
    base_uris: tuple[str, ...]
    scopes: frozenset[str]
    publish_for: frozenset[str]
    withdraw_for: frozenset[str]
    quotas: Quotas
    party_ids: frozenset[str]

    def is_party(self, identifier: str) -> bool:
        """True when {holder-id} or {instance-id} names a base URI of this identity."""
        return identifier in self.party_ids


class Policy:
    """The registry. Immutable; a changed file is a new Policy."""

    def __init__(self, identities: Iterable[Identity]) -> None:
        self.identities: Mapping[str, Identity] = MappingProxyType({each.uri: each for each in identities})
        self._owners: dict[str, Identity] = {}
        trusted: dict[str, set[str]] = {}
        for identity in self.identities.values():
            for uri in identity.base_uris:
                other = self._owners.setdefault(uri, identity)
                if other is not identity:
                    raise ValueError(f"base URI {uri} belongs to both {other.uri} and {identity.uri}")
            if identity.roles & HOLDER_ROLES:
                for scope in identity.scopes:
                    trusted.setdefault(scope, set()).update(identity.base_uris)
        self._trusted = {scope: frozenset(uris) for scope, uris in trusted.items()}

    @classmethod
    def load(cls, text: str) -> Policy:
        """Read the TOML text. Raises ValueError that says where it is wrong."""
        try:
            document = tomllib.loads(text)
        except RecursionError:
            raise ValueError("policy: nested too deep") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"policy: {error}") from None
        identities = document.pop("identities", {})
        if document:
            raise ValueError(f"policy: unknown key {min(document)!r}")
        if not isinstance(identities, dict):
            raise ValueError("policy: identities is not a table")
        return cls([_identity(uri, entry) for uri, entry in identities.items()])

    def identify(self, uri: str) -> Identity:
        """The identity of a URI SAN. Raises KvspError (403) when there is none (D1)."""
        identity = self.identities.get(uri)
        if identity is None:
            raise KvspError(registry.FORBIDDEN, "identity not in the policy")
        return identity

    def trusted_holders(self, scope_id_hex: str) -> frozenset[str]:
        """Base URIs that may publish and serve blocks of the scope (R-211, D10)."""
        return self._trusted.get(scope_id_hex, frozenset())

    def is_party(self, uri: str) -> bool:
        """True for a registered base URI: no other is ever connected to (D10)."""
        return uri in self._owners

    @staticmethod
    def require_role(identity: Identity, roles: Iterable[str]) -> None:
        """Raises KvspError (403) unless the identity has one of `roles`."""
        if identity.roles.isdisjoint(roles):
            raise KvspError(registry.FORBIDDEN, "role not allowed to do this")

    @staticmethod
    def require_scope(identity: Identity, scope_id_hex: str) -> None:
        """Raises KvspError (kvsp-scope-denied), the same for a foreign scope and for none at all (D8)."""
        if scope_id_hex not in identity.scopes:
            raise KvspError(registry.SCOPE_DENIED)

    @staticmethod
    def require_publisher(identity: Identity, identifier: str) -> None:
        """Raises KvspError (403) unless the identity is that holder or may publish for it (R-081)."""
        _require_grant(identity, identifier, identity.publish_for)

    @staticmethod
    def require_withdrawer(identity: Identity, identifier: str) -> None:
        """Raises KvspError (403) unless the identity is that holder or may withdraw for it (R-089, U-47)."""
        _require_grant(identity, identifier, identity.withdraw_for)


def _require_grant(identity: Identity, identifier: str, grant: frozenset[str]) -> None:
    is_self = bool(identity.roles & HOLDER_ROLES) and identity.is_party(identifier)
    if not is_self and identifier not in grant and ANY not in grant:
        raise KvspError(registry.FORBIDDEN, "not the holder and not authorized to act for it")


def _identity(uri: str, entry: Any) -> Identity:
    try:
        return _checked(uri, msgspec.convert(entry, _Entry))
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"policy: identity {uri!r}: {error}") from None


def _checked(uri: str, entry: _Entry) -> Identity:
    if len(uri) > limits.BASE_URI_OCTETS_MAX or not _IDENTITY_URI.fullmatch(uri):
        raise ValueError("not an absolute URI")
    unknown = set(entry.roles) - ROLES
    if unknown or not entry.roles:
        raise ValueError(f"unknown role {min(unknown)!r}" if unknown else "roles is empty")
    for base_uri in entry.base_uris:
        _check_uri(base_uri, "base_uris")
    for scope in entry.scopes:
        check_hex16(scope, f"scope {scope!r}")
    return Identity(
        uri=uri,
        roles=frozenset(entry.roles),
        base_uris=tuple(dict.fromkeys(entry.base_uris)),
        scopes=frozenset(entry.scopes),
        publish_for=_grant(entry.publish_for, "publish_for"),
        withdraw_for=_grant(entry.withdraw_for, "withdraw_for"),
        quotas=entry.quotas,
        party_ids=frozenset(map(party_id, entry.base_uris)),
    )


def _grant(stated: list[str] | Literal["*"], member: str) -> frozenset[str]:
    if isinstance(stated, str):
        return frozenset({ANY})
    for uri in stated:
        _check_uri(uri, member)
    return frozenset(map(party_id, stated))


def _check_uri(uri: str, member: str) -> None:
    try:
        check_holder_uri(uri)
    except ValueError as error:
        raise ValueError(f"{member} {uri!r}: {error}") from None
