"""New blocks on their way to holders: this instance's own first, then those that outlive it (R-171).

In the background, and bounded: when holders do not keep up, the oldest blocks are dropped; they can be computed
again. Whoever has many blocks at once waits for `room` before each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog

from kvsp.protocol.errors import KvspError
from kvsp.rpc.convert import block_name
from services.instance import metrics
from services.instance.loads import Stored
from services.instance.peers import Holder

WORKERS: Final = 2
FLUSH_S: Final = 2.0
PUT_S: Final = 30.0

log = structlog.get_logger()

Item = tuple[str, bytes, bytes]
"""Scope id, block key, container."""


class Store:
    """Puts blocks to `own` and then to each of `durable`. At most about `octets_max` wait."""

    def __init__(
        self, own: Holder, durable: Sequence[Holder], compat_id: str, *, octets_max: int, stored: Stored
    ) -> None:
        self._own = own
        self._durable = durable
        self._stored = stored
        self._compat_id = compat_id
        self._octets_max = octets_max
        self._waiting: deque[Item] = deque()
        self._octets = 0
        self._active = 0
        self._some = asyncio.Event()
        self._taken = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def add(self, scope_id: str, key: bytes, octets: bytes) -> None:
        """Queue a block."""
        self._waiting.append((scope_id, key, octets))
        self._octets += len(octets)
        while self._octets > self._octets_max and len(self._waiting) > 1:
            self._octets -= len(self._waiting.popleft()[2])
            metrics.STORE_DROPPED.inc()
        self._some.set()
        self._none.clear()

    async def room(self) -> None:
        """Wait until no more than half of what may wait does: the rest is for those who cannot wait."""
        while self._octets > self._octets_max // 2:
            self._taken.clear()
            await self._taken.wait()

    async def run(self) -> None:
        """Store what is queued, for ever; several may."""
        while True:
            while not self._waiting:
                self._some.clear()
                await self._some.wait()
            item = self._waiting.popleft()
            self._octets -= len(item[2])
            self._taken.set()
            self._active += 1
            try:
                if await self._put(self._own, item):
                    await self._stored(item[0], item[1], [item[2]])
                for holder in self._durable:
                    await self._put(holder, item)
            finally:
                self._active -= 1
                if not self._waiting and not self._active:
                    self._none.set()

    async def flushed(self) -> None:
        """Wait until nothing is queued, but not long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._none.wait()

    async def _put(self, holder: Holder, item: Item) -> bool:
        scope_id, key, octets = item
        try:
            async with asyncio.timeout(PUT_S):
                await holder.put(block_name(self._compat_id, scope_id, key.hex()), [octets])
        except (KvspError, TimeoutError) as error:
            status = error.status if isinstance(error, KvspError) else "timeout"
            metrics.STORED.labels(str(status)).inc()
            log.warning("block not stored", holder=holder.base_uri, status=status)
            return False
        metrics.STORED.labels("done").inc()
        return True
