"""Groups that end or are lost, with their session or without (A15, U-38)."""

from __future__ import annotations

import pytest

from kvsp.protocol import registry
from services.placement.groups import Settled
from services.placement.instructions import Survey
from tests.services.placement_groups import INSTANCES, S, formed, kinds, leaves
from tests.services.placement_records import (
    H1,
    A,
    B,
    C,
    checkpoint,
    fail,
    keys,
    refused,
    session_id,
)


@pytest.mark.parametrize("during", [False, True])
def test_the_end_of_a_session_is_the_end_of_its_group(during: bool) -> None:
    pc = formed(2)
    if during:
        pc.resize(3)
    pc.end()
    assert leaves(pc) == ({A, B, C} if during else {A, B})
    assert [each.committed for each in pc.take(Settled)] == [False] * during
    assert not [key for key in pc.disk if key[0] == "map"]
    late = pc.plans()
    for send in late.values():
        pc.answer(send)
    assert leaves(pc) == set(late)  # who took a plan after its end is told again


@pytest.mark.spec("R-179", "R-181")
@pytest.mark.parametrize("member", [A, B])
@pytest.mark.parametrize("how", ["restart", "failed", "silence"])
def test_the_session_migrates_when_the_context_is_whole_no_more(member: str, how: str) -> None:
    pc = formed(2)
    if how == "restart":
        pc.report(member, epoch=11)
    elif how == "failed":
        fail(pc, member)
    else:
        pc.tick(pc.now_ms + 59_000)
        for uri in INSTANCES:
            if uri != member:
                pc.report(uri)
        pc.tick(pc.now_ms + 2_000)
    (survey,) = pc.take(Survey)
    assert survey.epoch == 2
    assert len(pc.state.groups) == 0
    assert leaves(pc) == {A, B}
    assert not [key for key in pc.disk if key[0] == "map"]


def test_a_member_that_holds_nothing_of_the_version_costs_the_step_alone() -> None:
    pc = formed(2)
    pc.resize(3)
    plans = pc.plans()
    pc.answer(plans[A])
    pc.answer(plans[C])
    pc.report(C, epoch=11)  # it has acknowledged, and lost all since
    aborts = pc.decisions()
    assert kinds(aborts) == {"abort"}
    for uri in (A, B):
        pc.answer(aborts[uri])
    assert pc.map().version == 1
    assert not pc.take(Survey)


@pytest.mark.spec("R-194")
@pytest.mark.parametrize("member", [B, C])
def test_a_member_that_restarts_between_acknowledgement_and_commit_aborts_the_step(member: str) -> None:
    pc = formed(2)
    pc.resize(3)
    plans = pc.plans()
    pc.answer(plans[member])
    pc.report(member, epoch=11)
    sends = pc.decisions() if member == C else {}
    if member == C:
        assert kinds(sends) == {"abort"}
    for uri in {A, B, C} - {member}:
        pc.answer(plans[uri])  # acknowledged too late
    assert "commit" not in kinds(pc.decisions())
    assert len(pc.state.groups) == (member == C)


@pytest.mark.spec("R-193")
def test_a_commit_is_told_whatever_happens_after_it_was_decided() -> None:
    pc = formed(2)
    pc.resize(3)
    for send in pc.plans().values():
        pc.answer(send)
    first = pc.decisions()
    pc.answer(first[A])
    for _ in range(3):
        pc.restart()
        assert pc.map().version == 2
        assert kinds(pc.decisions()) == {"commit"}
        pc.tick(pc.now_ms + 60_000 // 4)
        again = pc.decisions()
        assert kinds(again) == {"commit"}
    for send in again.values():
        pc.answer(send)
    assert pc.map().version == 2
    assert pc.take(Settled)[-1].committed


@pytest.mark.spec("R-194")
def test_a_restart_before_the_decision_aborts() -> None:
    pc = formed(2)
    pc.resize(3)
    plans = pc.plans()
    pc.answer(plans[A])
    pc.restart()
    aborts = pc.decisions()
    assert set(aborts) == {A, B, C}
    assert kinds(aborts) == {"abort"}
    pc.answer(plans[B])  # of the earlier process: means nothing
    pc.answer(plans[C])
    for send in aborts.values():
        pc.answer(send)
    assert pc.map().version == 1
    assert "commit" not in kinds(pc.decisions())


def test_members_that_stay_away_after_a_restart_of_the_controller_are_missed() -> None:
    pc = formed(2)
    pc.restart()
    pc.report(A)
    pc.tick(pc.now_ms + 61_000)
    assert len(pc.state.groups) == 0


@pytest.mark.spec("D8", "D12")
def test_only_a_member_may_say_that_the_context_is_lost() -> None:
    pc = formed(2)
    for callers, name in (([C], S), ([H1], S), ([], S), ([A], session_id(2)), ([C], session_id(2))):
        with refused(registry.NOT_FOUND):
            pc.state.groups.lost(callers, name, pc.now_ms)
        pc.drain()
    assert len(pc.state.groups) == 1
    assert not pc.take(Survey)
    pc.state.groups.lost([B], S, pc.now_ms)
    pc.drain()
    (survey,) = pc.take(Survey)
    assert survey.epoch == 2
    assert leaves(pc) == {A, B}
    with refused(registry.NOT_FOUND):  # it is known by now; nothing happens
        pc.state.groups.lost([B], S, pc.now_ms)
    assert not pc.take(Survey)


def test_a_session_that_has_migrated_gets_no_other_group() -> None:
    pc = formed(2)
    pc.state.groups.lost([A], S, pc.now_ms)
    pc.drain()
    pc.survey()
    ((uri, request),) = pc.resumes()
    pc.resumed(request)
    pc.checkpoint(uri, checkpoint(1, 2, 9, prompt_blocks=keys(8)))
    assert not pc.plans()
    assert len(pc.state.groups) == 0
