"""One control stream: requests answered by id, and everything it opened dropped when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from kvsp.bulk.source import Ticket
from kvsp.protocol import access, registry
from kvsp.protocol.errors import KvspError, bad_request, unavailable
from kvsp.protocol.names import HEX16_CHARS, HEX32_CHARS
from kvsp.protocol.policy import Identity
from kvsp.rpc.clock import now_ms
from kvsp.rpc.errors import to_message
from kvsp.rpc.interceptors import frames
from kvsp.rpc.server import run_until
from kvsp.v1 import common_pb2, holder_pb2
from services.holder import metrics
from services.holder.blocks import Name
from services.holder.host import Host
from services.holder.transfers import Pin, Reservation

IN_PROGRESS_MAX: Final = 1024
"""Requests of one stream that may await their answer; more are refused, but for commits, which others
may be waiting for and of which there are no more than reservations."""

log = structlog.get_logger()


def name_of(message: common_pb2.BlockName) -> Name:
    """A block name of the right lengths. Raises KvspError (400)."""
    lengths = len(message.compat_id), len(message.scope_id), len(message.block_key)
    if lengths != (HEX32_CHARS // 2, HEX16_CHARS // 2, HEX32_CHARS // 2):
        raise bad_request("malformed block name")
    return Name(message.compat_id, message.scope_id, message.block_key)


Send = Callable[[holder_pb2.TransferReply], Awaitable[None]]


class TransferStream:
    """Serves the requests of one principal, replies through `send`.

    `has_descriptors`: the peer can ask for those of the arena, and is not told its path.
    """

    def __init__(
        self, host: Host, identity: Identity, send: Send, *, same_host: bool, has_descriptors: bool = False
    ) -> None:
        self._host = host
        self._identity = identity
        self._send = send
        self._same_host = same_host
        self._has_descriptors = has_descriptors
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()

    async def serve(self, requests: AsyncIterator[holder_pb2.TransferRequest]) -> None:
        """Until the peer ends the stream or is gone, or the holder stops and the peer has nothing open here."""
        with self._host.control_stream() as self._number:
            try:
                await run_until(self._read(requests), self._drained())
            finally:
                for task in self._tasks:
                    task.cancel()

    async def _drained(self) -> None:
        await self._host.draining.wait()
        while self._tasks or self._host.state.is_busy(self._number):
            self._progress.clear()
            await self._progress.wait()

    async def _read(self, requests: AsyncIterator[holder_pb2.TransferRequest]) -> None:
        async for request in requests:
            if self._note(request):
                continue
            if len(self._tasks) >= IN_PROGRESS_MAX and not request.HasField("commit"):
                busy = unavailable("too many requests at once")
                await self._send(holder_pb2.TransferReply(id=request.id, problem=to_message(busy)))
                continue
            task = asyncio.create_task(self._answer(request))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._progress.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("reply not sent", kind=type(error).__name__)  # the peer is gone; `serve` cleans up

    def _note(self, request: holder_pb2.TransferRequest) -> bool:
        """Carry out a request that has no reply, in the order of arrival; False for all others."""
        match request.WhichOneof("request"):
            case "close":
                self._host.close_transfer(self._number, request.close.transfer)
            case "abort":
                self._host.abort(self._number, request.abort.transfer)
            case "wrote":
                self._wrote(request.wrote)
            case _:
                return False
        self._progress.set()
        return True

    def _wrote(self, message: holder_pb2.WroteOctets) -> None:
        # No reply to put a problem in: a writer that has lapsed or oversteps hears of it at its commit.
        with suppress(KvspError):
            reservation = self._host.state.reservation(message.transfer, self._identity.uri)
            self._host.wrote(reservation, message.octets)

    async def _answer(self, request: holder_pb2.TransferRequest) -> None:
        reply = holder_pb2.TransferReply(id=request.id)
        try:
            match request.WhichOneof("request"):
                case "open":
                    reply.opened.CopyFrom(await self._open(request.open))
                case "reserve":
                    reply.reserved.CopyFrom(await self._reserve(request.reserve))
                case "commit":
                    reply.committed.CopyFrom(await self._commit(request.commit))
                case _:
                    raise bad_request("unknown request")
        except KvspError as error:
            reply.problem.CopyFrom(to_message(error))
        except Exception as error:  # the boundary: nothing internal may leave
            log.error("unexpected", kind=type(error).__name__, where=frames(error))
            reply.problem.CopyFrom(to_message(KvspError(registry.INTERNAL)))
        await self._send(reply)

    async def _open(self, message: holder_pb2.OpenBlock) -> holder_pb2.OpenedBlock:
        name = name_of(message.name)
        self._host.authorize(self._identity, access.GET_BLOCK, name.scope_id)
        scheme = self._scheme(message.schemes) if message.pin else ""
        layers = (message.layers.first, message.layers.last) if message.HasField("layers") else None
        codec = message.codec if message.HasField("codec") else None
        pin, header, sha256 = await self._host.open(self._number, self._identity, name, layers, codec)
        opened = holder_pb2.OpenedBlock(
            header=header,
            payload_octets=pin.header.payload_octets,
            sha256=sha256,
            max_age_s=self._host.max_age_s(pin.block),
        )
        if message.pin:
            opened.transfer = pin.id
            opened.deadline_ms = _left_ms(pin)
            opened.location.CopyFrom(self._location(scheme, pin.offset, pin.header.payload_octets))
            if scheme in self._host.offers:
                opened.location.ticket.CopyFrom(_message(self._host.offers.read(scheme, pin, now_ms())))
            _count("out", scheme, pin.header.payload_octets)
        else:
            self._host.close_pin(pin)
        return opened

    async def _reserve(self, message: holder_pb2.ReserveBlock) -> holder_pb2.ReservedBlock:
        name = name_of(message.name)
        self._host.authorize(self._identity, access.PUT_BLOCK, name.scope_id)
        if not message.length:
            self._host.state.check_reserve(name, 0)
            return holder_pb2.ReservedBlock()
        scheme = self._scheme(message.schemes)
        reservation = await self._host.reserve(
            self._number, self._identity, name, message.length, shared=scheme == "shm"
        )
        self._host.arena.renew(reservation.offset, reservation.length)
        _count("in", scheme, message.length)
        reserved = holder_pb2.ReservedBlock(
            transfer=reservation.id,
            location=self._location(scheme, reservation.offset, reservation.length),
            deadline_ms=_left_ms(reservation),
        )
        if scheme in self._host.offers:
            arrived = partial(self._host.arrived, reservation)
            ticket = self._host.offers.write(scheme, reservation, arrived, now_ms())
            reserved.location.ticket.CopyFrom(_message(ticket))
        return reserved

    async def _commit(self, message: holder_pb2.CommitBlock) -> holder_pb2.CommittedBlock:
        reservation = self._host.state.reservation(message.transfer, self._identity.uri)
        declared = [(field.algorithm, field.value) for field in message.digests]
        block = await self._host.commit(reservation, declared)
        return holder_pb2.CommittedBlock(sha256=block.digested.sha256)

    def _scheme(self, offered: Iterable[str]) -> str:
        return self._host.scheme(offered, same_host=self._same_host)

    def _location(self, scheme: str, offset: int, length: int) -> holder_pb2.Location:
        location = holder_pb2.Location(scheme=scheme)
        if scheme == "shm":
            arena = self._host.arena
            location.shm.arena = arena.files.name if self._has_descriptors else str(arena.path)
            location.shm.offset = offset
            location.shm.length = length
        return location


def _left_ms(transfer: Pin | Reservation) -> int:
    """The deadline counts from when the transfer began, which may be a while ago: a range was hashed meanwhile."""
    return max(0, transfer.deadline_ms - now_ms())


def _message(ticket: Ticket) -> holder_pb2.Ticket:
    return holder_pb2.Ticket(
        address=ticket.address, token=ticket.token, key=ticket.key, sealed=ticket.sealed, frames=ticket.frames
    )


def _count(direction: str, scheme: str, octets: int) -> None:
    metrics.TRANSFERS.labels(direction, scheme).inc()
    metrics.OCTETS.labels(direction, scheme).inc(octets)
