"""A stack under a policy of its own: grants, scopes that not everyone has, and a moqt holder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deploy.local import pki
from deploy.local.layout import Layout
from deploy.local.policy import identity_uri
from deploy.local.toml import dumps
from tests.stack.harness import credential_files, start_stack, temporary_layout
from tests.stack.wire import Wire

A, B, C, NOWHERE = ("a1" * 16, "b2" * 16, "c3" * 16, "d4" * 16)
"""Scopes. h1 serves A and B; C is the vault's alone; NOWHERE is nobody's."""

MOQT = "moqt://relay.example/ii1"


def _policy(layout: Layout) -> dict[str, Any]:
    def base(name: str) -> str:
        return layout.base_uri(name)

    identities = {
        "is": {"roles": ["index"], "base_uris": [base("is")]},
        "pc": {"roles": ["placement"], "base_uris": [base("pc")], "scopes": [A], "withdraw_for": "*"},
        "h1": {"roles": ["holder"], "base_uris": [base("h1")], "scopes": [A, B]},
        "ii1": {"roles": ["instance"], "base_uris": [base("ii1"), MOQT], "scopes": [A, B]},
        "ii2": {"roles": ["instance"], "base_uris": [base("ii2")], "scopes": [A, B]},
        "vault": {"roles": ["holder"], "base_uris": [base("vault")], "scopes": [C]},
        "gateway": {"roles": ["gateway"]},
        "client-demo": {"roles": ["client"], "scopes": [A]},
        "client-other": {"roles": ["client"], "scopes": [B]},
        "deputy": {
            "roles": ["client"],
            "scopes": [A],
            "publish_for": [base("ii1"), base("vault")],
            "withdraw_for": [base("ii1")],
        },
    }
    return {"identities": {identity_uri(name): entry for name, entry in identities.items()}}


@contextlib.contextmanager
def start_ruled() -> Iterator[Wire]:
    """The stack under that policy; `scope` of the Wire is A."""
    with temporary_layout() as layout:
        policy = layout.home / "ruled.toml"
        policy.write_text(dumps(_policy(layout)))
        ruled = {"policy": str(policy)}
        with start_stack(layout, {"index": ruled, "h1": ruled}) as stack:
            wire = Wire(stack)
            wire.scope = A
            authority = pki.Credential.read(layout.pki, "ca")
            assert authority is not None
            uris = {name: [identity_uri(name)] for name in ("vault", "deputy")}
            uris |= {"no-uri": [], "two-uris": [identity_uri("client-demo"), identity_uri("pc")]}
            for name, names in uris.items():
                credential = pki.issue(authority, name, uris=names)
                wire.credentials[name] = credential_files(layout.home, name, credential)
            yield wire
