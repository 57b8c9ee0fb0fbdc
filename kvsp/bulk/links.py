"""What a control stream runs over: framed messages on this host, gRPC elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, Protocol

import grpc

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.rpc.errors import from_rpc_error
from kvsp.rpc.framed import Connection
from kvsp.rpc.identity import speak_for
from kvsp.v1 import holder_pb2, holder_pb2_grpc

CLOSE_S: Final = 1.0

OnReply = Callable[[holder_pb2.TransferReply], None]
OnEnd = Callable[[KvspError], None]


def broken() -> KvspError:
    """The link is gone, with everything that was open on it (503)."""
    return unavailable("the connection to the holder broke")


class Link(Protocol):
    """Carries requests in the order of the calls, replies to `on_reply`, and calls `on_end` once."""

    def send(self, request: holder_pb2.TransferRequest) -> None:
        """Queue a request."""

    def close(self) -> None:
        """End when what is queued has gone."""

    async def closed(self) -> None:
        """Wait until it is over."""


class LocalLink:
    """Over the holder's control socket."""

    def __init__(self, path: Path, principal: str, on_reply: OnReply, on_end: OnEnd) -> None:
        self._on_reply = on_reply
        self._on_end = on_end
        self._connection: Connection | None = None
        self._early: list[bytes] = [holder_pb2.TransferHello(principal=principal).SerializeToString()]
        self._closing = False
        self._over = asyncio.Event()
        self._connecting = asyncio.create_task(self._connect(path))

    def send(self, request: holder_pb2.TransferRequest) -> None:
        """Queue a request."""
        message = request.SerializeToString()
        if self._connection is None:
            self._early.append(message)
        else:
            self._connection.send(message)

    def close(self) -> None:
        """End when what is queued has gone."""
        self._closing = True
        if self._connection is not None:
            self._connection.close()

    async def closed(self) -> None:
        """Wait until it is over; a holder that does not read is left."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._over.wait()
        except TimeoutError:
            if self._connection is not None:
                self._connection.abort()

    def receive(self, message: bytes) -> None:
        """Called by the connection."""
        self._on_reply(holder_pb2.TransferReply.FromString(message))

    def lost(self) -> None:
        """Called by the connection."""
        self._over.set()
        self._on_end(broken())

    async def _connect(self, path: Path) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: Connection(self._ready), str(path))
        except OSError:
            self.lost()

    def _ready(self, connection: Connection) -> LocalLink:
        self._connection = connection
        for message in self._early:
            connection.send(message)
        if self._closing:
            connection.close()
        return self


class GrpcLink:
    """Over `Holder.Transfer`."""

    def __init__(self, channel: grpc.aio.Channel, principal: str, on_reply: OnReply, on_end: OnEnd) -> None:
        self._on_reply = on_reply
        self._on_end = on_end
        self._queue: asyncio.Queue[holder_pb2.TransferRequest | None] = asyncio.Queue()
        self._call = holder_pb2_grpc.HolderStub(channel).Transfer(self._requests(), metadata=speak_for(principal))
        self._reader = asyncio.create_task(self._read())

    def send(self, request: holder_pb2.TransferRequest) -> None:
        """Queue a request."""
        self._queue.put_nowait(request)

    def close(self) -> None:
        """End when what is queued has gone."""
        self._queue.put_nowait(None)

    async def closed(self) -> None:
        """Wait until it is over; a holder that does not end it is left."""
        if (await asyncio.wait([self._reader], timeout=CLOSE_S))[1]:
            self._call.cancel()
            await asyncio.wait([self._reader])

    async def _requests(self) -> AsyncIterator[holder_pb2.TransferRequest]:
        while (request := await self._queue.get()) is not None:
            yield request

    async def _read(self) -> None:
        error = broken()
        try:
            async for reply in self._call:
                self._on_reply(reply)
        except grpc.aio.AioRpcError as failed:
            error = _reason(failed)
        except asyncio.CancelledError:
            if self._call.cancelled():  # the channel was closed under the stream
                return
            raise
        finally:
            self._queue.put_nowait(None)
            self._on_end(error)


def _reason(failed: grpc.aio.AioRpcError) -> KvspError:
    """Why the stream ended."""
    error = from_rpc_error(failed)
    # A call that ends while we write to it is INTERNAL to grpc.aio, whatever ended it: a break like any other.
    return broken() if error.problem is registry.INTERNAL else error
