"""A server that throws away what is put to it: what the machine and Envoy allow, whatever stands behind.

    python -m benchmarks.sink SOCKET

It speaks as much HTTP/1.1 as Envoy's requests with a Content-Length need, hashes nothing and keeps nothing.
"""

from __future__ import annotations

import asyncio
import re
import sys

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
        self._left -= nbytes
        if not self._left:
            self._transport.write(CREATED)  # type: ignore[attr-defined]


async def main(socket: str) -> None:
    """Serve for ever."""
    server = await asyncio.get_running_loop().create_unix_server(Sink, socket)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
