"""The kept `Index.Publish` stream: what the index should list, in the order of the state's instructions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final

import grpc
import structlog

from kvsp.protocol import registry
from kvsp.protocol.digests import format_digest, replica_digest
from kvsp.protocol.names import party_id
from kvsp.protocol.records import ReplicaRecord, Residency
from kvsp.rpc.clock import now_ms
from kvsp.rpc.convert import replica_to_message
from kvsp.rpc.errors import from_message, from_rpc_error
from kvsp.rpc.identity import speak_for
from kvsp.v1 import index_pb2, index_pb2_grpc
from services.holder import metrics
from services.holder.blocks import Block
from services.holder.journal import Journal

WINDOW: Final = 128
"""Items sent and not yet answered: the index sets the pace, also when everything is published anew."""

BACKOFF_S: Final = (0.1, 5.0)
RETRY_S: Final = 5.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Item:
    block_key: bytes
    block: Block | None  # None: withdraw
    sent_ms: int


def replica_record(block: Block, base_uri: str, ttl_ms: int) -> ReplicaRecord:
    """The record of a block in the arena. `size` is payload octets (U-26)."""
    digested = block.digested
    return ReplicaRecord(
        block_key=block.name.block_key.hex(),
        compat_id=block.name.compat_id.hex(),
        scope_id=block.name.scope_id.hex(),
        holder=base_uri,
        codec=digested.header.codec,
        size=digested.header.payload_octets,
        digest=format_digest(replica_digest(digested.layer_digests)),
        residency=[Residency(tier, layers) for tier, layers in block.residency],
        layer_digests=[each.hex() for each in digested.layer_digests],
        ttl_ms=ttl_ms,
    )


class Publisher:
    """Tells the index. Only the newest intention for a key is kept, so what waits is bounded by the blocks.

    A new stream may mean a new index, which knows nothing: then everything is published again, at
    the pace at which it answers. `held()` are all blocks, `listed(block_key)` is the one to be listed
    under a key; `published(block, granted_ms, sent_ms)` and `refused(block)` are told the outcome.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        principal: str,
        base_uri: str,
        ttl_ms: int,
        journal: Journal,
        *,
        held: Callable[[], Iterable[Block]],
        listed: Callable[[bytes], Block | None],
        published: Callable[[Block, int, int], None],
        refused: Callable[[Block], None],
    ) -> None:
        self._channel = channel
        self._principal = principal
        self._base_uri = base_uri
        self._ttl_ms = ttl_ms
        self._journal = journal
        self._held = held
        self._listed = listed
        self._published = published
        self._refused = refused
        self._wanted: dict[bytes, Block | None] = {}
        self._in_flight: dict[int, _Item] = {}
        self._seq = count(1)
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._answering = False
        # "DELETE those it remembers" (U-51): this process has none of them.
        for key in journal.remembered():
            self._want(key, None)

    def publish(self, block: Block) -> None:
        """List the block, or refresh its record."""
        self._want(block.name.block_key, block)

    def withdraw(self, block: Block) -> None:
        """List the block no more."""
        self._want(block.name.block_key, None)

    async def flushed(self) -> None:
        """Wait until the index has answered everything, as long as it answers at all."""
        await self._progressed(lambda: not self._wanted and not self._in_flight)

    async def settled(self, block_key: bytes) -> None:
        """Wait until the index has answered the newest intention for a key, as long as it answers at all."""

        def is_settled() -> bool:
            in_flight = any(item.block_key == block_key for item in self._in_flight.values())
            return block_key not in self._wanted and not in_flight

        await self._progressed(is_settled)

    async def _progressed(self, enough: Callable[[], bool]) -> None:
        while self._answering and not enough():
            self._progress.clear()
            await self._progress.wait()

    async def run(self) -> None:
        """Keep a stream to the index, for ever."""
        least, most = BACKOFF_S
        pause = least
        while True:
            try:
                async for reply in self._open_stream():
                    pause = least
                    self._answering = True
                    self._answered(reply)
            except grpc.aio.AioRpcError as error:
                log.warning("index stream broke", status=from_rpc_error(error).status)
            except asyncio.CancelledError:
                # Also what a call ends with whose own requests failed; then this task goes on.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                log.error("index stream cancelled itself")
            self._answering = False
            self._progress.set()
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    def _open_stream(self) -> grpc.aio.StreamStreamCall[index_pb2.PublishRequest, index_pb2.PublishReply]:
        for block in self._held():
            if self._listed(block.name.block_key) is block:
                self._wanted.setdefault(block.name.block_key, block)
        for item in self._in_flight.values():
            if self._listed(item.block_key) is None:
                self._wanted.setdefault(item.block_key, None)
        self._in_flight = {}
        self._wake.set()  # lets the generator of the old stream end
        self._wake = asyncio.Event()
        self._wake.set()
        stub = index_pb2_grpc.IndexStub(self._channel)
        return stub.Publish(self._requests(self._wake), metadata=speak_for(self._principal), wait_for_ready=True)

    def _want(self, block_key: bytes, block: Block | None) -> None:
        self._wanted.pop(block_key, None)  # to the end: the newest intention is sent after all before it
        self._wanted[block_key] = block
        self._wake.set()

    async def _requests(self, wake: asyncio.Event) -> AsyncIterator[index_pb2.PublishRequest]:
        while wake is self._wake:
            while self._wanted and len(self._in_flight) < WINDOW:
                block_key = next(iter(self._wanted))
                yield self._request(block_key, self._wanted.pop(block_key))
            wake.clear()
            await wake.wait()

    def _request(self, block_key: bytes, block: Block | None) -> index_pb2.PublishRequest:
        seq = next(self._seq)
        self._in_flight[seq] = _Item(block_key, block, now_ms())
        if block is None:
            withdraw = index_pb2.DeleteReplicaRequest(holder_id=party_id(self._base_uri), block_key=block_key)
            return index_pb2.PublishRequest(seq=seq, withdraw=withdraw)
        self._journal.remember(block_key)
        record = replica_record(block, self._base_uri, self._ttl_ms)
        return index_pb2.PublishRequest(seq=seq, put=replica_to_message(record))

    def _answered(self, reply: index_pb2.PublishReply) -> None:
        item = self._in_flight.pop(reply.seq, None)
        self._wake.set()
        self._progress.set()
        if item is None:
            return
        status = from_message(reply.problem).status if reply.HasField("problem") else 200
        if item.block is not None:
            self._put_answered(item, item.block, reply.put.ttl_ms, status)
        # "withdrawer treats 404 as done" (U-12)
        elif status in (200, 404):
            metrics.PUBLICATIONS.labels("withdraw", "done").inc()
            self._withdrawn(item.block_key)
        else:
            metrics.PUBLICATIONS.labels("withdraw", "refused").inc()
            log.warning("withdrawal refused", status=status)
            asyncio.get_running_loop().call_later(RETRY_S, self._retry_withdrawal, item.block_key)

    def _withdrawn(self, block_key: bytes) -> None:
        block = self._listed(block_key)
        if block is None:
            self._journal.forget(block_key)
        elif block_key not in self._wanted:  # another of the same key: its turn now (U-15)
            self._want(block_key, block)

    def _put_answered(self, item: _Item, block: Block, granted_ms: int, status: int) -> None:
        if status == 200:
            metrics.PUBLICATIONS.labels("put", "done").inc()
            self._published(block, granted_ms, item.sent_ms)
        else:
            metrics.PUBLICATIONS.labels("put", "refused").inc()
            log.warning("publication refused", status=status)
            self._refused(block)
            if status == registry.CONFLICT.status:
                # Our record of that key has another name, of an earlier block: withdraw it first (U-13).
                asyncio.get_running_loop().call_later(RETRY_S, self._replace, block)

    def _replace(self, block: Block) -> None:
        key = block.name.block_key
        if self._listed(key) is block and key not in self._wanted:
            self._want(key, None)

    def _retry_withdrawal(self, block_key: bytes) -> None:
        if self._listed(block_key) is None and block_key not in self._wanted:
            self._want(block_key, None)
