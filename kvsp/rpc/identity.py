"""Who is calling (design: identity and policy; D14).

Over a Unix socket, which file permissions close to others, the caller names the principal it
speaks for in metadata. Over mTLS the certificate's URI SAN is the principal, and only an identity
with role `gateway` may speak for another.
"""

from __future__ import annotations

from typing import Any

import grpc

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity, Policy

PRINCIPAL = "kvsp-principal"


def speak_for(principal: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that names the principal."""
    return ((PRINCIPAL, principal),)


def caller(context: grpc.aio.ServicerContext[Any, Any], policy: Policy) -> Identity:
    """The identity behind a call. Raises KvspError (403) when there is none."""
    named = [str(value) for name, value in context.invocation_metadata() or () if name == PRINCIPAL]
    if len(named) > 1:
        raise KvspError(registry.FORBIDDEN, "more than one principal")
    if context.peer().startswith("unix:"):
        if not named:
            raise KvspError(registry.FORBIDDEN, "no principal")
        return policy.identify(named[0])
    uris = list(context.auth_context().get("peer_uri", ()))
    if len(uris) != 1:
        raise KvspError(registry.FORBIDDEN, "the certificate needs exactly one URI SAN")
    peer = policy.identify(bytes(uris[0]).decode())
    if not named or named[0] == peer.uri:
        return peer
    policy.require_role(peer, frozenset({"gateway"}))
    return policy.identify(named[0])
