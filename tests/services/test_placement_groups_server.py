"""Groups over real sockets: joins before the answer, plans and decisions, who may ask for what."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest

from kvsp.cli.controller import shard_map, shards_text
from kvsp.protocol import registry, reshard
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.records import ReshardRequest, Shard, ShardMap
from kvsp.rpc.config import Party
from kvsp.v1 import common_pb2, placement_pb2
from services.placement import members as shell
from services.placement import metrics
from services.placement.config import GroupsConfig
from tests.services.placement_groups import PROMPT, kind_of
from tests.services.placement_records import BLOCK_TOKENS, A, B, C, checkpoint, keys, refused, session_id, status
from tests.services.placement_world import World, until, world

S = session_id(1)
GROUPS = GroupsConfig(tokens=PROMPT, prefill_tokens=48, decode_tokens=10_000, deadline_ms=1_000)
BLOCKS = {"tokens": PROMPT, "prompt_blocks": keys(8)}


@pytest.fixture
async def pc(tmp_path: Path) -> AsyncIterator[World]:
    """Instances A and B may have sessions of the scope; an assigned one has A as home, and B as member."""
    async with world(tmp_path, groups=GROUPS) as made:
        await report(made)
        yield made


async def report(pc: World) -> None:
    for uri in (A, B):
        await pc.report(status(uri))


async def output(pc: World, offset: int) -> None:
    await pc.put("ii1", checkpoint(1, 1, offset, prompt_blocks=keys(8)))


async def resize(pc: World, members: int, name: str = "pc", session: str = S) -> Any:
    return await pc.call("ResizeGroup", name, placement_pb2.ResizeGroupRequest(session=session, members=members))


async def lost(pc: World, name: str, session: str = S) -> None:
    await pc.call("LostGroup", name, common_pb2.GroupName(map=session))


async def overview(pc: World) -> placement_pb2.Overview:
    async for each in pc.stream("Watch", "pc", placement_pb2.WatchRequest()):
        return each  # type: ignore[no-any-return]
    raise AssertionError("no overview")


def told(pc: World, uri: str, after: int = 2) -> list[str]:
    """What an instance was asked for of later versions; a decision may come more than once."""
    asked = [each for each in pc.instances[uri].reshards if version_of(each) > after]
    return [kind for kind, _ in itertools.groupby(map(kind_of, asked))]


def version_of(request: ReshardRequest) -> int:
    named = (request.new, request.commit, request.abort)
    return next(version for version in named if isinstance(version, int))


async def grouped(pc: World) -> None:
    """Session 1 has a map of version 2, with A as its only member, that an operator may resize."""
    reply = await pc.assign(**BLOCKS)
    assert list(reply.members) == [B, A]
    with refused(registry.PLAN_CONFLICT):  # no output yet
        await resize(pc, 2)
    await output(pc, 1)  # early decode: the policy wants one
    await until(lambda: [told(pc, uri, 1) for uri in (A, B)] == [["plan", "commit"]] * 2)
    await until(lambda: S in pc.instances[B].left)
    for instance in pc.instances.values():
        instance.joined.clear()
        instance.left.clear()


# --- begin ----------------------------------------------------------------------------


@pytest.mark.spec("U-38")
async def test_all_members_have_joined_before_the_assignment_is_answered(pc: World) -> None:
    gate = pc.instances[B].gate
    gate.clear()
    asked = asyncio.create_task(pc.assign(**BLOCKS))
    await pc.instances[A].until(lambda: pc.instances[A].joined)
    follower = pc.follow()
    binding = asyncio.ensure_future(follower.read())
    await asyncio.sleep(0.05)
    assert not asked.done()
    assert not binding.done()  # nor does a front end that asks again begin before
    gate.set()
    reply = await asked
    assert (await binding).instance == A
    follower.cancel()
    assert reply.binding.instance == A
    assert list(reply.members) == [B, A]
    assert not reply.directive
    (context,) = pc.instances[A].joined
    assert pc.instances[B].joined == [context]
    assert not context.next
    assert (context.prompt_tokens, context.block_tokens) == (PROMPT, BLOCK_TOKENS)
    assert context.checkpoint.output_offset == 0
    assert reshard.held(context.map) == {B: [(0, 64)], A: [(64, 128)]}
    (shown,) = (await overview(pc)).groups
    assert shard_map(shown) == context.map
    collected = CollectorRegistry()
    collected.register(metrics.StateCollector(pc.controller.state))
    assert b"kvsp_placement_groups 1.0" in generate_latest(collected)


async def test_a_session_is_an_ordinary_one_when_a_member_does_not_join(pc: World) -> None:
    pc.instances[B].refusals.append(unavailable("no room"))
    reply = await pc.assign(**BLOCKS)
    assert reply.binding.instance == A
    assert not reply.members
    assert pc.instances[A].left == [S]  # before the answer: it may begin, and as any other
    await pc.instances[B].until(lambda: pc.instances[B].left == [S])
    assert not (await overview(pc)).groups
    await output(pc, 1)
    with refused(registry.NOT_FOUND):
        await resize(pc, 2)


async def test_a_session_does_not_wait_for_a_member_that_neither_joins_nor_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "LEAVE_S", 60.0)
    async with world(tmp_path, groups=structs.replace(GROUPS, tokens=3)) as pc:
        await report(pc)
        for block in range(8):
            await pc.publish(block)
        pc.instances[B].gate.clear()
        reply = await pc.assign(**BLOCKS)
        assert not reply.members
        assert pc.instances[A].left == [S]
        await pc.instances[A].until(lambda: pc.instances[A].directives)  # what a group would have computed
        pc.instances[B].gate.set()
        await pc.instances[B].until(lambda: pc.instances[B].left == [S])


async def test_an_instance_without_internal_address_is_no_member(tmp_path: Path) -> None:
    made = World(tmp_path)
    outside = Party(B)
    peers = tuple(outside if each.base_uri == B else each for each in made.config.instances)
    config = structs.replace(made.config, instances=peers, groups=GROUPS)
    assert config.settings().groups.instances == {A, C}


# --- resize ---------------------------------------------------------------------------


@pytest.mark.spec("R-190", "R-192", "R-193")
async def test_an_operator_resizes_a_context_step_by_step(pc: World) -> None:
    await grouped(pc)
    reply = await resize(pc, 2)
    assert shard_map(reply) == ShardMap(S, 3, [Shard((0, 64), B), Shard((64, 128), A)])
    for uri in (A, B):
        assert told(pc, uri) == ["plan", "commit"]
        (context,) = pc.instances[uri].joined  # before the plan
        assert (context.map.version, len(context.map.shards), len(context.next)) == (2, 1, 2)
        assert context.checkpoint.output_offset == 1
    assert not pc.instances[B].left
    assert await resize(pc, 2) == reply  # it is so already
    reply = await resize(pc, 1)
    assert shard_map(reply) == ShardMap(S, 4, [Shard((0, 128), A)])
    await pc.instances[B].until(lambda: pc.instances[B].left == [S])
    assert not pc.instances[A].left


@pytest.mark.spec("R-194", "R-195", "U-38")
@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_a_step_that_a_member_does_not_acknowledge_is_aborted_everywhere(pc: World, how: str) -> None:
    await grouped(pc)
    member = pc.instances[B]
    if how == "refused":
        member.refusals.append(KvspError(registry.PLAN_CONFLICT, "not now"))  # of the join, or
    else:
        member.gate.clear()  # it hangs: the deadline passes
    asked = asyncio.create_task(resize(pc, 2))
    if how == "silent":
        await pc.instances[A].until(lambda: "abort" in told(pc, A))
        with refused(registry.PLAN_CONFLICT):
            await resize(pc, 2)  # one step at a time
        member.gate.set()
    with refused(registry.PLAN_CONFLICT):
        await asked
    assert told(pc, A)[-1] == "abort"
    assert "commit" not in told(pc, A) + told(pc, B)
    assert (await overview(pc)).groups[0].version == 2


@pytest.mark.spec("R-193")
async def test_a_commit_survives_the_controller(tmp_path: Path) -> None:
    made = World(tmp_path, groups=GROUPS)
    async with AsyncExitStack() as stack:
        await made.serve_others(stack)
        async with made.serve():
            await report(made)
            await grouped(made)
            member = made.instances[B]
            real = member.Reshard

            async def plans_alone(request: Any, context: Any) -> Any:
                """The commit does not arrive."""
                if request.HasField("commit"):
                    raise unavailable("lost")
                return await real(request, context)

            member.Reshard = plans_alone  # type: ignore[method-assign]
            asked = asyncio.create_task(resize(made, 2))
            await made.instances[A].until(lambda: told(made, A) == ["plan", "commit"])
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(outcome, BaseException)  # nobody was told that it is done
        member.Reshard = real  # type: ignore[method-assign]
        async with made.serve():
            await member.until(lambda: told(made, B) == ["plan", "commit"])
            (shown,) = (await overview(made)).groups
            assert (shown.version, len(shown.shards)) == (3, 2)
            await report(made)
            await output(made, 2)
            assert told(made, B) == ["plan", "commit"]  # fixed by the operator, still
    assert made.failures == []


@pytest.mark.spec("R-194")
async def test_a_restart_before_the_decision_aborts(tmp_path: Path) -> None:
    made = World(tmp_path, groups=GROUPS)
    async with AsyncExitStack() as stack:
        await made.serve_others(stack)
        async with made.serve():
            await report(made)
            await grouped(made)
            made.instances[B].gate.clear()
            asked = asyncio.create_task(resize(made, 2))
            await made.instances[A].until(lambda: told(made, A) == ["plan"])
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(outcome, BaseException)  # nobody was told that it is done
        made.instances[B].gate.set()
        async with made.serve():
            await made.instances[A].until(lambda: told(made, A) == ["plan", "abort"])
            await made.instances[B].until(lambda: told(made, B)[-1:] == ["abort"])
            (shown,) = (await overview(made)).groups
            assert (shown.version, len(shown.shards)) == (2, 1)
    assert made.failures == []


async def test_the_end_of_the_session_has_all_members_leave_and_answers_who_waits(pc: World) -> None:
    await grouped(pc)
    pc.instances[B].gate.clear()
    asked = asyncio.create_task(resize(pc, 2))
    await pc.instances[A].until(lambda: told(pc, A) == ["plan"])
    await pc.end()
    with refused(registry.PLAN_CONFLICT):
        await asked
    pc.instances[B].gate.set()
    for uri in (A, B):
        await pc.instances[uri].until(lambda uri=uri: S in pc.instances[uri].left)
    assert not (await overview(pc)).groups


async def kvsp(pc: World, *arguments: str, principal: str = "pc") -> tuple[int, str]:
    """The tool in a process of its own: exit code and output."""
    path = pc.folder / f"{principal}.toml"
    instances = "".join(f'[[instances]]\nbase_uri = "{uri}"\n' for uri in (A, B))
    path.write_text(f'listen = "{pc.config.listen}"\nprincipal = "spiffe://t/{principal}"\n{instances}')
    argv = [sys.executable, "-m", "kvsp.cli.main", *arguments, "--config", str(path)]
    tool = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await tool.communicate()
    return tool.returncode or 0, output.decode()


async def test_the_tool_shows_and_resizes_groups(pc: World) -> None:
    assert await kvsp(pc, "group", "list") == (0, "")
    await grouped(pc)
    assert await kvsp(pc, "group", "list") == (0, f"{S} v2: kvsp 0-128\n")
    assert await kvsp(pc, "group", "resize", S, "2") == (0, f"{S} v3: kvsp 0-64, kvsp 64-128\n")
    code, output = await kvsp(pc, "group", "resize", session_id(9), "2")
    assert (code, "no such group" in output) == (1, True)
    code, _ = await kvsp(pc, "group", "resize", S, "1", principal="fe")
    assert code == 3
    code, output = await kvsp(pc, "top", "--once")
    assert code == 0
    assert "over 2 shards" in output


# --- who may --------------------------------------------------------------------------


@pytest.mark.spec("D1", "D8", "R-197")
@pytest.mark.parametrize("name", ["ii1", "ii2", "h1", "is", "fe", "client"])
async def test_only_the_operator_resizes_and_others_learn_nothing(pc: World, name: str) -> None:
    await grouped(pc)
    for session in (S, session_id(9), "no id"):
        with refused(registry.FORBIDDEN):
            await resize(pc, 2, name, session)
    assert not told(pc, A)


async def test_an_operator_is_told_what_is_wrong(pc: World) -> None:
    await grouped(pc)
    with refused(registry.NOT_FOUND):
        await resize(pc, 2, session=session_id(9))
    for members, session in ((0, S), (1 << 31, S), (2, "no id")):
        with refused(registry.BAD_REQUEST):
            await resize(pc, members, session=session)
    with refused(registry.UNAVAILABLE):
        await resize(pc, 3)


@pytest.mark.spec("D8", "D12", "D13")
async def test_a_stranger_cannot_have_a_session_migrate_nor_learn_of_a_group(pc: World) -> None:
    await grouped(pc)
    for name in ("h1", "is", "fe", "client", "pc"):
        with refused(registry.FORBIDDEN):
            await lost(pc, name)
    answers = set()
    # B is no member any more, ii3 is of another scope, "bare" is nobody's instance; and nobody knows session 9.
    for name, session in (("ii2", S), ("ii3", S), ("bare", S), ("ii1", session_id(9)), ("ii2", session_id(9))):
        with pytest.raises(KvspError) as raised:
            await lost(pc, name, session)
        answers.add((raised.value.problem, raised.value.detail))
    assert len(answers) == 1
    assert next(iter(answers))[0] == registry.NOT_FOUND
    with refused(registry.BAD_REQUEST):
        await lost(pc, "ii1", "no id")
    assert len((await overview(pc)).groups) == 1
    assert pc.controller.state.totals.migrations == 0


@pytest.mark.spec("R-179", "R-181")
async def test_a_session_whose_member_says_that_it_is_lost_goes_on_elsewhere(pc: World) -> None:
    await grouped(pc)
    await resize(pc, 2)
    await lost(pc, "ii2")
    await until(lambda: pc.instances[A].resumes or pc.instances[B].resumes)
    resumed = [request for uri in (A, B) for request in pc.instances[uri].resumes]
    assert [request.epoch for request in resumed] == [2]
    assert resumed[0].checkpoint.output_offset == 1
    for uri in (A, B):
        await pc.instances[uri].until(lambda uri=uri: pc.instances[uri].left == [S])
    with refused(registry.NOT_FOUND):  # it is known by now
        await lost(pc, "ii2")
    assert not (await overview(pc)).groups


def test_a_map_is_one_line() -> None:
    made = ShardMap(S, 3, [Shard((0, 64), "https://h.example/ii2/"), Shard((64, 96), "https://ii1.example/")])
    assert shards_text(made) == f"{S} v3: ii2 0-64, ii1.example 64-96"
