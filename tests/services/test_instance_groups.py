"""Parallel groups of real instances: one context over one to four of them, resized while it generates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.reshard import held
from kvsp.rpc.convert import checkpoint_to_message
from kvsp.v1 import common_pb2, instance_pb2
from services.instance import metrics
from tests.services.group_rig import ENGINE, OUTPUT, B, Rig, S, rig, sampler, shards
from tests.services.instance_engine import TOP_P, alone, tokens_of, work
from tests.services.instance_rig import MEMBERS, URIS, Attachment, until
from tests.services.test_instance_server_engine import sampler as sampled

PROMPT = tokens_of(3, 61)
HOME = "ii4"


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The tokens of a single instance."""
    return asyncio.run(alone(ENGINE, work(PROMPT, OUTPUT))).tokens


async def whole(made: Rig, reading: Attachment) -> list[int]:
    """The tokens of a session that has not been disturbed, to its end."""
    made.limits[S[0]] = OUTPUT
    await reading.reading
    assert reading.error is None, reading.error
    assert reading.finished is not None
    assert reading.finished.reason == "length"
    return reading.tokens


async def sampled_some(made: Rig, reading: Attachment) -> None:
    """Wait for some more tokens; the session does not come to its end by itself."""
    await made.sampled_some(reading, S[0], HOME)
    assert reading.finished is None


@pytest.mark.spec("R-190", "R-193")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_members_give_the_tokens_of_one_instance(tmp_path: Path, count: int, expected: list[int]) -> None:
    names = MEMBERS[-count:]
    async with rig(tmp_path, *names) as made:
        await made.form(S[0], PROMPT, *names)
        reading = made.generate(S[0], HOME)
        assert await whole(made, reading) == expected
        assert reading.reused is not None
        assert reading.reused.cached_tokens == 0
        # No instance computes such a context to the same bits: what leaves is covered by a checkpoint.
        assert not made.newest(S[0]).sampler.deterministic


async def test_a_seeded_sampler_chooses_as_on_one_instance(tmp_path: Path) -> None:
    outcome = await alone(ENGINE, work(PROMPT, OUTPUT, sampler=TOP_P))
    async with rig(tmp_path, *MEMBERS[-2:]) as made:
        await made.form(S[0], PROMPT, *MEMBERS[-2:])
        made_sampler = sampler(TOP_P.method, **TOP_P.params)
        made_sampler.seed = TOP_P.seed
        assert await whole(made, made.generate(S[0], HOME, sampler=made_sampler)) == outcome.tokens


@pytest.mark.spec("R-190", "R-191", "R-192", "R-193", "R-196", "U-38")
async def test_resized_while_it_generates(tmp_path: Path, expected: list[int]) -> None:
    async with rig(tmp_path, *MEMBERS[1:]) as made:
        await made.form(S[0], PROMPT, *MEMBERS[1:])
        reading = made.generate(S[0], HOME)
        for members in (["ii2", HOME], [HOME], ["ii3", "ii2", HOME]):
            await sampled_some(made, reading)
            await moved(made, members)
        assert await whole(made, reading) == expected
        version = made.maps[S[0]].version
        assert [made.groups(name).find(S[0]).view[0] for name in MEMBERS[1:]] == [version] * 3


async def moved(made: Rig, members: list[str]) -> None:
    """One step; what it fetches is what has moved, and what stays has stayed where it was."""
    before = {name: addresses(made, name) for name in made.instances}
    octets = counted()
    for place in made.world.places.values():
        place.asked.clear()
    fetched = await made.step(S[0], *members)
    names = made.names(PROMPT + list(made.newest(S[0]).generated))
    blocks = {block for ranges in fetched.values() for a, b in ranges for block in range(a // B, b // B)}
    after = held(made.maps[S[0]])
    all_blocks = made.maps[S[0]].shards[-1].tokens[1] // B
    payload = made.world.descriptor.payload_octets
    since = [now - then for now, then in zip(counted(), octets, strict=True)]
    assert since == [len(blocks) * payload, (all_blocks - len(blocks)) * payload]
    for name, known in before.items():
        stayed = addresses(made, name)
        for first, end in after.get(URIS[name], []):
            for block in range(first // B, end // B):
                assert block in blocks or stayed[block] == known[block]
        # The home's open tail is its own too; nothing else is kept.
        assert all(end <= made.maps[S[0]].shards[-1].tokens[1] or name == HOME for _, end in ranges_of(made, name))
    opened = {each for place in made.world.places.values() for each in place.asked if each.startswith("open")}
    assert opened <= {f"open {int.from_bytes(names[block])}" for block in blocks}


def counted() -> list[float]:
    """Octets of all instances here that were fetched, and that were retained."""
    return [metrics.GROUP_OCTETS.labels(how)._value.get() for how in ("fetched", "retained")]


def ranges_of(made: Rig, name: str) -> list[tuple[int, int]]:
    try:
        return made.store(name, S[0]).ranges()
    except KvspError:
        return []


def addresses(made: Rig, name: str) -> dict[int, int]:
    """Where each block that an instance holds is in memory."""
    return {
        block: made.store(name, S[0]).address(block)
        for first, end in ranges_of(made, name)
        for block in range(first // B, end // B)
    }


@pytest.mark.spec("R-193", "U-38")
async def test_the_home_learns_of_a_commit_by_itself(tmp_path: Path, expected: list[int]) -> None:
    async with rig(tmp_path, "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii3", HOME)
        reading = made.generate(S[0], HOME)
        await sampled_some(made, reading)
        end = made.grow(S[0])
        answers = await made.prepare(S[0], shards(end, [HOME]))
        assert set(answers.values()) == {None}
        assert made.groups(HOME).find(S[0]).view[0] == 1
        await made.decide(S[0], ["ii3"], commit=2)
        assert made.store("ii3", S[0]).ranges() == []
        made.limits[S[0]] = OUTPUT
        await until(lambda: made.groups(HOME).find(S[0]).view[0] == 2)
        await made.decide(S[0], [HOME], commit=2)
        assert await whole(made, reading) == expected


@pytest.mark.spec("R-194", "U-38")
async def test_an_abort_stops_what_is_being_fetched(tmp_path: Path, expected: list[int]) -> None:
    async with rig(tmp_path, "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii3", HOME)
        reading = made.generate(S[0], HOME)
        await sampled_some(made, reading)
        end = made.grow(S[0])
        before = addresses(made, "ii3")
        place = made.world.places["ii3"]
        place.asked.clear()
        place.gate.clear()
        plan = asyncio.create_task(made.prepare(S[0], shards(end, [HOME])))
        await until(lambda: any(each.startswith("open") for each in place.asked))
        repeat = asyncio.create_task(made.prepare(S[0], shards(end, [HOME])))
        await asyncio.sleep(0.05)
        assert not plan.done()
        await made.decide(S[0], ["ii3", HOME], abort=2)
        for answers in (await plan, await repeat):
            assert answers["ii3"] is None
            refusal = answers[HOME]
            assert isinstance(refusal, KvspError)
            assert refusal.problem is registry.UNAVAILABLE
        place.gate.set()
        await made.decide(S[0], ["ii3", HOME], abort=2)  # nothing is prepared
        assert addresses(made, "ii3") == before
        first = made.maps[S[0]].shards[-1].tokens[0]
        assert all(tokens[0] >= first for tokens in made.store(HOME, S[0]).ranges())
        await made.step(S[0], HOME)
        assert await whole(made, reading) == expected


@pytest.mark.spec("R-192", "R-194", "U-38")
async def test_what_cannot_be_had_in_time_is_refused_and_kept_until_the_abort(
    tmp_path: Path, expected: list[int]
) -> None:
    async with rig(tmp_path, "ii2", "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii2", "ii3", HOME)
        reading = made.generate(S[0], HOME)
        await sampled_some(made, reading)
        end = made.grow(S[0])
        place = made.world.places["ii2"]
        place.gate.clear()
        answers = await made.prepare(S[0], shards(end, [HOME]), deadline_ms=400)
        assert (answers["ii2"], answers["ii3"]) == (None, None)
        refusal = answers[HOME]
        assert isinstance(refusal, KvspError)
        assert refusal.problem is registry.UNAVAILABLE
        assert made.store(HOME, S[0]).ranges()[0][0] == 0
        again = await made.prepare(S[0], shards(end, [HOME]), deadline_ms=400)
        assert isinstance(again[HOME], KvspError)  # the same plan: the same answer
        place.gate.set()
        await made.decide(S[0], ["ii2", "ii3", HOME], abort=2)
        assert made.store(HOME, S[0]).ranges()[0][0] == made.maps[S[0]].shards[-1].tokens[0]
        assert await whole(made, reading) == expected


@pytest.mark.spec("R-194", "R-180")
async def test_a_member_that_is_gone_makes_the_session_migrate(tmp_path: Path, expected: list[int]) -> None:
    async with rig(tmp_path, "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii3", HOME)
        made.controller.lost_refusal = KvspError(registry.UNAVAILABLE)
        reading = made.generate(S[0], HOME)
        await sampled_some(made, reading)
        await made.stop("ii3")
        made.limits[S[0]] = OUTPUT
        await until(lambda: len(made.controller.lost) > 1)
        made.controller.lost_refusal = None
        count = len(made.controller.lost)
        await until(lambda: len(made.controller.lost) > count)
        assert set(made.controller.lost) == {S[0]}
        assert (await reading.failed()).problem is registry.STALE_EPOCH  # it is to be resumed, here or elsewhere
        with pytest.raises(KvspError):
            made.groups(HOME).find(S[0])
        newest = made.newest(S[0])
        request = instance_pb2.ResumeRequest(session=S[0], epoch=2, checkpoint=checkpoint_to_message(newest))
        await made.call(HOME, "Resume", request)
        assert reading.tokens == expected[: len(reading.tokens)]
        rest = made.generate(S[0], HOME, epoch=2, from_index=len(reading.tokens))
        assert reading.tokens + await whole(made, rest) == expected


async def test_a_session_whose_group_nobody_knows_goes_on_alone(tmp_path: Path, expected: list[int]) -> None:
    async with rig(tmp_path, "ii3", HOME) as made:
        made.controller.lost_refusal = KvspError(registry.NOT_FOUND)
        await made.form(S[0], PROMPT, "ii3", HOME)
        reading = made.generate(S[0], HOME)
        await sampled_some(made, reading)
        await made.stop("ii3")
        made.limits[S[0]] = OUTPUT
        assert await whole(made, reading) == expected


async def test_a_group_that_a_member_has_never_heard_of_leaves_its_session_alone(
    tmp_path: Path, expected: list[int]
) -> None:
    async with rig(tmp_path, "ii2", "ii3", HOME) as made:
        made.controller.lost_refusal = KvspError(registry.NOT_FOUND)
        await made.form(S[0], PROMPT, "ii2", "ii3", HOME)
        await made.call("ii2", "LeaveGroup", common_pb2.GroupName(map=S[0]))
        assert await whole(made, made.generate(S[0], HOME)) == expected  # no wait, and no hang
        assert made.controller.lost == [S[0]]
        assert made.groups(HOME).utilization == 0


@pytest.mark.spec("R-180")
async def test_a_group_that_is_ended_while_its_session_runs_was_for_an_earlier_epoch(tmp_path: Path) -> None:
    async with rig(tmp_path, "ii2", "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii2", "ii3", HOME)
        reading = made.generate(S[0], HOME)
        await sampled_some(made, reading)
        for name in (HOME, "ii2", "ii3", "ii3"):
            await made.call(name, "LeaveGroup", common_pb2.GroupName(map=S[0]))
        assert (await reading.failed()).problem is registry.STALE_EPOCH
        assert made.instances[HOME].host.state.sessions.running == 0
        assert made.controller.lost == []
        await until(lambda: made.groups(HOME).utilization == 0)


@pytest.mark.spec("R-180", "R-194")
async def test_a_session_that_is_lost_and_left_is_not_kept(tmp_path: Path, expected: list[int]) -> None:
    async with rig(tmp_path, "ii2", "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii3", HOME)
        await made.stop("ii3")  # before it has computed anything

        async def drop(name: str) -> None:  # as Grouping does: it answers when all have been told
            await made.call(HOME, "LeaveGroup", common_pb2.GroupName(map=name))

        made.controller.when_lost = drop
        assert (await made.generate(S[0], HOME).failed()).problem is registry.STALE_EPOCH
        sessions = made.instances[HOME].host.state.sessions
        assert sessions.running == 0
        assert sessions.get(S[0], 1) is None
        request = instance_pb2.ResumeRequest(
            session=S[0], epoch=2, checkpoint=checkpoint_to_message(made.newest(S[0]))
        )
        await made.call("ii2", "Resume", request)
        assert await whole(made, made.generate(S[0], "ii2", epoch=2)) == expected
        assert made.controller.lost == [S[0]]


async def test_a_session_that_is_ended_ends_its_run(tmp_path: Path) -> None:
    async with rig(tmp_path, "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii3", HOME)
        reading = made.generate(S[0], HOME)
        await sampled_some(made, reading)
        run = made.groups(HOME).find(S[0]).run
        assert run is not None
        await made.call(HOME, "EndGeneration", instance_pb2.EndGenerationRequest(session=S[0]), "spiffe://t/fe")
        assert (await reading.failed()).problem is registry.STALE_EPOCH
        await asyncio.to_thread(run.join)
        assert made.groups(HOME).utilization == 0
        assert made.controller.lost == []


async def test_other_sessions_run_beside_a_group(tmp_path: Path, expected: list[int]) -> None:
    async with rig(tmp_path, "ii3", HOME) as made:
        await made.form(S[0], PROMPT, "ii3", HOME)
        made.prompts[S[1]] = PROMPT
        readings = [made.generate(session, HOME, sampler=sampled(max_tokens=OUTPUT)) for session in S[:2]]
        assert [await whole(made, each) for each in readings] == [expected] * 2
        assert made.controller.lost == []
