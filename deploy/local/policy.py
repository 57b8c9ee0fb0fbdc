"""Who is in the dev stack: parties, their scopes and grants, and the policy file that says so (U-39)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deploy.local.layout import Layout, write_private
from deploy.local.toml import dumps
from kvsp.protocol.keys import ScopeKey, scope_id

TRUST_DOMAIN: Final = "spiffe://kvsp.local"
SCOPES: Final = ("demo", "other")
SCOPE_KEY_OCTETS: Final = 32


def identity_uri(name: str) -> str:
    """The URI SAN of a party's certificate."""
    return f"{TRUST_DOMAIN}/{name}"


@dataclass(frozen=True, slots=True)
class Party:
    """One identity. `prefix` is the path of its base URI, None for a party that serves nothing."""

    name: str
    role: str | None
    prefix: str | None = None
    scopes: tuple[str, ...] = ()
    withdraws_for_all: bool = False

    @property
    def uri(self) -> str:
        """The URI SAN."""
        return identity_uri(self.name)


PARTIES: Final = (
    Party("is", "index", "is"),
    Party("pc", "placement", "pc", SCOPES, withdraws_for_all=True),
    Party("h1", "holder", "h1", SCOPES),
    Party("ii1", "instance", "ii1", SCOPES),
    Party("ii2", "instance", "ii2", SCOPES),
    Party("ii3", "instance", "ii3", SCOPES),
    Party("fe", "frontend", "fe", SCOPES),
    Party("gateway", "gateway"),
    Party("client-demo", "client", None, ("demo",)),
    Party("client-other", "client", None, ("other",)),
    Party("outsider", None),  # a valid certificate that the policy does not know
)


def ensure_scopes(layout: Layout) -> dict[str, str]:
    """Make the scope keys that are missing. Returns scope id (hex16) by name."""
    for name in SCOPES:
        path = layout.scope_key(name)
        if not path.exists():
            write_private(path, secrets.token_hex(SCOPE_KEY_OCTETS).encode() + b"\n")
    return {name: scope_id(ScopeKey.parse(layout.scope_key(name).read_bytes())).hex() for name in SCOPES}


def write_policy(layout: Layout, scopes: Mapping[str, str]) -> None:
    """Write policy.toml: every party but the outsider."""
    identities = {}
    for party in PARTIES:
        if party.role is not None:
            identities[party.uri] = {
                "roles": [party.role],
                "base_uris": [] if party.prefix is None else [layout.base_uri(party.prefix)],
                "scopes": [scopes[name] for name in party.scopes],
                "withdraw_for": "*" if party.withdraws_for_all else [],
            }
    write_private(layout.policy, dumps({"identities": identities}).encode())
