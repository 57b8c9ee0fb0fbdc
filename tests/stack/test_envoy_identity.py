from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import pki
from tests.stack.edge import Edge
from tests.stack.harness import client_context, credential_files, request

pytestmark = [pytest.mark.stack, pytest.mark.spec("D2")]

OTHER = "spiffe://kvsp.local/pc"


def identity_fields(headers: list[list[str]]) -> list[list[str]]:
    return [pair for pair in headers if "client" in pair[0].lower() and "cert" in pair[0].lower()]


def only_own(headers: list[list[str]]) -> bool:
    [[name, value]] = identity_fields(headers)
    return name == "x-forwarded-client-cert" and value.endswith(";URI=spiffe://kvsp.local/client-demo")


@pytest.mark.parametrize("name", ["x-forwarded-client-cert", "X-Forwarded-Client-Cert", "X-FORWARDED-CLIENT-CERT"])
@pytest.mark.parametrize(
    "value",
    [f"URI={OTHER}", f'By=x;Hash=00;URI="{OTHER}"', f'URI="spiffe://a,URI={OTHER}"', f"URI=a,URI={OTHER}", ""],
)
def test_what_the_client_says_of_itself_is_dropped(edge: Edge, name: str, value: str) -> None:
    reply = edge.get("/h1/x", [(name, value)])
    assert reply.status == 200
    assert OTHER not in reply.body.decode()
    assert only_own(reply.json()["headers"])


def test_repeated_fields_are_dropped(edge: Edge) -> None:
    reply = edge.get("/h1/x", [("x-forwarded-client-cert", f"URI={OTHER}")] * 3)
    assert OTHER not in reply.body.decode()
    assert only_own(reply.json()["headers"])


@pytest.mark.parametrize("name", ["Client-Cert", "client-cert", "Client-Cert-Chain"])
def test_rfc_9440_fields_are_stripped(edge: Edge, name: str) -> None:
    assert only_own(edge.get("/h1/x", [(name, ":AAAA:")]).json()["headers"])


@pytest.mark.parametrize("name", ["x_forwarded_client_cert", "X_Forwarded-Client_Cert", "client_cert"])
def test_names_with_underscores_are_refused(edge: Edge, name: str) -> None:
    assert edge.get("/h1/x", [(name, f"URI={OTHER}")]).status == 400


def test_connection_does_not_remove_the_identity(edge: Edge) -> None:
    """A client may name any field as hop-by-hop; the one Envoy sets must survive that."""
    reply = edge.get("/h1/x", [("connection", "x-forwarded-client-cert, close")])
    assert reply.status >= 400 or only_own(reply.json()["headers"])


@pytest.mark.parametrize(("uris", "count"), [([], 0), (["spiffe://kvsp.local/h1", OTHER], 2)], ids=["none", "two"])
def test_every_uri_of_the_certificate_is_passed_on(
    edge: Edge, tmp_path: Path, uris: list[str], count: int
) -> None:
    """The gateway refuses all but exactly one, so it must see how many there are."""
    files = credential_files(tmp_path, "odd", pki.issue(edge.authority, "odd", uris=uris))
    reply = request("GET", edge.url + "x", client_context(edge.ca, files), None)
    [[_, value]] = identity_fields(reply.json()["headers"])
    assert sum(part.startswith("URI=spiffe") for part in value.split(";")) == count


@pytest.mark.parametrize("trick", [",", ";"])
def test_a_delimiter_in_a_uri_makes_more_than_one(edge: Edge, tmp_path: Path, trick: str) -> None:
    """Envoy does not quote URIs. A second element or a second URI= comes out: both are refused behind it."""
    uri = f"spiffe://kvsp.local/x{trick}URI={OTHER}"
    files = credential_files(tmp_path, "odd", pki.issue(edge.authority, "odd", uris=[uri]))
    reply = request("GET", edge.url + "x", client_context(edge.ca, files), None)
    [[_, value]] = identity_fields(reply.json()["headers"])
    assert value.endswith(f"URI={uri}")
    assert value.count("URI=") == 2
