"""Carries out prefetch directives (R-127 ... R-130, U-20), in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReplicaRecord
from kvsp.rpc.convert import block_name
from services.instance.directory import Directory
from services.instance.instructions import BeginDirective
from services.instance.loads import Load, Loads
from services.instance.peers import InternalHolder

WINDOW: Final = 32
"""Blocks of one directive that are leased and fetched at a time, in its order."""

Outcome = Callable[[str, bytes, bool], None]
"""Directive, block key, and whether the block is held here now."""

Block = tuple[bytes, tuple[str, ...]]


class Prefetch:
    """One directive at work. A watcher of loads."""

    urgent = False

    def __init__(
        self,
        begin: BeginDirective,
        outcome: Outcome,
        *,
        compat_id: str,
        own: InternalHolder,
        directory: Directory,
        loads: Loads,
    ) -> None:
        self._begin = begin
        self._compat_id = compat_id
        self._own = own
        self._directory = directory
        self._loads = loads
        self._outcome = outcome
        self._follows: set[Load] = set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until every block has had its outcome. Cancelled, it starts no other fetch and ends those under way."""
        blocks = self._begin.blocks
        try:
            for start in range(0, len(blocks), WINDOW):
                await self._until(WINDOW // 2)
                await self._load(start, blocks[start : start + WINDOW])
            await self._until(0)
        finally:
            for load in self._follows:
                self._loads.drop(load, self)

    def arrived(self, load: Load) -> None:
        """See Watcher."""

    def over(self, load: Load) -> None:
        """See Watcher."""
        self._follows.discard(load)
        self._outcome(self._begin.directive, load.key, load.held)
        self._changed.set()

    async def _until(self, left: int) -> None:
        while len(self._follows) > left:
            self._changed.clear()
            await self._changed.wait()

    async def _load(self, start: int, blocks: list[Block]) -> None:
        """Have a window of blocks fetched; "held blocks need nothing" (R-128)."""
        held = await asyncio.gather(*(self._is_held(key) for key, _ in blocks))
        missing: list[tuple[int, Block]] = []
        for at, block in enumerate(blocks):
            if held[at]:
                self._outcome(self._begin.directive, block[0], True)
            else:
                missing.append((start + at, block))
        replicas = await self._directory.each(self._begin.scope_id, [key for _, (key, _) in missing])
        wanted: list[tuple[int, bytes, list[ReplicaRecord]]] = []
        for (order, (key, sources)), row in zip(missing, replicas, strict=True):
            load = self._loads.find(self._begin.scope_id, key)
            # What the sources are asked for must be what the index says they have: its digests are all there is to
            # verify with (D11).
            listed = {record.holder: record for record in row}
            usable = [listed[source] for source in sources if source in listed]
            if load is not None:
                self._follows.add(load)
                self._loads.join(load, self)
            elif usable:
                wanted.append((order, key, usable))
            else:
                self._outcome(self._begin.directive, key, False)
        self._follows.update(self._loads.begin(self, self._begin.scope_id, wanted, self._begin.lease_ms))

    async def _is_held(self, key: bytes) -> bool:
        try:
            return await self._own.holds(block_name(self._compat_id, self._begin.scope_id, key.hex()))
        except KvspError:
            return False
