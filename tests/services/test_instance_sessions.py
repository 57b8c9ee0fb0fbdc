"""Sessions of an instance that other parties cannot be asked about: silence, foreign scopes, false promises."""

from __future__ import annotations

import pytest

from kvsp.protocol import keys, registry
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import SessionCheckpoint
from services.instance.instructions import Ended, Fenced, Release, SendCheckpoint, StopSession
from services.instance.session import SILENCE_MS_MAX
from services.instance.settings import Settings
from services.instance.state import InstanceState
from services.placement.settings import Settings as PlacementSettings
from tests.services.holder_states import refused
from tests.services.instance_states import COMPAT, II1, KEY, SCOPE, Driver, checkpoint, sampler, session_id

OTHER_KEY = ScopeKey(b"o" * 32)
OTHER = keys.scope_id(OTHER_KEY).hex()


def of_two_scopes() -> Driver:
    """An instance that has the keys of two scopes."""
    driver = Driver()
    settings = Settings(base_uri=II1, epoch=5, compat_id=COMPAT, block_tokens=4, positions_max=1000)
    driver.state = InstanceState(settings, {SCOPE: KEY, OTHER: OTHER_KEY}, lambda scope: set(), driver.now)
    driver.introduce()
    return driver


# --- silence of the placement controller ----------------------------------------------


def silent(driver: Driver, ms: int) -> list[SessionCheckpoint]:
    """No checkpoint is answered for so long; those that were sent."""
    sent: list[SessionCheckpoint] = []
    for _ in range(ms // 1000):
        new = driver.took(SendCheckpoint)
        sent += [each.checkpoint for each in new]
        for each in new:
            driver.state.sessions.unanswered(driver.now, each.checkpoint.session, each.checkpoint.epoch)
        driver.wait(1000)
    return sent


@pytest.mark.spec("R-181", "D12")
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_session_that_nobody_answers_for_ends_before_it_could_be_taken_for_a_new_one(
    deterministic: bool,
) -> None:
    driver = Driver()
    driver.generate(sampler=sampler(deterministic=deterministic))
    driver.sample(70)
    assert silent(driver, SILENCE_MS_MAX - 5000)
    assert driver.state.sessions.running == 1
    silent(driver, 10_000)
    assert driver.last(Fenced) == Fenced(session_id(), 1)
    assert driver.last(StopSession) == StopSession(session_id(), 1)
    assert silent(driver, PlacementSettings().ended_ms) == []
    refused(registry.STALE_EPOCH, driver.generate)


def test_an_answer_ends_the_silence() -> None:
    driver = Driver()
    driver.generate()
    driver.sample(1)
    for index in range(1, 4):
        assert silent(driver, SILENCE_MS_MAX - 20_000)
        while not driver.took(SendCheckpoint):
            driver.wait(100)
        driver.acknowledge()
        driver.sample(1, index)
    assert driver.state.sessions.running == 1


def test_the_silence_is_shorter_than_the_memory_of_the_controller() -> None:
    assert PlacementSettings().ended_ms >= 2 * SILENCE_MS_MAX


# --- determinism ----------------------------------------------------------------------


@pytest.mark.spec("R-175", "R-176")
@pytest.mark.parametrize("is_resumed", [True, False])
def test_an_engine_that_is_not_batch_invariant_makes_no_sampler_deterministic(is_resumed: bool) -> None:
    driver = Driver(batch_invariant=False)
    epoch, first = (2, 3) if is_resumed else (1, 0)
    if is_resumed:
        driver.resume(2, checkpoint(sampler=sampler(3, deterministic=True)))
        driver.acknowledge()
    else:
        driver.generate(sampler=sampler(deterministic=True))
    driver.sample(1, first, epoch=epoch)
    assert not driver.took(Release)
    sent = driver.last(SendCheckpoint).checkpoint
    assert (sent.output_offset, sent.sampler.deterministic) == (first + 1, False)
    driver.acknowledge()
    assert driver.last(Release).tokens == [100 + first]


# --- scopes ---------------------------------------------------------------------------


@pytest.mark.spec("D1", "R-210")
def test_the_epoch_of_a_session_is_not_told_to_other_scopes() -> None:
    """Whoever knows the id of a session that has gone gets the answer that an unknown one gives."""
    driver = of_two_scopes()
    driver.resume(4)
    driver.state.sessions.end(driver.now, session_id(), {SCOPE})
    refused(registry.STALE_EPOCH, lambda: driver.generate(epoch=3))
    for epoch in (2, 3, 4, 5):
        refused(registry.NOT_FOUND, lambda e=epoch: driver.generate(epoch=e, scope_id=OTHER))  # type: ignore[misc]
    driver.generate(scope_id=OTHER)  # theirs to use as any other


@pytest.mark.spec("D1", "R-181")
def test_a_session_is_not_resumed_in_another_scope() -> None:
    driver = of_two_scopes()
    driver.generate()
    made = checkpoint(scope_id=OTHER)
    for epoch in (2, 3):
        refused(registry.NOT_FOUND, lambda e=epoch: driver.resume(e, made))  # type: ignore[misc]
    assert driver.state.sessions.running == 1
    assert not driver.took(Fenced)


# --- what is kept ---------------------------------------------------------------------


def test_of_a_finished_session_the_output_is_kept_and_not_the_prompt() -> None:
    driver = Driver()
    driver.generate(sampler=sampler(deterministic=True))
    found = driver.state.sessions.get(session_id(), 1)
    assert found is not None
    driver.sample(6)
    assert found.prompt is not None
    name = driver.state.sessions.block_key(session_id(), 1, 2)
    driver.finish()
    while not driver.took(Ended):
        driver.acknowledge()
    assert found.prompt is None
    assert not found._keys
    driver.generate(sampler=sampler(deterministic=True))  # who attaches brings it again
    assert found.prompt is None
    assert driver.state.sessions.output(session_id(), 1, 4).tokens == [104, 105]
    assert driver.state.sessions.block_key(session_id(), 1, 2) == name
