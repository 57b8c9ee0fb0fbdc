"""The front end behind the gateway: octets in, octets out as they are made, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.v1 import frontend_pb2
from tests.services.gateway_harness import CLIENT, read_response
from tests.services.gateway_roles import PC, Roles

JSON = {"content-type": "application/json"}
SSE = frontend_pb2.ApiStart(status=200, content_type="text/event-stream")
HEAD = (
    f"POST /fe/v1/completions HTTP/1.1\r\nhost: x\r\nx-forwarded-client-cert: URI={CLIENT}\r\n"
    "content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
).encode()


def whole(body: bytes, status: int = 200, media: str = "application/json") -> list[Any]:
    """The parts of an answer of known length."""
    return [frontend_pb2.ApiStart(status=status, content_type=media, length=len(body)), body]


async def chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked body; empty at its end."""
    octets = int(await reader.readline(), 16)
    return (await reader.readexactly(octets + 2))[:-2]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "v1/completions"), ("POST", "v1/chat/completions"), ("GET", "v1/models"),
        ("GET", "v1/models/demo"), ("GET", "v1/models/a/b"), ("GET", "v1/models/a%2Fb"),
    ],
)  # fmt: skip
@pytest.mark.spec("R-067")
def test_octets_go_through_as_they_come(roles: Roles, method: str, path: str) -> None:
    body = b'{"prompt": "\xf0\x9f\x98\x82", "n": NaN}' if method == "POST" else b""
    roles.frontend.script(*whole(b'{"answer":1}'))
    response = roles.request(method, f"/fe/{path}", body, JSON)
    expected = {"content-type": "application/json", "content-length": "12", "cache-control": "no-store"}
    assert (response.status, response.headers, response.body) == (200, expected, b'{"answer":1}')
    assert roles.frontend.calls.pop() == (CLIENT, frontend_pb2.ApiRequest(method=method, path=path, body=body))


def test_head_is_get_without_body(roles: Roles) -> None:
    roles.frontend.script(*whole(b"12345"))
    response = roles.request("HEAD", "/fe/v1/models")
    assert (response.status, response.headers["content-length"], response.body) == (200, "5", b"")
    assert roles.frontend.calls.pop()[1].method == "GET"


def test_errors_of_the_api_are_answers(roles: Roles) -> None:
    for status in (400, 404, 429, 503):
        roles.frontend.script(*whole(b'{"error":{}}', status))
        response = roles.chat()
        assert (response.status, response.body) == (status, b'{"error":{}}')
        assert response.headers["content-type"] == "application/json"


@pytest.mark.spec("R-177")
def test_each_piece_arrives_before_the_next_is_made(roles: Roles) -> None:
    async def stream() -> None:
        reader, writer = await roles.connect()
        writer.write(HEAD)
        roles.frontend.script(SSE)
        response = await read_response(reader)
        assert (response.status, response.headers) == (
            200,
            {"content-type": "text/event-stream", "cache-control": "no-store", "transfer-encoding": "chunked"},
        )
        for piece in (b"data: 1\n\n", b"x", b"data: [DONE]\n\n"):
            roles.frontend.script(piece)
            assert await chunk(reader) == piece
        roles.frontend.script(None)
        assert await chunk(reader) == b""
        writer.write(HEAD)  # the connection goes on
        roles.frontend.script(*whole(b"2"))
        assert (await read_response(reader)).body == b"2"
        writer.close()

    roles.run(stream())


@pytest.mark.parametrize("parts", [[], [SSE], [SSE, b"data: 1\n\n"]])
def test_a_client_that_leaves_cancels_the_call(roles: Roles, parts: list[Any]) -> None:
    async def leave() -> None:
        asked = len(roles.frontend.calls)
        reader, writer = await roles.connect()
        writer.write(HEAD)
        roles.frontend.script(*parts)
        if parts:
            await reader.readuntil(b"\r\n\r\n")
        while len(roles.frontend.calls) == asked:
            await asyncio.sleep(0.001)
        writer.close()
        await roles.frontend.left.wait()

    roles.run(asyncio.wait_for(leave(), 30))


# --- what the gateway itself refuses ---


@pytest.mark.spec("R-065", "R-067", "D9", "D3")
@pytest.mark.parametrize(
    "path",
    ["", "v1", "v1/", "v1/completions/", "v1/Completions", "v2/models", "v1/models/", "v1/embeddings", "lookup"],
)
def test_other_paths_are_404(roles: Roles, path: str) -> None:
    response = roles.chat(path=path)
    assert (response.status, response.problem["type"]) == (404, "about:blank")


@pytest.mark.spec("R-072")
@pytest.mark.parametrize(
    ("path", "allow"),
    [("v1/completions", "POST"), ("v1/models", "GET, HEAD"), ("v1/models/x", "GET, HEAD")],
)
def test_other_methods_are_405(roles: Roles, path: str, allow: str) -> None:
    for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"} - set(allow.split(", ")):
        response = roles.request(method, f"/fe/{path}", b"{}", JSON)
        assert (response.status, response.headers["allow"]) == (405, allow)


@pytest.mark.spec("D4", "R-073")
def test_media_types_and_sizes(roles: Roles) -> None:
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/kvsp+json"}):
        assert roles.chat(headers=headers).problem["status"] == 415
    coded = roles.chat(headers={"content-encoding": "gzip"})
    assert (coded.status, coded.headers["accept-encoding"]) == (415, "identity")
    assert roles.chat(b"", headers={"content-length": "8388609"}).problem["status"] == 413
    most = b" " * (8 << 20)
    roles.frontend.script(*whole(b"ok"))
    assert roles.chat(most).body == b"ok"
    assert roles.frontend.calls.pop()[1].body == most

    async def chunked() -> int:
        reader, writer = await roles.connect()
        head = HEAD.replace(b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n")
        writer.write(head)
        for _ in range(9):
            writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        response = await read_response(reader)
        writer.close()
        return response.status

    asked = len(roles.frontend.calls)
    assert roles.run(chunked()) == 413
    assert len(roles.frontend.calls) == asked


@pytest.mark.spec("D1", "D2", "R-210")
def test_identity_is_needed(roles: Roles) -> None:
    assert roles.chat(principal=None).status == 403
    assert roles.chat(principal="spiffe://test/outsider").problem["title"] == "Forbidden"


@pytest.mark.spec("D1", "D8", "R-210", "R-073")
def test_who_may_not_call_sends_no_body(roles: Roles) -> None:
    async def refused(fields: str) -> bytes:
        reader, writer = await roles.connect()
        head = HEAD.split(b"content-type")[0].replace(CLIENT.encode(), PC.encode()).decode()
        writer.write(f"{head}{fields}expect: 100-continue\r\n\r\n".encode())
        status = await reader.readline()
        writer.close()
        return status

    asked = len(roles.frontend.calls)
    # nor does it hear what would be wrong with one
    for fields in ("content-type: application/json\r\ncontent-length: 2\r\n", "content-length: 99999999\r\n"):
        assert roles.run(asyncio.wait_for(refused(fields), 30)).split()[1] == b"403"
    assert len(roles.frontend.calls) == asked


# --- what goes wrong behind it ---


@pytest.mark.spec("R-065", "R-201")
def test_failures_before_the_answer_are_problems(roles: Roles) -> None:
    roles.frontend.script(KvspError(registry.SCOPE_DENIED, "why"))
    assert roles.chat().type == "kvsp-scope-denied"
    roles.frontend.script(unavailable("busy"))
    assert roles.chat().headers["retry-after"] == "1"
    for parts in ([None], [b"octets first", None], [RuntimeError("secret")]):
        roles.frontend.script(*parts)
        assert roles.chat().problem == {"type": "about:blank", "title": "Internal Server Error", "status": 500}
        roles.run(roles.frontend.forget())


@pytest.mark.spec("D9")
@pytest.mark.parametrize(
    "parts",
    [
        [SSE, b"data: 1\n\n", unavailable("gone")],
        [frontend_pb2.ApiStart(status=200, content_type="text/plain", length=100), b"data: 1\n\n", None],
        [frontend_pb2.ApiStart(status=200, content_type="text/plain", length=1), b"data: 1\n\n", None],
    ],
)
def test_an_answer_that_breaks_off_is_never_taken_for_whole(roles: Roles, parts: list[Any]) -> None:
    async def broken() -> bytes:
        reader, writer = await roles.connect()
        writer.write(HEAD)
        roles.frontend.script(*parts)
        octets = b""
        try:
            while piece := await reader.read(1 << 16):
                octets += piece
        except ConnectionResetError:
            pass
        writer.close()
        await roles.frontend.forget()
        return octets

    octets = roles.run(asyncio.wait_for(broken(), 30))
    assert not octets.endswith(b"0\r\n\r\n")
    assert b"problem" not in octets
