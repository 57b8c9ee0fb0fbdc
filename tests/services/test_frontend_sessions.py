"""Sessions whose instance, placement controller or client is lost, over real sockets that really break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.v1 import instance_pb2
from services.frontend.tokenizer import Tokenizer
from tests.services.frontend_harness import (
    II1,
    II2,
    Reply,
    World,
    asked,
    finished,
    reused,
    tokens,
    world,
)

SAID = "The ansẅer is 42, my friend."
HALF = "The ansẅe"
AT = len(HALF.encode())

Events = AsyncIterator[instance_pb2.GenerateEvent]
Request = instance_pb2.GenerateRequest


async def reading(fe: World, until: str) -> tuple[Reply, AsyncGenerator[Reply, None]]:
    """A stream that was read up to some text, and the rest of it."""
    parts = fe.parts(asked(stream=True))
    async for reply in parts:
        if reply.pieces and until in reply.text:
            return reply, parts
    raise AssertionError("the stream ended too early")


async def rest(reply: Reply, parts: AsyncGenerator[Reply, None]) -> Reply:
    async for _ in parts:
        pass
    return reply


def session(fe: World) -> str:
    return fe.placement.assigned[-1].start.session


# --- the instance is lost ---


@pytest.mark.spec("R-177", "R-180")
async def test_the_loss_of_the_instance_costs_the_client_nothing(fe: World) -> None:
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.stop(II1)
    await fe.placement.move(session(fe), II2)
    assert (await rest(reply, parts)).text == SAID
    assert reply.events[-1] == "[DONE]"
    (request,) = fe.ii2.requests
    assert (request.session, request.epoch, request.from_index) == (session(fe), 2, AT)
    assert request.prompt == fe.ii1.requests[0].prompt, "in case its blocks were lost with the instance"
    await fe.ended()
    assert fe.placement.ended == [session(fe)]


@pytest.mark.spec("R-176", "R-180")
async def test_tokens_computed_again_are_delivered_once(fe: World) -> None:
    async def again(request: Request) -> Events:
        for index, token in enumerate(fe.ii2.output):  # from its last checkpoint on, not from where it is asked to
            yield tokens(2, index, token)
        yield finished(2, "stop", len(fe.ii2.output))

    fe.ii2.scripts.append(again)
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.stop(II1)
    await fe.placement.move(session(fe), II2)
    assert (await rest(reply, parts)).text == SAID


@pytest.mark.spec("R-178", "R-181")
async def test_tokens_of_an_old_epoch_are_dropped(fe: World) -> None:
    async def haunted(request: Request) -> Events:
        yield tokens(1, AT, *fe.encode("XXXXX"))
        for index in range(AT, len(fe.ii2.output)):
            yield tokens(2, index, fe.ii2.output[index])
            yield tokens(1, index + 1, *fe.encode("YYYY"))
            yield finished(1, "stop", index)
        yield finished(2, "stop", len(fe.ii2.output))

    fe.ii2.scripts.append(haunted)
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.placement.move(session(fe), II2)
    assert (await rest(reply, parts)).text == SAID


@pytest.mark.spec("R-181")
async def test_an_instance_that_only_seems_alive_is_left_at_once(fe: World) -> None:
    """Stopped, or cut off from the others: its stream stays open, and must not be waited for."""
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.placement.move(session(fe), II2)
    assert (await rest(reply, parts)).text == SAID
    await asyncio.wait_for(fe.ii1.left.wait(), 10)


@pytest.mark.spec("R-180")
async def test_a_session_may_move_again_and_again(fe: World) -> None:
    fe.ii1.hold_at = fe.ii2.hold_at = 4
    reply, parts = await reading(fe, "The ")
    for at, (now, then) in enumerate([(fe.ii2, fe.ii1), (fe.ii1, fe.ii2), (fe.ii2, fe.ii1)]):
        now.hold_at = 8 + 4 * at
        await fe.placement.move(session(fe), II2 if now is fe.ii2 else II1)
        async for reply in parts:
            if len(reply.text.encode()) >= now.hold_at - 2:
                break
        assert then.requests
    fe.ii1.hold_at = None
    await fe.placement.move(session(fe), II1)
    assert (await rest(reply, parts)).text == SAID
    assert [request.epoch for request in fe.ii1.requests] == [1, 3, 5]


async def test_before_its_first_token_too(fe: World) -> None:
    fe.ii1.hold_at = 0
    asking = asyncio.create_task(fe.ask(asked()))
    await fe.placement.told(lambda: bool(fe.ii1.requests))
    await fe.stop(II1)
    await fe.placement.move(session(fe), II2)
    assert (await asking).json["choices"][0]["text"] == SAID


# --- connections break ---


@pytest.mark.spec("R-180")
async def test_a_broken_connection_is_made_again_from_the_next_index(fe: World) -> None:
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.stop(II1)
    fe.ii1.hold_at = None
    await fe.start(II1)
    assert (await rest(reply, parts)).text == SAID
    first, second = fe.ii1.requests[0], fe.ii1.requests[-1]
    assert (first.epoch, first.from_index, second.epoch, second.from_index) == (1, 0, 1, AT)
    assert first.session == second.session


async def test_a_stream_that_ends_without_an_end_is_taken_up_again(fe: World) -> None:
    async def cut(request: Request) -> Events:
        yield reused(1, 1, 0)
        yield tokens(1, 0, *fe.ii1.output[:5])

    fe.ii1.scripts.append(cut)
    assert (await fe.ask(asked())).json["choices"][0]["text"] == SAID
    assert [request.from_index for request in fe.ii1.requests] == [0, 5]


async def test_what_was_lost_is_asked_for_again(fe: World) -> None:
    async def gap(request: Request) -> Events:
        yield tokens(1, 0, *fe.ii1.output[:5])
        yield tokens(1, 7, *fe.ii1.output[7:])
        yield finished(1, "stop", len(fe.ii1.output))

    fe.ii1.scripts.append(gap)
    assert (await fe.ask(asked())).json["choices"][0]["text"] == SAID
    assert [request.from_index for request in fe.ii1.requests] == [0, 5]


@pytest.mark.spec("R-176", "R-177")
async def test_repeated_and_reordered_tokens(fe: World) -> None:
    async def mixed(request: Request) -> Events:
        output = fe.ii1.output
        yield tokens(1, 3, *output[3:6])
        yield tokens(1, 0, *output[0:2])
        yield tokens(1, 1, *output[1:4])
        yield finished(1, "stop", len(output))
        for index in range(len(output) - 1, 2, -1):
            yield tokens(1, index, output[index])

    fe.ii1.scripts.append(mixed)
    assert (await fe.ask(asked())).json["choices"][0]["text"] == SAID
    assert len(fe.ii1.requests) == 1


@pytest.mark.parametrize("problem", [registry.STALE_EPOCH, registry.NOT_FOUND])
async def test_an_instance_that_knows_of_another_binding(fe: World, problem: registry.ProblemType) -> None:
    """Before the resume has reached it, or after it was fenced: what holds comes with the next binding."""

    async def refuse(request: Request) -> Events:
        await fe.placement.move(request.session, II2)
        raise KvspError(problem)
        yield

    fe.ii1.scripts.append(refuse)
    assert (await fe.ask(asked())).json["choices"][0]["text"] == SAID
    assert [request.epoch for request in fe.ii2.requests] == [2]


# --- the placement controller is lost ---


async def test_the_placement_controller_may_restart_meanwhile(fe: World) -> None:
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.stop("placement")
    await fe.start("placement")
    await fe.placement.move(session(fe), II2)
    assert (await rest(reply, parts)).text == SAID
    await fe.ended()


async def test_without_it_a_session_goes_on_and_is_ended_later(fe: World) -> None:
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.stop("placement")
    await fe.stop(II1)
    fe.ii1.hold_at = None
    await fe.start(II1)
    assert (await rest(reply, parts)).text == SAID
    assert not fe.placement.ended
    await fe.start("placement")
    await fe.ended()


async def test_an_assignment_whose_reply_was_lost_is_found_again(fe: World) -> None:
    fe.placement.lose_reply = True
    assert (await fe.ask(asked())).json["choices"][0]["text"] == SAID
    first, second = fe.placement.assigned
    assert first.start.session == second.start.session
    await fe.ended()
    assert not fe.placement.bindings


async def test_a_request_waits_for_a_placement_controller_that_restarts(fe: World) -> None:
    await fe.stop("placement")
    asking = asyncio.create_task(fe.ask(asked()))
    await asyncio.sleep(0)
    await fe.start("placement")
    assert (await asking).status == 200


# --- the fleet refuses ---


async def test_no_active_instance(fe: World) -> None:
    fe.placement.refusals.append(KvspError(registry.UNAVAILABLE, "no active instance", retry_after_s=4))
    reply = await fe.ask(asked(stream=True))
    assert reply.status == 503
    assert reply.error == {
        "message": "no active instance", "type": "server_error", "param": None, "code": "unavailable",
        "retry_after_s": 4,
    }  # fmt: skip


@pytest.mark.parametrize("problem", [registry.INVALID_STATE, registry.UNAVAILABLE])
async def test_an_instance_that_will_not_begin_is_left(fe: World, problem: registry.ProblemType) -> None:
    async def refuse(request: Request) -> Events:
        fe.placement.instance = II2
        raise KvspError(problem, "not now")
        yield

    fe.ii1.scripts.append(refuse)
    assert (await fe.ask(asked())).json["choices"][0]["text"] == SAID
    first, second = fe.placement.assigned
    assert first.start.session != second.start.session
    await fe.ended(2)
    assert not fe.placement.bindings


async def test_instances_that_are_all_full(fe: World) -> None:
    async def refuse(request: Request) -> Events:
        raise unavailable("the queue is full")
        yield

    fe.ii1.scripts.extend([refuse] * 3)
    reply = await fe.ask(asked())
    assert (reply.status, reply.error["message"]) == (503, "the queue is full")
    await fe.ended(3)


async def test_a_refusal_for_good_is_not_the_clients_fault(fe: World) -> None:
    async def refuse(request: Request) -> Events:
        raise KvspError(registry.INCOMPATIBLE, "not the model of this instance")
        yield

    fe.ii1.scripts.append(refuse)
    reply = await fe.ask(asked())
    assert (reply.status, reply.error["code"], reply.error["message"]) == (500, "internal_error", "internal error")
    await fe.ended()


@pytest.mark.spec("D10")
async def test_an_instance_that_is_not_configured_is_not_contacted(fe: World) -> None:
    fe.placement.instance = "https://elsewhere.example/kvsp/"
    assert (await fe.ask(asked())).status == 503
    await fe.ended()


async def test_a_failure_after_the_stream_has_begun_is_an_event(fe: World) -> None:
    async def fail(request: Request) -> Events:
        yield tokens(1, 0, *fe.encode("The"))
        yield finished(1, "failed", 3)

    fe.ii1.scripts.append(fail)
    reply = await fe.ask(asked(stream=True))
    assert reply.status == 200
    assert reply.text == "The"
    assert reply.events[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.events
    await fe.ended()


async def test_a_failure_before_it_is_not(fe: World) -> None:
    async def fail(request: Request) -> Events:
        yield finished(1, "failed", 0)

    fe.ii1.scripts.append(fail)
    assert (await fe.ask(asked(stream=True))).status == 503


async def test_one_failed_choice_ends_the_others(fe: World) -> None:
    async def fail(request: Request) -> Events:
        await fe.placement.told(lambda: fe.ii1.sent > 4)
        yield finished(1, "failed", 0)

    fe.ii1.hold_at = 5
    fe.ii1.scripts.append(fail)
    assert (await fe.ask(asked(n=2, stream=True))).events[-1]["error"]["code"] == "unavailable"
    await fe.ended(2)
    await fe.placement.told(lambda: sorted(fe.ii1.ended) == sorted(fe.placement.ended))


@pytest.mark.parametrize("placement_too", [False, True])
async def test_patience_has_an_end(tmp_path: Path, tokenizer: Tokenizer, placement_too: bool) -> None:
    async with world(tmp_path, tokenizer, patience_s=0.2) as fe:
        fe.ii1.hold_at = AT
        reply, parts = await reading(fe, HALF)
        if placement_too:
            await fe.stop("placement")  # and the instance is silent
        else:
            await fe.stop(II1)
        assert (await rest(reply, parts)).text == HALF
        assert reply.events[-1]["error"]["code"] == "unavailable"
        await fe.start("placement" if placement_too else II1)
        await fe.ended()


async def test_a_long_queue_is_waited_for(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, tokenizer, patience_s=0.02) as fe:

        async def queue(request: Request) -> Events:
            await asyncio.sleep(0.2)
            async for event in fe.ii1._play(request):
                yield event

        fe.ii1.scripts.append(queue)
        assert (await fe.ask(asked())).status == 200


async def test_a_session_that_the_controller_has_forgotten(fe: World) -> None:
    fe.ii1.hold_at = AT
    reply, parts = await reading(fe, HALF)
    await fe.placement.set(session(fe), None)
    await fe.stop(II1)
    assert (await rest(reply, parts)).events[-1]["error"]["message"] == "the session was lost"
    await fe.start(II1)


@pytest.mark.spec("R-179", "R-182")
@pytest.mark.parametrize("silent", [False, True])
async def test_a_session_that_no_instance_can_continue(tmp_path: Path, tokenizer: Tokenizer, silent: bool) -> None:
    """It is an error that asking again does not change, also where the lost instance only seems alive."""
    async with world(tmp_path, tokenizer, patience_s=0.2) as fe:
        fe.ii1.hold_at = AT
        reply, parts = await reading(fe, HALF)
        fe.placement.ends = KvspError(registry.INCOMPATIBLE, "no instance can continue the session")
        with capture_logs() as logs:
            await fe.placement.set(session(fe), None)
            if not silent:
                await fe.stop(II1)
            assert (await rest(reply, parts)).text == HALF
        error = reply.events[-1]["error"]
        assert (error["code"], error["message"]) == ("internal_error", "internal error")
        (line,) = [line for line in logs if line["event"] == "session lost"]
        assert (line["status"], line["reason"]) == (409, "no instance can continue the session")
        await fe.ended()
        if not silent:
            await fe.start(II1)


# --- the client is lost ---


async def test_a_client_that_leaves_a_stream_leaves_no_session(fe: World) -> None:
    fe.ii1.hold_at = AT
    _, parts = await reading(fe, HALF)
    await parts.aclose()
    await fe.ended()
    await fe.placement.told(lambda: fe.ii1.ended == [session(fe)])
    assert not fe.placement.bindings
    await asyncio.wait_for(fe.ii1.left.wait(), 10)


@pytest.mark.parametrize("n", [1, 3])
async def test_nor_does_one_that_leaves_before_an_answer(fe: World, n: int) -> None:
    fe.ii1.hold_at = AT
    asking = asyncio.create_task(fe.ask(asked(n=n)))
    await fe.placement.told(lambda: len(fe.ii1.requests) == n)
    asking.cancel()
    await fe.ended(n)
    await fe.placement.told(lambda: len(fe.ii1.ended) == n)


async def test_nor_one_that_leaves_during_the_assignment(fe: World) -> None:
    release = asyncio.Event()
    assign = fe.placement.Assign

    async def slow(request: Any, context: Any) -> Any:
        reply = await assign(request, context)
        await release.wait()
        return reply

    fe.placement.Assign = slow  # type: ignore[method-assign]
    await fe.stop("placement")
    await fe.start("placement")
    asking = asyncio.create_task(fe.ask(asked()))
    await fe.placement.told(lambda: bool(fe.placement.bindings))
    asking.cancel()
    await fe.ended()
    assert not fe.placement.bindings
    release.set()


async def test_the_fleet_waits_for_sessions_that_are_being_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Their calls are cancelled when the server stops, and end them a little later."""
    async with world(tmp_path, tokenizer) as fe:
        fe.ii1.hold_at = AT
        _, parts = await reading(fe, HALF)
        closing = asyncio.create_task(fe.fleet.close(5.0))
        await asyncio.sleep(0.05)
        assert not closing.done()
        await parts.aclose()
        await closing
        assert fe.placement.ended == [session(fe)]


async def test_a_front_end_that_stops_ends_its_sessions(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, tokenizer) as fe:
        fe.ii1.hold_at = AT
        _, parts = await reading(fe, HALF)
    assert fe.placement.ended == [session(fe)]
    await parts.aclose()
