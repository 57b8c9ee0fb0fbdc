"""Prefetch directives of an instance, on a clock of the test's own."""

from __future__ import annotations

import pytest

from kvsp.protocol import limits, registry
from kvsp.protocol.records import DirectiveBlock
from services.instance import directives
from services.instance.directives import KEPT_MAX
from services.instance.instructions import BeginDirective, StopDirective
from tests.services.holder_states import refused
from tests.services.instance_states import FOREIGN, H1, H2, Driver, block_key, directive, session_id


def outcome(driver: Driver, block: int, *, loaded: bool, of: int = 1) -> None:
    driver.state.block_outcome(driver.now, session_id(of), bytes.fromhex(block_key(block)), loaded=loaded)


def status(driver: Driver, of: int = 1) -> tuple[str, list[str]]:
    found = driver.state.directive(session_id(of))
    return found.state, found.loaded


@pytest.mark.spec("U-18", "R-129")
@pytest.mark.parametrize(
    ("loaded", "state"), [([True, True], "complete"), ([False, True], "partial"), ([False, False], "failed")]
)
def test_terminal_states(loaded: list[bool], state: str) -> None:
    driver = Driver()
    assert driver.state.prefetch(driver.now, directive()).state == "pending"
    outcome(driver, 1, loaded=loaded[1])
    assert status(driver)[0] == "pending"
    outcome(driver, 0, loaded=loaded[0])
    assert status(driver) == (state, [block_key(i) for i in (0, 1) if loaded[i]])  # in directive order


@pytest.mark.spec("R-130", "U-18")
@pytest.mark.parametrize("loaded", [0, 1])
def test_the_deadline_makes_it_partial(loaded: int) -> None:
    driver = Driver()
    driver.state.prefetch(driver.now, directive(deadline_ms=50))
    for block in range(loaded):
        outcome(driver, block, loaded=True)
    driver.wait(49)
    assert not driver.took(StopDirective)
    driver.wait(1)
    assert driver.took(StopDirective) == [StopDirective(session_id())]
    assert status(driver) == ("partial", [block_key(0)][:loaded])
    outcome(driver, 1, loaded=True)  # too late
    assert status(driver) == ("partial", [block_key(0)][:loaded])


@pytest.mark.spec("U-18", "R-129")
def test_a_terminal_state_is_kept() -> None:
    driver = Driver()
    driver.state.prefetch(driver.now, directive(deadline_ms=50))
    driver.wait(60_050)
    assert status(driver)[0] == "partial"
    driver.wait(600_000)
    refused(registry.NOT_FOUND, lambda: driver.state.directive(session_id()))
    refused(registry.NOT_FOUND, lambda: driver.state.directive(session_id(9)))


@pytest.mark.spec("U-19")
def test_repeats() -> None:
    driver = Driver()
    driver.state.prefetch(driver.now, directive())
    driver.take()
    outcome(driver, 0, loaded=True)
    repeated = driver.state.prefetch(driver.now, directive())
    assert repeated.loaded == [block_key(0)]
    assert not driver.took(BeginDirective)
    refused(registry.CONFLICT, lambda: driver.state.prefetch(driver.now, directive(deadline_ms=999)))
    refused(registry.CONFLICT, lambda: driver.state.prefetch(driver.now, directive(request_ref="x")))
    driver.wait(2000)
    assert driver.state.prefetch(driver.now, directive()).state == "partial"
    driver.state.put_state(driver.now, "sleeping")
    assert driver.state.prefetch(driver.now, directive()).state == "partial"


@pytest.mark.spec("R-131", "R-214", "D13")
def test_pending_directives_are_bounded() -> None:
    driver = Driver()
    for i in range(limits.DIRECTIVES_PENDING_MAX):
        driver.state.prefetch(driver.now, directive(i, deadline_ms=2500))
    error = refused(registry.TOO_MANY_REQUESTS, lambda: driver.state.prefetch(driver.now, directive(99)))
    assert error.retry_after_s == 3
    driver.wait(2500)
    assert driver.state.prefetch(driver.now, directive(99)).state == "pending"


@pytest.mark.spec("U-20", "R-211", "D10")
def test_only_trusted_holders_are_sources() -> None:
    driver = Driver()
    sources = [H1, "https://stranger.example/", "moqt://relay.example/", H2]
    blocks = [DirectiveBlock(block_key(0), sources), DirectiveBlock(block_key(1), sources[1:3])]
    driver.state.prefetch(driver.now, directive(blocks=blocks))
    begun = driver.took(BeginDirective)[0]
    assert [sources for _, sources in begun.blocks] == [(H1, H2), ()]


@pytest.mark.spec("U-20", "R-017", "U-10")
def test_refusals() -> None:
    driver = Driver()
    refused(registry.SCOPE_DENIED, lambda: driver.state.prefetch(driver.now, directive(scope_id=FOREIGN)))
    refused(registry.INCOMPATIBLE, lambda: driver.state.prefetch(driver.now, directive(compat_id="22" * 32)))
    many = [DirectiveBlock(block_key(i), [H1]) for i in range(limits.DIRECTIVE_BLOCKS_MAX + 1)]
    refused(registry.CONTENT_TOO_LARGE, lambda: driver.state.prefetch(driver.now, directive(blocks=many)))
    crowded = [DirectiveBlock(block_key(0), [H1] * (limits.DIRECTIVE_SOURCES_MAX + 1))]
    refused(registry.CONTENT_TOO_LARGE, lambda: driver.state.prefetch(driver.now, directive(blocks=crowded)))


def test_what_is_loading_stops_when_the_instance_drains() -> None:
    driver = Driver()
    driver.generate()
    driver.state.prefetch(driver.now, directive())
    outcome(driver, 0, loaded=True)
    driver.state.put_state(driver.now, "draining")
    assert driver.took(StopDirective) == [StopDirective(session_id())]
    assert status(driver) == ("partial", [block_key(0)])


@pytest.mark.spec("R-131", "U-18")
def test_terminal_directives_keep_no_place_from_new_ones() -> None:
    driver = Driver()
    count = 3 * KEPT_MAX // 2
    for i in range(count):
        driver.state.prefetch(driver.now, directive(i))
        for block in (0, 1):
            outcome(driver, block, loaded=True, of=i)
        driver.wait(1)
        driver.take()
    assert status(driver, count - 1)[0] == "complete"
    assert status(driver, count - KEPT_MAX)[0] == "complete"
    refused(registry.NOT_FOUND, lambda: status(driver, count - KEPT_MAX - 1))  # the oldest


@pytest.mark.spec("R-131", "D13")
def test_the_keys_of_terminal_directives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directives, "KEPT_KEYS_MAX", 7)
    driver = Driver()
    driver.generate()  # so that it stays awake
    for i in range(5):
        driver.state.prefetch(driver.now, directive(i, deadline_ms=50))
    driver.wait(50)
    for i in range(2):
        refused(registry.NOT_FOUND, lambda i=i: status(driver, i))  # type: ignore[misc]
    assert [status(driver, i)[0] for i in (2, 3, 4)] == ["partial"] * 3
