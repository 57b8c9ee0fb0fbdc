"""Lookups from peers on this host, over a Unix socket of their own; see `kvsp/rpc/lookup.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.policy import Identity, Policy
from kvsp.rpc.errors import to_message
from kvsp.rpc.framed import LocalListener, read_message, write_message
from kvsp.rpc.interceptors import frames
from kvsp.rpc.lookup import REQUEST_OCTETS_MAX, TIMEOUT_S
from kvsp.rpc.server import DRAIN_S, clear_stale_socket
from kvsp.v1 import index_pb2

log = structlog.get_logger()

LookUp = Callable[[Identity, index_pb2.LookupRequest], Awaitable[tuple[index_pb2.LookupHead, list[bytes]]]]


BUSY_MAX: Final = 32
"""Lookups answered at once: each may hold tens of MB until its peer has read them."""
PIECE_OCTETS: Final = 1 << 20


class LocalPeers:
    """Answers whoever may open the socket, on behalf of the principal that each lookup names."""

    def __init__(self, policy: Policy, look_up: LookUp) -> None:
        self._policy = policy
        self._look_up = look_up
        self._idle: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._draining = False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A peer has come."""
        peer = asyncio.create_task(self._serve(reader, writer))
        self._idle.add(peer)
        peer.add_done_callback(self._idle.discard)
        peer.add_done_callback(self._busy.discard)

    async def drain(self) -> None:
        """Let idle peers go, and wait until the others have their answer, for DRAIN_S at the most."""
        self._draining = True
        for peer in self._idle:
            peer.cancel()
        if self._busy:
            await asyncio.wait(self._busy, timeout=DRAIN_S)
        for peer in self._busy:
            peer.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One peer: lookup after lookup, until it goes."""
        me = asyncio.current_task()
        assert me is not None  # noqa: S101 - for the type checker
        writer.transport.set_write_buffer_limits(high=0)  # `drain` then waits until all has gone
        try:
            while not self._draining:
                message = await read_message(reader, REQUEST_OCTETS_MAX)
                self._idle.discard(me)
                self._busy.add(me)
                async with asyncio.timeout(TIMEOUT_S):  # a peer that does not read is let go
                    await self._reply(writer, index_pb2.LocalLookup.FromString(message))
                self._busy.discard(me)
                self._idle.add(me)
        except (OSError, ValueError, DecodeError, asyncio.IncompleteReadError):
            pass  # gone, or no peer of ours
        finally:
            writer.transport.abort()

    async def _reply(self, writer: asyncio.StreamWriter, lookup: index_pb2.LocalLookup) -> None:
        head, text = await self._answer(lookup)
        write_message(writer, head.SerializeToString())
        for at in range(0, len(text), PIECE_OCTETS):
            writer.write(text[at : at + PIECE_OCTETS])
            await writer.drain()
        await writer.drain()

    async def _answer(self, lookup: index_pb2.LocalLookup) -> tuple[index_pb2.LookupChunk, memoryview]:
        try:
            if len(self._busy) > BUSY_MAX:
                raise unavailable("too many lookups at once")
            head, pieces = await self._look_up(self._policy.identify(lookup.principal), lookup.request)
            return index_pb2.LookupChunk(head=head), memoryview(b"".join(pieces))
        except KvspError as error:
            return index_pb2.LookupChunk(problem=to_message(error)), memoryview(b"")
        except Exception as error:  # the boundary: nothing internal may leave
            log.error("unexpected", kind=type(error).__name__, at=frames(error))
            return index_pb2.LookupChunk(problem=to_message(KvspError(registry.INTERNAL))), memoryview(b"")


@asynccontextmanager
async def local_peers(
    policy: Policy, look_up: LookUp, path: Path | None
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Serve local peers on `path`; None: there are none. Yields what ends it in order.

    Raises ConfigError when another process listens there.
    """
    peers = LocalPeers(policy, look_up)
    if path is None:
        yield peers.drain
        return
    clear_stale_socket(path)
    server = await asyncio.start_unix_server(peers.accept, str(path), limit=REQUEST_OCTETS_MAX)
    listener = LocalListener(server, path)

    async def drain() -> None:
        listener.close()  # a successor may listen there at once
        await peers.drain()

    try:
        yield drain
    finally:
        await drain()
