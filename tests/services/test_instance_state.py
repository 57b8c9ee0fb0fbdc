"""The rules of an inference instance on a clock of the test's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import keys, registry
from kvsp.protocol.records import CheckpointReply
from services.instance import lifecycle
from services.instance.instructions import (
    EmptyDevice,
    Ended,
    Fenced,
    ProvidePrompt,
    Release,
    SendCheckpoint,
    SendStatus,
    StartSession,
    StopSession,
)
from tests.services.holder_states import refused
from tests.services.instance_states import (
    BLOCK,
    COMPAT,
    FOREIGN,
    KEY,
    SCOPE,
    Driver,
    checkpoint,
    directive,
    sampler,
    session_id,
)


def released(driver: Driver) -> list[int]:
    driver.take()
    return [token for each in driver.asked if isinstance(each, Release) for token in each.tokens]


# --- lifecycle ------------------------------------------------------------------------


@pytest.mark.spec("R-107", "U-36")
@pytest.mark.parametrize("before", sorted(registry.INSTANCE_STATES))
@pytest.mark.parametrize("wanted", sorted(registry.INSTANCE_STATES))
def test_transitions(before: Any, wanted: str) -> None:
    if "failed" in (before, wanted):
        refused(registry.INVALID_STATE, lambda: lifecycle.changed(before, wanted))
        return
    after = lifecycle.changed(before, wanted)
    assert lifecycle.changed(after, wanted) == after  # idempotent
    assert (after == "active") == (wanted == "active")


@pytest.mark.spec("R-109", "U-36")
def test_sleeping_while_sessions_run_is_draining_until_they_end() -> None:
    driver = Driver()
    driver.generate(sampler=sampler(deterministic=True))
    assert driver.state.put_state(driver.now, "sleeping") == "draining"
    assert driver.last(SendStatus).status.state == "draining"
    refused(registry.INVALID_STATE, lambda: driver.generate(session_id(2)))
    refused(registry.INVALID_STATE, lambda: driver.resume(2, checkpoint(session_id(2))))
    refused(registry.INVALID_STATE, lambda: driver.state.prefetch(driver.now, directive()))
    driver.generate(sampler=sampler(deterministic=True))  # attaching to what it has is no new session
    driver.sample(3)
    assert driver.state.state == "draining"
    driver.finish()
    driver.acknowledge()
    assert driver.state.state == "sleeping"
    asked = driver.asked + driver.take()
    assert EmptyDevice() in asked
    assert driver.last(SendStatus).status.state == "sleeping"


@pytest.mark.spec("R-105", "R-109")
def test_a_member_of_a_group_does_not_sleep_before_it_has_left() -> None:
    """Its shard is part of a session that runs elsewhere."""
    driver = Driver(sleep_after_ms=5000)
    driver.state.memberships = 1
    driver.wait(20_000)
    assert all(each.status.requested_state is None for each in driver.took(SendStatus))
    assert driver.state.put_state(driver.now, "sleeping") == "draining"
    driver.wait(1000)
    assert driver.state.state == "draining"
    driver.state.memberships = 0
    driver.wait(1000)
    assert driver.state.state == "sleeping"


@pytest.mark.spec("R-110", "U-36")
def test_a_sleeping_instance_wakes_only_by_a_state_change() -> None:
    driver = Driver()
    assert driver.state.put_state(driver.now, "sleeping") == "sleeping"
    refused(registry.INVALID_STATE, driver.generate)
    driver.wait(100_000)
    assert driver.state.state == "sleeping"
    assert driver.state.put_state(driver.now, "active") == "active"
    driver.generate()


@pytest.mark.spec("U-36")
def test_draining_can_be_called_off() -> None:
    driver = Driver()
    driver.generate()
    driver.state.put_state(driver.now, "draining")
    assert driver.state.put_state(driver.now, "active") == "active"
    driver.generate(session_id(2))


# --- status ---------------------------------------------------------------------------


@pytest.mark.spec("R-100")
def test_at_least_three_statuses_within_each_ttl() -> None:
    driver = Driver(status_ttl_ms=1200)
    at: list[int] = []
    for _ in range(6000):
        driver.wait(1)
        at += [driver.now] * len(driver.took(SendStatus))
    assert max(b - a for a, b in itertools.pairwise(at)) <= 400
    assert len(at) < 6000 / 200


@pytest.mark.spec("R-105", "R-106")
@pytest.mark.parametrize(("view", "after"), [("draining", "sleeping"), ("active", "active")])
def test_an_idle_instance_asks_to_sleep(view: str, after: str) -> None:
    driver = Driver(sleep_after_ms=5000)
    driver.generate(sampler=sampler(deterministic=True))
    driver.wait(20_000)
    assert all(each.status.requested_state is None for each in driver.took(SendStatus))
    driver.finish()
    driver.wait(4900)
    assert driver.last(SendStatus).status.requested_state is None
    driver.wait(500)
    asking = driver.last(SendStatus).status
    assert asking.requested_state == "sleeping"
    driver.state.status_answered(driver.now, asking, view)
    assert driver.state.state == after
    driver.wait(4000)
    assert driver.last(SendStatus).status.requested_state is None  # a refusal is not questioned at once


@pytest.mark.spec("R-106")
def test_only_an_answer_to_the_request_drains() -> None:
    driver = Driver()
    driver.wait(500)
    driver.state.status_answered(driver.now, driver.last(SendStatus).status, "draining")
    assert driver.state.state == "active"


@pytest.mark.spec("R-103", "D12")
def test_a_status_refused_as_stale_ends_this_life() -> None:
    driver = Driver()
    driver.generate()
    driver.sample(2)
    driver.state.status_refused(driver.now, registry.UNAVAILABLE)
    assert driver.state.state == "active"
    driver.take()
    driver.state.status_refused(driver.now, registry.STALE_EPOCH)
    asked = driver.take()
    assert StopSession(session_id(), 1) in asked
    assert Fenced(session_id(), 1) in asked
    assert driver.state.state == "failed"
    refused(registry.INVALID_STATE, lambda: driver.state.put_state(driver.now, "active"))
    refused(registry.INVALID_STATE, lambda: driver.generate(session_id(2)))


# --- release and checkpoints ----------------------------------------------------------


@pytest.mark.spec("R-175")
def test_no_token_leaves_before_its_checkpoint_is_acknowledged() -> None:
    driver = Driver()
    driver.generate()
    driver.sample(5)
    sent = driver.took(SendCheckpoint)
    assert [each.checkpoint.output_offset for each in sent] == [1]
    assert released(driver) == []
    driver.acknowledge()
    assert released(driver) == [100]
    # what came while one was under way goes in one
    assert driver.acknowledge() == 5
    assert released(driver) == [100, 101, 102, 103, 104]


@pytest.mark.spec("R-175")
@given(st.data())
def test_released_is_always_covered(data: st.DataObject) -> None:
    driver = Driver()
    driver.generate()
    covered = index = 0
    for _ in range(40):
        match data.draw(st.sampled_from(["sample", "acknowledge", "lose", "wait"])):
            case "sample":
                driver.sample(1, index)
                index += 1
            case "acknowledge" if any(isinstance(each, SendCheckpoint) for each in driver.asked + driver.take()):
                sent = driver.last(SendCheckpoint).checkpoint
                session = driver.state.sessions.get(session_id(), 1)
                assert session is not None
                if session.in_flight is not None:
                    covered = max(covered, driver.acknowledge())
                    assert sent.generated == [100 + i for i in range(sent.output_offset)]
            case "lose":
                driver.state.sessions.unanswered(driver.now, session_id(), 1)
            case "wait":
                driver.wait(data.draw(st.integers(1, 3000)))
        assert released(driver) == [100 + i for i in range(covered)]


@pytest.mark.spec("R-170", "R-175", "R-176")
@pytest.mark.parametrize("block", [16, 128])
def test_deterministic_tokens_leave_at_once_and_are_checkpointed_on_schedule(block: int) -> None:
    driver = Driver(block_tokens=block)
    driver.generate(sampler=sampler(deterministic=True))
    offsets = []
    for index in range(200):
        driver.sample(1, index)
        assert len(released(driver)) == index + 1
        for each in driver.asked:
            if isinstance(each, SendCheckpoint):
                offsets.append(each.checkpoint.output_offset)
                assert each.checkpoint.sampler.step == offsets[-1]
        driver.asked = [each for each in driver.asked if isinstance(each, Release)]
        if offsets:
            driver.state.sessions.acknowledged(driver.now, session_id(), CheckpointReply(1, offsets[-1]))
    assert {n for n in range(1, 201) if (10 + n) % block == 0} <= set(offsets)
    assert all(b - a <= 64 for a, b in zip([0, *offsets], offsets, strict=False))


def test_an_unanswered_checkpoint_is_sent_again_with_all_that_came_since() -> None:
    driver = Driver()
    driver.generate()
    driver.sample(1)
    driver.take()
    driver.state.sessions.unanswered(driver.now, session_id(), 1)
    driver.sample(3, 1)
    assert not driver.took(SendCheckpoint)
    waits = []
    for _ in range(8):
        before = driver.now
        while not (sent := driver.took(SendCheckpoint)):
            driver.wait(1)
        assert sent[0].checkpoint.output_offset == 4
        waits.append(driver.now - before)
        driver.state.sessions.unanswered(driver.now, session_id(), 1)
    assert waits[0] <= 100
    assert waits[-1] == 2000
    assert released(driver) == []
    driver.wait(2000)
    driver.acknowledge()
    assert len(released(driver)) == 4


@pytest.mark.spec("R-175")
def test_the_end_waits_for_the_last_checkpoint() -> None:
    driver = Driver()
    driver.generate()
    driver.sample(3)
    driver.finish()
    driver.acknowledge()
    assert not driver.took(Ended)
    driver.acknowledge()
    assert driver.took(Ended) == [Ended(session_id(), 1, "length", 3)]
    assert not driver.took(SendCheckpoint)
    assert driver.state.sessions.output(session_id(), 1, 1).tokens == [101, 102]


def test_output_is_kept_for_a_while_after_the_end() -> None:
    driver = Driver(keep_output_ms=60_000)
    driver.generate(sampler=sampler(deterministic=True))
    driver.sample(2)
    driver.finish()
    driver.acknowledge()
    driver.wait(59_000)
    assert driver.state.sessions.output(session_id(), 1, 0).tokens == [100, 101]
    driver.wait(2000)
    refused(registry.STALE_EPOCH, lambda: driver.state.sessions.output(session_id(), 1, 0))
    assert len(driver.state.sessions) == 0


# --- fencing --------------------------------------------------------------------------


@pytest.mark.spec("R-181", "R-175", "D12")
def test_a_refused_checkpoint_fences_the_session() -> None:
    driver = Driver()
    driver.generate()
    driver.sample(5)
    driver.acknowledge()
    driver.take()
    driver.state.sessions.checkpoint_refused(driver.now, session_id(), 1)
    assert driver.take() == [StopSession(session_id(), 1), Fenced(session_id(), 1)]
    driver.sample(3, 5)
    driver.finish()
    assert driver.take() == []
    refused(registry.STALE_EPOCH, driver.generate)
    refused(registry.STALE_EPOCH, lambda: driver.resume(1, checkpoint(epoch=0)))
    assert driver.resume(2) is not None


@pytest.mark.spec("R-181")
def test_a_reply_that_is_ahead_fences_too() -> None:
    driver = Driver()
    driver.generate()
    driver.sample(2)
    driver.acknowledge(recorded=9)
    assert released(driver) == []
    assert driver.last(Fenced) == Fenced(session_id(), 1)


@pytest.mark.spec("R-177", "R-181")
def test_generate_by_epoch() -> None:
    driver = Driver()
    refused(registry.NOT_FOUND, lambda: driver.generate(epoch=2))
    refused(registry.NOT_FOUND, lambda: driver.generate(from_index=3))
    refused(registry.STALE_EPOCH, lambda: driver.generate(epoch=0))
    driver.resume(4)
    refused(registry.STALE_EPOCH, lambda: driver.generate(epoch=3))
    refused(registry.NOT_FOUND, lambda: driver.generate(epoch=5))
    driver.generate(epoch=4)
    assert not driver.took(StartSession)
    assert driver.state.sessions.output(session_id(), 4, 1).tokens == [101, 102]


@pytest.mark.spec("R-175", "R-181")
def test_a_start_that_the_controller_has_not_heard_of_begins_no_session() -> None:
    driver = Driver(is_known=False)
    refused(registry.NOT_FOUND, driver.generate)
    refused(registry.NOT_FOUND, lambda: driver.resume(2))
    driver.introduce()
    driver.generate()
    assert driver.resume(2) is not None


def test_generate_refusals() -> None:
    driver = Driver(batch_size=1, queue_max=1)
    refused(registry.SCOPE_DENIED, lambda: driver.generate(scope_id=FOREIGN))
    refused(registry.INCOMPATIBLE, lambda: driver.generate(compat_id="22" * 32))
    for bad in ([], list(range(1000))):
        refused(registry.BAD_REQUEST, lambda bad=bad: driver.generate(prompt=bad))  # type: ignore[misc]
    refused(registry.BAD_REQUEST, lambda: driver.generate(sampler=sampler(step=1)))
    for params in ({"max_tokens": 0}, {"max_tokens": "5"}, {"stop_tokens": [-1]}, {"stop_tokens": 3}):
        refused(registry.BAD_REQUEST, lambda params=params: driver.generate(sampler=sampler(**params)))  # type: ignore[misc]
    driver.generate(session_id(1))
    driver.generate(session_id(2))
    error = refused(registry.UNAVAILABLE, lambda: driver.generate(session_id(3)))
    assert error.retry_after_s is not None


def test_ending() -> None:
    driver = Driver()
    driver.generate()
    for session, scopes in ((session_id(2), {SCOPE}), (session_id(), {FOREIGN})):
        refused(registry.NOT_FOUND, lambda s=session, c=scopes: driver.state.sessions.end(driver.now, s, c))  # type: ignore[misc]
    driver.take()
    driver.state.sessions.end(driver.now, session_id(), {SCOPE})
    assert driver.take() == [StopSession(session_id(), 1), Fenced(session_id(), 1)]
    refused(registry.NOT_FOUND, lambda: driver.state.sessions.end(driver.now, session_id(), {SCOPE}))


# --- resume ---------------------------------------------------------------------------


@pytest.mark.spec("R-180", "U-33")
def test_resume_continues_at_the_checkpoint() -> None:
    driver = Driver()
    made = checkpoint(generated=3)
    started = driver.resume(2, made)
    assert started is not None
    # 10 prompt tokens and 3 generated ones: blocks of 4 are complete up to position 12, the last a generated one
    whole = keys.block_keys(KEY, bytes.fromhex(COMPAT), [*range(10), 100, 101, 102], BLOCK)
    assert started.block_keys == whole
    assert (started.known_from, started.tokens) == (8, [8, 9, 100, 101, 102])
    assert (started.prompt_tokens, started.sampler.step) == (10, 3)
    first = driver.last(SendCheckpoint).checkpoint
    assert (first.epoch, first.output_offset) == (2, 3)
    assert first.generated == made.generated
    driver.sample(1, 2, epoch=2)  # an index it has: not taken
    driver.sample(2, 3, epoch=2)
    driver.acknowledge()
    driver.acknowledge()
    assert released(driver) == [103, 104]


@pytest.mark.spec("U-35", "R-181", "R-182")
def test_resume_by_epoch() -> None:
    driver = Driver()
    assert driver.resume(3) is not None
    assert driver.resume(3) is None  # the same again: 202, no restart
    refused(registry.STALE_EPOCH, lambda: driver.resume(3, checkpoint(generated=2)))
    refused(registry.STALE_EPOCH, lambda: driver.resume(2))
    driver.take()
    assert driver.resume(4) is not None
    assert Fenced(session_id(), 3) in driver.asked
    assert StopSession(session_id(), 3) in driver.asked
    driver.state.put_state(driver.now, "draining")
    assert driver.resume(4) is None  # draining, and still its own
    refused(registry.INVALID_STATE, lambda: driver.resume(5))


@pytest.mark.spec("R-182")
def test_resume_is_checked_in_order() -> None:
    driver = Driver()
    driver.resume(3)
    driver.state.put_state(driver.now, "draining")
    wrong: dict[str, Any] = {"scope_id": FOREIGN, "compat_id": "22" * 32}
    refused(registry.SCOPE_DENIED, lambda: driver.resume(2, checkpoint(**wrong)))
    del wrong["scope_id"]
    refused(registry.INCOMPATIBLE, lambda: driver.resume(2, checkpoint(**wrong)))
    refused(registry.BAD_REQUEST, lambda: driver.resume(2, checkpoint(prompt_tail=[1] * BLOCK)))
    refused(registry.STALE_EPOCH, lambda: driver.resume(2))
    refused(registry.INVALID_STATE, lambda: driver.resume(4))


def test_a_session_that_is_complete_resumes_to_its_end() -> None:
    driver = Driver()
    assert driver.resume(2, checkpoint(sampler=sampler(3, max_tokens=3))) is None
    driver.acknowledge()
    assert driver.last(Ended) == Ended(session_id(), 2, "length", 3)
    stopped = checkpoint(session_id(2), sampler=sampler(3, stop_tokens=[102]))
    assert driver.resume(2, stopped) is None
    driver.acknowledge()
    assert driver.last(Ended) == Ended(session_id(2), 2, "stop", 3)


@pytest.mark.spec("R-180", "R-088")
def test_a_lost_prefix_waits_for_the_prompt() -> None:
    driver = Driver(prompt_wait_ms=5000)
    driver.resume(2)
    driver.state.sessions.prefix_lost(driver.now, session_id(), 2)
    assert not driver.took(ProvidePrompt)
    refused(registry.BAD_REQUEST, lambda: driver.generate(epoch=2, prompt=list(range(1, 11))))
    driver.generate(epoch=2)
    assert driver.took(ProvidePrompt) == [ProvidePrompt(session_id(), 2, list(range(10)))]
    driver.state.sessions.prefix_lost(driver.now, session_id(), 2)  # more of it is lost: it is here now
    assert driver.took(ProvidePrompt)
    driver.wait(10_000)
    assert not driver.took(StopSession)


def test_a_prompt_that_never_comes_ends_the_session() -> None:
    driver = Driver(prompt_wait_ms=5000)
    driver.resume(2)
    driver.acknowledge()
    driver.state.sessions.prefix_lost(driver.now, session_id(), 2)
    driver.wait(4900)
    assert not driver.took(StopSession)
    driver.wait(200)
    assert driver.took(Ended) == [Ended(session_id(), 2, "failed", 3)]


def test_a_session_that_comes_back_keeps_its_prompt() -> None:
    driver = Driver()
    driver.generate()
    driver.take()
    started = driver.resume(2)
    assert started is not None
    assert started.known_from == 0
    assert started.tokens == [*range(10), 100, 101, 102]
