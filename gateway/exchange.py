"""One HTTP request and its response over ASGI, without request or response objects of a framework."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from gateway import problems
from gateway.fields import is_media
from gateway.problems import NO_STORE, FieldError, Fields
from gateway.protocol import EXTENSION, Connection, Incoming
from kvsp.bulk.source import Piece
from kvsp.protocol import jsonio, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.registry import MEDIA_JSON
from kvsp.rpc.server import run_until


class Disconnected(Exception):  # noqa: N818 - an event at the client's end, not an error of ours
    """The client has gone; there is nobody to answer."""


class Exchange:
    """The request's fields and body, and the response."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["raw_path"].decode("latin-1")
        self.query: bytes = scope["query_string"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.incoming: Incoming = scope["extensions"][EXTENSION]
        self.connection: Connection = self.incoming.connection
        self.status = 0  # of the response; 0: not started, or not completed
        self._receive = receive
        self._send = send
        self._body_asked = False
        self._more = True  # of the body is to come
        self._finished = False

    def value(self, name: bytes) -> str | None:
        """A field's value, lines joined as RFC 9110 says; None when absent."""
        lines = [value for key, value in self.headers if key == name]
        return b", ".join(lines).decode("latin-1") if lines else None

    def content_length(self) -> int | None:
        """The declared length of the body in octets; the HTTP parser has checked its syntax."""
        value = self.value(b"content-length")
        return None if value is None else int(value)

    def check_content(self, media: str, octets_max: int) -> None:
        """Raise KvspError (415, 413) unless the body is declared as `media`, uncoded, and not too long."""
        if not is_media(self.value(b"content-type"), media):
            raise KvspError(registry.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be {media}")
        if (self.value(b"content-encoding") or "identity").strip().lower() != "identity":
            # "we accept no request content coding and name `Accept-Encoding: identity`"
            detail = "content codings are not supported"
            raise FieldError(registry.UNSUPPORTED_MEDIA_TYPE, detail, (b"accept-encoding", b"identity"))
        if (self.content_length() or 0) > octets_max:
            raise too_large()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Asking for it is what sends 100 Continue. Raises Disconnected."""
        while self._more:
            piece = await self._next()
            if piece:
                yield piece

    async def pour(self, sink: Callable[[bytes], None]) -> None:
        """Give `sink` the rest of the body piece by piece, straight from the parser: it must not keep a
        caller waiting. Raises Disconnected, and what the sink raises.
        """
        self.incoming.sink = sink
        try:
            while self._more:
                piece = await self._next()
                if self.incoming.failure is not None:
                    raise self.incoming.failure
                sink(piece)  # collected before there was a sink
        finally:
            self.incoming.sink = None

    async def _next(self) -> bytes:
        self._body_asked = True
        event = await self._receive()
        if event["type"] == "http.disconnect":
            raise Disconnected
        self._more = event.get("more_body", False)
        return event["body"]  # type: ignore[no-any-return]

    async def body(self, octets_max: int) -> bytes:
        """The whole body, counted as it arrives (D4). Raises KvspError (413), Disconnected."""
        kept: list[bytes] = []
        octets = 0
        async for piece in self.pieces():
            octets += len(piece)
            if octets > octets_max:
                raise too_large()
            kept.append(piece)
        return kept[0] if len(kept) == 1 else b"".join(kept)

    async def while_connected(self, response: Coroutine[Any, Any, None]) -> None:
        """Run what sends a response, once the body has been read; cancel it when the client goes.

        Raises Disconnected then, and what `response` raises.
        """
        await run_until(response, self._gone())
        if not self._finished:
            raise Disconnected

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, fields: Fields) -> None:
        """Send status and fields."""
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, octets: Piece) -> None:
        """Send more of the body, once everything sent before has left the process."""
        await self._send({"type": "http.response.body", "body": octets, "more_body": True})

    async def finish(self, octets: bytes = b"") -> None:
        """End the body. Returns when everything written before has left the process."""
        await self._send({"type": "http.response.body", "body": octets, "more_body": False})
        self._finished = True

    async def reply(self, status: int, fields: Fields, body: bytes = b"") -> None:
        """A whole response."""
        await self.start(status, fields)
        await self.finish(body)

    async def json(self, status: int, record: Any, location: str | None = None) -> None:
        """A record as response."""
        body = jsonio.encode(record)
        fields = json_fields(len(body))
        if location is not None:
            fields.append((b"location", location.encode()))
        await self.reply(status, fields, body)

    async def empty(self, status: int) -> None:
        """A response without content."""
        length = [] if status == 204 else [(b"content-length", b"0")]  # RFC 9110, 8.6: none in a 204
        await self.reply(status, [NO_STORE, *length])

    async def fail(self, error: KvspError) -> None:
        """Answer with the problem, or reset the stream if a body has begun: never truncate silently."""
        if self.status:
            await self.connection.reset()
            self.status = 0
            return
        status, fields, body = problems.render(error)
        if not self._body_asked and self.value(b"expect") is not None:
            # RFC 9110, 10.1.1: the client may keep its body back, and the next octets would be taken for it.
            fields.append((b"connection", b"close"))
        await self.reply(status, fields, body)


def json_fields(octets: int) -> Fields:
    """Fields of a JSON response of known length."""
    return [(b"content-type", MEDIA_JSON.encode()), (b"content-length", b"%d" % octets), NO_STORE]


def too_large() -> KvspError:
    """The body is too long (413)."""
    return KvspError(registry.CONTENT_TOO_LARGE, "content too large")
