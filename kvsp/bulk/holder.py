"""The holder as its readers and writers see it: open a block and take its octets, reserve room and fill it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import grpc

from kvsp.bulk.chooser import Chooser, report_fallback
from kvsp.bulk.control import ControlStream
from kvsp.bulk.source import (
    BlockReader,
    BlockWriter,
    Capabilities,
    DirectWriter,
    Extent,
    Piece,
    SourceUnavailableError,
    Ticket,
    Transfer,
)
from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError, bad_request, unavailable
from kvsp.v1 import common_pb2, holder_pb2

STREAMS_MAX: Final = 256
IDLE_S: Final = 60.0
OPEN_TIMEOUT_S: Final = 10.0  # the first request of a layer range waits until the range is hashed
RESERVE_TIMEOUT_S: Final = OPEN_TIMEOUT_S + limits.PIN_DEADLINE_MS / 1000
"""The holder answers once another writer of the same block is done, whose deadline has passed by then."""

COMMIT_TIMEOUT_S: Final = 60.0
REPORT_OCTETS: Final = 256 << 10
"""A writer to shared memory says this often how far it is: seldom enough for the message to cost little."""


class HolderClient:
    """One holder. Keeps a control stream per principal: at most STREAMS_MAX that are idle, IDLE_S long."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        schemes: Sequence[str] = ("shm", "grpc"),
        *,
        same_host: bool = True,
        local: Path | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._channel = channel
        self._local = local
        self._chooser = Chooser(schemes, same_host=same_host)
        self._idle_s = idle_s
        self._streams: OrderedDict[str, ControlStream] = OrderedDict()

    async def open(
        self,
        principal: str,
        name: common_pb2.BlockName,
        *,
        layers: tuple[int, int] | None = None,
        codec: int | None = None,
        pin: bool = True,
    ) -> OpenedTransfer:
        """Describe a block, or layers first..last of it, and with `pin` hold it for reading.

        Raises KvspError: 403, 404 (block, codec, layers), 503, 504.
        """
        stream = self._stream(principal)
        request = holder_pb2.OpenBlock(name=name, codec=codec, pin=pin)
        if layers is not None:
            request.layers.first, request.layers.last = layers
        while True:
            offered = self._chooser.ranked() if pin else []
            del request.schemes[:]
            request.schemes.extend(offered)
            opened = (await stream.ask(OPEN_TIMEOUT_S, open=request)).opened
            if not pin:
                return OpenedTransfer(stream, opened, None)
            transfer = self._transfer(principal, opened.transfer, opened.payload_octets, opened.location)
            try:
                reader = self._chooser.source(opened.location.scheme).reader(transfer)
            except SourceUnavailableError as error:
                stream.tell(close=holder_pb2.CloseBlock(transfer=opened.transfer))
                self._fell_back(offered, opened.location.scheme, error)
                continue
            return OpenedTransfer(stream, opened, reader)

    async def reserve(self, principal: str, name: common_pb2.BlockName, length: int) -> ReservedTransfer | None:
        """Room for a container of `length` octets; 0: only check that it may be written, answer None.

        While another writes the same block, waits for the outcome, at most as long as that one may take.
        Raises KvspError: 403, 409, 412, 413, 429, 503, 504.
        """
        stream = self._stream(principal)
        while True:
            offered = self._chooser.ranked()
            request = holder_pb2.ReserveBlock(name=name, length=length, schemes=offered)
            timeout_s = RESERVE_TIMEOUT_S if length else OPEN_TIMEOUT_S
            reserved = (await stream.ask(timeout_s, reserve=request)).reserved
            if not length:
                return None
            transfer = self._transfer(principal, reserved.transfer, length, reserved.location)
            try:
                source = self._chooser.source(reserved.location.scheme)
                writer = source.writer(transfer)
            except SourceUnavailableError as error:
                stream.tell(abort=holder_pb2.AbortBlock(transfer=reserved.transfer))
                self._fell_back(offered, reserved.location.scheme, error)
                continue
            return ReservedTransfer(stream, reserved, length, writer, source.capabilities)

    async def close(self) -> None:
        """End every stream; the holder drops what is open on them."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.close()
        for stream in streams:
            await stream.closed()

    def _stream(self, principal: str) -> ControlStream:
        stream = self._streams.get(principal)
        if stream is None:
            if len(self._streams) >= STREAMS_MAX:
                idle = next((each for each in self._streams.values() if each.idle), None)
                if idle is not None:
                    idle.close()
            stream = ControlStream(self._channel, principal, self._idle_s, self._forget, self._control_socket())
            self._streams[principal] = stream
        self._streams.move_to_end(principal)
        return stream

    def _control_socket(self) -> Path | None:
        """The holder's control socket; None: it has none, or is on another host, and gRPC carries the stream."""
        if self._local is None or self._local.exists():
            return self._local
        report_fallback("control", f"no socket {self._local.name}")
        return None

    def _forget(self, stream: ControlStream) -> None:
        if self._streams.get(stream.principal) is stream:
            del self._streams[stream.principal]

    def _transfer(self, principal: str, transfer: int, length: int, where: holder_pb2.Location) -> Transfer:
        extent = None
        if where.HasField("shm"):
            extent = Extent(where.shm.arena, where.shm.offset, where.shm.length)
        ticket = None
        if where.HasField("ticket"):
            given = where.ticket
            ticket = Ticket(given.address, given.token, given.key, given.sealed, tuple(given.frames))
        return Transfer(transfer, length, principal, self._channel, extent, ticket)

    def _fell_back(self, offered: list[str], scheme: str, error: SourceUnavailableError) -> None:
        if scheme not in offered:
            raise KvspError(registry.INTERNAL) from error
        self._chooser.failed(scheme, error)


class OpenedTransfer:
    """A described block, and when pinned, its payload.

    `header` is the container header of the selected layers, `sha256` covers header and payload.
    `max_age_s` is how long a cache may keep it; the pin lapses at `deadline`, in seconds of the event loop's
    clock. Close it when no piece is in use any more.
    """

    def __init__(self, stream: ControlStream, opened: holder_pb2.OpenedBlock, reader: BlockReader | None) -> None:
        self.header = opened.header
        self.payload_octets = opened.payload_octets
        self.total_octets = len(opened.header) + opened.payload_octets
        self.sha256 = opened.sha256
        self.max_age_s = opened.max_age_s
        self._id = opened.transfer
        self._stream = stream
        self._reader = reader
        self.deadline = _deadline(opened.deadline_ms)
        if reader is not None:
            stream.users += 1

    async def pieces(self) -> AsyncIterator[Piece]:
        """The payload in order. Raises KvspError (503) once the pin is gone: its octets may be another's."""
        if self._reader is None:
            raise ValueError("the block was opened without a pin")
        async for piece in self._reader.pieces():
            _check_held(self._stream, self.deadline)
            yield piece

    def close(self) -> None:
        """Drop the pin. Idempotent, does not wait."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self._stream.users -= 1
            self._stream.tell(close=holder_pb2.CloseBlock(transfer=self._id))


class ReservedTransfer:
    """Room for one container, to be filled from its first octet to its last and committed, or aborted.

    `put` is `write` for callers that must not wait; None: this transport has to. The room is lost at
    `deadline`, in seconds of the event loop's clock.
    """

    def __init__(
        self,
        stream: ControlStream,
        reserved: holder_pb2.ReservedBlock,
        length: int,
        writer: BlockWriter,
        able: Capabilities,
    ) -> None:
        self.length = length
        self.written = 0
        # What comes in messages the holder counts itself; of its own memory it must be told.
        self._report_at = REPORT_OCTETS if able.zero_copy else length + 1
        self._id = reserved.transfer
        self._stream = stream
        self._writer = writer
        self.put: Callable[[Piece], None] | None = self._put if able.zero_copy else None
        self.deadline = _deadline(reserved.deadline_ms)
        self._open = True
        stream.users += 1

    async def write(self, piece: Piece) -> None:
        """Append; the holder hashes what has arrived meanwhile. Raises KvspError: 400 too many octets, 503."""
        octets = self._check(piece)
        await self._writer.write(piece)
        self._advance(octets)

    def _put(self, piece: Piece) -> None:
        octets = self._check(piece)
        cast(DirectWriter, self._writer).put(piece)
        self._advance(octets)

    def _check(self, piece: Piece) -> int:
        # Past its deadline the room may be given to another block: never touch it again.
        _check_held(self._stream, self.deadline)
        if not self._open:
            raise ValueError("the transfer is over")
        octets = memoryview(piece).nbytes
        if self.written + octets > self.length:
            raise bad_request("more octets than announced")
        return octets

    def _advance(self, octets: int) -> None:
        self.written += octets
        if self.written >= self._report_at:
            self._report_at = self.written + REPORT_OCTETS
            self._stream.tell(wrote=holder_pb2.WroteOctets(transfer=self._id, octets=self.written))

    async def commit(self, digests: Mapping[str, bytes] | Iterable[tuple[str, bytes]] = ()) -> bytes:
        """Make the block visible and return its SHA-256, comparing `digests` (by RFC 9530 algorithm name).

        Raises KvspError: 400, 404, 409, 422, 503, 504. Whatever is raised, the transfer is over, and nothing is
        stored; but after 503 and 504, when the holder's answer is missing, the block may be there all the same.
        """
        pairs = digests.items() if isinstance(digests, Mapping) else digests
        fields = [holder_pb2.FieldDigest(algorithm=name, value=value) for name, value in pairs]
        try:
            if self.written < self.length:
                raise bad_request("fewer octets than announced")
            await self._writer.finish()
            commit = holder_pb2.CommitBlock(transfer=self._id, digests=fields)
            reply = await self._stream.ask(COMMIT_TIMEOUT_S, commit=commit)
        except BaseException:
            self.abort()
            raise
        self._end()
        return reply.committed.sha256

    def abort(self) -> None:
        """Give the room back; nothing is stored. Idempotent, does not wait, nothing after `commit`."""
        if self._open:
            self._end()
            self._stream.tell(abort=holder_pb2.AbortBlock(transfer=self._id))

    def _end(self) -> None:
        self._open = False
        self._writer.close()
        self._stream.users -= 1


def _deadline(after_ms: int) -> float:
    return asyncio.get_running_loop().time() + after_ms / 1000


def _check_held(stream: ControlStream, deadline: float) -> None:
    if not stream.alive or asyncio.get_running_loop().time() >= deadline:
        raise unavailable("the transfer has lapsed")
