"""What an operator orders outlives the controller, and an epoch that locked an instance out is reset."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvsp.protocol import limits, registry
from services.placement.instructions import InstanceRow, Persist, SendState, Survey
from tests.services.placement_records import (
    A,
    B,
    Driven,
    checkpoint,
    refused,
    session_id,
    status,
)
from tests.services.placement_world import until, world


@pytest.mark.spec("R-107", "R-108", "U-36")
def test_an_order_outlives_the_controller_that_it_was_given_to() -> None:
    pc = Driven()
    pc.status(status(A))
    pc.state.order(A, "draining", pc.now_ms)
    persist, sent = pc.state.instructions()
    assert persist == Persist((InstanceRow(A, 10, 3_000, "draining"),))
    assert sent == SendState(A, "draining")
    pc.disk["instance", A] = persist.rows[0]
    pc.restart()
    assert pc.status(status(A)) == "draining"
    assert pc.take(SendState) == [SendState(A, "draining")]
    with refused(registry.UNAVAILABLE):
        pc.assign()
    pc.state.ordered(A, "draining", pc.now_ms)
    pc.status(status(A, state="draining"))
    pc.restart()  # it has arrived, and is the instance's own affair from then on
    assert pc.status(status(A)) == "active"


@pytest.mark.parametrize("forgets", ["refused", "expired", "restarted"])
def test_an_order_that_is_forgotten_does_not_come_back(forgets: str) -> None:
    pc = Driven()
    pc.status(status(A))
    pc.state.order(A, "draining", pc.now_ms)
    pc.drain()
    if forgets == "refused":
        pc.state.order_failed(A, refused=True)
        pc.drain()
    elif forgets == "expired":
        pc.tick(3_000)
    else:
        pc.status(status(A, epoch=11))
    pc.restart()
    assert pc.status(status(A, epoch=11 if forgets == "restarted" else 10)) == "active"
    assert pc.take(SendState) == []


@pytest.mark.spec("D12", "R-103")
def test_an_operator_takes_back_who_was_locked_out() -> None:
    pc = Driven()
    with refused(registry.NOT_FOUND):
        pc.state.reset_epoch(A, pc.now_ms)
    pc.status(status(epoch=limits.INT_MAX))
    with refused(registry.INVALID_STATE):  # it reports under this very epoch
        pc.state.reset_epoch(A, pc.now_ms)
    pc.tick(3_000)
    assert pc.state.reset_epoch(A, pc.now_ms) == limits.INT_MAX
    pc.drain()
    pc.restart()
    assert pc.status(status(epoch=12)) == "active"
    pc.restart()
    with refused(registry.STALE_EPOCH):  # from here on as ever
        pc.status(status(epoch=11))
    pc.tick(pc.now_ms + 3_000)
    with refused(registry.NOT_FOUND):
        pc.state.reset_epoch(B, pc.now_ms)


@pytest.mark.spec("D12", "R-102", "R-179")
def test_its_sessions_stay_with_it_until_it_restarts() -> None:
    """Its checkpoints were taken all the while, as they carry no epoch of it."""
    pc = Driven()
    pc.status(status(epoch=limits.INT_MAX))
    pc.tick(3_000)
    pc.checkpoint(A, checkpoint(7, 1, 16))
    pc.state.reset_epoch(A, pc.now_ms)
    pc.drain()
    pc.restart()
    pc.status(status(epoch=12))
    assert pc.take(Survey) == []
    assert pc.checkpoint(A, checkpoint(7, 1, 32)) == (False, 1, 32)
    pc.status(status(epoch=13))
    assert [each.session for each in pc.take(Survey)] == [session_id(7)]


@pytest.mark.spec("D12", "R-210")
async def test_an_operator_resets_an_epoch_and_leaves_a_trace(tmp_path: Path) -> None:
    async with world(tmp_path) as pc:
        await pc.report(status(A, epoch=2**53 - 1, ttl_ms=50))
        with refused(registry.STALE_EPOCH):
            await pc.report(status(A, epoch=12))
        for name in ("fe", "ii1", "client", "is", "nobody"):
            for instance in (A, B):
                with refused(registry.FORBIDDEN):
                    await pc.reset_epoch(instance, name)
        with refused(registry.NOT_FOUND):
            await pc.reset_epoch(B)
        await until(lambda: not pc.controller.state.is_active(A))
        with capture_logs() as logs:
            assert await pc.reset_epoch(A) == 2**53 - 1
        (line,) = [line for line in logs if line["event"] == "epoch reset by an operator"]
        assert (line["operator"], line["instance"], line["epoch"]) == ("spiffe://t/pc", A, 2**53 - 1)
        assert await pc.report(status(A, epoch=12)) == "active"
        with refused(registry.INVALID_STATE):
            await pc.reset_epoch(A)
        assert (await pc.assign()).binding.instance == A
