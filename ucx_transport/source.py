"""The reader's and writer's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

from kvsp.bulk.source import (
    PIECE_OCTETS,
    BlockWriter,
    Capabilities,
    Piece,
    SourceUnavailableError,
    Ticket,
    Transfer,
)
from ucx_transport import library
from ucx_transport.dialer import Dialer, Link
from ucx_transport.frames import Movement
from ucx_transport.memory import Buffers, Octets, octets_of


class UcxSource:
    """Takes tickets of holders that listen with UCX. Raises SourceUnavailableError where UCX cannot be had.

    `UCX_*` variables of the environment tune it. Connections are kept per holder and used again.
    """

    scheme: ClassVar[str] = "ucx"

    def __init__(self) -> None:
        context = library.open_context({})
        self.capabilities = Capabilities(
            direct=True, places=True, rdma=library.has_rdma(context), cuda=library.has_cuda(context)
        )
        self._dialer = Dialer(context)
        self._buffers = Buffers()

    def reader(self, transfer: Transfer) -> UcxReader:
        """Begin to take octets."""
        cuda = self.capabilities.cuda
        return UcxReader(self._dialer, self._buffers, transfer.length, _ticket(transfer), cuda=cuda)

    def writer(self, transfer: Transfer) -> BlockWriter:
        """Begin to give octets."""
        return _Writer(self._dialer, self._buffers, _ticket(transfer))

    def close(self) -> None:
        """End all connections. Idempotent; a later transfer makes new ones."""
        self._dialer.close()


class UcxReader:
    """A BlockReader that can also put octets where they are wanted."""

    def __init__(self, dialer: Dialer, buffers: Buffers, length: int, ticket: Ticket, *, cuda: bool) -> None:
        self._dialer = dialer
        self._cuda = cuda
        self._buffers = buffers
        self._length = length
        self._ticket = ticket
        self._task: asyncio.Task[None] | None = None
        self._movement: Movement | None = None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Octets in order, as views of memory that stays as it is while views of it are there."""
        view = self._buffers.take(self._length)
        done = 0
        async for end in self.into(view):
            for at in range(done, end, PIECE_OCTETS):
                yield view[at : min(at + PIECE_OCTETS, end)]
            done = end

    async def into(self, target: Any) -> AsyncIterator[int]:
        """Receive into a writable buffer or tensor of `length` octets; yields n when 0...n are in place.

        With the capability `cuda` the tensor may lie in a device's memory, which nobody else uses meanwhile.
        Raises ValueError for an unfit target, KvspError (503).
        """
        view = octets_of(target, cuda=self._cuda)
        if len(view) != self._length:
            raise ValueError("the target has another length than the transfer")
        try:
            if len(self._ticket.frames) == 1:
                await self._receive(view, lambda _: None)
                yield self._length
                return
            arrived: asyncio.Queue[int | None] = asyncio.Queue()
            # A task of its own: a slow consumer must not let the holder's sending stall.
            self._task = asyncio.ensure_future(self._receive(view, arrived.put_nowait))
            self._task.add_done_callback(lambda _: arrived.put_nowait(None))
            while (end := await arrived.get()) is not None:
                yield end
            await self._task
        finally:
            self.close()

    async def _receive(self, view: Octets, arrived: Callable[[int], None]) -> None:
        link = await self._dialer.link(self._ticket.address)
        self._movement = await link.present(self._ticket, view, self._buffers)
        await self._movement.receive(arrived)
        self._movement.done()
        self._movement = None
        self._dialer.keep(link)

    def close(self) -> None:
        """Let go of everything; idempotent. Nothing is written to a target of `into` any more."""
        if self._task is not None:
            self._task.cancel()
        if self._movement is not None:
            self._movement.stop()
            self._movement = None


class _Writer:
    """Gathers octets into frames and sends them, several at a time."""

    def __init__(self, dialer: Dialer, buffers: Buffers, ticket: Ticket) -> None:
        self._dialer = dialer
        self._buffers = buffers
        self._ticket = ticket
        self._link: Link | None = None
        self._movement: Movement | None = None
        self._frame = memoryview(b"")
        self._number = 0
        self._filled = 0

    async def begin(self) -> None:
        await self._begun()

    async def write(self, piece: Piece) -> None:
        rest = memoryview(piece).cast("B")
        while rest:
            if not self._filled:
                if self._number == len(self._ticket.frames):
                    raise ValueError("more octets than agreed")
                self._frame = self._buffers.take(self._ticket.frames[self._number])
            part = rest[: len(self._frame) - self._filled]
            self._frame[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == len(self._frame):
                await self._send()

    async def _send(self) -> None:
        movement = await self._begun()
        await movement.send_frame(self._number, self._frame)
        self._number += 1
        self._filled = 0

    async def _begun(self) -> Movement:
        if self._link is None:
            self._link = await self._dialer.link(self._ticket.address)
            self._movement = await self._link.present(self._ticket, memoryview(b""), self._buffers, write=True)
        if self._movement is None:
            raise ValueError("the writer is closed")
        return self._movement

    async def finish(self) -> None:
        movement = await self._begun()
        await movement.sent()
        assert self._link is not None  # noqa: S101 - begun
        await self._link.finished()
        movement.done()
        self._movement = None
        self._dialer.keep(self._link)

    def close(self) -> None:
        if self._movement is not None:
            self._movement.stop()
            self._movement = None


def _ticket(transfer: Transfer) -> Ticket:
    if transfer.ticket is None:
        raise SourceUnavailableError("the holder gave no ticket")
    if sum(transfer.ticket.frames) != transfer.length:
        raise SourceUnavailableError("the ticket is for another length")
    return transfer.ticket
