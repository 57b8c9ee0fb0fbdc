"""Sessions that move, wait for their turn, or cannot go on, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.errors import from_rpc_error
from services.placement import controller
from services.placement import state as rules
from tests.services.placement_records import A, B, refused, session_id, status
from tests.services.placement_world import World, until, world


@pytest.fixture
async def pc(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


@pytest.mark.spec("R-179", "R-182")
async def test_who_follows_is_told_why_no_instance_can_go_on(pc: World) -> None:
    await pc.report(status(A))
    await pc.assign()
    follower = pc.follow()
    assert (await follower.read()).epoch == 1
    await pc.report(status(B))
    pc.instances[B].refusals = [KvspError(registry.INCOMPATIBLE, "not the model of this instance")]
    with capture_logs() as logs:
        await pc.report(status(A, state="failed"))
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await follower.read()
    error = from_rpc_error(broken.value)
    assert (error.problem, error.detail) == (registry.INCOMPATIBLE, "no instance can continue the session")
    assert [line["status"] for line in logs if line["event"] == "no instance continues the session"] == [409]
    assert pc.controller.state.sessions == 0
    with refused(registry.NOT_FOUND):
        await pc.end()


@pytest.fixture
async def waiting(pc: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Session 1 is being resumed at B, which hangs; 2 and 3 wait there for their turn, and A has failed."""
    monkeypatch.setattr(controller, "RESUMES_MAX", 1)
    await pc.report(status(A))
    await pc.assign(1)
    pc.instances[B].gate.clear()
    await pc.report(status(B, prefill_tokens_per_s=1))
    await pc.report(status(A, state="failed"))
    await until(lambda: pc.controller.state.is_offered(session_id(1), 2))
    await pc.report(status(A, epoch=11))
    for n in (2, 3):
        assert (await pc.assign(n)).binding.instance == A
    await pc.report(status(A, epoch=11, state="failed"))
    await until(lambda: all(pc.controller.state.is_offered(session_id(n), 2) for n in (2, 3)))
    return pc


def resumed(pc: World, instance: str) -> list[tuple[str, int]]:
    return sorted((each.checkpoint.session, each.epoch) for each in pc.instances[instance].resumes)


@pytest.mark.spec("R-179", "D13")
async def test_an_instance_that_hangs_holds_up_nobody_else(waiting: World) -> None:
    await waiting.report(status(A, epoch=12))
    assert (await waiting.assign(4)).binding.instance == A
    await waiting.report(status(A, epoch=13))  # it restarts, and is asked to go on with what it had
    await waiting.instances[A].until(lambda: resumed(waiting, A) == [(session_id(4), 2)])
    assert resumed(waiting, B) == []
    waiting.instances[B].gate.set()
    await waiting.instances[B].until(lambda: resumed(waiting, B) == [(session_id(n), 2) for n in (1, 2, 3)])


@pytest.mark.spec("R-179", "R-181")
async def test_a_session_that_ends_while_it_waits_for_its_turn_is_not_resumed(waiting: World) -> None:
    await waiting.end(2)
    waiting.instances[B].gate.set()
    await waiting.instances[B].until(lambda: (session_id(3), 2) in resumed(waiting, B))
    assert resumed(waiting, B) == [(session_id(1), 2), (session_id(3), 2)]


@pytest.mark.spec("R-179", "R-108")
async def test_an_instance_that_drains_meanwhile_is_given_no_more_sessions(waiting: World) -> None:
    await waiting.report(status(B, state="draining"))
    await waiting.report(status(A, epoch=12))
    waiting.instances[B].gate.set()
    await waiting.instances[A].until(lambda: resumed(waiting, A) == [(session_id(n), 3) for n in (2, 3)])
    assert resumed(waiting, B) == [(session_id(1), 2)]


@pytest.mark.spec("D13")
async def test_what_a_crashed_front_end_leaves_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams break; those of another front end of the same identity do not."""
    monkeypatch.setattr(rules, "SWEEP_MS", 20)
    async with world(tmp_path, unfollowed_ms=2_000) as pc:
        await pc.report(status(A))
        await pc.assign(1)
        follower = pc.follow(1)
        assert (await follower.read()).epoch == 1
        await pc.assign(2)
        crashed = pc.follow(2)
        await crashed.read()
        crashed.cancel()
        state = pc.controller.state
        await until(lambda: state.sessions == 1)
        assert state.binding("spiffe://t/fe", session_id(1)) is not None
        follower.cancel()
        await until(lambda: state.sessions == 0)
