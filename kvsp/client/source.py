"""The `https` block source of `kvsp/bulk`: the transport that every peer has (R-075)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar

from kvsp.bulk.source import PIECE_OCTETS, Capabilities, Piece, SourceUnavailableError, Transfer
from kvsp.client.aio import AsyncClient
from kvsp.client.block import Layers
from kvsp.client.errors import unavailable
from kvsp.protocol.records import ReplicaRecord


@dataclass(frozen=True, slots=True)
class HttpsEndpoint:
    """The `endpoint` of a transfer: which block of which holder, and the client to reach it with.

    Reading moves the payload of `layers` of the block (None: all); writing moves a whole container.
    """

    client: AsyncClient
    record: ReplicaRecord
    layers: Layers | None = None


class HttpsSource:
    """Moves blocks over the public interface, verified as any client does."""

    scheme: ClassVar[str] = "https"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def reader(self, transfer: Transfer) -> HttpsReader:
        """Begin to read. Raises SourceUnavailableError when the transfer is not for HTTPS."""
        return HttpsReader(_endpoint(transfer), transfer.length)

    def writer(self, transfer: Transfer) -> HttpsWriter:
        """Begin to write. Raises SourceUnavailableError when the transfer is not for HTTPS."""
        return HttpsWriter(_endpoint(transfer), transfer.length)

    def close(self) -> None:
        """Connections are the client's."""


class HttpsReader:
    """Gives out payload octets whose layer digests matched the record (U-54)."""

    def __init__(self, endpoint: HttpsEndpoint, length: int) -> None:
        self._endpoint = endpoint
        self._length = length

    async def pieces(self) -> AsyncIterator[Piece]:
        """Exactly `length` octets. Raises KvspError, a final digest mismatch included."""
        at, moved = self._endpoint, 0
        async with aclosing(at.client.get_layers(at.record, layers=at.layers)) as layers:
            async for layer in layers:
                for section in (layer.k, layer.v):
                    for start in range(0, len(section), PIECE_OCTETS):
                        yield section[start : start + PIECE_OCTETS]
                    moved += len(section)
        if moved != self._length:
            raise unavailable("block is not as long as agreed")

    def close(self) -> None:
        """Nothing is held between pieces."""


class HttpsWriter:
    """Collects one container and stores it with a PUT."""

    def __init__(self, endpoint: HttpsEndpoint, length: int) -> None:
        self._endpoint = endpoint
        self._octets = bytearray()
        self._length = length

    async def write(self, piece: Piece) -> None:
        """Append. Raises KvspError beyond the agreed length."""
        if len(self._octets) + len(piece) > self._length:
            raise unavailable("more octets than agreed")
        self._octets += piece

    async def finish(self) -> None:
        """Store it; that the holder already had the block is as good. Raises KvspError."""
        record = self._endpoint.record
        await self._endpoint.client.put(
            record.holder, record.compat_id, record.scope_id, record.block_key, self._octets
        )

    def close(self) -> None:
        """Forget what was collected."""
        self._octets = bytearray()


def _endpoint(transfer: Transfer) -> HttpsEndpoint:
    if not isinstance(transfer.endpoint, HttpsEndpoint):
        raise SourceUnavailableError("https: the transfer was not agreed over HTTPS")
    return transfer.endpoint
