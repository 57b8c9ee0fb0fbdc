"""Bounds that Envoy keeps (D4) and the form of its own errors (D9), with short timeouts."""

from __future__ import annotations

import io
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pycurl
import pytest

from tests.stack import h2
from tests.stack.edge import SHORT, Edge, read_all, start_edge
from tests.stack.harness import request, temporary_layout

pytestmark = [pytest.mark.stack, pytest.mark.spec("D4", "D9", "R-065", "R-067")]


@pytest.fixture(scope="module")
def edge_alone() -> Iterator[Edge]:
    with temporary_layout() as layout, start_edge(layout, serve=False) as started:
        yield started


def assert_problem(received: bytes, status: int) -> bytes:
    head, _, body = received.partition(b"\r\n\r\n")
    assert int(head.split(b" ", 2)[1]) == status
    assert b"content-type: application/problem+json\r\n" in head + b"\r\n"
    assert b"cache-control: no-store\r\n" in head + b"\r\n"
    problem = json.loads(body)
    assert problem.pop("title")
    assert problem == {"type": "about:blank", "status": status}
    return head


GET = b"GET /h1/x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"


def test_oversized_headers_are_431(edge: Edge) -> None:
    assert_problem(edge.raw(GET + b"x-big: " + b"a" * (61 << 10) + b"\r\n\r\n"), 431)


def test_too_many_headers_are_431(edge: Edge) -> None:
    assert_problem(edge.raw(GET + b"".join(b"x-%d: a\r\n" % n for n in range(120)) + b"\r\n"), 431)


def test_headers_below_the_bound_pass(edge: Edge) -> None:
    assert edge.get("/h1/x", [("x-big", "a" * (50 << 10))]).status == 200


def test_slow_headers_are_cut(edge: Edge) -> None:
    assert_problem(edge.raw(GET), 408)


def test_a_handshake_that_never_comes_is_cut(edge: Edge) -> None:
    with socket.create_connection(("127.0.0.1", edge.layout.port), timeout=20) as link:
        assert link.recv(1) == b""


def test_a_body_that_stops_is_cut(edge: Edge) -> None:
    received = edge.raw(b"PUT /h1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nonly this")
    status = int(received.split(b" ", 2)[1])
    assert status in {408, 504}
    assert_problem(received, status)


def test_a_reply_that_never_starts_is_504_or_408(edge: Edge) -> None:
    received = edge.raw(b"GET /h1/x?hang HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    status = int(received.split(b" ", 2)[1])
    assert status in {408, 504}
    assert_problem(received, status)


def test_a_slow_body_that_goes_on_is_not_cut(edge: Edge) -> None:
    """It takes longer than every timeout but the stream's whole life."""
    assert edge.get("/h1/x?drip=6").body == bytes(6)


def test_a_stream_has_an_end(edge: Edge) -> None:
    received = edge.raw(b"GET /h1/x?drip=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")
    assert len(received.partition(b"\r\n\r\n")[2]) < 20


@pytest.mark.parametrize("octets", [0, 1, 1 << 16, (8 << 20) + 1])
def test_bodies_pass_whole(edge: Edge, octets: int) -> None:
    assert len(edge.get(f"/h1/x?body={octets}").body) == octets
    url = edge.url + "x"
    assert request("PUT", url, edge.context(), bytes(octets)).json()["received"] == octets


def test_the_gateway_answers_expect_continue(edge: Edge) -> None:
    """ "?deny" answers without reading: the client must see that before it sends its body (U-21)."""
    start = (
        b"HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    )
    with edge.connect() as link:
        link.sendall(b"PUT /h1/x?deny " + start)
        assert read_all(link).startswith(b"HTTP/1.1 200")
    with edge.connect() as link:
        link.sendall(b"PUT /h1/x " + start)
        assert link.recv(65536).startswith(b"HTTP/1.1 100")
        link.sendall(b"body")
        assert b'"received": 4' in read_all(link)


@pytest.mark.parametrize(
    "version", [pycurl.CURL_HTTP_VERSION_2TLS, pycurl.CURL_HTTP_VERSION_1_1], ids=["h2", "h1"]
)
def test_an_answer_that_comes_before_the_body_arrives(edge: Edge, version: int) -> None:
    """A PUT that is refused early (412, 413) must show its status, not a broken connection."""
    handle = pycurl.Curl()
    certificate, key = edge.credential()
    for _ in range(10):
        body = io.BytesIO(bytes(4 << 20))
        options = {
            pycurl.URL: edge.url + "x?deny",
            pycurl.UPLOAD: 1,
            pycurl.READDATA: body,
            pycurl.INFILESIZE: 4 << 20,
            pycurl.HTTPHEADER: ["expect:"],
            pycurl.HTTP_VERSION: version,
            pycurl.CAINFO: edge.ca,
            pycurl.SSLCERT: certificate,
            pycurl.SSLKEY: key,
            pycurl.WRITEDATA: io.BytesIO(),
        }
        for option, value in options.items():
            handle.setopt(option, value)
        handle.perform()
        assert handle.getinfo(pycurl.RESPONSE_CODE) == 200
    handle.close()


def test_nobody_behind_is_503_with_retry_after(edge_alone: Edge) -> None:
    head = assert_problem(edge_alone.raw(GET + b"\r\n"), 503)
    assert b"retry-after: 1" in head


def test_overload_is_503_with_retry_after() -> None:
    """A heap bound that is always exceeded stands for one that is now."""
    with temporary_layout() as layout, start_edge(layout, replace(SHORT, heap_octets=1 << 20)) as full:
        received = full.raw(GET + b"\r\n")
        while received.startswith(b"HTTP/1.1 200"):  # until the overload manager has looked for the first time
            received = full.raw(GET + b"\r\n")
    assert b"retry-after: 1" in assert_problem(received, 503)


def test_the_admin_page_shows_and_does_not_act(edge: Edge) -> None:
    for path in (
        "/quitquitquit",
        "/config_dump",
        "/runtime_modify?a=b",
        "/logging?level=trace",
        "/drain_listeners",
    ):
        call = urllib.request.Request(edge.layout.admin_url + path, method="POST")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(call, timeout=10)


def test_http_1_0_is_refused(edge: Edge) -> None:
    assert_problem(edge.raw(b"GET /h1/x HTTP/1.0\r\nhost: localhost\r\n\r\n"), 426)


@pytest.mark.parametrize(
    "octets", [b"\r\n\r\n\r\nx\r\n\r\n", b"GET\r\n\r\n", b"GET /h1/x HTTP/1.1\r\n\r\n", b"\x00" * 64]
)
def test_what_is_no_request_is_400(edge: Edge, octets: bytes) -> None:
    assert_problem(edge.raw(octets), 400)


@pytest.mark.spec("R-068")
def test_replies_carry_no_fields_of_the_proxy(edge: Edge, edge_alone: Edge) -> None:
    for reply in (edge.get("/h1/x"), edge.get("/none"), edge_alone.get("/h1/x")):
        assert not [name for name in reply.headers if name.startswith("x-") or name in {"server", "via"}]


@pytest.mark.spec("U-30")
def test_replies_are_not_compressed(edge: Edge) -> None:
    reply = edge.get("/h1/x?body=100000", [("accept-encoding", "gzip, br, zstd")])
    assert "content-encoding" not in reply.headers
    assert len(reply.body) == 100000


@pytest.mark.spec("R-215")
def test_the_access_log_holds_no_path(edge: Edge) -> None:
    key = "ab" * 32
    edge.get(f"/h1/blocks/{key}?layers=0-1")
    edge.background.call(edge.background.stack.stop())
    try:
        text = edge.layout.log("access").read_text()
    finally:
        edge.background.call(edge.background.stack.start())
    assert key not in text
    assert "layers" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"h1"} <= {line["role"] for line in lines}


# --- HTTP/2 ----------------------------------------------------------------------------


@pytest.fixture
def link(edge: Edge) -> Iterator[h2.Link]:
    with edge.connect(edge.context(alpn="h2")) as connection:
        yield h2.Link(connection)


def test_h2_streams_are_bounded(link: h2.Link) -> None:
    kind, _, _, payload = next(each for each in link.frames() if each[0] == h2.SETTINGS)
    assert kind == h2.SETTINGS
    assert h2.settings(payload)[h2.MAX_CONCURRENT_STREAMS] == 100


def test_h2_serves(link: h2.Link) -> None:
    link.send(h2.headers(1, h2.get("/h1/x")))
    _, body, complete = link.exchange(1)
    assert complete
    assert json.loads(body)["path"] == "/h1/x"


@pytest.mark.spec("D2")
@pytest.mark.parametrize("name", ["x-forwarded-client-cert", "client-cert"])
def test_h2_identity_fields_are_dropped(link: h2.Link, name: str) -> None:
    link.send(h2.headers(1, h2.get("/h1/x", (name, "URI=spiffe://kvsp.local/pc"))))
    _, body, complete = link.exchange(1)
    assert complete
    assert b"kvsp.local/pc" not in body
    assert b"URI=spiffe://kvsp.local/client-demo" in body


@pytest.mark.spec("D2", "D3")
@pytest.mark.parametrize(
    "fields",
    [
        h2.get("/h1/x", ("X-Forwarded-Client-Cert", "URI=a")),
        h2.get("/h1/x", ("x_forwarded_client_cert", "URI=a")),
        h2.get("/h1/x", ("transfer-encoding", "chunked")),
        h2.get("/h1/x", ("connection", "close")),
        h2.get("/h1/x", ("content-length", "5")),
        h2.get("/h1/x", ("x", "a\r\nx-forwarded-client-cert: URI=b")),
        h2.get("/h1/x\r\nx-a: b"),
        h2.get("/h1/a%2Fb"),
        [*h2.get("/h1/x"), (":path", "/h1/y")],
    ],
    ids=lambda fields: repr(fields[-1])[:50],
)  # fmt: skip
def test_h2_malformed_requests_never_pass(link: h2.Link, fields: list[tuple[str, str]]) -> None:
    link.send(h2.headers(1, fields))
    _, body, complete = link.exchange(1)
    if complete:
        assert json.loads(body)["status"] == 400


def test_h2_oversized_headers_do_not_pass(link: h2.Link) -> None:
    fields = h2.get("/h1/x", *((f"x-{n}", "a" * 1000) for n in range(14)))
    link.send(h2.headers(1, fields))
    assert link.exchange(1)[2]
    many = h2.get("/h1/x", *((f"x-{n}", "a") for n in range(120)))
    link.send(h2.headers(3, many))
    _, body, complete = link.exchange(3)
    if complete:
        assert json.loads(body)["status"] == 431


def test_h2_rapid_reset_ends_the_connection(edge: Edge, link: h2.Link) -> None:
    """CVE-2023-44487: requests that are taken back at once cost the server, not the client."""
    for first in range(1, 4000, 200):
        pairs = (
            h2.headers(number, h2.get("/h1/x")) + h2.frame(h2.RST_STREAM, 0, number, h2.CANCEL.to_bytes(4, "big"))
            for number in range(first, first + 200, 2)
        )
        link.send(b"".join(pairs))
    assert list(link.frames()) is not None  # ends: Envoy has closed
    assert edge.stat("http.kvsp.downstream_rq_too_many_premature_resets") > 0
    assert edge.get("/h1/x").status == 200
