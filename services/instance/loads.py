"""Blocks on their way here: each is fetched once, whoever wants it, from one source after the other.

A source has a lane of its own, so that a slow one holds up nobody but those who wait for its blocks. In a lane,
sessions go before directives: a session's blocks range by range of layers, that the first layers of all are early;
a directive's block by block, that the prefix is whole at its deadline. Every range is verified before it counts as
there; a whole block goes to this instance's own holder.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

import structlog

from kvsp.bulk.source import Piece
from kvsp.protocol import container, limits, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReplicaRecord
from kvsp.rpc.convert import block_name
from services.instance import metrics
from services.instance.directory import Directory
from services.instance.lull import Lull
from services.instance.peers import Holder, InternalHolder, source_failed

Stored = Callable[[str, bytes, Sequence[Piece]], Awaitable[None]]
"""Told of a block that the own holder has taken: scope, key, and its container in pieces."""

LEASED_TOGETHER_MAX: Final = 64
STORES_MAX: Final = 4

log = structlog.get_logger()


class Watcher(Protocol):
    """Who wants a block; called on the event loop."""

    urgent: bool
    """A session, not a directive."""

    def arrived(self, load: Load) -> None:
        """More layers are there: `load.ready` in all."""

    def over(self, load: Load) -> None:
        """Nothing more will come; `load.held` says whether this instance's own holder has the block now."""


@dataclass(eq=False)
class Load:
    """One block. `order` is its place in what asked for it first; `payload` is filled as layers arrive."""

    scope_id: str
    key: bytes
    order: int
    lease_ms: int
    sources: deque[ReplicaRecord]
    watchers: set[Watcher] = field(default_factory=set)
    record: ReplicaRecord | None = None
    """What is being fetched."""
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    ready: int = 0
    held: bool = False
    ended: bool = False
    busy: asyncio.Task[None] | None = None
    left: asyncio.Future[None] | None = None
    """Done when the source is not needed any more."""

    @property
    def urgent(self) -> bool:
        """Does a session wait for it?"""
        return any(watcher.urgent for watcher in self.watchers)

    @property
    def whole(self) -> bool:
        """Have all layers arrived?"""
        return self.record is not None and self.ready == self.record.layer_count

    def next_source(self) -> bool:
        """Go to the next source. False: there is none that could continue.

        Two replicas of a block may differ (U-13); layers of them are not mixed once somebody has used some.
        """
        self.leave()
        before = self.record
        while self.sources:
            record = self.sources.popleft()
            if before is None or not self.ready or record.digest == before.digest:
                self.record = record
                return True
        return False

    def leave(self) -> None:
        """The source's lease is not needed for this block any more."""
        if self.left is not None and not self.left.done():
            self.left.set_result(None)


class Loads:
    """Every block on its way. `parallel` is how many requests a source gets at a time."""

    def __init__(
        self,
        own: InternalHolder,
        holders: dict[str, Holder],
        directory: Directory,
        descriptor: Descriptor,
        compat_id: str,
        *,
        parallel: int,
        fetch_s: float,
        stored: Stored,
        lull: Lull | None = None,
    ) -> None:
        self._own = own
        self._holders = holders
        self._directory = directory
        self._descriptor = descriptor
        self._compat_id = compat_id
        self._parallel = parallel
        self._fetch_s = fetch_s
        self._all: dict[tuple[str, bytes], Load] = {}
        self._lanes: dict[str, asyncio.PriorityQueue[tuple[int, int, int, int, Load]]] = {}
        self._serial = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._storing = asyncio.Semaphore(STORES_MAX)
        self._stored = stored
        self._lull = lull or Lull()

    def __len__(self) -> int:
        """Blocks on their way."""
        return len(self._all)

    def find(self, scope_id: str, key: bytes) -> Load | None:
        """A block that somebody wants already."""
        return self._all.get((scope_id, key))

    def join(self, load: Load, watcher: Watcher) -> None:
        """Want a block that is on its way."""
        load.watchers.add(watcher)
        if watcher.urgent:
            self._queue(load)  # once more, nearer to the front; whichever entry comes first counts

    def begin(
        self,
        watcher: Watcher,
        scope_id: str,
        blocks: Iterable[tuple[int, bytes, Sequence[ReplicaRecord]]],
        lease_ms: int,
    ) -> list[Load]:
        """Fetch blocks (their place, key, and replicas to try in this order), none of which is on its way.

        The watcher hears nothing of them before this returns.
        """
        made = [
            Load(scope_id, key, order, lease_ms, deque(replicas), {watcher}) for order, key, replicas in blocks
        ]
        for load in made:
            self._all[scope_id, load.key] = load
        asyncio.get_running_loop().call_soon(self._assign, made)
        return made

    def drop(self, load: Load, watcher: Watcher) -> None:
        """Want it no more. A block that nobody wants is fetched no further; one that is whole is still stored."""
        load.watchers.discard(watcher)
        if not load.watchers and not load.whole:
            self._end(load)

    async def close(self) -> None:
        """End everything."""
        for load in list(self._all.values()):
            load.watchers.clear()
            self._end(load)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- sources ---

    def _assign(self, loads: Iterable[Load]) -> None:
        """Each to its next source, those of one source under common leases."""
        by_holder: dict[str, list[Load]] = {}
        for load in loads:
            if load.ended:
                continue
            if load.next_source() and load.record is not None:
                by_holder.setdefault(load.record.holder, []).append(load)
            else:
                self._end(load)
        for uri, group in by_holder.items():
            for at in range(0, len(group), LEASED_TOGETHER_MAX):
                self._spawn(self._hold(self._holders[uri], group[at : at + LEASED_TOGETHER_MAX]))

    async def _hold(self, holder: Holder, loads: list[Load]) -> None:
        """Lease blocks of one scope at a source until all have been fetched, or are not wanted there any more."""
        loads = [load for load in loads if not load.ended]
        if not loads:
            return
        keys = [load.key for load in loads]
        loop = asyncio.get_running_loop()
        try:
            async with holder.leased(loads[0].scope_id, self._compat_id, keys, loads[0].lease_ms):
                waiting = []
                for load in loads:
                    if not load.ended:
                        load.left = loop.create_future()
                        waiting.append(load.left)
                        self._queue(load)
                if waiting:
                    await asyncio.wait(waiting)
        except KvspError as error:
            self._not_leased(holder, loads, error)

    def _not_leased(self, holder: Holder, loads: list[Load], error: KvspError) -> None:
        """ "All or nothing" (U-16): without those that are missing, or in halves, the rest may be."""
        log.info("not leased", holder=holder.base_uri, blocks=len(loads), status=error.status)
        missing = set(error.extensions.get("block_keys", ()))
        lost = [load for load in loads if load.key.hex() in missing]
        rest = [load for load in loads if load.key.hex() not in missing]
        if (
            not lost
            and len(loads) > 1
            and error.status in (registry.NOT_FOUND.status, registry.LEASE_QUOTA.status)
        ):
            middle = len(loads) // 2
            self._spawn(self._hold(holder, loads[:middle]))
            self._spawn(self._hold(holder, loads[middle:]))
            return
        if lost and rest:
            self._spawn(self._hold(holder, rest))
        self._assign(lost or loads)

    # --- lanes ---

    def _queue(self, load: Load) -> None:
        """Put a block into its source's lane, at the place that its next range of layers has."""
        if load.left is None or load.left.done() or load.record is None:
            return  # not leased yet: it is queued then
        uri = load.record.holder
        lane = self._lanes.get(uri)
        if lane is None:
            lane = self._lanes[uri] = asyncio.PriorityQueue()
            for _ in range(self._parallel):
                self._spawn(self._work(self._holders[uri], lane))
        place = (0, load.ready, load.order) if load.urgent else (1, load.order, load.ready)
        lane.put_nowait((*place, next(self._serial), load))

    async def _work(self, holder: Holder, lane: asyncio.PriorityQueue[tuple[int, int, int, int, Load]]) -> None:
        while True:
            load = (await lane.get())[-1]
            here = load.record is not None and load.record.holder == holder.base_uri
            if not here or load.ended or load.busy is not None or load.left is None or load.left.done():
                continue  # another entry of the same block was first
            load.busy = asyncio.create_task(self._fetch(holder, load))
            await asyncio.wait([load.busy])
            load.busy = None
            if not load.ended:
                self._queue(load)

    async def _fetch(self, holder: Holder, load: Load) -> None:
        """The next range of layers; on failure the block goes to its next source."""
        record = load.record
        assert record is not None  # noqa: S101  (queued blocks have a source)
        try:
            header = self._make_room(load)
            first = load.ready
            last = min(first + holder.range_layers(record), record.layer_count) - 1
            start = header.layer_span(first)[0]
            end = sum(header.layer_span(last))
            # "a slower transfer is cut" (D4)
            async with asyncio.timeout(self._fetch_s + (end - start) / limits.RATE_OCTETS_PER_S_MIN):
                await holder.fetch(record, (first, last), load.payload[start:end])
        except (KvspError, TimeoutError) as error:
            self._failed(holder, load, error)
            return
        metrics.FETCHED_OCTETS.inc(end - start)
        load.ready = last + 1
        if load.whole:
            load.leave()
            self._spawn(self._store(load))
        for watcher in list(load.watchers):
            watcher.arrived(load)

    def _make_room(self, load: Load) -> container.Header:
        header = container.raw_header(self._descriptor)
        if not load.payload:
            load.payload = memoryview(bytearray(header.payload_octets))
        return header

    def _failed(self, holder: Holder, load: Load, error: KvspError | TimeoutError) -> None:
        if source_failed(holder.base_uri, error):
            self._spawn(self._directory.withdraw(holder.base_uri, load.key.hex()))
        self._assign([load])

    # --- ends ---

    async def _store(self, load: Load) -> None:
        """Put a whole block into this instance's own holder, which publishes it (R-128)."""
        name = block_name(self._compat_id, load.scope_id, load.key.hex())
        try:
            if load.urgent:  # a session has it: what it still lacks comes first
                await self._lull.wait()
            async with self._storing:
                pieces = (self._make_room(load).encode(), load.payload)
                await self._own.put(name, pieces)
            load.held = True
            await self._stored(load.scope_id, load.key, pieces)
        except KvspError as error:
            log.warning("block not stored", status=error.status)
        finally:
            self._end(load)

    def _end(self, load: Load) -> None:
        if load.ended:
            return
        load.ended = True
        load.leave()
        if load.busy is not None:
            load.busy.cancel()  # "no GET after the deadline"
        self._all.pop((load.scope_id, load.key), None)
        for watcher in list(load.watchers):
            watcher.over(load)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
