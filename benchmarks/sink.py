"""A server that throws away what is put to it: what the machine and Envoy allow, whatever stands behind.

    python -m benchmarks.sink SOCKET [hash]

It speaks as much HTTP/1.1 as Envoy's requests with a Content-Length need, and keeps nothing. With `hash` it also
does what every holder has to: it hashes all octets twice (as a whole, and layers), on two threads, as they come.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import uvloop

BUFFER_OCTETS = 256 << 10
CREATED = b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
END = b"\r\n\r\n"


class Sink(asyncio.BufferedProtocol):
    """One connection of Envoy's."""

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_OCTETS)
        self._head = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        """Called by the event loop."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop: the next octets of a body, or of a head and what follows it."""
        if not self._left:
            self._head += self._buffer[:nbytes]
            head, end, body = self._head.partition(END)
            if not end:
                return
            length = LENGTH.search(head + END)
            self._left, nbytes, self._head = int(length[1]) if length else 0, len(body), b""
            self._buffer[:nbytes] = body
        self._left -= nbytes
        self.take(memoryview(self._buffer)[:nbytes], ends=not self._left)

    def take(self, piece: memoryview, *, ends: bool) -> None:
        """The next octets of a body."""
        if ends:
            self._transport.write(CREATED)  # type: ignore[attr-defined]


class HashingSink(Sink):
    """Hashes each body twice. One thread a hash, which gets pieces in order."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._threads = [ThreadPoolExecutor(1) for _ in range(2)]
        self._hashes: list[Any] = []
        self._gathered = bytearray()

    def take(self, piece: memoryview, *, ends: bool) -> None:
        """The next octets of a body."""
        self._gathered += piece
        if not ends and len(self._gathered) < BUFFER_OCTETS:
            return
        self._hashes = self._hashes or [hashlib.sha256() for _ in self._threads]
        both = zip(self._threads, self._hashes, strict=True)
        last = [thread.submit(each.update, self._gathered) for thread, each in both]
        self._gathered = bytearray()
        if ends:
            self._loop.create_task(self._answer(last))
            self._hashes = []

    async def _answer(self, last: list[Future[None]]) -> None:
        await asyncio.gather(*map(asyncio.wrap_future, last))
        self._transport.write(CREATED)  # type: ignore[attr-defined]


async def main(socket: str, kind: type[Sink]) -> None:
    """Serve for ever."""
    server = await asyncio.get_running_loop().create_unix_server(kind, socket)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], HashingSink if sys.argv[2:] == ["hash"] else Sink))
