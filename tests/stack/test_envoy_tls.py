from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from deploy.local import pki
from tests.stack.edge import Edge, read_all
from tests.stack.harness import client_context, credential_files

pytestmark = pytest.mark.stack

GET = b"GET /h1/x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def handshake_and_get(edge: Edge, context: ssl.SSLContext) -> bytes:
    """In TLS 1.3 a refused client certificate shows at the first read, not in connect."""
    with edge.connect(context) as link:
        link.sendall(GET)
        received = b""
        while piece := link.recv(65536):
            received += piece
        return received


def assert_refused(edge: Edge, context: ssl.SSLContext, counter: str) -> None:
    """Nothing is answered, and Envoy says for which reason. (Its alert may be lost in a reset.)"""
    before = edge.stat(counter)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake_and_get(edge, context)
    assert edge.stat(counter) == before + 1


def test_a_known_client_is_served(edge: Edge) -> None:
    assert handshake_and_get(edge, edge.context()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.spec("R-061")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
def test_tls_below_1_3_is_refused(edge: Edge, version: ssl.TLSVersion) -> None:
    context = edge.context()
    context.maximum_version = version
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        edge.connect(context)


@pytest.mark.spec("R-062")
def test_a_client_without_certificate_is_refused(edge: Edge) -> None:
    assert_refused(edge, client_context(edge.ca, None), "ssl.fail_verify_no_cert")


@pytest.mark.spec("R-062")
def test_a_certificate_of_another_authority_is_refused(edge: Edge, tmp_path: Path) -> None:
    foreign = pki.issue_client(pki.make_authority(), "client-demo", "spiffe://kvsp.local/client-demo")
    assert_refused(
        edge, client_context(edge.ca, credential_files(tmp_path, "foreign", foreign)), "ssl.fail_verify_error"
    )


@pytest.mark.spec("R-062")
@pytest.mark.parametrize(("start", "end"), [(-3, -2), (2, 3)], ids=["expired", "not-yet-valid"])
def test_a_certificate_outside_its_life_is_refused(edge: Edge, tmp_path: Path, start: int, end: int) -> None:
    now = datetime.now(UTC)
    leaf = pki.issue(
        edge.authority,
        "client-demo",
        uris=["spiffe://kvsp.local/client-demo"],
        not_before=now + timedelta(days=start),
        not_after=now + timedelta(days=end),
    )
    assert_refused(
        edge, client_context(edge.ca, credential_files(tmp_path, "late", leaf)), "ssl.fail_verify_error"
    )


@pytest.mark.spec("R-062")
def test_a_server_certificate_does_not_make_a_client(edge: Edge, tmp_path: Path) -> None:
    server = pki.issue_server(edge.authority)
    assert_refused(
        edge, client_context(edge.ca, credential_files(tmp_path, "server", server)), "ssl.fail_verify_error"
    )


@pytest.mark.spec("R-062")
def test_a_client_refuses_another_server_name(edge: Edge) -> None:
    raw = socket.create_connection(("127.0.0.1", edge.layout.port), timeout=20)
    with raw, pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        edge.context().wrap_socket(raw, server_hostname="h2.example")


@pytest.mark.spec("R-063")
@pytest.mark.parametrize(("offer", "chosen"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1")])
def test_alpn(edge: Edge, offer: list[str], chosen: str) -> None:
    context = edge.context()
    context.set_alpn_protocols(offer)
    with edge.connect(context) as link:
        assert link.version() == "TLSv1.3"
        assert link.selected_alpn_protocol() == chosen


@pytest.mark.spec("U-48")
def test_a_resumed_session_keeps_the_identity_and_takes_no_early_data(edge: Edge) -> None:
    context = edge.context()
    with edge.connect(context) as link:
        link.sendall(GET)
        first = read_all(link)
        session = link.session
    assert session is not None
    assert session.has_ticket
    raw = socket.create_connection(("127.0.0.1", edge.layout.port), timeout=20)
    with context.wrap_socket(raw, server_hostname="localhost", session=session) as link:
        assert link.session_reused
        link.sendall(GET)
        second = read_all(link)
    for reply in (first, second):
        assert b"URI=spiffe://kvsp.local/client-demo" in reply
