"""The holder as its readers and writers see it: open a block and take its octets, reserve room and fill it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, cast

import grpc

from kvsp.bulk.chooser import Chooser, report_fallback
from kvsp.bulk.control import ControlStream
from kvsp.bulk.rates import LinkRate
from kvsp.bulk.reading import TRANSPORT_FAILED, Grant, OpenedTransfer
from kvsp.bulk.shm import ShmSource
from kvsp.bulk.source import (
    SCHEMES,
    BlockSource,
    BlockWriter,
    ConnectingWriter,
    Extent,
    SourceUnavailableError,
    Ticket,
    Transfer,
)
from kvsp.bulk.writing import ReservedTransfer
from kvsp.protocol import container, limits, registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.v1 import common_pb2, holder_pb2

__all__ = ["HolderClient", "OpenedTransfer", "ReservedTransfer"]

STREAMS_MAX: Final = 256
IDLE_S: Final = 60.0
OPEN_TIMEOUT_S: Final = 10.0  # the first request of a layer range waits until the range is hashed
RESERVE_TIMEOUT_S: Final = OPEN_TIMEOUT_S + limits.PIN_DEADLINE_MS / 1000
"""The holder answers once another writer of the same block is done, whose deadline has passed by then."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a reader wants: layers first..last of a block (None: all), in a codec (None: as stored)."""

    principal: str
    name: common_pb2.BlockName
    layers: tuple[int, int] | None
    codec: int | None

    def message(self, schemes: Sequence[str] | None) -> holder_pb2.OpenBlock:
        """To be pinned and read by one of the schemes; None: only described."""
        request = holder_pb2.OpenBlock(
            name=self.name, codec=self.codec, pin=schemes is not None, schemes=schemes or ()
        )
        if self.layers is not None:
            request.layers.first, request.layers.last = self.layers
        return request


class HolderClient:
    """One holder. Keeps a control stream per principal: at most STREAMS_MAX that are idle, IDLE_S long."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        schemes: Sequence[str] = SCHEMES,
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
        digests: Sequence[bytes] | None = None,
    ) -> OpenedTransfer:
        """Describe a block, or layers first..last of it, and with `pin` hold it for reading.

        `digests`: what these layers have to match before octets are given out; None leaves that to the caller.
        Raises KvspError: 403, 404 (block, codec, layers), 422 (another number of layers), 503, 504.
        """
        stream = self._stream(principal)
        asked = _Asked(principal, name, layers, codec)
        if not pin:
            return OpenedTransfer(stream, await self._described(stream, asked), self._chooser)
        grant = await self._grant(stream, asked)
        again = partial(self._grant_again, stream, asked, grant.opened)
        opened = OpenedTransfer(stream, grant.opened, self._chooser, grant, again=again, digests=digests)
        if digests is not None:
            header = opened.parsed_header
            if (header.layer_count, header.payload_octets) != (len(digests), opened.payload_octets):
                opened.close()
                raise KvspError(registry.DIGEST_MISMATCH, "the block has other layers than there are digests for")
        return opened

    async def _described(self, stream: ControlStream, asked: _Asked) -> holder_pb2.OpenedBlock:
        began = _now()
        opened = (await stream.ask(OPEN_TIMEOUT_S, open=asked.message(None))).opened
        self._chooser.rates.answered(_now() - began)
        return opened

    async def _grant(self, stream: ControlStream, asked: _Asked, without: Collection[str] = ()) -> Grant:
        """A pin, and a reader that can be had for it."""
        while True:
            offered = self._chooser.offer(without)
            began = _now()
            opened = (await stream.ask(OPEN_TIMEOUT_S, open=asked.message(offered))).opened
            self._chooser.rates.answered(_now() - began)
            # The holder counts from when it granted: not before it was asked.
            deadline = began + opened.deadline_ms / 1000
            transfer = self._transfer(asked.principal, opened.transfer, opened.payload_octets, opened.location)
            try:
                source = await self._source(opened.location, offered)
                return Grant(opened, source.reader(transfer), source.capabilities, deadline)
            except BaseException as error:
                stream.tell(close=holder_pb2.CloseBlock(transfer=opened.transfer))
                if not isinstance(error, SourceUnavailableError):
                    raise
                self._chooser.failed(opened.location.scheme, error)

    async def _grant_again(
        self,
        stream: ControlStream,
        asked: _Asked,
        before: holder_pb2.OpenedBlock,
        layer: int,
        failed: Collection[str],
    ) -> Grant:
        """The rest of a block that was granted before, from `layer` on, by another scheme. Raises KvspError."""
        header = container.parse_header(before.header)
        asked = replace(asked, layers=header.layers, codec=header.codec)
        grant = await self._grant(stream, replace(asked, layers=(layer, header.layers[1])), failed)
        try:
            # Somebody may have purged the block and stored another under its name meanwhile.
            if (await self._described(stream, asked)).sha256 != before.sha256:
                raise unavailable("the block has changed")
        except BaseException:
            grant.reader.close()
            stream.tell(close=holder_pb2.CloseBlock(transfer=grant.opened.transfer))
            raise
        return grant

    async def reserve(self, principal: str, name: common_pb2.BlockName, length: int) -> ReservedTransfer | None:
        """Room for a container of `length` octets; 0: only check that it may be written, answer None.

        While another writes the same block, waits for the outcome, at most as long as that one may take.
        Raises KvspError: 403, 409, 412, 413, 429, 503, 504.
        """
        stream = self._stream(principal)
        while True:
            offered = self._chooser.offer()
            request = holder_pb2.ReserveBlock(name=name, length=length, schemes=offered)
            timeout_s = RESERVE_TIMEOUT_S if length else OPEN_TIMEOUT_S
            reserved = (await stream.ask(timeout_s, reserve=request)).reserved
            if not length:
                return None
            transfer = self._transfer(principal, reserved.transfer, length, reserved.location)
            try:
                source = await self._source(reserved.location, offered)
                writer = await _begun(source, transfer)
                return ReservedTransfer(stream, reserved, length, writer, self._chooser)
            except BaseException as error:
                stream.tell(abort=holder_pb2.AbortBlock(transfer=reserved.transfer))
                if not isinstance(error, SourceUnavailableError):
                    raise
                self._chooser.failed(reserved.location.scheme, error)

    def rate(self, scheme: str) -> float | None:
        """Octets a second that reads by a scheme have made lately; None: not known yet."""
        return self._chooser.rates.rate(scheme)

    def link(self) -> LinkRate | None:
        """What the way to this holder has given lately, for instance status; None: not known yet."""
        return self._chooser.link()

    async def close(self) -> None:
        """End every stream and what transports keep; the holder drops what is open."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.close()
        for stream in streams:
            await stream.closed()
        self._chooser.close()

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

    async def _source(self, where: holder_pb2.Location, offered: Collection[str]) -> BlockSource:
        """The source that the holder took, ready for the place that it named.

        Raises SourceUnavailableError, and KvspError (500) when it took another than was offered: asked again it
        might do so for ever.
        """
        if where.scheme not in offered:
            raise KvspError(registry.INTERNAL)
        source = self._chooser.source(where.scheme)
        if isinstance(source, ShmSource) and self._local is not None:
            await source.admit(where.shm.arena, self._local)
        return source

    def _transfer(self, principal: str, transfer: int, length: int, where: holder_pb2.Location) -> Transfer:
        extent = None
        if where.HasField("shm"):
            extent = Extent(where.shm.arena, where.shm.offset, where.shm.length)
        ticket = None
        if where.HasField("ticket"):
            given = where.ticket
            ticket = Ticket(given.address, given.token, given.key, given.sealed, tuple(given.frames))
        return Transfer(transfer, length, principal, self._channel, extent, ticket)


async def _begun(source: BlockSource, transfer: Transfer) -> BlockWriter:
    """A writer that has found its holder. Raises SourceUnavailableError: another source may be taken."""
    writer = source.writer(transfer)
    if transfer.ticket is not None:
        try:
            await cast(ConnectingWriter, writer).begin()
        except BaseException as error:
            writer.close()
            if isinstance(error, KvspError) and error.problem in TRANSPORT_FAILED:
                raise SourceUnavailableError(str(error)) from error
            raise
    return writer


def _now() -> float:
    return asyncio.get_running_loop().time()
