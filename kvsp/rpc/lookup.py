"""Lookups at an index: over its control socket on one host, over gRPC elsewhere.

A reply of 2.6 MB costs index and gateway together 6 ms of CPU through Python gRPC, 2 ms through a plain
Unix socket, and there the first octets are on their way to the client while the rest is copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.rpc.errors import from_message, translated
from kvsp.rpc.framed import read_message, write_message
from kvsp.rpc.identity import speak_for
from kvsp.v1 import index_pb2, index_pb2_grpc

TIMEOUT_S: Final = 60.0  # covers the way to a slow client too
PIECE_OCTETS: Final = 256 << 10
REQUEST_OCTETS_MAX: Final = limits.JSON_OCTETS_MAX  # too many keys are for the index to refuse
IDLE_MAX: Final = 16
_BUFFER_OCTETS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """A lookup's outcome: how many keys matched, and the JSON text of LookupReply in pieces, `octets` in all."""

    matched: int
    octets: int
    pieces: AsyncIterator[bytes]


class LookupClient:
    """One index. `local` is its control socket when it is on this host."""

    def __init__(self, channel: grpc.aio.Channel, local: Path | None = None) -> None:
        self._stub = index_pb2_grpc.IndexStub(channel)
        self._local = local
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()

    @asynccontextmanager
    async def lookup(self, principal: str, request: index_pb2.LookupRequest) -> AsyncIterator[Answer]:
        """Look up on behalf of `principal`. Raises KvspError: 400, 403, 413, 503, 504."""
        if self._local is not None and self._local.exists():
            async with self._over_socket(self._local, principal, request) as answer:
                yield answer
            return
        async with translated():
            chunks = aiter(self._stub.Lookup(request, metadata=speak_for(principal), timeout=TIMEOUT_S))
            head = (await anext(chunks)).head
            yield Answer(head.matched, head.json_octets, _texts(chunks))

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    @asynccontextmanager
    async def _over_socket(
        self, path: Path, principal: str, request: index_pb2.LookupRequest
    ) -> AsyncIterator[Answer]:
        """A connection serves one lookup at a time; it is kept when the answer was read to its end."""
        reader, writer = await self._connection(path)
        try:
            write_message(writer, index_pb2.LocalLookup(principal=principal, request=request).SerializeToString())
            async with asyncio.timeout(TIMEOUT_S):
                reply = index_pb2.LookupChunk.FromString(await read_message(reader, REQUEST_OCTETS_MAX))
                if reply.HasField("problem"):
                    self._keep(reader, writer)
                    raise from_message(reply.problem)
                rest = [reply.head.json_octets]
                yield Answer(reply.head.matched, reply.head.json_octets, _pieces(reader, rest))
        except TimeoutError:
            writer.transport.abort()
            raise KvspError(registry.GATEWAY_TIMEOUT, "the index did not answer in time") from None
        except (OSError, ValueError, DecodeError, asyncio.IncompleteReadError):
            writer.transport.abort()
            raise _away() from None
        except KvspError:
            raise
        except BaseException:
            writer.transport.abort()
            raise
        if rest[0]:
            writer.transport.abort()
        else:
            self._keep(reader, writer)

    async def _connection(self, path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
        try:
            return await asyncio.open_unix_connection(str(path), limit=_BUFFER_OCTETS)
        except OSError:
            raise _away() from None

    def _keep(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._idle) < IDLE_MAX:
            self._idle.append((reader, writer))
        else:
            writer.close()


async def _texts(chunks: AsyncIterator[index_pb2.LookupChunk]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk.json


async def _pieces(reader: asyncio.StreamReader, rest: list[int]) -> AsyncIterator[bytes]:
    """What is left of the text; `rest[0]` says how much that is."""
    while rest[0]:
        piece = await reader.read(min(PIECE_OCTETS, rest[0]))
        if not piece:
            raise asyncio.IncompleteReadError(b"", rest[0])
        rest[0] -= len(piece)
        yield piece


def _away() -> KvspError:
    return unavailable("the connection to the index broke")
