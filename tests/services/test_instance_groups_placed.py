"""Parallel groups of real instances under a real placement controller, as a front end sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvsp.protocol import descriptor as descriptors
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import Party, Peer
from kvsp.rpc.convert import checkpoint_to_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import placement_pb2, placement_pb2_grpc
from services.placement import server as placement_server
from services.placement.config import GroupsConfig, PlacementConfig
from tests.services.group_rig import ENGINE, OUTPUT, Rig, S, rig
from tests.services.instance_engine import alone, tokens_of, work
from tests.services.instance_rig import FE, MEMBERS, PC, URIS, Attachment, World, until
from tests.services.rpc import served

PROMPT = tokens_of(3, 61)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The tokens of a single instance."""
    return asyncio.run(alone(ENGINE, work(PROMPT, OUTPUT))).tokens


async def controlled(groups: GroupsConfig, made: World, stack: AsyncExitStack) -> None:
    """A placement controller on pc.sock."""
    folder = made.folder
    (folder / "descriptor.json").write_bytes(descriptors.canonical(made.descriptor))
    config = PlacementConfig(
        listen=f"unix:{folder}/pc.sock",
        policy="",
        principal=PC,
        state_dir=str(folder / "pc-state"),
        index=Peer(f"unix:{folder}/is.sock"),
        instances=tuple(Party(URIS[name], f"unix:{folder}/{name}-engine.sock") for name in MEMBERS),
        descriptors=(str(folder / "descriptor.json"),),
        scopes={"one": str(folder / "scope.key")},
        groups=groups,
        instance_checkpoints_per_s=100_000,
        session_checkpoints_per_s=100_000,
    )
    (folder / "pc-state").mkdir()
    controller = await stack.enter_async_context(placement_server.controlling(config, made.policy))
    servicer = placement_server.PlacementServicer(PC, made.policy, controller)
    stack.push_async_callback(servicer.drain)
    register = partial(placement_server.register, servicer=servicer, policy=made.policy)
    await stack.enter_async_context(served(config.listen, register))


class FrontEnd:
    """One session, followed wherever it goes."""

    def __init__(self, made: Rig, stub: placement_pb2_grpc.PlacementStub) -> None:
        self.made = made
        self.stub = stub
        self.bindings: list[Any] = []
        self.members: list[str] = []
        self.tokens: list[int] = []
        self.reading: Attachment | None = None

    def call(self, name: str, request: Any, principal: str = FE) -> Any:
        async def answered() -> Any:
            async with translated():
                return await getattr(self.stub, name)(request, metadata=speak_for(principal))

        return answered()

    async def assign(self) -> None:
        self.made.prompts[S[0]] = PROMPT
        start = checkpoint_to_message(self.made.start_checkpoint(S[0]))
        reply = await self.call("Assign", placement_pb2.AssignRequest(start=start, prompt_tokens=len(PROMPT)))
        self.members = list(reply.members)

    async def run(self) -> None:
        """Take the session's output to its end, from one instance after the other."""
        follow: Any = self.stub.Follow(placement_pb2.SessionName(session=S[0]), metadata=speak_for(FE))
        async for binding in follow:
            self.bindings.append(binding)
            [home] = [name for name in self.made.instances if URIS[name] == binding.instance]
            self.reading = self.made.generate(S[0], home, epoch=binding.epoch, from_index=len(self.tokens))
            await self.reading.reading
            self.tokens += self.reading.tokens
            if self.reading.finished is not None:
                assert self.reading.finished.reason == "length"
                break
        follow.cancel()
        await self.call("EndSession", placement_pb2.SessionName(session=S[0]))

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self.tokens) + (0 if self.reading is None else len(self.reading.tokens))

    async def resize(self, members: int) -> list[str]:
        request = placement_pb2.ResizeGroupRequest(session=S[0], members=members)
        reply = await self.call("ResizeGroup", request, PC)
        return [shard.instance for shard in reply.shards]


@asynccontextmanager
async def fleet(folder: Path, **groups: Any) -> AsyncIterator[FrontEnd]:
    """Three instances that report to a controller."""
    made_groups = GroupsConfig(**({"tokens": 16, "prefill_tokens": 16, "members_max": 3} | groups))
    placement = partial(controlled, made_groups)
    async with (
        rig(folder, *MEMBERS[:3], placement=placement) as made,
        open_channel(f"unix:{folder}/pc.sock") as channel,
    ):
        yield FrontEnd(made, placement_pb2_grpc.PlacementStub(channel))


@pytest.mark.spec("R-190", "R-193")
async def test_an_operator_resizes_a_group_while_it_generates(tmp_path: Path, expected: list[int]) -> None:
    async with fleet(tmp_path, decode_tokens=24) as front:
        await front.assign()
        assert len(set(front.members)) == 3
        running = asyncio.create_task(front.run())
        home = front.members[-1]
        name = next(each for each in MEMBERS if URIS[each] == home)
        for members in (2, 1, 3):
            there = front.count
            front.made.let_sample(S[0], name, 20)  # a step may have to wait
            await until(lambda there=there: front.count >= there + 3)  # type: ignore[misc]
            held = await front.resize(members)
            assert len(held) == members
            assert held[-1] == home
        front.made.limits[S[0]] = OUTPUT
        await running
        assert front.tokens == expected
        assert len(front.bindings) == 1
        # All have heard of the end.
        hosts = [instance.host for instance in front.made.instances.values()]
        await until(lambda: not any(host.groups.utilization for host in hosts))


async def test_a_group_follows_its_policy(tmp_path: Path, expected: list[int]) -> None:
    async with fleet(tmp_path, decode_tokens=90) as front:
        await front.assign()
        assert len(front.members) == 3
        home = next(name for name in MEMBERS if URIS[name] == front.members[-1])
        running = asyncio.create_task(front.run())
        widths: list[int] = []
        while not running.done():
            found = front.made.groups(home)._members.get(S[0])
            if found is not None and widths[-1:] != [len(found.context.map.shards)]:
                widths.append(len(found.context.map.shards))
            await asyncio.sleep(0.002)
        await running
        assert front.tokens == expected
        assert widths[:2] == [3, 1]  # wide for the prefill, narrow then


@pytest.mark.spec("R-180", "R-194")
@pytest.mark.parametrize("resizing", [False, True])
async def test_a_member_that_is_gone_moves_the_session(
    tmp_path: Path, expected: list[int], resizing: bool
) -> None:
    async with fleet(tmp_path, decode_tokens=24) as front:
        await front.assign()
        running = asyncio.create_task(front.run())
        await until(lambda: front.count >= 5)
        gone = next(name for name in MEMBERS if URIS[name] == front.members[0])
        resize = asyncio.create_task(front.resize(2 if resizing else 3))
        await front.made.stop(gone)
        await asyncio.gather(running, resize, return_exceptions=True)
        assert running.exception() is None
        assert front.tokens == expected
        assert front.bindings[-1].epoch > 1
