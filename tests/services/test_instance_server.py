"""An instance over a real Unix socket, with a real holder and index; the test says what the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvsp.protocol import container, keys, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import DirectiveBlock, PrefetchDirective, Sampler, SessionCheckpoint
from kvsp.rpc.convert import checkpoint_to_message, directive_to_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, common_pb2_grpc, instance_pb2
from services.instance.engine import BlockDone, Finished, PrefixLost, Started
from tests.services.holder_harness import refused
from tests.services.instance_rig import (
    DESCRIPTOR,
    FE,
    FE2,
    FOREIGN,
    II,
    PC,
    SCOPE,
    SCOPE_KEY,
    URIS,
    Instance,
    instance,
    key,
    sections,
    until,
    world,
)  # fmt: skip
from tests.services.instance_states import session_id

S1, S2 = session_id(1), session_id(2)


@pytest.fixture
async def ii(tmp_path: Path) -> AsyncIterator[Instance]:
    async with world(tmp_path, "ii1", "h1") as made, instance(made, "h1", durable=(URIS["h1"],)) as running:
        yield running


def directive(ii: Instance, i: int, blocks: list[int], **changes: Any) -> instance_pb2.PrefetchDirective:
    members: dict[str, Any] = {
        "directive": session_id(i),
        "scope_id": SCOPE,
        "compat_id": ii.world.compat_id,
        "blocks": [DirectiveBlock(key(n).hex(), [URIS["h1"]]) for n in blocks],
        "deadline_ms": 60_000,
        "lease_ms": 2000,
    }
    return directive_to_message(PrefetchDirective(**(members | changes)))


def checkpoint(ii: Instance, session: str = S1, generated: int = 3) -> SessionCheckpoint:
    prompt = list(range(10))
    names = keys.block_keys(SCOPE_KEY, bytes.fromhex(ii.world.compat_id), prompt, 8)
    return SessionCheckpoint(
        session, 1, ii.world.compat_id, SCOPE, [name.hex() for name in names], prompt[8:],
        list(range(100, 100 + generated)), generated, Sampler("greedy", {"max_tokens": 200}, 0, generated, False),
    )  # fmt: skip


def resume(made: SessionCheckpoint, epoch: int = 2) -> instance_pb2.ResumeRequest:
    return instance_pb2.ResumeRequest(session=made.session, epoch=epoch, checkpoint=checkpoint_to_message(made))


async def status(ii: Instance, of: int) -> instance_pb2.DirectiveStatus:
    found = await ii.call("GetDirective", instance_pb2.GetDirectiveRequest(directive=session_id(of)), PC)
    assert isinstance(found, instance_pb2.DirectiveStatus)
    return found


# --- generation -----------------------------------------------------------------------


@pytest.mark.spec("R-177")
async def test_tokens_come_in_order_and_can_be_read_again(ii: Instance) -> None:
    reading = ii.generate(S1, deterministic=True)
    work = await ii.compute.started(S1)
    assert (list(work.tokens), work.max_tokens, work.prefix) == (list(range(10)), 200, None)
    ii.compute.tell(Started(S1, 1, 8))
    ii.compute.sample(S1, 20)
    await until(lambda: len(reading.tokens) == 20)
    assert (reading.reused.prompt_tokens, reading.reused.cached_tokens) == (10, 8)
    await reading.leave()  # "ending the call does not end the session"
    ii.compute.sample(S1, 5, 20)
    ii.compute.tell(Finished(S1, 1, "length"))
    again = ii.generate(S1, deterministic=True, from_index=18)
    await again.reading
    assert (again.first_index, again.tokens) == (18, [100 + i for i in range(18, 25)])
    assert (again.finished.reason, again.finished.output_tokens) == ("length", 25)
    await ii.call("EndGeneration", instance_pb2.EndGenerationRequest(session=S1), FE)
    await refused(registry.NOT_FOUND, ii.call("EndGeneration", instance_pb2.EndGenerationRequest(session=S1), FE))


async def test_the_latest_to_attach_gets_the_output(ii: Instance) -> None:
    first = ii.generate(S1, deterministic=True)
    await ii.compute.started(S1)
    ii.compute.sample(S1, 2)
    await until(lambda: len(first.tokens) == 2)
    second = ii.generate(S1, deterministic=True)
    assert (await first.failed()).problem is registry.CONFLICT
    ii.compute.sample(S1, 2, 2)
    await until(lambda: second.tokens == [100, 101, 102, 103])
    await second.leave()


@pytest.mark.spec("R-175")
async def test_while_the_controller_withholds_its_reply_no_token_leaves(ii: Instance) -> None:
    ii.controller.answers.clear()
    reading = ii.generate(S1)
    await ii.compute.started(S1)
    ii.compute.sample(S1, 6)
    await until(lambda: len(ii.controller.checkpoints) == 1)
    ii.compute.sample(S1, 6, 6)
    await ii.call("PutState", common_pb2.StateChange(state="active"), PC)  # meanwhile it serves others
    assert reading.tokens == []
    ii.controller.answers.set()
    await until(lambda: len(reading.tokens) == 12)
    assert [each.output_offset for each in ii.controller.checkpoints] == [1, 12]
    last = ii.controller.checkpoints[-1]
    assert (list(last.generated), last.sampler.step) == ([100 + i for i in range(12)], 12)
    await reading.leave()


@pytest.mark.spec("R-175")
async def test_a_checkpoint_that_is_not_answered_is_sent_again(ii: Instance) -> None:
    ii.controller.refusal = KvspError(registry.UNAVAILABLE)
    reading = ii.generate(S1)
    await ii.compute.started(S1)
    ii.compute.sample(S1, 6)
    await until(lambda: len(ii.controller.checkpoints) == 3)
    assert reading.tokens == []
    ii.controller.refusal = None
    await until(lambda: len(reading.tokens) == 6)
    await reading.leave()


@pytest.mark.spec("R-181", "R-175", "D12")
@pytest.mark.parametrize("problem", [registry.STALE_EPOCH, registry.FORBIDDEN, registry.CONFLICT])
async def test_a_refused_checkpoint_stops_the_session(ii: Instance, problem: registry.ProblemType) -> None:
    ii.controller.refusal = KvspError(problem)
    reading = ii.generate(S1)
    await ii.compute.started(S1)
    ii.compute.sample(S1, 6)
    assert (await reading.failed()).problem is registry.STALE_EPOCH
    assert reading.tokens == []
    assert ii.compute.cancelled == [(S1, 1)]
    assert (await ii.generate(S1).failed()).problem is registry.STALE_EPOCH


async def test_no_checkpoint_follows_the_end_of_a_session(ii: Instance) -> None:
    ii.controller.answers.clear()
    reading = ii.generate(S1)
    await ii.compute.started(S1)
    ii.compute.sample(S1, 6)
    await until(lambda: len(ii.controller.checkpoints) == 1)
    ending = asyncio.create_task(ii.call("EndGeneration", instance_pb2.EndGenerationRequest(session=S1), FE))
    assert (await reading.failed()).problem is registry.STALE_EPOCH
    assert not ending.done()
    ii.controller.answers.set()
    await ending
    assert len(ii.controller.checkpoints) == 1


@pytest.mark.spec("R-170", "R-171")
async def test_new_blocks_go_to_the_own_holder_and_a_durable_one(ii: Instance) -> None:
    reading = ii.generate(S1, deterministic=True)
    await ii.compute.started(S1)
    octets = container.build(0, 8, sections(1))
    ii.compute.tell(BlockDone(S1, 1, 0, octets))
    ii.compute.sample(S1, 7)
    ii.compute.tell(BlockDone(S1, 1, 1, octets))
    tokens = [*range(10), *range(100, 107)]
    names = keys.block_keys(SCOPE_KEY, bytes.fromhex(ii.world.compat_id), tokens, 8)
    for name in names:
        for party in ("ii1", "h1"):
            await until(lambda p=party, n=name: ii.world.index.table.find(party_id(URIS[p]), n, 0) is not None)  # type: ignore[misc]
    # position 10 + 6 ends the second block
    assert [each.output_offset for each in ii.controller.checkpoints] == [6]
    ii.compute.tell(BlockDone(S1, 1, 9, octets))  # not one of its blocks: no name, and no harm
    await reading.leave()


# --- resume ---------------------------------------------------------------------------


@pytest.mark.spec("R-180", "U-35", "R-182")
async def test_resume_and_attach(ii: Instance) -> None:
    made = checkpoint(ii)
    reply = await ii.call("Resume", resume(made), PC)
    assert (reply.session, reply.epoch, reply.output_offset) == (S1, 2, 3)
    assert await ii.call("Resume", resume(made), PC) == reply
    await refused(registry.STALE_EPOCH, ii.call("Resume", resume(checkpoint(ii, generated=2)), PC))
    await until(lambda: [(each.epoch, each.output_offset) for each in ii.controller.checkpoints] == [(2, 3)])
    work = await ii.compute.started(S1, 2)
    assert (work.known_from, list(work.tokens)) == (8, [8, 9, 100, 101, 102])
    ii.compute.tell(PrefixLost(S1, 2, 0))
    assert (await ii.generate(S1, epoch=2, prompt=range(1, 11)).failed()).problem is registry.BAD_REQUEST
    reading = ii.generate(S1, epoch=2, from_index=1)
    await until(lambda: ii.compute.provided == [(S1, 2, list(range(10)))])
    ii.compute.sample(S1, 4, 3, epoch=2)
    await until(lambda: reading.tokens == [101, 102, 103, 104, 105, 106])
    assert reading.first_index == 1
    await reading.leave()


async def test_resume_refusals(ii: Instance) -> None:
    made = checkpoint(ii)
    request = resume(made)
    for principal in (FE, II):
        await refused(registry.FORBIDDEN, ii.call("Resume", request, principal))
    bad = resume(made)
    bad.session = S2
    await refused(registry.BAD_REQUEST, ii.call("Resume", bad, PC))
    await refused(registry.BAD_REQUEST, ii.call("Resume", resume(made, epoch=1), PC))
    bad = resume(made)
    bad.checkpoint.sampler.method = "dice"
    await refused(registry.BAD_REQUEST, ii.call("Resume", bad, PC))
    bad = resume(made)
    bad.checkpoint.scope_id = bytes.fromhex(FOREIGN)  # the controller's, but not this instance's
    await refused(registry.SCOPE_DENIED, ii.call("Resume", bad, PC))
    bad.checkpoint.scope_id = b"\xdd" * 16
    await refused(registry.SCOPE_DENIED, ii.call("Resume", bad, PC))
    bad = resume(made)
    bad.checkpoint.compat_id = b"\x22" * 32
    await refused(registry.INCOMPATIBLE, ii.call("Resume", bad, PC))


@pytest.mark.spec("R-180")
async def test_a_resumed_session_loads_what_is_published(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, instance(made, "h1") as ii:
        names = keys.block_keys(SCOPE_KEY, bytes.fromhex(made.compat_id), [*range(10), *range(100, 107)], 8)
        for i, name in enumerate(names):
            octets = container.build(0, 8, sections(i))
            holder = ii.host._loading.holders.own if i else ii.host._loading.holders.others[URIS["h1"]]
            named = common_pb2.BlockName(
                compat_id=bytes.fromhex(made.compat_id), scope_id=bytes.fromhex(SCOPE), block_key=name
            )
            await holder.put(named, [octets])
        await until(lambda: made.index.table.find(party_id(URIS["h1"]), names[0], 0) is not None)
        await ii.call("Resume", resume(checkpoint(ii, generated=7)), PC)
        work = await ii.compute.started(S1, 2)
        assert work.prefix is not None
        await asyncio.to_thread(work.prefix.wait)
        assert work.prefix.prefix_tokens == 16
        for i in (0, 1):
            assert tuple(map(bytes, work.prefix.rows(3, i))) == sections(i)[3]


# --- directives -----------------------------------------------------------------------


@pytest.mark.spec("R-125", "R-129", "U-18", "U-19", "R-126")
async def test_a_directive_from_start_to_end(ii: Instance) -> None:
    await ii.world.put("h1", 1, 2)
    request = directive(ii, 7, [1, 2, 3])
    for principal in (FE, II):
        await refused(registry.FORBIDDEN, ii.call("Prefetch", request, principal))
        asked = instance_pb2.GetDirectiveRequest(directive=session_id(7))
        await refused(registry.FORBIDDEN, ii.call("GetDirective", asked, principal))
    assert (await ii.call("Prefetch", request, PC)).state == "pending"
    async with asyncio.timeout(10):
        while (found := await status(ii, 7)).state == "pending":
            await asyncio.sleep(0.005)
    assert (found.state, found.loaded) == ("partial", key(1) + key(2))
    assert await ii.call("Prefetch", request, PC) == found
    await refused(registry.CONFLICT, ii.call("Prefetch", directive(ii, 7, [1]), PC))
    await refused(registry.NOT_FOUND, status(ii, 8))
    nonsense = instance_pb2.GetDirectiveRequest(directive="nonsense")
    await refused(registry.NOT_FOUND, ii.call("GetDirective", nonsense, PC))
    await until(lambda: ii.world.listed("ii1", 1) and ii.world.listed("ii1", 2))


@pytest.mark.spec("R-130", "R-127")
async def test_a_slow_source_makes_it_partial_while_sessions_go_on(ii: Instance) -> None:
    await ii.world.put("ii1", 1)
    await ii.world.put("h1", 2, 3, 4, 5, 6, 7, 8)
    slow = ii.world.places["h1"]
    slow.gate.clear()
    reading = ii.generate(S1, deterministic=True)
    await ii.compute.started(S1)
    await ii.call("Prefetch", directive(ii, 7, list(range(1, 9)), deadline_ms=200), PC)
    await until(lambda: any(each.startswith("open") for each in slow.asked))
    ii.compute.sample(S1, 30)
    await until(lambda: len(reading.tokens) == 30)
    async with asyncio.timeout(10):
        while (found := await status(ii, 7)).state == "pending":
            await asyncio.sleep(0.005)
    assert (found.state, found.loaded) == ("partial", key(1))
    await until(lambda: slow.asked[-1] == "release")
    opened = [each for each in slow.asked if each.startswith("open")]
    slow.gate.set()
    # A second directive goes all the way: nothing of the first has been asked for since its deadline.
    await ii.call("Prefetch", directive(ii, 8, [8]), PC)
    await until(lambda: ii.world.listed("ii1", 8))
    assert [each for each in slow.asked if each.startswith("open")] == [*opened, "open 8"]
    await reading.leave()


@pytest.mark.spec("R-017", "U-20", "R-108")
async def test_directives_that_are_refused(ii: Instance) -> None:
    await refused(registry.INCOMPATIBLE, ii.call("Prefetch", directive(ii, 1, [1], compat_id="22" * 32), PC))
    await refused(registry.SCOPE_DENIED, ii.call("Prefetch", directive(ii, 1, [1], scope_id=FOREIGN), PC))
    bad = directive(ii, 1, [1])
    bad.layer_order = "descending"
    await refused(registry.BAD_REQUEST, ii.call("Prefetch", bad, PC))
    await ii.call("PutState", common_pb2.StateChange(state="sleeping"), PC)
    await refused(registry.INVALID_STATE, ii.call("Prefetch", directive(ii, 1, [1]), PC))


# --- lifecycle, status ----------------------------------------------------------------


@pytest.mark.spec("R-107", "R-109", "U-36")
async def test_states(ii: Instance) -> None:
    for principal in (FE, II):
        await refused(registry.FORBIDDEN, ii.call("PutState", common_pb2.StateChange(state="active"), principal))
    await refused(registry.BAD_REQUEST, ii.call("PutState", common_pb2.StateChange(state="resting"), PC))
    await refused(registry.INVALID_STATE, ii.call("PutState", common_pb2.StateChange(state="failed"), PC))
    reading = ii.generate(S1, deterministic=True)
    await ii.compute.started(S1)
    assert (await ii.call("PutState", common_pb2.StateChange(state="sleeping"), PC)).state == "draining"
    assert (await ii.generate(S2).failed()).problem is registry.INVALID_STATE
    ii.compute.tell(Finished(S1, 1, "stop"))
    await reading.reading
    await until(lambda: ii.controller.statuses[-1].state == "sleeping")


@pytest.mark.spec("R-100", "R-046")
async def test_status_says_what_was_measured(ii: Instance) -> None:
    await until(lambda: len(ii.controller.statuses) > 2)
    found = ii.controller.statuses[-1]
    assert (found.instance, found.state, found.prefill_tokens_per_s) == (URIS["ii1"], "active", 1000.0)
    assert [(link.holder, link.mbit_per_s) for link in found.links] == [(URIS["h1"], 10_000.0)]
    assert found.epoch > 1_700_000_000_000


@pytest.mark.spec("U-37")
async def test_leaving_is_reported_at_once(ii: Instance) -> None:
    reading = ii.generate(S1)
    await ii.compute.started(S1)
    await ii.host.leave()
    assert ii.controller.statuses[-1].state == "failed"
    assert (await reading.failed()).problem is registry.STALE_EPOCH


@pytest.mark.spec("R-103", "D12")
async def test_a_later_start_of_it_ends_this_one(ii: Instance) -> None:
    reading = ii.generate(S1)
    await ii.compute.started(S1)
    ii.controller.status_refusal = KvspError(registry.STALE_EPOCH)
    await ii.host.failed.wait()
    assert (await reading.failed()).problem is registry.STALE_EPOCH
    assert ii.compute.cancelled == [(S1, 1)]


# --- who may --------------------------------------------------------------------------


@pytest.mark.spec("R-210", "D1")
async def test_generation_is_for_front_ends_of_the_scope(ii: Instance) -> None:
    for principal in (PC, II):
        assert (await ii.generate(S1, principal=principal).failed()).problem is registry.FORBIDDEN
    assert (await ii.generate(S1, principal=FE2).failed()).problem is registry.SCOPE_DENIED
    foreign = ii.generate(S1, principal=FE2, scope_id=bytes.fromhex(FOREIGN))
    assert (await foreign.failed()).problem is registry.SCOPE_DENIED
    reading = ii.generate(S1, deterministic=True)
    await ii.compute.started(S1)
    end = instance_pb2.EndGenerationRequest(session=S1)
    await refused(registry.NOT_FOUND, ii.call("EndGeneration", end, FE2))
    await refused(registry.FORBIDDEN, ii.call("EndGeneration", end, PC))
    await reading.leave()


@pytest.mark.spec("R-197", "U-38")
async def test_reshard_of_maps_that_it_does_not_know(ii: Instance) -> None:
    commit = instance_pb2.ReshardRequest(map="m", commit=2)
    await refused(registry.FORBIDDEN, ii.call("Reshard", commit, II))
    await refused(registry.PLAN_CONFLICT, ii.call("Reshard", commit, PC))
    # "an unseen map adopts `from` when retain and release are empty" (U-38); what it fetches has no names here.
    plan = instance_pb2.ReshardRequest(map="m", plan=instance_pb2.ReshardPlan(to=1, deadline_ms=5))
    assert (await ii.call("Reshard", plan, PC)).to == 1
    fetch = plan.plan.fetch.add(**{"from": URIS["h1"]})
    fetch.tokens.end = 8
    await refused(registry.PLAN_CONFLICT, ii.call("Reshard", plan, PC))
    assert (await ii.call("Reshard", instance_pb2.ReshardRequest(map="m", abort=1), PC)).version == 0
    await refused(registry.UNAVAILABLE, ii.call("Reshard", plan, PC))
    await refused(registry.BAD_REQUEST, ii.call("Reshard", instance_pb2.ReshardRequest(map="m"), PC))


async def test_authority_is_served(ii: Instance, tmp_path: Path) -> None:
    from kvsp.rpc.channel import open_channel

    async with open_channel(f"unix:{tmp_path}/ii1-engine.sock") as channel:
        stub = common_pb2_grpc.AuthorityStub(channel)
        request = common_pb2.AuthorizeRequest(method="POST", path="prefetch")
        await stub.Authorize(request, metadata=speak_for(PC))

        async def asked() -> None:
            async with translated():
                await stub.Authorize(request, metadata=speak_for(FE))

        await refused(registry.FORBIDDEN, asked())


def test_the_rig_fits_the_layout() -> None:
    assert container.parse_header(container.build(0, 8, sections(1))).payload_octets == (
        2 * DESCRIPTOR.layers * DESCRIPTOR.section_octets
    )
