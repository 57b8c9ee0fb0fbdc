"""uvicorn's HTTP/1.1 protocol with what raw block bodies and strict errors need besides."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway import problems
from kvsp.bulk.source import Piece
from kvsp.protocol.errors import bad_request

EXTENSION: Final = "kvsp.incoming"
HEADER_OCTETS_MAX: Final = 64 << 10  # D4: Envoy's own limit is 60 KiB
QUEUED_OCTETS_MAX: Final = 8 << 10
HELD_OCTETS_MIN: Final = 8 << 10
SOCKET_OCTETS: Final = 1 << 20
"""Sent and not yet read by Envoy, as far as the system allows (net.core.wmem_max). With the usual 208 KiB the two
wake each other five times as often for a block, which costs Envoy a fifth of its time."""


class Corkable:
    """A transport that can hold a few octets back for those that follow: all leave in one system call, and Envoy
    wakes once. uvloop sends each write at once."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[Piece] | None = None  # None: not corked

    def cork(self) -> None:
        """Hold back what is written, until it is HELD_OCTETS_MIN at a time, or `uncork`."""
        self._held = []

    def uncork(self) -> None:
        """Send what is held back. Idempotent."""
        held, self._held = self._held, None
        if held:
            self._transport.writelines(held)

    def write(self, octets: Piece) -> None:
        """As a transport does."""
        if self._held is None:
            self._transport.write(octets)
            return
        self._held.append(octets)
        if len(octets) >= HELD_OCTETS_MIN:
            self.uncork()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection:
    """A client connection as handlers see it."""

    def __init__(self, transport: Corkable) -> None:
        self._transport = transport
        self._lost = asyncio.Event()
        self.cork = transport.cork
        self.uncork = transport.uncork

    @property
    def closing(self) -> bool:
        """True when nothing that is written arrives any more."""
        return bool(self._transport.is_closing())

    def abort(self) -> None:
        """Close at once; what is queued is dropped."""
        self._transport.abort()

    async def reset(self) -> None:
        """Close at once, and return when the transport holds no octets any more."""
        self._transport.abort()
        await self._lost.wait()

    def lost(self) -> None:
        """The transport is closed."""
        self._lost.set()


class Incoming:
    """One request while it arrives, in `scope["extensions"]`.

    While `sink` is set, pieces of the body go to it as they are parsed, and reading never pauses: for
    sinks that take octets at once. Otherwise uvicorn collects them, which copies them twice more and stops
    and starts reading every 64 KiB.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.headers_too_large = False
        self.sink: Callable[[bytes], None] | None = None
        self.failure: Exception | None = None  # what the sink raised; it gets nothing more


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 on the socket that Envoy opens."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep little more than a response's fields queued.

        uvicorn drains before every send, so a sender knows that no more than QUEUED_OCTETS_MAX of what it sent are
        still on their way through the process.
        """
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=QUEUED_OCTETS_MAX)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_OCTETS)
        corkable = Corkable(transport)
        self.transport = cast(asyncio.Transport, corkable)
        self.connection = Connection(corkable)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for the transport to be closed."""
        super().connection_lost(exc)
        self.connection.lost()

    def on_message_begin(self) -> None:
        """Give handlers the request."""
        super().on_message_begin()
        self._header_octets = 0
        self._incoming = Incoming(self.connection)
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: self._incoming}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep no more fields than the limit; the request is then answered with 431."""
        self._header_octets += len(name) + len(value)
        if self._header_octets > HEADER_OCTETS_MAX:
            self._incoming.headers_too_large = True
            return
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Give the sink what comes after all that was collected before there was one."""
        incoming = self._incoming
        if incoming.sink is None or self.cycle.body:
            super().on_body(body)
            return
        try:
            incoming.sink(body)
        except Exception as error:  # the parser would make a 400 of it; the handler is the one to tell
            incoming.sink, incoming.failure = None, error
            self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Octets that are no HTTP request get Problem Details too (R-065)."""
        status, fields, body = problems.render(bad_request(msg))
        lines = [b"%s: %s\r\n" % field for field in (*fields, (b"connection", b"close"))]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", body)))
        self.transport.close()
