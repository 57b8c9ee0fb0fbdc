"""The kept `Index.Feed` stream: the newest status of every instance, from which lookups are estimated (U-41)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
import structlog
from msgspec import structs

from kvsp.protocol import limits
from kvsp.protocol.records import InstanceStatus
from kvsp.rpc.clock import now_ms
from kvsp.rpc.convert import status_to_message
from kvsp.rpc.errors import from_rpc_error
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, index_pb2_grpc

BACKOFF_S: Final = (0.1, 5.0)
log = structlog.get_logger()


class IndexFeed:
    """Tells the index. Only the newest status of an instance is kept, so a slow index costs no memory.

    A new stream may mean a new index, which knows nothing: then every status that has not lapsed is told again,
    with the time that it has left.
    """

    def __init__(self, channel: grpc.aio.Channel, principal: str, clock: Callable[[], int] = now_ms) -> None:
        self._stub = index_pb2_grpc.IndexStub(channel)
        self._metadata = speak_for(principal)
        self._clock = clock
        self._latest: dict[str, tuple[InstanceStatus, int]] = {}
        self._untold: dict[str, None] = {}
        self._wake = asyncio.Event()

    def tell(self, status: InstanceStatus) -> None:
        """Pass a status on."""
        expires_ms = self._clock() + min(status.ttl_ms, limits.STATUS_TTL_MS_MAX)
        self._latest[status.instance] = (status, expires_ms)
        self._untold[status.instance] = None
        self._wake.set()

    async def run(self) -> None:
        """Keep a stream to the index, for ever."""
        least, most = BACKOFF_S
        pause = least
        while True:
            self._untold = dict.fromkeys(self._latest)
            self._wake.set()  # lets the generator of the old stream end
            self._wake = asyncio.Event()
            self._wake.set()
            started_ms = self._clock()
            try:
                call = self._stub.Feed(self._messages(self._wake), metadata=self._metadata, wait_for_ready=True)
                await call
            except grpc.aio.AioRpcError as error:
                log.warning("index feed broke", status=from_rpc_error(error).status)
            except asyncio.CancelledError:
                # Also what a call ends with whose own requests failed; then this task goes on.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                log.error("index feed cancelled itself")
            if self._clock() - started_ms > 1000 * most:
                pause = least
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def _messages(self, wake: asyncio.Event) -> AsyncIterator[common_pb2.InstanceStatus]:
        while wake is self._wake:
            while self._untold:
                instance = next(iter(self._untold))
                del self._untold[instance]
                status, expires_ms = self._latest[instance]
                left_ms = expires_ms - self._clock()
                if left_ms > 0:
                    yield status_to_message(structs.replace(status, ttl_ms=left_ms))
                else:
                    del self._latest[instance]
            wake.clear()
            await wake.wait()
