"""A parallel group in one process: stores, rules and runs as they are, the network a pool of threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from kvsp.protocol import container, reshard
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReshardFetch, Shard, ShardMap
from kvsp.protocol.reshard import Range
from services.instance import shards
from services.instance.engine import BlockDone, Event, Finished, Started, Work
from services.instance.partial import Partial
from services.instance.shard_run import Computed, GroupGone, HomeRun, MemberRun, ShardEvent, ShardRun
from services.instance.shard_store import NotHeld, ShardStore
from services.instance.sharded import VersionMoved, View, attend_local
from services.instance.torch_engine import TorchEngine
from tests.services.instance_engine import Outcome

NAME = "m"
WAIT_S = 30
URIS = [f"https://ii{n}.example/kvsp/" for n in range(4)]
HOME = URIS[0]
"""Holds the last range always."""


@dataclass
class Member:
    store: ShardStore
    rules: shards.Shards
    view: View
    prepared: dict[int, list[Range]] = field(default_factory=dict)


class Group:
    """Members of one map. `hook` is called on home's thread before each of its calls to the others."""

    def __init__(self, engine: TorchEngine, edges: Sequence[int]) -> None:
        """Ranges between `edges`, the last for home."""
        self.engine = engine
        self.block = engine.descriptor.block_tokens
        self.lock = threading.RLock()
        self.pool = ThreadPoolExecutor(8)
        self.advanced = threading.Condition()
        """Notified when any store changes."""
        self.hook: Callable[[int, int], None] = lambda layer, before: None
        self.members = {
            uri: Member(ShardStore(engine.descriptor, 1 << 26), shards.Shards(self.block), View(0, (), 0))
            for uri in URIS
        }
        for member in self.members.values():
            member.store.watch(self.changed)
        ranges = list(itertools.pairwise(edges))
        names = [*URIS[1 : len(ranges)], HOME]
        self.maps = {1: ShardMap(NAME, 1, [Shard(*each) for each in zip(ranges, names, strict=True)])}
        for uri, held in reshard.held(self.maps[1]).items():
            self.members[uri].rules.adopt(NAME, 1, held)
            for tokens in held:
                self.members[uri].store.reserve(tokens)
            self.members[uri].view = View(1, tuple(held), edges[-1])
        self.computed = 0
        """By home, in all layers."""
        self.moved = 0
        """Tokens that steps have moved."""
        self.retries = 0
        """Layers that home computed again."""

    @property
    def version(self) -> int:
        """The newest that placement knows to be authoritative."""
        return max(self.maps)

    # --- the network ---

    def changed(self) -> None:
        with self.advanced:
            self.advanced.notify_all()

    def ask(self, asking: str, version: int, layer: int, queries: torch.Tensor, before: int) -> list[Partial]:
        partials = []
        for uri in reshard.held(self.maps[version]):
            if uri == asking:
                continue
            store, ranges = self.members[uri].store, self.serves(uri, version, asking)
            seen = reshard.common(ranges, [(0, before)])
            if not seen:
                continue
            with self.advanced:
                if not self.advanced.wait_for(lambda store=store, seen=seen: store.ready(layer, seen), WAIT_S):
                    raise TimeoutError
            scale = self.engine.scales[layer]
            with contextlib.suppress(NotHeld):  # then the version has moved, as the next line says
                partials.append(attend_local(store, ranges, layer, queries, before, scale=scale))
            self.serves(uri, version, asking)
        return partials

    def serves(self, uri: str, version: int, asking: str) -> list[Range]:
        """What a member has of a version; that it has committed the next one tells home of the decision."""
        member = self.members[uri]
        with self.lock:
            with contextlib.suppress(KvspError):
                if member.rules.version(NAME) == version:
                    return member.rules.held(NAME)
            if version in member.prepared:
                return member.prepared[version]
            self.commit(asking, version + 1)
            self.retries += 1
            raise VersionMoved

    # --- placement ---

    def grow(self) -> None:
        """The map is to cover what home has computed: before a step, never within one."""
        with self.lock:
            old = reshard.covered(self.maps[self.version])[1]
            end = self.computed // self.block * self.block
            if end > old:
                self.maps[self.version] = reshard.grown(self.maps[self.version], end)
                self.members[HOME].rules.grown(NAME, (old, end))
                self.serve(HOME, self.version)

    def plan(self, owners: Sequence[str]) -> dict[str, list[int]]:
        """Prepare the next version, of equal ranges of these; returns the addresses of what stays."""
        self.grow()
        old = self.maps[self.version]
        end = reshard.covered(old)[1]
        cuts = [end // self.block * at // len(owners) * self.block for at in range(len(owners) + 1)]
        parts = [
            Shard(tokens, uri)
            for tokens, uri in zip(itertools.pairwise(cuts), owners, strict=True)
            if tokens[0] < tokens[1]
        ]
        new = ShardMap(NAME, old.version + 1, parts)
        stays = {}
        for uri, request in reshard.plans(old, new, 1000).items():
            member = self.members[uri]
            with self.lock:
                acknowledged = member.rules.plan(request)
                member.rules.instructions()
            assert isinstance(request.retain, list)
            assert isinstance(request.fetch, list)
            for fetch in request.fetch:
                self.fetch(member.store, fetch)
            with self.lock:
                assert acknowledged or member.rules.loaded(NAME, new.version)
                member.prepared[new.version] = reshard.merged(
                    [*request.retain, *(each.tokens for each in request.fetch)]
                )
            stays[uri] = [
                member.store.address(block)
                for first, stop in request.retain
                for block in range(first // self.block, stop // self.block)
            ]
        with self.lock:
            self.maps[new.version] = new
        return stays

    def fetch(self, store: ShardStore, fetch: ReshardFetch) -> None:
        source, (first, end) = self.members[fetch.source].store, fetch.tokens
        store.reserve((first, end))
        for block in range(first // self.block, end // self.block):
            octets = source.export(block)
            header = container.parse_header(octets)
            for layer in range(header.layer_count):
                at = header.header_octets + header.layer_span(layer)[0]
                for place in store.rows(layer, block):
                    place[:] = octets[at : at + len(place)]
                    at += len(place)
            assert store.export(block) == octets
        store.advance((first, end), self.engine.descriptor.layers)
        self.moved += end - first

    def commit(self, uri: str, version: int) -> None:
        with self.lock:
            member = self.members[uri]
            with contextlib.suppress(KvspError):
                if member.rules.version(NAME) == version:
                    return
            if version not in member.prepared:
                return
            member.rules.commit(NAME, version)
            self.serve(uri, version)
            self.drop(member)

    def abort(self, version: int) -> None:
        with self.lock:
            del self.maps[version]
            for member in self.members.values():
                if member.prepared.pop(version, None) is not None:
                    member.rules.abort(NAME, version)
                    self.drop(member)

    def serve(self, uri: str, version: int) -> None:
        member = self.members[uri]
        member.prepared.clear()
        held = reshard.held(self.maps[version]).get(uri, [])
        member.view = View(version, tuple(held), reshard.covered(self.maps[version])[1])

    def drop(self, member: Member) -> None:
        for instruction in member.rules.instructions():
            if isinstance(instruction, shards.Drop):
                for tokens in instruction.ranges:
                    member.store.release(tokens)

    def check(self, stays: dict[str, list[int]]) -> None:
        """After a commit: every member has what the map says, and what stayed has not moved."""
        for uri, ranges in reshard.held(self.maps[self.version]).items():
            store = self.members[uri].store
            blocks = [block for a, b in ranges for block in range(a // self.block, b // self.block)]
            addresses = {store.address(block) for block in blocks}
            assert addresses >= set(stays[uri])


class Near:
    """One member's `Remote`."""

    def __init__(self, group: Group, uri: str) -> None:
        self.group = group
        self.uri = uri

    def view(self) -> View:
        return self.group.members[self.uri].view

    def attend(self, version: int, layer: int, queries: torch.Tensor, before: int) -> Future[list[Partial]]:
        if self.uri == HOME:
            self.group.hook(layer, before)
        return self.group.pool.submit(self.group.ask, self.uri, version, layer, queries, before)


class Runs:
    """The runs of a group, and what they told."""

    def __init__(self, group: Group, work: Work) -> None:
        self.group = group
        self.events: dict[str, list[ShardEvent]] = {uri: [] for uri in URIS}
        self.blocks: list[BlockDone] = []
        """Of what was computed in one piece."""
        self.told = asyncio.Event()
        self.runs: dict[str, ShardRun] = {}
        self.work = work

    def start(self, *uris: str) -> None:
        """At these members; at all of version 1 if none is named."""
        group, work = self.group, self.work
        for uri, [tokens] in reshard.held(group.maps[1]).items():
            if uris and uri not in uris:
                continue
            args = group.engine, group.members[uri].store, Near(group, uri), self.teller(uri)
            if uri == HOME:
                self.runs[uri] = HomeRun(*args, work, first=tokens[0])
            else:
                ids = work.tokens[slice(*tokens)]
                self.runs[uri] = MemberRun(*args, (work.session, work.epoch), tokens=tokens, ids=ids)

    def teller(self, uri: str) -> Callable[[ShardEvent], None]:
        def tell(event: ShardEvent) -> None:
            self.events[uri].append(event)
            if isinstance(event, Computed | Started):
                self.blocks += self.computed(uri)
            self.told.set()

        return tell

    def computed(self, uri: str) -> Iterator[BlockDone]:
        [(first, end)] = reshard.held(self.group.maps[1])[uri]
        if uri == HOME:
            end = len(self.work.tokens)
        for block in range(first // self.group.block, end // self.group.block):
            with contextlib.suppress(NotHeld):
                octets = self.group.members[uri].store.export(block)
                yield BlockDone(self.work.session, self.work.epoch, block, octets)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.told.clear()
                await self.told.wait()

    def over(self, uri: str) -> bool:
        events = self.events[uri]
        if events and isinstance(events[-1], Finished | GroupGone):
            return True
        return uri != HOME and bool(events)

    async def finished(self) -> Outcome:
        """What home told, and the blocks of all."""
        await self.until(lambda: all(map(self.over, self.runs)))
        outcome = Outcome([event for event in self.events[HOME] if isinstance(event, Event)])
        for uri in self.runs.keys() - {HOME}:
            [event] = self.events[uri]
            assert isinstance(event, Computed)
        outcome.events[:0] = self.blocks
        return outcome

    def close(self) -> None:
        for run in self.runs.values():
            run.cancel()
        for run in self.runs.values():
            run.join()
        self.group.pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def running(group: Group, work: Work) -> Iterator[Runs]:
    runs = Runs(group, work)
    try:
        yield runs
    finally:
        runs.close()


def steps(group: Group, seed: int) -> Iterator[None]:
    """Versions that come and go, one event at each call: plan, then commit here and there, or abort."""
    rng = random.Random(seed)
    pause = 2 * group.engine.descriptor.layers
    while True:
        yield from itertools.repeat(None, rng.randint(0, pause))
        owners = [*rng.sample(URIS[1:], rng.randint(0, 3)), HOME]
        stays = group.plan(owners)
        new = group.version
        yield from itertools.repeat(None, rng.randint(0, pause))
        if rng.random() < 0.2:
            group.abort(new)
            continue
        for uri in rng.sample(URIS, len(URIS)):
            group.commit(uri, new)
            yield from itertools.repeat(None, rng.randint(0, 2))
        group.check(stays)
