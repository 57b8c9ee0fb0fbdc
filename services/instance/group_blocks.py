"""How a group's KV moves: as blocks, those of a plan's `fetch` ranges each from the holder of the instance named.

A block that is not there yet is asked for again: its member stores what it is to release when it gets its own
plan. Every block is verified before it counts as there. How long all this may take, the caller bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

import structlog

from kvsp.protocol import container
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.records import ReplicaRecord
from kvsp.rpc.convert import block_name
from services.instance import metrics
from services.instance.directory import Directory
from services.instance.loading import Holders
from services.instance.peers import Holder, source_failed
from services.instance.storing import Store

Block = tuple[int, bytes]
"""Its number in the context, and its key."""

Rows = Sequence[tuple[memoryview, memoryview]]
"""K and V of each layer of a block."""

Place = Callable[[int, Rows], None]
"""Takes a block that is verified; called on a worker thread."""

LEASED_TOGETHER_MAX: Final = 64
LEASE_MS: Final = 10_000
PAUSE_S: Final = (0.02, 0.5)
"""Before missing blocks are asked for again: the first time, and the longest."""

log = structlog.get_logger()


class GroupBlocks:
    """Fetches `parallel` blocks of each holder at a time; keeps what is released at this instance's own.

    What was computed goes the way of all new blocks, by `store`.
    """

    def __init__(
        self,
        holders: Holders,
        directory: Directory,
        workers: Executor,
        store: Store,
        *,
        descriptor: Descriptor,
        compat_id: str,
        parallel: int,
    ) -> None:
        self._holders = holders
        self._directory = directory
        self._workers = workers
        self._store = store
        self._descriptor = descriptor
        self._compat_id = compat_id
        self._parallel = parallel

    async def fetch(self, scope_id: str, wanted: Mapping[str, Sequence[Block]], place: Place) -> None:
        """All blocks that are wanted of each source; returns when the last one is in its place.

        Raises KvspError (503) for a source that is not trusted: "only connect to registered base URIs" (D10).
        """
        if not wanted.keys() <= set(self._holders.sources(scope_id)):
            raise unavailable("a source is no holder that is trusted for the scope")
        async with asyncio.TaskGroup() as group:
            for source, blocks in wanted.items():
                group.create_task(self._drain(scope_id, self._holders.others[source], list(blocks), place))

    async def keep(self, scope_id: str, blocks: Iterable[Block], export: Callable[[int], bytes]) -> None:
        """Store those that this instance's own holder lacks: others are about to fetch them there.

        `export` makes a block's container, on a worker thread.
        """
        loop = asyncio.get_running_loop()
        for block, key in blocks:
            name = block_name(self._compat_id, scope_id, key.hex())
            try:
                if not await self._holders.own.holds(name):
                    octets = await loop.run_in_executor(self._workers, export, block)
                    await self._holders.own.put(name, [octets])
            except KvspError as error:
                log.warning("block not stored", status=error.status)

    async def publish(self, scope_id: str, blocks: Iterable[Block], export: Callable[[int], bytes]) -> None:
        """Store new blocks, no faster than holders take them.

        `export` makes a block's container, on a worker thread; LookupError: it is not here any more, but stored.
        """
        loop = asyncio.get_running_loop()
        for block, key in blocks:
            await self._store.room()
            with suppress(LookupError):
                self._store.add(scope_id, key, await loop.run_in_executor(self._workers, export, block))

    async def _drain(self, scope_id: str, holder: Holder, missing: list[Block], place: Place) -> None:
        """Until a source has given every block."""
        pause_s, longest_s = PAUSE_S
        while missing:
            before = len(missing)
            rows = await self._directory.each(scope_id, [key for _, key in missing])
            found = {
                block: record
                for (block, _), row in zip(missing, rows, strict=True)
                for record in row
                if record.holder == holder.base_uri
            }
            listed = [(block, found[block]) for block, _ in missing if block in found]
            for at in range(0, len(listed), LEASED_TOGETHER_MAX):
                done = await self._batch(scope_id, holder, listed[at : at + LEASED_TOGETHER_MAX], place)
                missing = [each for each in missing if each[0] not in done]
            if missing:
                pause_s = PAUSE_S[0] if len(missing) < before else min(longest_s, 2 * pause_s)
                await asyncio.sleep(pause_s)

    async def _batch(
        self, scope_id: str, holder: Holder, listed: Sequence[tuple[int, ReplicaRecord]], place: Place
    ) -> set[int]:
        """The blocks that came, of some that the index lists, under a lease that keeps them from eviction."""
        waiting = list(reversed(listed))
        done: set[int] = set()

        async def lane() -> None:
            while waiting:
                block, record = waiting.pop()
                if await self._one(holder, record, block, place):
                    done.add(block)

        keys = [bytes.fromhex(record.block_key) for _, record in listed]
        try:
            async with holder.leased(scope_id, self._compat_id, keys, LEASE_MS), asyncio.TaskGroup() as group:
                for _ in range(min(self._parallel, len(waiting))):
                    group.create_task(lane())
        except KvspError as error:
            log.info("not leased", holder=holder.base_uri, blocks=len(listed), status=error.status)
        return done

    async def _one(self, holder: Holder, record: ReplicaRecord, block: int, place: Place) -> bool:
        payload = memoryview(bytearray(self._descriptor.payload_octets))
        try:
            await holder.fetch(record, (0, record.layer_count - 1), payload)
        except KvspError as error:
            if source_failed(holder.base_uri, error):
                await self._directory.withdraw(holder.base_uri, record.block_key)
            return False
        metrics.FETCHED_OCTETS.inc(len(payload))
        metrics.GROUP_OCTETS.labels("fetched").inc(len(payload))
        rows = _split(payload, self._descriptor)
        await asyncio.get_running_loop().run_in_executor(self._workers, place, block, rows)
        return True


def _split(payload: memoryview, descriptor: Descriptor) -> Rows:
    section, header = descriptor.section_octets, container.raw_header(descriptor)
    spans = (header.layer_span(layer)[0] for layer in range(descriptor.layers))
    return [(payload[at : at + section], payload[at + section : at + 2 * section]) for at in spans]
