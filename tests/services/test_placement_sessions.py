"""Checkpoints, ownership and quotas of sessions."""

from __future__ import annotations

import pytest

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ResumeRequest
from services.instance.session import SILENCE_MS_MAX
from services.placement.instructions import (
    Bind,
    Ended,
    Survey,
)
from services.placement.quota import Rate
from services.placement.settings import Settings
from tests.services.placement_records import (
    BLOCK_TOKENS,
    COMPAT,
    OTHER_COMPAT,
    OTHER_SCOPE,
    OWNER,
    A,
    B,
    C,
    Driven,
    assigned,
    checkpoint,
    fail,
    keys,
    refused,
    sampler,
    session_id,
    status,
)

# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.spec("R-170", "R-172", "U-34")
def test_the_highest_offset_is_kept_and_lower_ones_are_acknowledged() -> None:
    pc = assigned(B)
    assert pc.checkpoint(A, checkpoint(1, 1, 64)) == (True, 1, 64)
    assert pc.checkpoint(A, checkpoint(1, 1, 128)) == (False, 1, 128)
    assert pc.checkpoint(A, checkpoint(1, 1, 64)) == (False, 1, 128)
    assert pc.checkpoint(A, checkpoint(1, 1, 128)) == (False, 1, 128)
    fail(pc)
    pc.survey()
    ((_, request),) = pc.resumes()
    assert request == ResumeRequest(2, checkpoint(1, 1, 128))


@pytest.mark.spec("R-172", "U-34")
def test_the_first_checkpoint_may_cover_nothing() -> None:
    pc = assigned()
    assert pc.checkpoint(A, checkpoint(1, 1, 0)) == (True, 1, 0)
    assert pc.checkpoint(A, checkpoint(1, 1, 0)) == (False, 1, 0)


@pytest.mark.spec("R-172", "R-175")
def test_acknowledged_tokens_are_never_given_up_for_fewer_of_a_later_epoch() -> None:
    pc = assigned(B)
    pc.checkpoint(A, checkpoint(1, 1, 128))
    fail(pc)
    pc.survey()
    ((_, request),) = pc.resumes()
    pc.resumed(request)
    assert pc.checkpoint(B, checkpoint(1, 2, 64)) == (False, 2, 128)
    assert pc.checkpoint(B, checkpoint(1, 2, 129)) == (False, 2, 129)


@pytest.mark.spec("R-173", "R-174", "R-017", "U-34")
def test_the_order_of_refusals() -> None:
    """scope -> compat -> epoch (lower, higher) -> binding: every case violates all that come after it as well."""
    pc = assigned(B)
    fail(pc)
    pc.survey()
    ((_, request),) = pc.resumes()
    pc.resumed(request)
    everything = {"compat_id": OTHER_COMPAT, "scope_id": OTHER_SCOPE}
    with refused(registry.SCOPE_DENIED):
        pc.checkpoint(A, checkpoint(1, 1, 16, **everything))
    with refused(registry.INCOMPATIBLE):
        pc.checkpoint(A, checkpoint(1, 1, 16, compat_id=OTHER_COMPAT))
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(A, checkpoint(1, 1, 16))
    with refused(registry.CONFLICT):
        pc.checkpoint(A, checkpoint(1, 3, 16))
    with refused(registry.FORBIDDEN):
        pc.checkpoint(A, checkpoint(1, 2, 16))
    with refused(registry.CONFLICT):  # whose session it is may know what is wrong
        pc.checkpoint(B, checkpoint(1, 2, 16, scope_id=OTHER_SCOPE))
    assert pc.checkpoint(B, checkpoint(1, 2, 16)) == (True, 2, 16)


@pytest.mark.spec("D8", "R-174")
def test_what_a_session_is_up_to_is_told_to_nobody_of_another_scope() -> None:
    """Whatever it guesses, and whether the session runs, has ended, or was ended by an earlier process."""
    pc = assigned()
    pc.checkpoint(A, checkpoint(1, 1, 16))
    answers: set[tuple[object, str]] = set()

    def guess() -> None:
        for epoch in (0, 1, 2):
            for compat_id in (COMPAT, OTHER_COMPAT):
                with pytest.raises(KvspError) as error:
                    pc.checkpoint(C, checkpoint(1, epoch, 1, compat_id=compat_id, scope_id=OTHER_SCOPE))
                answers.add((error.value.problem, error.value.detail))

    guess()
    pc.end(1)
    guess()
    pc.restart()
    guess()
    assert answers == {(registry.SCOPE_DENIED, "")}
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(A, checkpoint(1, 1, 16))


@pytest.mark.spec("U-34", "U-53")
def test_an_unknown_session_is_bound_to_who_checkpoints_it_in_any_epoch() -> None:
    pc = Driven()
    pc.status(status(A))
    pc.status(status(B))
    assert pc.checkpoint([C, A], checkpoint(7, 41, 16)) == (True, 41, 16)
    assert pc.checkpoint([C, A], checkpoint(7, 41, 32)) == (False, 41, 32)
    with refused(registry.FORBIDDEN):
        pc.checkpoint(B, checkpoint(7, 41, 48))
    with refused(registry.NOT_FOUND):
        pc.state.binding("", session_id(7))  # it is nobody's to follow
    fail(pc)
    pc.survey()
    assert pc.resumes() == [(B, ResumeRequest(42, checkpoint(7, 41, 32)))]


@pytest.mark.spec("U-34", "R-101")
def test_who_checkpoints_without_reporting_is_given_a_ttl_to_report() -> None:
    pc = Driven()
    pc.checkpoint(A, checkpoint(7, 3, 16))
    pc.tick(30_000)
    pc.status(status(A, epoch=5))  # its first report: no restart
    assert pc.take(Survey) == []
    assert pc.checkpoint(A, checkpoint(7, 3, 32)) == (False, 3, 32)
    pc.checkpoint(B, checkpoint(8, 3, 16))
    pc.tick(30_000 + limits.STATUS_TTL_MS_MAX)
    assert {each.session for each in pc.take(Survey)} == {session_id(7), session_id(8)}


@pytest.mark.spec("R-047", "D13")
def test_checkpoints_are_bounded_in_size() -> None:
    pc = Driven(block_tokens={COMPAT: BLOCK_TOKENS})
    pc.status(status(A))
    with refused(registry.BAD_REQUEST):
        pc.checkpoint(A, checkpoint(1, 1, prompt_tail=list(range(BLOCK_TOKENS))))
    for changes in (
        {"prompt_blocks": keys(limits.LOOKUP_KEYS_MAX + 1)},
        {"generated": [1] * ((1 << 20) + 1), "output_offset": (1 << 20) + 1},
        {"sampler": sampler(params={"x": "x" * (64 << 10)})},
    ):
        with refused(registry.CONTENT_TOO_LARGE):
            pc.checkpoint(A, checkpoint(1, 1, **changes))
    with refused(registry.INCOMPATIBLE):
        pc.checkpoint(A, checkpoint(1, 1, 1, compat_id=OTHER_COMPAT))
    assert pc.disk.keys() == {("instance", A)}


@pytest.mark.spec("D13")
def test_a_flood_of_checkpoints_is_refused_after_all_else_and_lets_up() -> None:
    pc = assigned(settings=Settings(session_rate=Rate(10, 1)))
    for offset in range(1, 11):
        pc.checkpoint(A, checkpoint(1, 1, offset))
    with refused(registry.TOO_MANY_REQUESTS):
        pc.checkpoint(A, checkpoint(1, 1, 11))
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(A, checkpoint(1, 0, 11))
    pc.now_ms = 100
    assert pc.checkpoint(A, checkpoint(1, 1, 11)) == (False, 1, 11)


@pytest.mark.spec("D13")
@pytest.mark.parametrize("settings", [Settings(instance_rate=Rate(10, 1)), Settings(octet_rate=Rate(10_000, 1))])
def test_one_instance_cannot_flood_with_many_sessions(settings: Settings) -> None:
    pc = Driven(settings)
    pc.status(status(A))
    pc.status(status(B))
    with refused(registry.TOO_MANY_REQUESTS):
        for n in range(20):
            pc.checkpoint(A, checkpoint(n, 1, 100))
    assert pc.state.sessions < 20
    pc.checkpoint(B, checkpoint(99, 1, 100))


@pytest.mark.spec("D13")
def test_sessions_that_begin_with_a_checkpoint_are_bounded() -> None:
    pc = Driven(Settings(sessions_max=3))
    pc.status(status(A))
    for n in range(3):
        pc.checkpoint(A, checkpoint(n, 1, 1))
    with refused(registry.TOO_MANY_REQUESTS):
        pc.checkpoint(A, checkpoint(3, 1, 1))


TOKENS = 10_000


@pytest.mark.spec("D13")
def test_what_is_kept_for_one_owner_is_bounded() -> None:
    pc = Driven(Settings(kept_octets_max=4 * (TOKENS + 500)))
    pc.status(status(A))
    pc.status(status(B))
    assert {pc.assign(n).binding.instance for n in (1, 2)} == {A, B}
    at = {each.instance: each for n in (1, 2) if (each := pc.state.binding(OWNER, session_id(n)))}
    pc.checkpoint(A, checkpoint(at[A].session, 1, TOKENS))
    with refused(registry.TOO_MANY_REQUESTS):  # together they are too large, though each instance has one of them
        pc.checkpoint(B, checkpoint(at[B].session, 1, TOKENS))
    with refused(registry.TOO_MANY_REQUESTS):
        pc.assign(3, prompt_tail=[1] * TOKENS, prompt_blocks=[], tokens=TOKENS)
    assert pc.checkpoint(B, checkpoint(at[B].session, 1, 1)) == (True, 1, 1)
    pc.assign(4, owner="spiffe://t/other", prompt_tail=[1] * 100, prompt_blocks=[], tokens=100)
    pc.state.end(OWNER, at[A].session, pc.now_ms)
    assert pc.checkpoint(B, checkpoint(at[B].session, 1, TOKENS)) == (False, 1, TOKENS)


@pytest.mark.spec("D13")
def test_what_is_kept_for_one_instance_is_bounded() -> None:
    pc = Driven(Settings(kept_octets_max=4 * (TOKENS + 500)))
    pc.checkpoint(A, checkpoint(1, 1, TOKENS))
    with refused(registry.TOO_MANY_REQUESTS):
        pc.checkpoint(A, checkpoint(2, 1, TOKENS))
    assert pc.checkpoint(A, checkpoint(3, 1, 1)) == (True, 1, 1)
    with refused(registry.TOO_MANY_REQUESTS):
        pc.checkpoint(A, checkpoint(3, 1, TOKENS))
    assert pc.checkpoint(A, checkpoint(3, 1, 1)) == (False, 1, 1)
    assert pc.checkpoint(B, checkpoint(2, 1, TOKENS)) == (True, 1, TOKENS)


@pytest.mark.spec("D13", "R-179")
def test_a_session_that_moves_takes_what_is_kept_of_it_along() -> None:
    pc = Driven(Settings(kept_octets_max=4 * (TOKENS + 500)))
    pc.status(status(A))
    pc.checkpoint(A, checkpoint(1, 1, TOKENS))
    pc.status(status(B))
    fail(pc)
    pc.survey()
    ((instance, request),) = pc.resumes()
    pc.resumed(request)
    assert instance == B
    with refused(registry.TOO_MANY_REQUESTS):
        pc.checkpoint(B, checkpoint(2, 1, TOKENS))
    assert pc.checkpoint(A, checkpoint(3, 1, TOKENS)) == (True, 1, TOKENS)


# --- ownership and end ----------------------------------------------------------------


@pytest.mark.spec("D8", "R-200")
def test_a_session_exists_for_its_owner_alone() -> None:
    pc = assigned()
    for owner, session in (("spiffe://t/other", 1), (OWNER, 2), ("", 1)):
        with refused(registry.NOT_FOUND):
            pc.state.binding(owner, session_id(session))
        with refused(registry.NOT_FOUND):
            pc.state.end(owner, session_id(session), 0)
    pc.end(1)
    assert pc.take(Ended) == [Ended(session_id(1))]
    with refused(registry.NOT_FOUND):
        pc.state.end(OWNER, session_id(1), 0)


@pytest.mark.spec("R-181", "R-173")
def test_an_ended_session_does_not_come_back() -> None:
    pc = assigned(B)
    pc.end(1)
    for _ in range(2):
        with refused(registry.STALE_EPOCH):
            pc.checkpoint(A, checkpoint(1, 1, 16))
        pc.restart()
        pc.status(status(A))
    fail(pc)
    assert pc.take(Survey) == []
    pc.tick(700_000)
    assert pc.disk.keys() == {("instance", A), ("instance", B)}


def test_a_session_that_ends_while_it_moves_stays_ended() -> None:
    pc = assigned(B)
    fail(pc)
    (asked,) = pc.take(Survey)
    pc.end(1)
    pc.state.surveyed(asked.session, asked.epoch, [], pc.now_ms)
    assert pc.state.instructions() == []
    pc = assigned(B)
    fail(pc)
    pc.survey()
    ((_, request),) = pc.resumes()
    pc.end(1)
    pc.resumed(request)
    assert pc.take(Bind) == []
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(B, checkpoint(1, 2, 16))


@pytest.mark.spec("D13", "R-216")
def test_a_session_that_nobody_ends_is_forgotten_in_the_end() -> None:
    pc = assigned(settings=Settings(session_idle_ms=50_000))
    for now_ms in range(0, 40_000, 1_000):
        pc.now_ms = now_ms
        pc.status(status(A))
    pc.checkpoint(A, checkpoint(1, 1, 16))
    for now_ms in range(40_000, 100_000, 1_000):
        pc.now_ms = now_ms
        pc.status(status(A))
    assert pc.take(Ended) == [Ended(session_id(1))]
    assert pc.state.sessions == 0


@pytest.mark.spec("D13")
def test_a_session_that_its_front_end_no_longer_follows_ends() -> None:
    """What a crashed front end had under way; another one of the same identity keeps its own."""
    pc = Driven(Settings(unfollowed_ms=50_000))
    pc.status(status(A))
    pc.assign(1)
    pc.assign(2)
    pc.checkpoint(A, checkpoint(3, 1, 1))  # it began with a checkpoint: nobody can follow it
    alive(pc, 100_000)
    assert pc.take(Ended) == []
    pc.unfollowed = {session_id(1), session_id(3)}
    alive(pc, 140_000)
    pc.unfollowed.clear()  # for a moment, as its connection broke
    alive(pc, 150_000)
    pc.unfollowed = {session_id(1), session_id(3)}
    alive(pc, 190_000)
    assert pc.take(Ended) == []
    alive(pc, 200_000)
    assert pc.take(Ended) == [Ended(session_id(1))]
    assert pc.state.sessions == 2


def test_after_a_restart_a_front_end_has_time_to_come_back() -> None:
    pc = Driven(Settings(unfollowed_ms=50_000), unfollowed={session_id(1)})
    pc.status(status(A))
    pc.assign(1)
    alive(pc, 40_000)
    pc.restart()
    alive(pc, 80_000)
    assert pc.take(Ended) == []
    alive(pc, 90_000)
    assert pc.take(Ended) == [Ended(session_id(1))]


def alive(pc: Driven, until_ms: int) -> None:
    """Time goes on, and all is well with A and its sessions."""
    while pc.now_ms < until_ms:
        pc.tick(min(pc.now_ms + 1_000, until_ms))
        pc.status(status(A))


@pytest.mark.spec("R-173", "R-181", "U-34")
def test_an_ended_session_is_known_for_longer_than_anybody_tries_to_go_on_with_it() -> None:
    """An instance that was cut off and comes back late must find its session ended, not begin a new one."""
    pc = assigned()
    pc.checkpoint(A, checkpoint(1, 1, 16))
    pc.end(1)
    alive(pc, 2 * SILENCE_MS_MAX - 1)
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(A, checkpoint(1, 1, 32))
    pc.restart()  # which may have been just before it came back
    pc.status(status(A))
    alive(pc, pc.now_ms + 2 * SILENCE_MS_MAX - 1)
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(A, checkpoint(1, 1, 32))
