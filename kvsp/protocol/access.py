"""The authorization matrix (D1, R-210): role, then party, then scope.

Services call this before they look anything up, so that an answer never tells a caller without
authorization whether something exists (D8).
"""

from __future__ import annotations

from typing import Final

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity, Policy
from kvsp.protocol.registry import index_rows
from kvsp.protocol.routes import ROUTES, Route

_ROUTES: Final = index_rows(ROUTES, lambda route: (route.method, route.path))


def find(method: str, path: str) -> Route:
    """The route of a method and a path template. HEAD is GET. Raises KvspError (404) when there is none."""
    route = _ROUTES.get(("GET" if method == "HEAD" else method, path))
    if route is None:
        raise KvspError(registry.NO_ROUTE)
    return route


PUBLISH: Final = find("PUT", "replicas/{holder_id}/{block_key}")
WITHDRAW: Final = find("DELETE", "replicas/{holder_id}/{block_key}")
LOOKUP: Final = find("POST", "lookup")
GET_BLOCK: Final = find("GET", "blocks/{compat}/{scope}/{block_key}")
PUT_BLOCK: Final = find("PUT", "blocks/{compat}/{scope}/{block_key}")
CREATE_LEASE: Final = find("POST", "leases")
STATUS: Final = find("PUT", "instances/{instance_id}/status")


def authorize(
    policy: Policy,
    identity: Identity,
    route: Route,
    *,
    scope_id: str | None = None,
    party_id: str | None = None,
) -> None:
    """May this identity use this route for this party and scope (hex16)? Raises KvspError (403)."""
    policy.require_role(identity, route.callers)
    if party_id is not None:
        _require_party(policy, identity, route, party_id)
    if scope_id is not None:
        policy.require_scope(identity, scope_id)


def _require_party(policy: Policy, identity: Identity, route: Route, party_id: str) -> None:
    if route is PUBLISH:
        # "the authenticated client is the holder named in the record or is authorized to publish on its behalf"
        policy.require_publisher(identity, party_id)
    elif route is WITHDRAW:
        policy.require_withdrawer(identity, party_id)
    elif not identity.is_party(party_id):
        raise KvspError(registry.FORBIDDEN, "not the caller's own resource")
