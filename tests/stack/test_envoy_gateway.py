"""What Envoy and the gateway make of hostile identities and paths together."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import pki
from tests.stack.harness import RunningStack, client_context, credential_files, request

pytestmark = pytest.mark.stack

KNOWN = "spiffe://kvsp.local/client-demo"


def lookup(stack: RunningStack) -> dict[str, object]:
    return {"scope_id": stack.scope_id(), "compat_id": stack.compat_id(), "block_keys": []}


@pytest.mark.spec("D2", "U-39", "R-065", "R-067")
@pytest.mark.parametrize(
    "uris",
    [
        [],
        [KNOWN, KNOWN],
        [KNOWN, "spiffe://kvsp.local/pc"],
        [f"spiffe://kvsp.local/x,URI={KNOWN}"],
        [f"spiffe://kvsp.local/x;URI={KNOWN}"],
        [f"{KNOWN},x"],
        [KNOWN + "/"],
        [KNOWN.upper()],
        ["spiffe://kvsp.local/nobody"],
    ],
    ids=repr,
)
def test_only_one_exact_uri_is_an_identity(stack: RunningStack, tmp_path: Path, uris: list[str]) -> None:
    authority = pki.Credential.read(stack.layout.pki, "ca")
    assert authority is not None
    files = credential_files(tmp_path, "odd", pki.issue(authority, "client-demo", uris=uris))
    context = client_context(stack.ca, files)
    headers = [("content-type", "application/kvsp+json")]
    body = b'{"scope_id":"%s","compat_id":"%s","block_keys":[]}' % (
        stack.scope_id().encode(),
        stack.compat_id().encode(),
    )
    reply = request("POST", stack.index + "lookup", context, body, headers)
    assert reply.status == 403
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.json()["type"] == "about:blank"


@pytest.mark.spec("D2")
@pytest.mark.parametrize("name", ["x-forwarded-client-cert", "client-cert", "kvsp-principal"])
def test_no_header_changes_the_identity(stack: RunningStack, name: str) -> None:
    fields = [(name, f"URI={KNOWN}"), (name, KNOWN)]
    reply = stack.request("POST", stack.index + "lookup", lookup(stack), fields, identity="outsider")
    assert reply.status == 403
    reply = stack.request("POST", stack.index + "lookup", lookup(stack), [(name, "URI=spiffe://kvsp.local/is")])
    assert reply.status == 200


PATHS = [
    "is/%6cookup", "is/lookup/", "is//lookup", "/is/lookup", "is/./lookup", "is/../is/lookup", "h1/../is/lookup",
    "is/%2e%2e/is/lookup", "is%2flookup", "is/lookup%2f", "is/lookup%5c", "is/lookup;x=1", "is/lookup;",
    "is/lookup%00", "is/lookup%20", "is/LOOKUP", "IS/lookup", "is/lookup%3fx", "is/lo%c0%afokup",
    "is/lookup%C3%A9", "lookup", "",
]  # fmt: skip


@pytest.mark.spec("D3", "U-05", "R-060", "R-065", "R-067", "R-069")
@pytest.mark.parametrize("path", PATHS)
def test_a_resource_has_one_spelling(stack: RunningStack, path: str) -> None:
    origin = stack.index.removesuffix("is/")
    reply = stack.request("POST", origin + path, lookup(stack))
    assert reply.status in {400, 404}
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.json()["status"] == reply.status


@pytest.mark.spec("R-063", "R-070")
def test_the_one_spelling_is_served(stack: RunningStack) -> None:
    assert stack.request("POST", stack.index + "lookup", lookup(stack)).json() == {"matched": 0, "replicas": []}
    assert stack.request("POST", stack.index + "lookup?x=%2F", lookup(stack)).status == 200
