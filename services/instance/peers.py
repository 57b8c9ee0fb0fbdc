"""Holders as an instance sees them: lease, fetch verified layers, put. Internal calls, or HTTPS where there is no
internal address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

import grpc
import structlog

from kvsp.bulk.holder import HolderClient, OpenedTransfer
from kvsp.bulk.rates import LinkRate, Rates
from kvsp.bulk.source import Piece
from kvsp.client import AsyncClient
from kvsp.client.block import Expectation
from kvsp.protocol import registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReplicaRecord
from kvsp.rpc.channel import DEFAULT_TIMEOUT_S
from kvsp.rpc.convert import block_name
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, holder_pb2, holder_pb2_grpc
from services.instance import metrics

REQUEST_OCTETS_MIN: Final = 256 << 10
"""Layers are fetched in ranges of at least this many octets (measured in kvsp/connectors)."""

RETRY_S: Final = 0.25
RELEASE_S: Final = 1.0

log = structlog.get_logger()

Leased = AbstractAsyncContextManager[None]


def source_failed(holder: str, error: KvspError | TimeoutError) -> bool:
    """Log and count a fetch that failed. True: the octets are not the block's, which the index is to hear of."""
    status = error.status if isinstance(error, KvspError) else "timeout"
    log.info("source failed", holder=holder, status=status)
    metrics.SOURCE_FAILURES.labels(str(status)).inc()
    is_wrong = isinstance(error, KvspError) and error.problem is registry.DIGEST_MISMATCH
    if is_wrong:
        metrics.DIGEST_FAILURES.labels("fetch").inc()
    return is_wrong


class Holder(Protocol):
    """One holder. Methods raise KvspError."""

    base_uri: str

    def leased(self, scope_id: str, compat_id: str, keys: Sequence[bytes], ttl_ms: int) -> Leased:
        """Keeps the blocks from eviction while it is open, however long that is (R-128)."""

    def range_layers(self, record: ReplicaRecord) -> int:
        """How many layers a fetch should ask for."""

    async def fetch(self, record: ReplicaRecord, layers: tuple[int, int], into: memoryview) -> None:
        """The payload octets of layers first..last, verified against the record (R-155, D11).

        `into` holds anything after a failure.
        """

    async def put(self, name: common_pb2.BlockName, pieces: Sequence[Piece]) -> None:
        """Store a container, given in pieces; that the holder had the block already is as good."""

    def link(self) -> LinkRate | None:
        """What transfers have measured; None: too little yet."""


class InternalHolder:
    """A holder of the same operator, by gRPC and what transports it offers.

    On the same host a block is one read; elsewhere each range of layers is a request, so that the first are early.
    """

    def __init__(
        self,
        base_uri: str,
        channel: grpc.aio.Channel,
        client: HolderClient,
        principal: str,
        *,
        descriptor: Descriptor,
        same_host: bool,
    ) -> None:
        self.base_uri = base_uri
        self._stub = holder_pb2_grpc.HolderStub(channel)
        self._client = client
        self._principal = principal
        self._metadata = speak_for(principal)
        self._descriptor = descriptor
        self._same_host = same_host
        self._releasing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for leases that are being released, but not for long: they lapse by themselves."""
        if self._releasing:
            _, late = await asyncio.wait(self._releasing, timeout=RELEASE_S)
            for task in late:
                task.cancel()

    @asynccontextmanager
    async def leased(
        self, scope_id: str, compat_id: str, keys: Sequence[bytes], ttl_ms: int
    ) -> AsyncIterator[None]:
        """See Holder.leased."""
        request = holder_pb2.CreateLeaseRequest(
            block_keys=b"".join(keys),
            ttl_ms=ttl_ms,
            scope_id=bytes.fromhex(scope_id),
            compat_id=bytes.fromhex(compat_id),
        )
        async with translated():
            granted = await self._stub.CreateLease(request, metadata=self._metadata, timeout=DEFAULT_TIMEOUT_S)
        renewing = asyncio.create_task(self._renew(granted.lease, ttl_ms, granted.ttl_ms))
        try:
            yield
        finally:
            renewing.cancel()
            releasing = asyncio.create_task(self._release(granted.lease))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    async def _renew(self, lease: str, ttl_ms: int, granted_ms: int) -> None:
        pause_s = granted_ms / 3000
        while True:
            await asyncio.sleep(pause_s)
            try:
                request = holder_pb2.RenewLeaseRequest(lease=lease, ttl_ms=ttl_ms)
                async with translated():
                    reply = await self._stub.RenewLease(
                        request, metadata=self._metadata, timeout=DEFAULT_TIMEOUT_S
                    )
                pause_s = reply.ttl_ms / 3000
            except KvspError as error:
                if error.problem is registry.NOT_FOUND:
                    return  # the source may evict now; a fetch that comes too late finds another source
                pause_s = min(RETRY_S, granted_ms / 6000)

    async def _release(self, lease: str) -> None:
        """The lease lapses by itself if this fails (R-141)."""
        try:
            request = holder_pb2.ReleaseLeaseRequest(lease=lease)
            await self._stub.ReleaseLease(request, metadata=self._metadata, timeout=DEFAULT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("lease not released", holder=self.base_uri, code=error.code().name)

    def range_layers(self, record: ReplicaRecord) -> int:
        """See Holder.range_layers."""
        return record.layer_count if self._same_host else _range_layers(record)

    async def fetch(self, record: ReplicaRecord, layers: tuple[int, int], into: memoryview) -> None:
        """See Holder.fetch."""
        first, last = layers
        part = None if layers == (0, record.layer_count - 1) else layers
        expect = Expectation.of_record(record, part, descriptor=self._descriptor)
        if expect.layer_digests is None:
            raise KvspError(registry.DIGEST_MISMATCH, "record has no layer digests to verify layers with")
        name = block_name(record.compat_id, record.scope_id, record.block_key)
        wanted = expect.layer_digests[first : last + 1]
        opened = await self._client.open(self._principal, name, layers=part, digests=wanted)
        try:
            expect.check_header(opened.parsed_header)
            async for _ in opened.into(into):
                pass
        finally:
            opened.close()

    async def open(self, name: common_pb2.BlockName, layers: tuple[int, int] | None = None) -> OpenedTransfer:
        """A pinned block, to be closed."""
        return await self._client.open(self._principal, name, layers=layers)

    async def holds(self, name: common_pb2.BlockName) -> bool:
        """Is the block there?"""
        try:
            await self._client.open(self._principal, name, pin=False)
        except KvspError as error:
            if error.status == registry.NOT_FOUND.status:
                return False
            raise
        return True

    async def put(self, name: common_pb2.BlockName, pieces: Sequence[Piece]) -> None:
        """See Holder.put."""
        try:
            reserved = await self._client.reserve(self._principal, name, sum(map(len, pieces)))
        except KvspError as error:
            if error.problem is registry.PRECONDITION_FAILED:
                return
            raise
        assert reserved is not None  # noqa: S101  (None is for length 0 alone)
        try:
            for piece in pieces:
                await reserved.write(piece)
            await reserved.commit()
        finally:
            reserved.abort()

    async def purge(self, name: common_pb2.BlockName) -> None:
        """Have a block of this instance's own holder dropped."""
        async with translated():
            request = holder_pb2.PurgeBlockRequest(name=name)
            await self._stub.PurgeBlock(request, metadata=self._metadata, timeout=DEFAULT_TIMEOUT_S)

    async def set_tier(self, names: Sequence[common_pb2.BlockName], layers: tuple[int, int] | None) -> None:
        """Tell this instance's own holder which layers of these blocks, or of all, the engine keeps (U-49)."""
        request = holder_pb2.SetTierRequest(tier="device", names=names)
        if layers is not None:
            request.layers.first, request.layers.last = layers
        async with translated():
            await self._stub.SetTier(request, metadata=self._metadata, timeout=DEFAULT_TIMEOUT_S)

    def link(self) -> LinkRate | None:
        """See Holder.link."""
        return self._client.link()


class HttpsHolder:
    """Another maker's holder, or another operator's: by its public interface."""

    def __init__(self, base_uri: str, client: AsyncClient, descriptor: Descriptor) -> None:
        self.base_uri = base_uri
        self._client = client
        self._descriptor = descriptor
        self._rates = Rates()

    @asynccontextmanager
    async def leased(
        self, scope_id: str, compat_id: str, keys: Sequence[bytes], ttl_ms: int
    ) -> AsyncIterator[None]:
        """See Holder.leased."""
        names = [key.hex() for key in keys]
        began = time.monotonic()
        async with self._client.lease(self.base_uri, names, ttl_ms, scope_id=scope_id, compat_id=compat_id):
            self._rates.answered(time.monotonic() - began)
            yield

    def range_layers(self, record: ReplicaRecord) -> int:
        """See Holder.range_layers."""
        return _range_layers(record)

    async def fetch(self, record: ReplicaRecord, layers: tuple[int, int], into: memoryview) -> None:
        """See Holder.fetch."""
        began = time.monotonic()
        await self._client.get(record, layers=layers, descriptor=self._descriptor, into=into)
        self._rates.moved("https", into.nbytes, time.monotonic() - began)

    async def put(self, name: common_pb2.BlockName, pieces: Sequence[Piece]) -> None:
        """See Holder.put."""
        octets = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        await self._client.put(
            self.base_uri, name.compat_id.hex(), name.scope_id.hex(), name.block_key.hex(), octets
        )

    def link(self) -> LinkRate | None:
        """See Holder.link."""
        rate, rtt_s = self._rates.rate("https"), self._rates.rtt_s
        return None if rate is None or rtt_s is None else LinkRate(rate * 8 / 1e6, rtt_s * 1e6)


def _range_layers(record: ReplicaRecord) -> int:
    layer_octets = max(1, record.size // record.layer_count)
    return min(record.layer_count, -(-REQUEST_OCTETS_MIN // layer_octets))
