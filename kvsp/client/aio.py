"""The asynchronous SDK: the synchronous one on a pool of threads, cancellable.

libcurl works outside the GIL, so threads cost little; what asyncio would save in threads it would
spend in passing every piece of a block through the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from types import TracebackType
from typing import Any, TypeVar

from kvsp.client.block import Block, Layer, Layers
from kvsp.client.client import BlockInfo, Client, Replicas
from kvsp.client.config import Credentials, Endpoints, Options
from kvsp.client.download import WritableBuffer
from kvsp.client.lease import Lease
from kvsp.client.transport import CANCEL
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.records import (
    CheckpointReply,
    DirectiveStatus,
    InstanceStatus,
    LookupReply,
    PrefetchDirective,
    ReplicaRecord,
    ResumeReply,
    SessionCheckpoint,
)

T = TypeVar("T")


class AsyncClient:
    """`Client` with awaitable methods; see there for what they do and raise.

    Cancelling an await stops its exchange, and returns only when no more octets will be written to
    `into`: at once while octets flow, within a second otherwise.
    """

    def __init__(self, credentials: Credentials, endpoints: Endpoints, options: Options | None = None) -> None:
        self._sync = Client(credentials, endpoints, options)
        self._threads = ThreadPoolExecutor(self._sync.options.pool_size, "kvsp-call")

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for what is under way and close all connections."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._sync.close)

    async def lookup(
        self, scope_id: str, compat_id: str, keys: Sequence[str], targets: Sequence[str] | None = None
    ) -> LookupReply:
        """See Client.lookup."""
        return await self._run(lambda: self._sync.lookup(scope_id, compat_id, keys, targets))

    async def publish(self, record: ReplicaRecord) -> int:
        """See Client.publish."""
        return await self._run(lambda: self._sync.publish(record))

    async def withdraw(self, holder: str, block_key: str) -> bool:
        """See Client.withdraw."""
        return await self._run(lambda: self._sync.withdraw(holder, block_key))

    async def get(
        self,
        replicas: Replicas,
        *,
        layers: Layers | None = None,
        codec: int | None = None,
        descriptor: Descriptor | None = None,
        into: WritableBuffer | None = None,
    ) -> Block:
        """See Client.get."""
        return await self._run(
            lambda: self._sync.get(replicas, layers=layers, codec=codec, descriptor=descriptor, into=into)
        )

    async def get_from(
        self,
        holder: str,
        compat_id: str,
        scope_id: str,
        block_key: str,
        *,
        layers: Layers | None = None,
        codec: int | None = None,
        descriptor: Descriptor | None = None,
        into: WritableBuffer | None = None,
    ) -> Block:
        """See Client.get_from."""
        asked: dict[str, Any] = {"layers": layers, "codec": codec, "descriptor": descriptor, "into": into}
        return await self._run(lambda: self._sync.get_from(holder, compat_id, scope_id, block_key, **asked))

    async def get_layers(
        self,
        replicas: Replicas,
        *,
        layers: Layers | None = None,
        descriptor: Descriptor | None = None,
        into: WritableBuffer | None = None,
    ) -> AsyncGenerator[Layer, None]:
        """See Client.get_layers. Use `contextlib.aclosing` when you may leave the loop early."""
        cancel = threading.Event()
        layer_iterator = self._sync.get_layers(replicas, layers=layers, descriptor=descriptor, into=into)
        try:
            while (layer := await self._run(lambda: next(layer_iterator, None), cancel)) is not None:
                yield layer
        finally:
            cancel.set()
            await asyncio.to_thread(layer_iterator.close)

    async def head(self, holder: str, compat_id: str, scope_id: str, block_key: str) -> BlockInfo:
        """See Client.head."""
        return await self._run(lambda: self._sync.head(holder, compat_id, scope_id, block_key))

    async def put(
        self,
        holder: str,
        compat_id: str,
        scope_id: str,
        block_key: str,
        octets: bytes | bytearray | memoryview,
        *,
        sha256: bytes | None = None,
    ) -> bool:
        """See Client.put."""
        return await self._run(
            lambda: self._sync.put(holder, compat_id, scope_id, block_key, octets, sha256=sha256)
        )

    @asynccontextmanager
    async def lease(
        self,
        holder: str,
        keys: Sequence[str],
        ttl_ms: int,
        *,
        scope_id: str | None = None,
        compat_id: str | None = None,
    ) -> AsyncIterator[Lease]:
        """See Client.lease."""
        lease = self._sync.lease(holder, keys, ttl_ms, scope_id=scope_id, compat_id=compat_id)
        try:
            await self._run(lease.__enter__)
            yield lease
        finally:  # also when cancelled while it was entered, which may have come to its end by then
            await asyncio.to_thread(lease.__exit__, None, None, None)

    async def put_status(self, status: InstanceStatus) -> str:
        """See Client.put_status."""
        return await self._run(lambda: self._sync.put_status(status))

    async def put_checkpoint(self, checkpoint: SessionCheckpoint) -> CheckpointReply:
        """See Client.put_checkpoint."""
        return await self._run(lambda: self._sync.put_checkpoint(checkpoint))

    async def prefetch(self, instance: str, directive: PrefetchDirective) -> DirectiveStatus:
        """See Client.prefetch."""
        return await self._run(lambda: self._sync.prefetch(instance, directive))

    async def directive(self, instance: str, directive_id: str) -> DirectiveStatus:
        """See Client.directive."""
        return await self._run(lambda: self._sync.directive(instance, directive_id))

    async def resume(self, instance: str, epoch: int, checkpoint: SessionCheckpoint) -> ResumeReply:
        """See Client.resume."""
        return await self._run(lambda: self._sync.resume(instance, epoch, checkpoint))

    async def set_state(self, instance: str, state: str) -> str:
        """See Client.set_state."""
        return await self._run(lambda: self._sync.set_state(instance, state))

    async def _run(self, call: Callable[[], T], cancel: threading.Event | None = None) -> T:
        """Run `call` on a thread; when cancelled, stop it and wait until it has stopped."""
        stop = cancel or threading.Event()
        context = copy_context()
        context.run(CANCEL.set, stop)
        job = self._threads.submit(context.run, call)
        result = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            stop.set()
            if not job.cancel():
                while not result.done():  # however often it is cancelled
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([result])
                result.exception()  # it is known why: not a forgotten failure
            raise
