"""Migration of sessions, and what a restart of the controller leaves of them."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvsp.protocol import limits, registry
from kvsp.protocol.records import ResumeRequest
from services.placement.instructions import (
    Bind,
    Binding,
    Ended,
    Persist,
    SendPrefetch,
    SendResume,
    SessionRow,
    Survey,
    WantInstance,
)
from services.placement.settings import Settings
from tests.services.placement_records import (
    H1,
    OTHER_SCOPE,
    OWNER,
    A,
    B,
    C,
    Driven,
    assigned,
    checkpoint,
    fail,
    refused,
    run,
    session_id,
    source,
    status,
)

# --- migration ------------------------------------------------------------------------


@pytest.mark.spec("R-101", "R-179", "R-180", "R-181")
def test_sessions_of_an_expired_instance_go_on_elsewhere() -> None:
    pc = assigned()
    pc.checkpoint(A, checkpoint(1, 1, 16))
    pc.now_ms = 2_000
    pc.status(status(B))
    pc.tick(3_000)
    (asked,) = pc.take(Survey)
    assert (asked.session, asked.epoch, asked.checkpoint) == (session_id(1), 2, checkpoint(1, 1, 16))
    # "Any message from the failed instance carrying the old epoch MUST be rejected", from the failure on.
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(A, checkpoint(1, 1, 32))
    assert pc.state.binding(OWNER, session_id(1)) is None
    pc.state.surveyed(asked.session, asked.epoch, [], pc.now_ms)
    pc.drain()
    assert pc.take(Bind) == []
    ((instance, request),) = pc.resumes()
    assert (instance, request) == (B, ResumeRequest(2, checkpoint(1, 1, 16)))
    pc.resumed(request)
    assert pc.take(Bind) == [Bind(Binding(session_id(1), 2, B))]
    assert pc.state.binding(OWNER, session_id(1)) == Binding(session_id(1), 2, B)
    assert pc.state.totals.migrations == 1


@pytest.mark.spec("R-179")
def test_a_session_without_any_checkpoint_is_started_anew_from_its_start() -> None:
    pc = assigned(B)
    fail(pc)
    pc.survey()
    assert pc.resumes() == [(B, ResumeRequest(2, checkpoint(1, 0, 0)))]


@pytest.mark.spec("R-102", "R-179", "U-37")
def test_a_restart_migrates_at_once_and_may_bring_the_session_back() -> None:
    pc = assigned()
    pc.status(status(A, epoch=11))
    pc.survey()
    assert pc.resumes() == [(A, ResumeRequest(2, checkpoint(1, 0, 0)))]


@pytest.mark.spec("R-179", "U-37")
def test_a_self_reported_failure_migrates_at_once() -> None:
    pc = assigned(B)
    assert pc.status(status(A, state="failed")) == "failed"
    assert len(pc.take(Survey)) == 1


@pytest.mark.spec("R-179", "R-119")
def test_the_new_instance_is_chosen_by_what_it_would_have_to_load_and_compute() -> None:
    pc = assigned(B, C)
    pc.checkpoint(A, checkpoint(1, 1, 61))  # prompt and output fill six blocks
    fail(pc)
    pc.survey([run(2, B), run(4, C)])
    assert [instance for instance, _ in pc.resumes()] == [B]  # no links among them: C could load nothing
    pc = assigned(B, C)
    pc.checkpoint(A, checkpoint(1, 1, 61))
    fail(pc)
    pc.survey([run(2, B, source(H1, 10_000)), run(4, C)])
    assert [instance for instance, _ in pc.resumes()] == [C]
    assert pc.take(SendPrefetch) == []  # it loads as it resumes


@pytest.mark.spec("R-179", "U-35")
def test_the_next_is_asked_under_another_epoch_when_one_refuses_or_does_not_answer() -> None:
    pc = assigned(B, C)
    fail(pc)
    pc.survey()
    ((first, request),) = pc.resumes()
    pc.resume_failed(request)
    ((second, again),) = pc.resumes()
    assert {first, second} == {B, C}
    assert (request.epoch, again.epoch) == (2, 3)
    # It had accepted after all: its epoch has passed, whatever it says.
    pc.resumed(request)
    assert pc.take(Bind) == []
    with refused(registry.STALE_EPOCH):
        pc.checkpoint(first, checkpoint(1, 2, 16))
    pc.resumed(again)
    assert pc.take(Bind) == [Bind(Binding(session_id(1), 3, second))]


@pytest.mark.spec("R-179")
def test_when_all_have_refused_they_are_asked_again_later() -> None:
    pc = assigned(B, settings=Settings(retry_ms=500))
    fail(pc)
    pc.survey()
    ((_, request),) = pc.resumes()
    pc.resume_failed(request)
    assert pc.resumes() == []
    assert pc.state.next_deadline() == 500
    pc.tick(500)
    pc.survey()
    ((instance, request),) = pc.resumes()
    assert (instance, request.epoch) == (B, 3)  # which nobody was offered


FOR_GOOD = [registry.BAD_REQUEST, registry.CONTENT_TOO_LARGE, registry.SCOPE_DENIED, registry.INCOMPATIBLE]


@pytest.mark.spec("R-179", "R-182")
@pytest.mark.parametrize("problem", FOR_GOOD)
def test_a_session_that_all_refuse_for_good_ends_and_says_why(problem: registry.ProblemType) -> None:
    pc = assigned(B, C)
    fail(pc)
    pc.survey()
    for left in (1, 0):
        ((_, request),) = pc.resumes()
        pc.resume_failed(request, problem)
        assert len(pc.take(Ended)) == (not left)
    pc = assigned(B)
    fail(pc)
    pc.survey()
    ((_, request),) = pc.resumes()
    pc.resume_failed(request, problem)
    assert pc.take(Ended) == [Ended(session_id(1), problem)]
    assert pc.take(WantInstance) == []
    assert (pc.state.sessions, pc.state.totals.lost) == (0, 1)
    with refused(registry.STALE_EPOCH):  # whoever may have it after all is fenced
        pc.checkpoint(B, checkpoint(1, 2, 16))


@pytest.mark.spec("R-179", "R-182")
@pytest.mark.parametrize("problem", FOR_GOOD)
def test_who_refused_for_good_is_not_asked_again_and_no_other_is_wanted(problem: registry.ProblemType) -> None:
    pc = assigned(B, C, settings=Settings(retry_ms=500))
    fail(pc)
    pc.survey()
    ((first, request),) = pc.resumes()
    pc.resume_failed(request, problem)
    ((second, request),) = pc.resumes()
    pc.resume_failed(request, registry.INVALID_STATE)
    for now_ms in range(500, 5_000, 500):
        for uri in (B, C):
            pc.status(status(uri))
        pc.tick(now_ms)
        pc.survey()
        ((instance, request),) = pc.resumes()
        assert instance == second != first
        pc.resume_failed(request, registry.UNAVAILABLE)
    assert pc.take(WantInstance) == []
    assert pc.take(Ended) == []
    pc.status(status(first, epoch=11))  # a new process may have been set up differently
    pc.survey()
    ((instance, request),) = pc.resumes()
    assert instance == first
    pc.resumed(request)
    assert [each.binding.instance for each in pc.take(Bind)] == [first]


@pytest.mark.spec("R-179", "R-119")
def test_one_more_instance_is_wanted_once_who_refused_for_good_is_not_active_any_more() -> None:
    pc = assigned(B, C)
    fail(pc)
    pc.survey()
    ((first, request),) = pc.resumes()
    pc.resume_failed(request, registry.INCOMPATIBLE)
    ((second, request),) = pc.resumes()
    pc.status(status(first, state="draining"))
    fail(pc, second)
    pc.survey()
    assert pc.resumes() == []
    assert pc.take(Ended) == []
    assert len(pc.take(WantInstance)) == 1


@pytest.mark.spec("R-179", "R-119")
def test_without_an_active_instance_the_session_waits_for_one() -> None:
    pc = assigned()
    fail(pc)
    pc.survey()
    assert pc.resumes() == []
    assert len(pc.take(WantInstance)) == 1
    pc.status(status(B, state="draining"))
    assert pc.take(Survey) == []
    pc.status(status(B))
    pc.survey()
    ((instance, request),) = pc.resumes()
    assert (instance, request.epoch) == (B, 2)


@pytest.mark.spec("R-181", "R-179")
def test_an_instance_that_fails_while_it_is_asked_is_passed_over() -> None:
    pc = assigned(B, C)
    fail(pc)
    pc.survey()
    ((first, request),) = pc.resumes()
    fail(pc, first)
    pc.survey()
    ((second, again),) = pc.resumes()
    assert second != first
    assert again.epoch == request.epoch + 1
    pc.resume_failed(request)  # an answer that is overtaken
    assert pc.resumes() == []


@pytest.mark.spec("R-179", "U-35")
def test_who_checkpoints_the_new_epoch_has_accepted_it() -> None:
    pc = assigned(B)
    fail(pc)
    pc.survey()
    ((_, request),) = pc.resumes()
    assert pc.checkpoint(B, checkpoint(1, 2, 16)) == (True, 2, 16)
    assert pc.take(Bind) == [Bind(Binding(session_id(1), 2, B))]
    pc.resumed(request)
    assert pc.take(Bind) == []


@pytest.mark.spec("R-179")
def test_sessions_of_one_failure_are_spread() -> None:
    pc = Driven()
    pc.status(status(A))
    for n in range(8):
        pc.assign(n)
    pc.status(status(B))
    pc.status(status(C))
    fail(pc)
    pc.survey()
    placed = [instance for instance, _ in pc.resumes()]
    assert (placed.count(B), placed.count(C)) == (4, 4)


@pytest.mark.spec("R-109", "R-108")
def test_a_draining_instance_keeps_its_sessions_and_gets_no_others() -> None:
    pc = assigned(B)
    pc.status(status(A, state="draining"))
    assert pc.checkpoint(A, checkpoint(1, 1, 16)) == (True, 1, 16)
    pc.assign(2)
    fail(pc, B)
    pc.survey()
    assert pc.resumes() == []


@pytest.mark.spec("D12")
def test_a_session_whose_epochs_are_used_up_ends() -> None:
    pc = Driven()
    pc.status(status(A))
    pc.status(status(B))
    pc.checkpoint(A, checkpoint(1, limits.INT_MAX, 16))
    fail(pc)
    assert pc.take(Ended) == [Ended(session_id(1))]
    assert pc.take(Survey) == []


# --- restart --------------------------------------------------------------------------


@pytest.mark.spec("R-172", "R-173", "R-103")
def test_a_restart_changes_nothing_for_sessions_whose_instance_reports() -> None:
    pc = assigned(B)
    pc.checkpoint(A, checkpoint(1, 1, 16))
    pc.now_ms = 1_000_000
    pc.restart()
    pc.now_ms += 2_999
    pc.status(status(A))
    pc.tick(pc.now_ms + 1)
    assert pc.take(Survey) == []
    assert pc.state.binding(OWNER, session_id(1)) == Binding(session_id(1), 1, A)
    assert pc.checkpoint(A, checkpoint(1, 1, 8)) == (False, 1, 16)


@pytest.mark.spec("R-101", "R-179", "R-103")
def test_after_a_restart_sessions_of_who_does_not_report_in_time_move() -> None:
    pc = assigned()
    pc.checkpoint(A, checkpoint(1, 1, 16))
    pc.restart()
    assert pc.state.next_deadline() == 3_000
    pc.status(status(B))
    pc.tick(2_999)
    assert pc.take(Survey) == []
    pc.tick(3_000)
    pc.status(status(B))
    pc.survey()
    assert pc.resumes() == [(B, ResumeRequest(2, checkpoint(1, 1, 16)))]


@pytest.mark.spec("R-102", "R-179")
def test_after_a_restart_an_instance_that_restarted_too_has_lost_its_sessions() -> None:
    pc = assigned()
    pc.restart()
    pc.status(status(A, epoch=11))
    pc.survey()
    assert pc.resumes() == [(A, ResumeRequest(2, checkpoint(1, 0, 0)))]


@pytest.mark.spec("R-179", "U-35")
def test_a_resume_that_may_not_have_been_sent_is_sent_again_once_its_instance_reports() -> None:
    pc = assigned(B)
    fail(pc)
    pc.survey()
    before = pc.resumes()
    pc.restart()
    assert pc.resumes() == []
    pc.status(status(B))
    pc.status(status(B))
    (again,) = pc.take(SendResume)
    assert [(again.instance, again.request)] == before
    assert again.again
    pc.resumed(before[0][1])
    assert pc.take(Bind) == [Bind(Binding(session_id(1), 2, B))]


@pytest.mark.spec("R-179")
def test_a_session_that_was_nobodys_at_the_restart_is_placed() -> None:
    pc = assigned()
    fail(pc)
    pc.restart()
    pc.status(status(B))
    pc.survey()
    ((instance, request),) = pc.resumes()
    assert (instance, request.epoch) == (B, 2)


@pytest.mark.spec("R-179", "R-181")
def test_every_step_is_on_disk_before_it_is_taken() -> None:
    pc = assigned(B)
    pc.state.status(status(A, state="failed"), 0)
    persist, *rest = pc.state.instructions()
    assert isinstance(persist, Persist)
    assert [(row.epoch, row.instance, row.bound) for row in persist.rows if isinstance(row, SessionRow)] == [
        (2, "", False)
    ]
    assert any(isinstance(each, Survey) for each in rest)
    pc.state.surveyed(session_id(1), 2, [], 0)
    persist, _ = pc.state.instructions()
    assert isinstance(persist, Persist)
    (row,) = persist.rows
    assert isinstance(row, SessionRow)
    assert (row.epoch, row.instance, row.instance_epoch, row.bound) == (2, B, 10, False)
    pc.state.resumed(session_id(1), 2, 0)
    persist, bind = pc.state.instructions()
    assert isinstance(persist, Persist)
    (row,) = persist.rows
    assert isinstance(row, SessionRow)
    assert row.bound
    assert isinstance(bind, Bind)


def test_scope_of_a_start_is_kept() -> None:
    pc = assigned()
    with refused(registry.CONFLICT):
        pc.checkpoint(A, structs.replace(checkpoint(1, 1, 16), scope_id=OTHER_SCOPE))
