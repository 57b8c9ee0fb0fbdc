from __future__ import annotations

import json

import pytest

from tests.stack.edge import Edge
from tests.stack.harness import Reply

pytestmark = [pytest.mark.stack, pytest.mark.spec("D3")]


def assert_problem(reply: Reply, status: int) -> None:
    assert reply.status == status
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["cache-control"] == "no-store"
    problem = reply.json()
    assert problem["type"] == "about:blank"
    assert problem["status"] == status
    assert problem["title"]


@pytest.mark.parametrize("path", ["/h1/a%2Fb", "/h1/a%2fb", "/h1/a%5Cb", "/h1/a%5cb", "/h1%2Fblocks"])
def test_escaped_slashes_are_refused(edge: Edge, path: str) -> None:
    assert_problem(edge.get(path), 400)


@pytest.mark.parametrize(
    "path",
    [
        "/h1/a/../b", "/h1/./b", "/h1/%2e%2e/is/lookup", "/h1/%2E/b", "/h1//b", "/h1/b/", "/h1/b;x=1", "/h1/b;",
        "/h1/%00", "/h1/%61bc", "/h1/%c0%ae", "/h1/%", "/h1/%zz", "/h1/%C3%A9", "/h1/~b", "/h1/a\\b",
    ],
)  # fmt: skip
def test_every_other_spelling_reaches_the_gateway_as_it_is(edge: Edge, path: str) -> None:
    """It matches raw octets, and so gives 404 for each; a normalised path would name a resource twice."""
    reply = edge.get(path)
    if reply.status == 200:
        assert reply.json()["path"] == path
    else:
        assert_problem(reply, 400)


@pytest.mark.spec("R-060", "R-065", "R-067")
@pytest.mark.parametrize("path", ["/lookup", "/", "//h1/x", "/x/../h1/x", "/H1/x", "/h1", "/%68%31/x"])
def test_paths_outside_a_role_are_not_found(edge: Edge, path: str) -> None:
    reply = edge.get(path)
    assert_problem(reply, 404)


@pytest.mark.parametrize(
    "target", [b"/h1/\xc3\xa9", b"/h1/\x00", b"/h1/a b", b"/h1/x#y", b"h1/x", b"http://other/h1/x@y#z"]
)
def test_octets_that_no_path_has_are_refused(edge: Edge, target: bytes) -> None:
    reply = edge.raw(b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    status = int(reply.split(b" ", 2)[1])
    assert status in {400, 404} or target == b"/h1/\xc3\xa9"
    if status != 200:
        assert b"application/problem+json" in reply


SMUGGLED = b"0\r\n\r\nGET /h1/smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.spec("D4", "R-065", "R-067")
@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % len(SMUGGLED),
        b"transfer-encoding: chunked\r\ncontent-length: 0\r\n",
        b"content-length: 4\r\ncontent-length: 5\r\n",
        b"content-length: 0\r\ncontent-length: %d\r\n" % len(SMUGGLED),
        b"transfer-encoding: identity, chunked\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"content-length: +4\r\n",
        b"content-length: 0x4\r\n",
        b"transfer-encoding : chunked\r\n",
        b"transfer-encoding:\x0bchunked\r\n",
    ],
)
def test_smuggling_is_refused(edge: Edge, fields: bytes) -> None:
    received = edge.raw(b"POST /h1/first HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n" + SMUGGLED)
    assert received.count(b"HTTP/1.1 ") == 1
    assert int(received.split(b" ", 2)[1]) in {400, 501}
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    assert b"cache-control: no-store" in head
    assert json.loads(body)["status"] == int(received.split(b" ", 2)[1])


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
def test_no_upgrade(edge: Edge, upgrade: bytes) -> None:
    received = edge.raw(
        b"GET /h1/x HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: " + upgrade + b"\r\n\r\n"
    )
    assert not received.startswith(b"HTTP/1.1 101")
