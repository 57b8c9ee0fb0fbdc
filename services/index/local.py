"""Lookups from peers on this host, over a Unix socket of their own; see `kvsp/rpc/lookup.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity, Policy
from kvsp.rpc.errors import to_message
from kvsp.rpc.framed import read_message, write_message
from kvsp.rpc.interceptors import frames
from kvsp.rpc.lookup import REQUEST_OCTETS_MAX, TIMEOUT_S
from kvsp.rpc.server import clear_stale_socket
from kvsp.v1 import index_pb2

log = structlog.get_logger()

LookUp = Callable[[Identity, index_pb2.LookupRequest], Awaitable[tuple[index_pb2.LookupHead, list[bytes]]]]


class LocalPeers:
    """Answers whoever may open the socket, on behalf of the principal that each lookup names."""

    def __init__(self, policy: Policy, look_up: LookUp) -> None:
        self._policy = policy
        self._look_up = look_up

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One peer: lookup after lookup, until it goes."""
        try:
            while True:
                message = await read_message(reader, REQUEST_OCTETS_MAX)
                head, text = await self._answer(index_pb2.LocalLookup.FromString(message))
                write_message(writer, head.SerializeToString())
                writer.write(text)
                async with asyncio.timeout(TIMEOUT_S):  # a peer that does not read is let go
                    await writer.drain()
        except (OSError, ValueError, DecodeError, asyncio.IncompleteReadError):
            pass  # gone, or no peer of ours
        finally:
            writer.transport.abort()

    async def _answer(self, lookup: index_pb2.LocalLookup) -> tuple[index_pb2.LookupChunk, bytes]:
        try:
            head, pieces = await self._look_up(self._policy.identify(lookup.principal), lookup.request)
            return index_pb2.LookupChunk(head=head), b"".join(pieces)
        except KvspError as error:
            return index_pb2.LookupChunk(problem=to_message(error)), b""
        except Exception as error:  # the boundary: nothing internal may leave
            log.error("unexpected", kind=type(error).__name__, at=frames(error))
            return index_pb2.LookupChunk(problem=to_message(KvspError(registry.INTERNAL))), b""


@asynccontextmanager
async def local_peers(policy: Policy, look_up: LookUp, path: Path | None) -> AsyncIterator[None]:
    """Serve local peers on `path`; None: there are none. Raises ConfigError when another process listens there."""
    if path is None:
        yield
        return
    clear_stale_socket(path)
    local = LocalPeers(policy, look_up)
    peers: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = asyncio.create_task(local.serve(reader, writer))
        peers.add(peer)
        peer.add_done_callback(peers.discard)

    server = await asyncio.start_unix_server(accept, str(path), limit=REQUEST_OCTETS_MAX)
    try:
        yield
    finally:
        server.close()
        for peer in peers:
            peer.cancel()
        clear_stale_socket(path)
