"""Messages over a Unix socket, each after its length: for control calls between processes of one host.

A message there and back takes some 20 microseconds, where a kept gRPC stream takes 350: most of a
block's control cost. File permissions (the roles' umask)
close it to other users, as they do for gRPC over Unix sockets. Between hosts it is gRPC with mutual TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, cast

LENGTH_OCTETS: Final = 4
MESSAGE_OCTETS_MAX: Final = 256 << 10  # a container header of the most layers allowed fits in
UNSENT_OCTETS_MAX: Final = 8 << 20
"""A peer that asks and never reads is cut off here."""


class Receiver(Protocol):
    """Takes what arrives on one connection."""

    def receive(self, message: bytes) -> None:
        """The next message. What it raises ends the connection."""

    def lost(self) -> None:
        """The connection is over; called once."""


class Connection(asyncio.Protocol):
    """One end. `receiver` is made when the connection is there, for it."""

    def __init__(self, receiver: Callable[[Connection], Receiver]) -> None:
        self._make_receiver = receiver
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)
        self._receiver = self._make_receiver(self)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= LENGTH_OCTETS:
                length = int.from_bytes(buffer[at : at + LENGTH_OCTETS])
                if length > MESSAGE_OCTETS_MAX:
                    raise ValueError("message too long")
                end = at + LENGTH_OCTETS + length
                if len(buffer) < end:
                    break
                self._receiver.receive(bytes(buffer[at + LENGTH_OCTETS : end]))
                at = end
        except Exception:
            self._transport.abort()
            raise
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the interface is asyncio's
        """Called by the event loop."""
        self._receiver.lost()

    def send(self, message: bytes) -> None:
        """Queue a message; after the end it goes nowhere."""
        self._transport.write(len(message).to_bytes(LENGTH_OCTETS) + message)
        if self._transport.get_write_buffer_size() > UNSENT_OCTETS_MAX:
            self._transport.abort()

    def close(self) -> None:
        """End the connection when what is queued has gone."""
        self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()


class LocalListener:
    """A listening Unix socket, whose file is removed with it, but not when a successor's has taken its place."""

    def __init__(self, server: asyncio.Server, path: Path) -> None:
        self._server = server
        self._path = path
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Take no more connections; those that are open go on. Idempotent."""
        self._server.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def local_socket(address: str) -> Path | None:
    """Where a role that serves gRPC at `address` takes framed messages; None: on another host."""
    return Path(address.removeprefix("unix:") + ".control") if address.startswith("unix:") else None


async def read_message(reader: asyncio.StreamReader, octets_max: int) -> bytes:
    """The next message of a stream. Raises ValueError when too long, IncompleteReadError at the end."""
    length = int.from_bytes(await reader.readexactly(LENGTH_OCTETS))
    if length > octets_max:
        raise ValueError("message too long")
    return await reader.readexactly(length)


def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Queue a message on a stream."""
    writer.write(len(message).to_bytes(LENGTH_OCTETS) + message)
