"""Octets as messages of the holder's ReadBlock and WriteBlock streams: works wherever the control channel does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc

from kvsp.bulk.source import BlockReader, BlockWriter, Capabilities, Piece, Transfer
from kvsp.protocol import limits
from kvsp.protocol.errors import unavailable
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import holder_pb2, holder_pb2_grpc

_CHUNK = limits.GRPC_CHUNK_OCTETS


class GrpcSource:
    """`Transfer.endpoint` is the holder's channel."""

    scheme: ClassVar[str] = "grpc"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def reader(self, transfer: Transfer) -> BlockReader:
        """Pull the octets of an open transfer."""
        return _Reader(transfer)

    def writer(self, transfer: Transfer) -> BlockWriter:
        """Push the octets of a reserved transfer."""
        return _Writer(transfer)

    def close(self) -> None:
        """The channel is its owner's."""


class _Reader:
    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._call: Any = None
        self._closed = False

    async def pieces(self) -> AsyncIterator[Piece]:
        if self._closed:
            raise unavailable("the reader is closed")
        transfer, left = self._transfer, self._transfer.length
        self._call = holder_pb2_grpc.HolderStub(transfer.endpoint).ReadBlock(
            holder_pb2.ReadBlockRequest(transfer=transfer.id), metadata=speak_for(transfer.principal)
        )
        async with translated():
            while (chunk := await self._next()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                left -= len(chunk.octets)
                if left < 0:
                    break
                yield chunk.octets
        if left:
            raise unavailable("the holder sent another number of octets")

    async def _next(self) -> Any:
        # Not to be cancelled: grpcio 1.8x never frees the message of a read that is.
        reading = asyncio.ensure_future(self._call.read())
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._call.cancel()
            raise

    def close(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()


class _Writer:
    def __init__(self, transfer: Transfer) -> None:
        self._id = transfer.id
        self._call = holder_pb2_grpc.HolderStub(transfer.endpoint).WriteBlock(
            metadata=speak_for(transfer.principal)
        )

    async def write(self, piece: Piece) -> None:
        view = memoryview(piece).cast("B")
        for at in range(0, len(view), _CHUNK):
            chunk = holder_pb2.WriteBlockRequest(transfer=self._id, octets=bytes(view[at : at + _CHUNK]))
            await self._send(chunk)

    async def _send(self, chunk: holder_pb2.WriteBlockRequest) -> None:
        async with translated():
            try:
                await self._call.write(chunk)
            except Exception:
                # A call that the holder ended says why in its status, not in the failed write.
                if self._call.done():
                    await self._call
                raise

    async def finish(self) -> None:
        async with translated():
            await self._call.done_writing()
            await self._call

    def close(self) -> None:
        self._call.cancel()
