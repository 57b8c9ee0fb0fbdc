"""What a member of a parallel group does again, takes back, or leaves off; how its blocks are brought out."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest

from kvsp.protocol import registry
from kvsp.rpc.clock import now_ms
from kvsp.rpc.convert import reshard_from_message
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, instance_pb2
from services.instance import metrics
from services.instance.group_links import Link
from services.instance.groups import GROUPS_MAX, IDLE_MS
from tests.services.group_rig import B, Rig, S, rig, sampler, shards
from tests.services.instance_engine import tokens_of
from tests.services.instance_rig import URIS, until
from tests.services.test_instance_groups_rules import (
    DIM,
    HEADS,
    MEMBERS,
    PROMPT,
    asked,
    compute,
    question,
    refused,
    reshard,
)

LONG = tokens_of(3, 500)


def plan(session: str, old: int = 1, **members: Any) -> instance_pb2.ReshardRequest:
    made = instance_pb2.ReshardPlan(**{"from": old, "to": old + 1, "deadline_ms": 100, **members})
    return instance_pb2.ReshardRequest(map=session, plan=made)


def tokens(first: int, end: int) -> common_pb2.TokenRange:
    return common_pb2.TokenRange(first=first, end=end)


@pytest.mark.spec("U-38")
async def test_decisions_are_told_again(tmp_path: Path) -> None:
    async with rig(tmp_path, "ii1", "ii2", "ii3") as made:
        await made.form(S[0], PROMPT, *MEMBERS)
        end = made.grow(S[0])
        await made.call("ii1", "ComputeShard", compute(), "spiffe://t/ii2")
        await made.join("ii3", made.context(S[0], shards(end, ["ii3", "ii2"])))
        for _ in range(2):
            await made.decide(S[0], ["ii3"], abort=2)  # its plan never came
        answers = await made.prepare(S[0], shards(end, ["ii3", "ii2"], [0, 24, end]))
        assert set(answers.values()) == {None}
        for _ in range(2):
            await made.decide(S[0], ["ii1", "ii3"], abort=2)
        await made.decide(S[0], ["ii2"], abort=2)
        answers = await made.prepare(S[0], shards(end, ["ii3", "ii2"], [0, 24, end]))
        assert set(answers.values()) == {None}
        for _ in range(2):
            await made.decide(S[0], ["ii1", "ii2", "ii3"], commit=2)
        for name in ("ii1", "ii2", "ii3"):
            await refused(registry.PLAN_CONFLICT, made.call(name, "Reshard", reshard(abort=2)))


@pytest.mark.spec("R-194")
async def test_an_abort_takes_back_who_would_have_been_a_member(tmp_path: Path) -> None:
    async with rig(tmp_path, *MEMBERS) as made:
        await made.form(S[0], PROMPT, *MEMBERS)
        end = made.grow(S[0])
        await made.join("ii2", made.context(S[0], shards(end, ["ii2"])))
        await made.decide(S[0], ["ii2"], abort=2)
        # Another attempt has other members, and this one has not been told of them.
        await refused(registry.UNAVAILABLE, made.call("ii2", "Reshard", plan(S[0], retain=[tokens(24, end)])))


@pytest.mark.spec("U-38", "D6")
async def test_maps_that_nobody_has_told_of_do_not_stay(tmp_path: Path) -> None:
    async with rig(tmp_path, "ii1") as made:
        groups = made.groups("ii1")
        source: Any = {"tokens": tokens(24, 32), "from": URIS["h1"]}
        fetching = plan(S[1], fetch=[instance_pb2.ReshardFetch(**source)])
        await refused(registry.UNAVAILABLE, made.call("ii1", "Reshard", fetching))
        await made.call("ii1", "Reshard", plan(S[1], old=7))  # nothing was adopted

        async def plan_many(first: int) -> None:
            for n in range(first, first + GROUPS_MAX):
                await groups.reshard(reshard_from_message(plan(f"{n:08x}-0000-4000-8000-000000000000")))

        groups.expire(now_ms() + IDLE_MS)
        await plan_many(0)
        await refused(registry.UNAVAILABLE, made.call("ii1", "Reshard", plan(S[2])))
        groups.expire(now_ms() + IDLE_MS - 10_000)
        await refused(registry.UNAVAILABLE, made.call("ii1", "Reshard", plan(S[2])))
        groups.expire(now_ms() + IDLE_MS)
        await made.call("ii1", "Reshard", plan(S[2]))
        await made.call("ii1", "Reshard", instance_pb2.ReshardRequest(map=S[2], commit=2))
        await plan_many(GROUPS_MAX)


@pytest.mark.parametrize("turns", range(12))
async def test_a_question_that_is_given_up_leaves_its_link_in_order(tmp_path: Path, turns: int) -> None:
    async with rig(tmp_path, *MEMBERS) as made:
        await made.form(S[0], PROMPT, *MEMBERS)
        home = "spiffe://t/ii2"
        await made.call("ii1", "ComputeShard", compute(), home)
        questions = [question(queries=struct.pack(f"<{HEADS * DIM}f", *[n] * HEADS * DIM)) for n in range(3)]
        answers = await asked(made, "ii1", home, *questions)
        assert len({answer.output for answer in answers}) == len(questions)
        link = Link(made.groups("ii2").stubs[URIS["ii1"]], S[0], speak_for(home))
        if turns % 2:
            assert await link.ask(questions[1]) == answers[1]  # the stream is open already
        given_up = asyncio.create_task(link.ask(questions[0]))
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        given_up.cancel()
        follow = [asyncio.create_task(link.ask(each)) for each in questions]
        assert await asyncio.gather(*follow) == answers
        assert given_up.cancelled()
        link.close()


@pytest.mark.spec("R-171", "D6")
@pytest.mark.parametrize("is_left", [False, True])
async def test_all_blocks_of_a_long_prompt_are_stored_however_few_may_wait(tmp_path: Path, is_left: bool) -> None:
    dropped = metrics.STORE_DROPPED._value.get()
    async with rig(tmp_path, *MEMBERS, queue_octets=1) as made:
        await made.form(S[0], LONG, *MEMBERS)
        gates = [held_up(made, name) for name in MEMBERS]
        reading = made.generate(S[0], "ii2", sampler=sampler(max_tokens=2))
        await reading.reading
        assert len(reading.tokens) == 2
        if is_left:
            for name in MEMBERS:
                await made.call(name, "LeaveGroup", common_pb2.GroupName(map=S[0]))
                assert made.groups(name).utilization > 0  # their memory is still in use
        for gate in gates:
            gate.set()
        blocks = set(range(len(LONG) // B))
        middle = made.maps[S[0]].shards[0].tokens[1] // B
        await until(lambda: len(stored(made, "ii1")) + len(stored(made, "ii2")) == len(blocks))
        assert stored(made, "ii1") == set(range(middle))
        assert metrics.STORE_DROPPED._value.get() == dropped
        if is_left:
            await until(lambda: all(made.groups(name).utilization == 0 for name in MEMBERS))


def held_up(made: Rig, name: str) -> asyncio.Event:
    """Let a holder take no block before this is set."""
    host, gate = made.world.places[name].host, asyncio.Event()
    real_reserve = host.reserve

    async def reserve(*arguments: Any, **options: Any) -> Any:
        await gate.wait()
        return await real_reserve(*arguments, **options)

    host.reserve = reserve  # type: ignore[method-assign]
    return gate


def stored(made: Rig, name: str) -> set[int]:
    """The blocks of the prompt that a holder has."""
    place, keys = made.world.places[name], made.names(LONG)
    found = (place.stored(int.from_bytes(key), made.world.compat_id) for key in keys)
    return {block for block, each in enumerate(found) if each is not None}
