"""Several instances with a real, small model, each beside a real holder, and a placement controller by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvsp.protocol import jsonio, keys, reshard
from kvsp.protocol.records import Sampler, SessionCheckpoint, Shard, ShardMap
from kvsp.protocol.reshard import GroupContext, Range
from kvsp.rpc import convert, convert_groups
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import Party
from kvsp.rpc.convert import reshard_to_message
from kvsp.v1 import common_pb2, instance_pb2, instance_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.instance import server as instance_server
from services.instance.groups import Groups
from services.instance.scheduler import Scheduler
from services.instance.shard_store import ShardStore
from services.instance.sharding import Sharding
from services.instance.tiers import TierNews
from tests.services.instance_engine import B, engine
from tests.services.instance_rig import (
    MEMBERS,
    PC,
    SCOPE,
    SCOPE_KEY,
    URIS,
    Attachment,
    Controller,
    Instance,
    World,
    until,
    world,
)
from tests.services.instance_states import session_id
from tests.services.rpc import served

ENGINE = engine()
"""Of all instances: it keeps nothing of a session, and takes longer to make than they do."""

DEADLINE_MS = 10_000
OUTPUT = 120


def sampler(method: str = "greedy", **params: Any) -> common_pb2.Sampler:
    return common_pb2.Sampler(
        method=method, params_json=jsonio.encode({"max_tokens": OUTPUT} | params), deterministic=True
    )


class Placement(Controller):
    """Answers LostGroup too, when the test has let it."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.lost_refusal: Exception | None = None
        self.when_lost: Callable[[str], Awaitable[None]] | None = None
        """Done before it is answered."""

    async def LostGroup(self, request: Any, context: Any) -> placement_pb2.LostGroupReply:
        self.lost.append(request.map)
        if self.when_lost is not None:
            await self.when_lost(request.map)
        if self.lost_refusal is not None:
            raise self.lost_refusal
        return placement_pb2.LostGroupReply()


@dataclass
class Rig:
    """Instances by name; `map` is what the controller takes for authoritative."""

    world: World
    controller: Placement
    instances: dict[str, Instance] = field(default_factory=dict)
    stacks: dict[str, AsyncExitStack] = field(default_factory=dict)
    maps: dict[str, ShardMap] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    """Tokens after which the home of a session asks nobody for more."""

    # --- instances ---

    async def start(self, name: str, **config: Any) -> Instance:
        """Start an instance; it knows all others, also those that do not run."""
        others = [each for each in MEMBERS if each != name]
        folder = self.world.folder
        parties = tuple(Party(URIS[each], f"unix:{folder}/{each}-engine.sock") for each in others)
        settings = self.world.config(*others, name=name, **({"instances": parties} | config))
        stack = self.stacks[name] = AsyncExitStack()
        schedule, sharding = partial(Scheduler, ENGINE), Sharding(ENGINE)
        host = await stack.enter_async_context(
            instance_server.hosted(settings, self.world.policy, ENGINE, schedule, TierNews(), sharding=sharding)
        )
        await stack.enter_async_context(
            served(settings.listen, lambda target: instance_server.register(target, host, self.world.policy))
        )
        channel = await stack.enter_async_context(open_channel(settings.listen))
        stub = instance_pb2_grpc.InstanceStub(channel)
        await until(lambda: host.state.is_known)
        computes: Any = None
        made = self.instances[name] = Instance(self.world, host, computes, self.controller, stub)
        return made

    async def stop(self, name: str) -> None:
        await self.stacks.pop(name).aclose()
        del self.instances[name]

    def groups(self, name: str) -> Groups:
        return self.instances[name].host.groups

    def store(self, name: str, session: str) -> ShardStore:
        return self.groups(name).find(session).store

    # --- the placement controller's part ---

    def call(self, name: str, method: str, request: Any, principal: str = PC) -> Any:
        return self.instances[name].call(method, request, principal)

    def start_checkpoint(self, session: str) -> SessionCheckpoint:
        prompt = self.prompts[session]
        names = [name.hex() for name in self.names(prompt)]
        tail = prompt[len(names) * B :]
        made = Sampler("greedy", {"max_tokens": OUTPUT}, 0, 0, True)
        return SessionCheckpoint(session, 0, self.world.compat_id, SCOPE, names, tail, [], 0, made)

    def newest(self, session: str) -> SessionCheckpoint:
        sent = [each for each in self.controller.checkpoints if each.session == session]
        if not sent:
            return self.start_checkpoint(session)
        return convert.checkpoint_from_message(max(sent, key=lambda each: each.output_offset))

    def names(self, tokens: Sequence[int]) -> list[bytes]:
        return keys.block_keys(SCOPE_KEY, bytes.fromhex(self.world.compat_id), tokens, B)

    def context(self, session: str, following: Sequence[Shard] = (), checkpoint: Any = None) -> GroupContext:
        checkpoint = checkpoint or self.newest(session)
        return GroupContext(self.maps[session], checkpoint, len(self.prompts[session]), B, tuple(following))

    async def join(self, name: str, context: GroupContext, principal: str = PC) -> None:
        await self.call(name, "JoinGroup", convert_groups.context_to_message(context), principal)

    async def form(self, session: str, prompt: list[int], *members: str, edges: Sequence[int] = ()) -> None:
        """Version 1 of a map over the prompt's complete blocks, the last of the members being home."""
        self.prompts[session] = prompt
        self.maps[session] = ShardMap(session, 1, shards(len(prompt) // B * B, members, edges))
        for name in members:
            await self.join(name, self.context(session))

    def generate(self, session: str, home: str, **changes: Any) -> Attachment:
        made: dict[str, Any] = {
            "prompt": self.prompts[session],
            "sampler": sampler(),
        }
        return self.instances[home].generate(session, **(made | changes))

    async def sampled_some(self, reading: Attachment, session: str, home: str, more: int = 10) -> None:
        """Wait for some more tokens, and let home sample a few beyond them, but not to its end."""
        self.let_sample(session, home, 2 * more)
        there = len(reading.tokens) + more
        await until(lambda: len(reading.tokens) >= there)
        assert self.newest(session).output_offset

    def let_sample(self, session: str, home: str, more: int) -> None:
        """Home is to sample so many more tokens, and to wait then."""
        member, sessions = self.groups(home).find(session), self.instances[home].host.state.sessions

        def count() -> int:
            found = sessions.get(session, 1)
            return 0 if found is None else len(found.generated)

        if session not in self.limits:
            real_ask = member.links.ask

            async def ask(*arguments: Any) -> Any:
                while count() >= self.limits[session]:
                    await asyncio.sleep(0.002)
                return await real_ask(*arguments)

            member.links.ask = ask  # type: ignore[method-assign]
        self.limits[session] = count() + more

    def grow(self, session: str) -> int:
        """Where the map ends after the newest checkpoint."""
        known = len(self.prompts[session]) + self.newest(session).output_offset - 1
        self.maps[session] = reshard.grown(self.maps[session], known // B * B)
        return known // B * B

    async def prepare(
        self, session: str, following: Sequence[Shard], deadline_ms: int = DEADLINE_MS
    ) -> dict[str, Exception | None]:
        """Contexts, then plans to all members of either version; what each answered."""
        old = self.maps[session]
        new = ShardMap(session, old.version + 1, list(following))
        plans = reshard.plans(old, new, deadline_ms)
        context = self.context(session, following)
        named = {URIS[name]: name for name in self.instances}
        await asyncio.gather(*(self.join(named[uri], context) for uri in plans if uri in named))

        async def plan(uri: str) -> Exception | None:
            try:
                reply = await self.call(named[uri], "Reshard", reshard_to_message(plans[uri]))
            except Exception as error:
                return error
            assert (reply.map, reply.to) == (session, new.version)
            return None

        answers = await asyncio.gather(*(plan(uri) for uri in plans if uri in named))
        return dict(zip([named[uri] for uri in plans if uri in named], answers, strict=True))

    async def decide(self, session: str, members: Sequence[str], **step: int) -> None:
        for name in members:
            reply = await self.call(name, "Reshard", instance_pb2.ReshardRequest(map=session, **step))
            assert reply.map == session

    async def step(self, session: str, *members: str, edges: Sequence[int] = ()) -> dict[str, list[Range]]:
        """Move to these members, equal ranges unless told; what each fetches."""
        end = self.grow(session)
        following = shards(end, members, edges)
        old = self.maps[session]
        new = ShardMap(session, old.version + 1, following)
        answers = await self.prepare(session, following)
        assert set(answers.values()) == {None}, answers
        await self.decide(session, list(answers), commit=new.version)
        self.maps[session] = new
        before, after = reshard.held(old), reshard.held(new)
        return {name: reshard.without(after.get(URIS[name], []), before.get(URIS[name], [])) for name in answers}


def shards(end: int, members: Sequence[str], edges: Sequence[int] = ()) -> list[Shard]:
    """Ranges of whole blocks, equal but for rounding or between `edges`, for members in this order."""
    if not edges:
        blocks = end // B
        edges = [blocks * at // len(members) * B for at in range(len(members) + 1)]
    pairs = zip(itertools.pairwise(edges), members, strict=True)
    return [Shard(tokens, URIS[name]) for tokens, name in pairs]


async def by_hand(made: World, stack: AsyncExitStack) -> Placement:
    """The test is the placement controller."""
    controller = Placement()
    await stack.enter_async_context(
        served(
            f"unix:{made.folder}/pc.sock",
            lambda target: placement_pb2_grpc.add_PlacementServicer_to_server(controller, target),
        )
    )
    return controller


@asynccontextmanager
async def rig(folder: Path, *names: str, placement: Any = by_hand, **config: Any) -> AsyncIterator[Rig]:
    """Running instances of these names, a holder beside each."""
    async with world(folder, *names, descriptor=ENGINE.descriptor) as made, AsyncExitStack() as stack:
        running = Rig(made, await placement(made, stack))
        try:
            for name in names:
                await running.start(name, **config)
            yield running
        finally:
            for each in reversed(list(running.stacks)):
                await running.stop(each)


S = [session_id(n) for n in range(1, 9)]
