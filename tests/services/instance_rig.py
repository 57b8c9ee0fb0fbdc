"""An instance among real holders and a real index, all on Unix sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from kvsp.bulk.holder import HolderClient
from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol import container, keys
from kvsp.protocol import descriptor as descriptors
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.rpc.channel import open_channel
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import Party, Peer
from kvsp.rpc.convert import block_name
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, instance_pb2, instance_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.holder import server as holder_server
from services.holder.blocks import Block
from services.holder.config import HolderConfig
from services.holder.host import Host
from services.holder.stream import name_of
from services.index import server as index_server
from services.index.config import IndexConfig
from services.index.state import IndexState
from services.instance import loading
from services.instance import server as instance_server
from services.instance.config import InstanceConfig
from services.instance.directory import Directory
from services.instance.engine import Event, Sampled, Stats, Work
from services.instance.filling import Prefixes
from services.instance.host import Host as InstanceHost
from services.instance.instructions import BeginDirective
from services.instance.loads import Loads
from services.instance.prefetch import Prefetch
from services.instance.tiers import TierNews
from tests.services.rpc import served

SCOPE_KEY = ScopeKey(b"s" * 32)
SCOPE = keys.scope_id(SCOPE_KEY).hex()
FOREIGN = "cc" * 16
MEMBERS = ["ii1", "ii2", "ii3", "ii4"]
URIS = {name: f"https://{name}.example/kvsp/" for name in (*MEMBERS, "h1", "h2", "h3", "pc")}
II, PC, FE, FE2 = "spiffe://t/ii1", "spiffe://t/pc", "spiffe://t/fe", "spiffe://t/fe2"

DESCRIPTOR = Descriptor(
    model="rig", model_digest="sha-256:" + "0" * 64, tokenizer_digest="sha-256:" + "0" * 64, layers=4, kv_heads=2,
    head_dim=64, kv_dtype="fp32", positional="rope", block_tokens=8, layout="kvsp-layout-1",
)  # fmt: skip


def policy_text(withdraw: Sequence[str] = ()) -> str:
    """h3 is trusted for no scope of the instance's; `withdraw`: whose records the instance may withdraw."""
    rows = [
        ("is", "index", "", []),
        ("pc", "placement", URIS["pc"], [SCOPE, FOREIGN]),
        *((name, "instance", URIS[name], [SCOPE]) for name in MEMBERS),
        ("h1", "holder", URIS["h1"], [SCOPE]),
        ("h2", "holder", URIS["h2"], [SCOPE]),
        ("h3", "holder", URIS["h3"], [FOREIGN]),
        ("fe", "frontend", "", [SCOPE]),
        ("fe2", "frontend", "", [FOREIGN]),
        ("writer", "client", "", [SCOPE, FOREIGN]),
    ]
    text = ""
    for name, role, uri, scopes in rows:
        text += f'[identities."spiffe://t/{name}"]\nroles = ["{role}"]\nscopes = {scopes}\n'
        text += f'base_uris = ["{uri}"]\n' if uri else ""
        if name == "ii1":
            text += f"withdraw_for = {list(withdraw)}\n"
    return text.replace("'", '"')


def sections(i: int, descriptor: Descriptor = DESCRIPTOR) -> list[tuple[bytes, bytes]]:
    """K and V of every layer of block i."""
    octets = descriptor.section_octets
    return [
        (bytes([i % 251, layer, 1, 7]) * (octets // 4), bytes([i % 251, layer, 2, 9]) * (octets // 4))
        for layer in range(descriptor.layers)
    ]


def key(i: int) -> bytes:
    return i.to_bytes(32)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks bring about."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Place:
    """A holder, and what was asked of it."""

    name: str
    host: Host
    client: HolderClient
    asked: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        real_open, real_lease = self.host.open, self.host.lease
        real_release = self.host.state.release_lease

        async def gated_open(stream: int, identity: Any, name: Any, *rest: Any) -> Any:
            self.asked.append(f"open {int.from_bytes(name.block_key)}")
            await self.gate.wait()
            return await real_open(stream, identity, name, *rest)

        def noted_lease(identity: Any, names: list[bytes], *rest: Any) -> Any:
            self.asked.append("lease " + ",".join(str(int.from_bytes(each)) for each in names))
            return real_lease(identity, names, *rest)

        def noted_release(*rest: Any) -> None:
            self.asked.append("release")
            real_release(*rest)

        self.host.open = gated_open  # type: ignore[method-assign]
        self.host.lease = noted_lease  # type: ignore[method-assign]
        self.host.state.release_lease = noted_release  # type: ignore[method-assign]

    def stored(self, i: int, compat_id: str, scope: str = SCOPE) -> Block | None:
        return self.host.state.store.get(name_of(block_name(compat_id, scope, key(i).hex())))

    def flip(self, i: int, compat_id: str, layer: int, scope: str = SCOPE) -> None:
        """Change a bit of a layer at rest."""
        found = self.stored(i, compat_id, scope)
        assert found is not None
        header = found.digested.header
        self.host.arena.view[found.offset + header.header_octets + header.layer_span(layer)[0] + 3] ^= 4


@dataclass
class World:
    """Holders by name, the index, and what an instance needs to find them."""

    folder: Path
    policy: Policy
    descriptor: Descriptor
    stack: AsyncExitStack
    index: IndexState = field(default_factory=lambda: IndexState(block_tokens={}))
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def compat_id(self) -> str:
        return descriptors.compat_id(self.descriptor).hex()

    async def add(self, name: str, arena_octets: int = 8 << 20) -> Place:
        """Start a holder."""
        config = HolderConfig(
            listen=f"unix:{self.folder}/{name}.sock",
            policy="",
            principal=f"spiffe://t/{name}",
            base_uri=URIS[name],
            index=Peer(f"unix:{self.folder}/is.sock"),
            arena_dir=str(self.folder),
            arena_octets=arena_octets,
        )
        host = await self.stack.enter_async_context(holder_server.hosted(config, self.policy))
        await self.stack.enter_async_context(
            served(config.listen, lambda target: holder_server.register(target, host))
        )
        channel = await self.stack.enter_async_context(open_channel(config.listen))
        client = HolderClient(channel)
        self.stack.push_async_callback(client.close)
        self.places[name] = place = Place(name, host, client)
        return place

    async def put(self, name: str, *blocks: int, scope: str = SCOPE) -> None:
        """Store blocks at a holder, and wait until the index lists them."""
        for i in blocks:
            octets = container.build(0, self.descriptor.block_tokens, sections(i, self.descriptor))
            named = block_name(self.compat_id, scope, key(i).hex())
            reserved = await self.places[name].client.reserve("spiffe://t/writer", named, len(octets))
            assert reserved is not None
            await reserved.write(octets)
            await reserved.commit()
        await until(lambda: all(self.listed(name, i) for i in blocks))

    def listed(self, name: str, i: int) -> bool:
        return self.index.table.find(party_id(URIS[name]), key(i), now_ms()) is not None

    def config(self, *others: str, name: str = "ii1", **changes: Any) -> InstanceConfig:
        made: dict[str, Any] = {
            "listen": f"unix:{self.folder}/{name}-engine.sock",
            "policy": "",
            "principal": f"spiffe://t/{name}",
            "base_uri": URIS[name],
            "model": "",
            "block_tokens": self.descriptor.block_tokens,
            "placement": Party(URIS["pc"], f"unix:{self.folder}/pc.sock"),
            "index": Peer(f"unix:{self.folder}/is.sock"),
            "holder": Peer(f"unix:{self.folder}/{name}.sock"),
            "holders": tuple(Party(URIS[name], f"unix:{self.folder}/{name}.sock") for name in others),
            "scopes": {"one": str(self.folder / "scope.key")},
            "state_dir": str(self.folder / f"{name}-state"),
        }
        return InstanceConfig(**(made | changes))


@asynccontextmanager
async def world(
    folder: Path, *names: str, descriptor: Descriptor = DESCRIPTOR, withdraw: Sequence[str] = ()
) -> AsyncIterator[World]:
    """An index and these holders."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    key_file = folder / "scope.key"
    key_file.write_bytes(SCOPE_KEY.reveal())
    key_file.chmod(0o600)
    policy = Policy.load(policy_text(withdraw))
    async with AsyncExitStack() as stack:
        made = World(folder, policy, descriptor, stack)
        servicer = index_server.IndexServicer(IndexConfig(listen="", policy="", principal=""), policy, made.index)
        await stack.enter_async_context(
            served(f"unix:{folder}/is.sock", lambda target: index_server.register(target, servicer, policy))
        )
        for name in names:
            await made.add(name)
        yield made


@dataclass
class Loader:
    """What moves blocks, without an engine."""

    world: World
    prefixes: Prefixes
    loads: Loads
    directory: Directory
    holders: loading.Holders
    kept: list[int] = field(default_factory=list)

    async def fill(self, *blocks: int, known: bool = True) -> PrefixCache | None:
        """Find and load a prefix; the cache when something of it can be had."""
        plan = await self.prefixes.find(SCOPE, [key(i) for i in blocks])
        if not plan.blocks:
            return None
        cache = PrefixCache(self.world.descriptor, len(plan.blocks), 0)
        await self.prefixes.fill(plan, cache, self.holders.links())
        return cache

    def prefetch(self, blocks: Sequence[tuple[int, Sequence[str]]], outcome: Any) -> asyncio.Task[None]:
        """Carry out a directive."""
        named = [(key(i), tuple(URIS[name] for name in names)) for i, names in blocks]
        begin = BeginDirective("d", SCOPE, named, 2000)
        return asyncio.create_task(
            Prefetch(
                begin, outcome, compat_id=self.world.compat_id, own=self.holders.own,
                directory=self.directory, loads=self.loads,
            ).run()
        )  # fmt: skip


@asynccontextmanager
async def loader(made: World, *others: str, **changes: Any) -> AsyncIterator[Loader]:
    """The parts of an instance that load, among `others`."""
    config = made.config(*others, **changes)
    kept: list[int] = []

    async def stored(scope_id: str, block_key: bytes, pieces: Any) -> None:
        kept.append(int.from_bytes(block_key))

    with ThreadPoolExecutor(2) as workers:
        async with AsyncExitStack() as stack:
            holders = await stack.enter_async_context(loading.holders_of(config, made.policy, made.descriptor))
            channel = await stack.enter_async_context(open_channel(config.index.address))
            client = loading.lookups(config.index, channel)
            stack.push_async_callback(client.close)
            directory = Directory(
                channel, client, II, compat_id=made.compat_id, descriptor=made.descriptor, holders=holders.usable
            )
            loads = Loads(
                holders.own, holders.others, directory, made.descriptor, made.compat_id,
                parallel=2, fetch_s=config.fetch_timeout_ms / 1000, stored=stored,
            )  # fmt: skip
            stack.push_async_callback(loads.close)
            prefixes = Prefixes(
                holders.own, directory, loads, workers,
                descriptor=made.descriptor, compat_id=made.compat_id, lease_ms=10_000,
            )  # fmt: skip
            yield Loader(made, prefixes, loads, directory, holders, kept)


# --- an instance without a model ------------------------------------------------------


class Bare:
    """An engine that only says what it is: `Compute` does as it is told by the test."""

    batch_invariant = True
    positions_max = 4096
    device = None

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.compat_id = descriptors.compat_id(descriptor)

    def prefix(self, blocks: int, room: int) -> PrefixCache:
        return PrefixCache(self.descriptor, blocks, room)


@dataclass
class Compute:
    """A scheduler whose every step is the test's."""

    tell: Callable[[Event], None]
    work: dict[tuple[str, int], Work] = field(default_factory=dict)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    provided: list[tuple[str, int, list[int]]] = field(default_factory=list)

    async def room(self, session: str, epoch: int, prompt_tokens: int, max_tokens: int) -> None:
        pass

    def submit(self, work: Work) -> None:
        self.work[work.session, work.epoch] = work

    def cancel(self, session: str, epoch: int) -> None:
        self.cancelled.append((session, epoch))

    def provide_tokens(self, session: str, epoch: int, prompt: Sequence[int]) -> None:
        self.provided.append((session, epoch, list(prompt)))

    def stats(self) -> Stats:
        return Stats(len(self.work), 0, 0.25, 1000.0, 100.0)

    def close(self) -> None:
        self.work.clear()

    async def started(self, session: str, epoch: int = 1) -> Work:
        await until(lambda: (session, epoch) in self.work)
        return self.work[session, epoch]

    def sample(self, session: str, count: int, first: int = 0, epoch: int = 1) -> None:
        for index in range(first, first + count):
            self.tell(Sampled(session, epoch, index, 100 + index))


class Controller(placement_pb2_grpc.PlacementServicer):
    """A placement controller that answers when, and as, the test says."""

    def __init__(self) -> None:
        self.statuses: list[common_pb2.InstanceStatus] = []
        self.checkpoints: list[common_pb2.SessionCheckpoint] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.refusal: KvspError | None = None
        self.status_refusal: KvspError | None = None
        self.view: str | None = None

    async def PutStatus(self, request: Any, context: Any) -> common_pb2.StateChange:
        self.statuses.append(request.status)
        if self.status_refusal is not None:
            raise self.status_refusal
        return common_pb2.StateChange(state=self.view or request.status.state)

    async def PutCheckpoint(self, request: Any, context: Any) -> placement_pb2.PutCheckpointReply:
        self.checkpoints.append(request.checkpoint)
        await self.answers.wait()
        if self.refusal is not None:
            raise self.refusal
        made = request.checkpoint
        return placement_pb2.PutCheckpointReply(epoch=made.epoch, output_offset=made.output_offset)


@dataclass
class Instance:
    """A served instance, and what is around it."""

    world: World
    host: InstanceHost
    compute: Compute
    controller: Controller
    stub: instance_pb2_grpc.InstanceStub

    def call(self, name: str, request: Any, principal: str) -> Any:
        """A unary call; raises KvspError."""

        async def answered() -> Any:
            async with translated():
                return await getattr(self.stub, name)(request, metadata=speak_for(principal))

        return answered()

    def request(
        self, session: str, *, deterministic: bool = False, **changes: Any
    ) -> instance_pb2.GenerateRequest:
        members: dict[str, Any] = {
            "session": session,
            "epoch": 1,
            "from_index": 0,
            "scope_id": bytes.fromhex(SCOPE),
            "compat_id": bytes.fromhex(self.world.compat_id),
            "prompt": range(10),
            "sampler": common_pb2.Sampler(
                method="greedy", params_json=b'{"max_tokens": 200}', deterministic=deterministic
            ),
        }
        return instance_pb2.GenerateRequest(**(members | changes))

    def generate(self, session: str, *, principal: str = FE, **changes: Any) -> Attachment:
        request = self.request(session, **changes)
        return Attachment(self.stub.Generate(request, metadata=speak_for(principal)))


class Attachment:
    """What a front end has read of a session."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.tokens: list[int] = []
        self.first_index: int | None = None
        self.finished: instance_pb2.Finished | None = None
        self.reused: instance_pb2.Reused | None = None
        self.error: KvspError | None = None
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async with translated():
                async for event in self._call:
                    match event.WhichOneof("event"):
                        case "tokens":
                            if self.first_index is None:
                                self.first_index = event.tokens.first_index
                            assert event.tokens.first_index == self.first_index + len(self.tokens)
                            self.tokens += event.tokens.tokens
                        case "finished":
                            self.finished = event.finished
                        case "reused":
                            self.reused = event.reused
        except KvspError as error:
            self.error = error

    async def failed(self) -> KvspError:
        await self.reading
        assert self.error is not None
        return self.error

    async def leave(self) -> None:
        self._call.cancel()
        await asyncio.wait([self.reading])


@asynccontextmanager
async def instance(
    made: World, *others: str, make_engine: Any = None, schedule: Any = None, **config: Any
) -> AsyncIterator[Instance]:
    """An instance with the holder ii1 beside it and `others` to load from."""
    controller, news = Controller(), TierNews()
    engine = Bare(made.descriptor) if make_engine is None else make_engine(news.changed)
    computes: list[Any] = []

    def make(tell: Callable[[Event], None]) -> Any:
        computes.append(Compute(tell) if schedule is None else schedule(engine)(tell))
        return computes[-1]

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            served(
                f"unix:{made.folder}/pc.sock",
                lambda target: placement_pb2_grpc.add_PlacementServicer_to_server(controller, target),
            )
        )
        settings = made.config(*others, **config)
        host = await stack.enter_async_context(instance_server.hosted(settings, made.policy, engine, make, news))
        await stack.enter_async_context(
            served(settings.listen, lambda target: instance_server.register(target, host, made.policy))
        )
        channel = await stack.enter_async_context(open_channel(settings.listen))
        stub = instance_pb2_grpc.InstanceStub(channel)
        await until(lambda: host.state.is_known)  # before that it begins no sessions
        yield Instance(made, host, computes[0], controller, stub)
