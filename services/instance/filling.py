"""A session's prefix on its way into the engine's cache, layer by layer (R-034, R-155, R-180).

What this instance's own holder has is copied from its memory; the rest comes as loads (loads.py), shared with
directives that want the same blocks. A layer counts as arrived when it has been verified for every block.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
from msgspec import UnsetType

from kvsp.bulk.holder import OpenedTransfer
from kvsp.bulk.source import Piece
from kvsp.protocol import container, digests, estimate, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.records import Link, ReplicaRecord
from kvsp.rpc.convert import block_name
from services.instance import metrics
from services.instance.directory import Directory
from services.instance.loads import Load, Loads
from services.instance.peers import InternalHolder

if TYPE_CHECKING:
    from kvsp.connectors.prefix import PrefixCache
    from services.instance.device import DeviceTier

OPENED_TOGETHER_MAX: Final = 256
OPEN_S: Final = 1.0
"""What the own holder has not opened by then is not waited for."""

VERIFY_OCTETS: Final = 4 << 20
"""About as much is verified at a time before the engine hears of it."""

Wanted = tuple[int, bytes, list[ReplicaRecord]]
"""A block's place in the prefix, its key, and its replicas in the order in which they are tried."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(eq=False)
class Block:
    """Where one block of a prefix can be had: at this instance's own holder, or from others."""

    key: bytes
    opened: OpenedTransfer | None
    record: ReplicaRecord | None
    """That of the own holder, if the index knows it."""
    replicas: list[ReplicaRecord]


@dataclass
class Plan:
    """The leading blocks of a sequence that can be had. Close it when it is not filled."""

    scope_id: str
    blocks: list[Block] = field(default_factory=list)

    def cut(self, blocks: int) -> None:
        """Keep the first ones only."""
        for block in self.blocks[blocks:]:
            if block.opened is not None:
                block.opened.close()
        del self.blocks[blocks:]

    def close(self) -> None:
        """Let go of all."""
        self.cut(0)


class Prefixes:
    """Finds prefixes and fills caches with them."""

    def __init__(
        self,
        own: InternalHolder,
        directory: Directory,
        loads: Loads,
        workers: Executor,
        *,
        descriptor: Descriptor,
        compat_id: str,
        lease_ms: int,
        device: DeviceTier | None = None,
    ) -> None:
        self._device = device
        self._own = own
        self._directory = directory
        self._loads = loads
        self._workers = workers
        self._descriptor = descriptor
        self._compat_id = compat_id
        self._lease_ms = lease_ms

    async def find(self, scope_id: str, keys: Sequence[bytes]) -> Plan:
        """The leading blocks that can be had. What the own holder has needs no index."""
        lookup = asyncio.create_task(self._directory.prefix(scope_id, keys))
        opened: list[OpenedTransfer | None] = []
        try:
            await self._open_own(scope_id, keys, opened)
            replicas = await lookup
        except BaseException:
            lookup.cancel()
            for each in opened:
                if each is not None:
                    each.close()
            raise
        plan = Plan(scope_id)
        for at, key in enumerate(keys):
            row = replicas[at] if at < len(replicas) else []
            own = next((record for record in row if record.holder == self._own.base_uri), None)
            others = [record for record in row if record.holder != self._own.base_uri]
            plan.blocks.append(Block(key, opened[at], own, others))
        kept = self._kept()
        usable = (
            each.opened or each.replicas or self._loads.find(scope_id, each.key)
            or device_name(scope_id, each.key) in kept
            for each in plan.blocks
        )  # fmt: skip
        plan.cut(next((at for at, can_be_had in enumerate(usable) if not can_be_had), len(keys)))
        return plan

    def spare(self, plan: Plan, links: Mapping[str, Link], prefill_tokens_per_s: float) -> None:
        """Leave out what takes longer to fetch than to compute (R-117), from the first block not held here."""
        held = next((at for at, block in enumerate(plan.blocks) if block.opened is None), len(plan.blocks))
        remote = plan.blocks[held:]
        rows = [block.replicas for block in remote if block.opened is None and block.replicas]
        fetch_us = estimate.fetch_us(self._own.base_uri, rows, links)
        recompute_us = estimate.recompute_us(len(remote) * self._descriptor.block_tokens, prefill_tokens_per_s)
        if fetch_us is not None and recompute_us is not None and fetch_us > recompute_us:
            plan.cut(held)

    async def fill(self, plan: Plan, cache: PrefixCache, links: Mapping[str, Link]) -> None:
        """Bring the blocks of a plan, which is closed at the end; the cache's `arrival` hears how far it is."""
        filling = _Filling(cache, self._descriptor, self._loads)
        try:
            if self._device is not None:
                await self._in_thread(partial(self._from_device, self._device, filling, plan))
            missing = [at for at in range(len(plan.blocks)) if filling.done[at] < self._descriptor.layers]
            self._request(filling, plan, [at for at in missing if plan.blocks[at].opened is None], links)
            held = [at for at in missing if plan.blocks[at].opened is not None]
            if held:
                await self._copy_held(filling, plan, held, links)
            filling.reached([], 0)
            await filling.finished.wait()
        except BaseException:
            cache.arrival.fail(unavailable("loading has ended"))  # whoever waits for the layers must hear of it
            raise
        finally:
            filling.close()
            plan.close()

    def _kept(self) -> set[str]:
        """Names of blocks that the device tier has all layers of."""
        if self._device is None or self._device.layers[1] + 1 < self._descriptor.layers:
            return set()
        return set(self._device.names())

    @staticmethod
    def _from_device(device: DeviceTier, filling: _Filling, plan: Plan) -> None:
        """Copy what the engine has in its own memory: computed here, or verified when it came."""
        for at, block in enumerate(plan.blocks):
            filling.done[at] = device.fill(device_name(plan.scope_id, block.key), filling.cache, at)

    async def _open_own(self, scope_id: str, keys: Sequence[bytes], opened: list[OpenedTransfer | None]) -> None:
        """Pin what the own holder has of these blocks."""

        async def open_at(at: int) -> None:
            try:
                opened[at] = await self._own.open(block_name(self._compat_id, scope_id, keys[at].hex()))
            except KvspError as error:
                if error.status != registry.NOT_FOUND.status:
                    log.warning("own holder refused", status=error.status)

        opened.extend([None] * len(keys))
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                for start in range(0, len(keys), OPENED_TOGETHER_MAX):
                    await asyncio.gather(*map(open_at, range(start, min(len(keys), start + OPENED_TOGETHER_MAX))))

    def _request(self, filling: _Filling, plan: Plan, places: list[int], links: Mapping[str, Link]) -> None:
        """Have others' blocks fetched, or join those who already do; the prefix ends where neither is possible."""
        wanted: list[Wanted] = []
        for at in places:
            load = self._loads.find(plan.scope_id, plan.blocks[at].key)
            if load is not None:
                filling.follow(at, load)
                self._loads.join(load, filling)
                filling.arrived(load)
            elif plan.blocks[at].replicas:
                wanted.append((at, plan.blocks[at].key, plan.blocks[at].replicas))
            else:
                filling.lost(at)
        wanted = [each for each in _spread(wanted, links) if each[0] < filling.blocks]
        for load in self._loads.begin(filling, plan.scope_id, wanted, self._lease_ms):
            filling.follow(load.order, load)

    async def _copy_held(self, filling: _Filling, plan: Plan, held: list[int], links: Mapping[str, Link]) -> None:
        """Copy what the own holder has, then verify it: a layer of all blocks before the next layer of any."""
        copied: list[int] = []
        for at in held:
            block = plan.blocks[at]
            try:
                await self._copy(filling, at, block)
                copied.append(at)
            except KvspError as error:
                log.info("own block not usable", status=error.status)
                self._request(filling, plan, [at], links)
        listed = [at for at in copied if plan.blocks[at].record is not None]
        for at in copied:
            if plan.blocks[at].record is None:
                await self._verify_whole(filling, at, plan)
        layer_octets = 2 * self._descriptor.section_octets * max(1, len(listed))
        step = max(1, VERIFY_OCTETS // layer_octets)
        for first in range(0, self._descriptor.layers if listed else 0, step):
            layers = range(first, min(first + step, self._descriptor.layers))
            check = partial(_mismatches, filling, layers, [(at, plan.blocks[at].record) for at in listed])
            for at in await self._in_thread(check):
                await self._discard(filling, at, plan)
            listed = [at for at in listed if at < filling.blocks]
            filling.reached(listed, layers.stop)

    async def _copy(self, filling: _Filling, at: int, block: Block) -> None:
        opened = block.opened
        assert opened is not None  # noqa: S101  (the caller chose those)
        container.check_geometry(opened.parsed_header, self._descriptor)
        position, start = 0, filling.done[at] * 2 * self._descriptor.section_octets
        async for piece in opened.pieces():
            end = position + len(piece)
            if end > start:
                skipped = max(start - position, 0)
                filling.put(at, position + skipped, memoryview(piece)[skipped:])
            position = end
        opened.close()

    async def _verify_whole(self, filling: _Filling, at: int, plan: Plan) -> None:
        """Without a record there is the holder's own word, and it is our own holder (R-155)."""
        opened = plan.blocks[at].opened
        assert opened is not None  # noqa: S101
        sha256 = await self._in_thread(partial(_sha256, filling.cache, at, opened.header, self._descriptor.layers))
        if hmac.compare_digest(sha256, opened.sha256):
            filling.reached([at], self._descriptor.layers)
        else:
            await self._discard(filling, at, plan)

    async def _discard(self, filling: _Filling, at: int, plan: Plan) -> None:
        """ "MUST discard it" (R-161): here and in the own holder, where it has rotted."""
        metrics.DIGEST_FAILURES.labels("own").inc()
        filling.lost(at)
        try:
            await self._own.purge(block_name(self._compat_id, plan.scope_id, plan.blocks[at].key.hex()))
        except KvspError as error:
            log.warning("block not purged", status=error.status)

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._workers, work)


class _Filling:
    """How far the blocks of one cache are. A watcher of loads."""

    urgent = True

    def __init__(self, cache: PrefixCache, descriptor: Descriptor, loads: Loads) -> None:
        self.cache = cache
        self.finished = asyncio.Event()
        self._section = descriptor.section_octets
        self._layers = descriptor.layers
        self._loads = loads
        self.done = [0] * cache.arrival.blocks
        self._told = 0
        self._follows: dict[Load, int] = {}

    @property
    def blocks(self) -> int:
        """Blocks that can still be used."""
        return self.cache.arrival.blocks

    def follow(self, at: int, load: Load) -> None:
        """This load brings block `at`."""
        self._follows[load] = at

    def put(self, at: int, position: int, piece: Piece) -> None:
        """Payload octets of a block, from `position` on, to where they belong."""
        view = memoryview(piece).cast("B")
        while view:
            section, start = divmod(position, self._section)
            layer, half = divmod(section, 2)
            place = self.cache.rows(layer, at)[half][start : start + len(view)]
            place[:] = view[: len(place)]
            position += len(place)
            view = view[len(place) :]

    def reached(self, places: Sequence[int], layers: int) -> None:
        """These blocks have so many layers, verified."""
        for at in places:
            self.done[at] = max(self.done[at], layers)
        self._tell()

    def lost(self, at: int) -> None:
        """The prefix ends before this block; what follows it is not wanted any more."""
        self.cache.arrival.shorten(at)
        for load in [load for load, place in self._follows.items() if place >= at]:
            del self._follows[load]
            self._loads.drop(load, self)
        self._tell()

    def arrived(self, load: Load) -> None:
        """See Watcher."""
        at = self._follows.get(load)
        if at is None or at >= self.blocks or load.ready <= self.done[at]:
            return
        start, end = (layers * 2 * self._section for layers in (self.done[at], load.ready))
        self.put(at, start, load.payload[start:end])
        self.reached([at], load.ready)

    def over(self, load: Load) -> None:
        """See Watcher."""
        at = self._follows.pop(load, None)
        if at is not None and self.done[at] < self._layers:
            self.lost(at)

    def close(self) -> None:
        """Follow nothing any more."""
        for load in list(self._follows):
            self._loads.drop(load, self)
        self._follows.clear()

    def _tell(self) -> None:
        least = min(self.done[: self.blocks], default=self._layers)
        if least > self._told:
            self._told = least
            self.cache.arrival.advance(least)
        if least == self._layers:
            self.finished.set()


def device_name(scope_id: str, key: bytes) -> str:
    """What the device tier calls a block."""
    return scope_id + key.hex()


def _spread(wanted: Iterable[Wanted], links: Mapping[str, Link]) -> list[Wanted]:
    """Each block's sources reordered: first the one that would be done soonest, all before it included (U-43)."""
    busy_us: dict[str, float] = {}

    def done_us(record: ReplicaRecord) -> tuple[float, str]:
        link = links[record.holder]
        start = busy_us.get(record.holder, link.rtt_us)
        return start + 8 * record.size / link.mbit_per_s, record.holder

    spread: list[Wanted] = []
    for at, key, replicas in wanted:
        ordered = sorted(replicas, key=done_us)
        busy_us[ordered[0].holder] = done_us(ordered[0])[0]
        spread.append((at, key, ordered))
    return spread


def _mismatches(filling: _Filling, layers: range, blocks: list[tuple[int, ReplicaRecord | None]]) -> set[int]:
    """Blocks of which a layer that was copied is not what the record says."""
    wrong: set[int] = set()
    for layer in layers:
        for at, record in blocks:
            if record is None or isinstance(record.layer_digests, UnsetType):
                wrong.add(at)
            elif layer >= filling.done[at]:
                found = digests.layer_digest(*filling.cache.rows(layer, at)).hex()
                if not hmac.compare_digest(found, record.layer_digests[layer]):
                    wrong.add(at)
    return wrong


def _sha256(cache: PrefixCache, at: int, header: bytes, layers: int) -> bytes:
    """Of a block's container (Repr-Digest)."""
    hasher = hashlib.sha256(header)
    for layer in range(layers):
        for section in cache.rows(layer, at):
            hasher.update(section)
    return hasher.digest()
