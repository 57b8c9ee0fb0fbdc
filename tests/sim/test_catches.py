"""The simulation can fail: each of these mistakes in a rule, made on purpose, is found within a few seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvsp.protocol.records import CheckpointReply, InstanceStatus, ReshardRequest, SessionCheckpoint, ShardMap
from services.frontend.state import Delivery
from services.holder.leases import Leases
from services.instance import lifecycle
from services.instance.session import Session
from services.instance.sessions import Sessions
from services.instance.shards import Shards, parts
from services.instance.state import InstanceState
from services.placement.fleet import Instance
from services.placement.groups import Groups, MapRow
from services.placement.instructions import NOBODY, Row
from services.placement.migration import Migration
from services.placement.outbox import Outbox
from services.placement.sessions import Session as Placed
from services.placement.state import PlacementState
from tests.sim.checker import InvariantError
from tests.sim.cluster import run
from tests.sim.faults import PROFILES
from tests.sim.instance import InstanceNode

Patch = pytest.MonkeyPatch


def caught(profile: str, *, first: int = 0, seeds: int = 20) -> str:
    """What the invariants say of some seeds under a profile, after a mistake was made."""
    chosen = next(each for each in PROFILES if each.name == profile)
    for seed in range(first, first + seeds):
        try:
            run(seed, profile=chosen)
        except InvariantError as error:
            return str(error)
    raise AssertionError(f"not caught by {seeds} seeds of {profile}")


# --- release and checkpoints ----------------------------------------------------------


def test_tokens_released_before_the_acknowledgement(monkeypatch: Patch) -> None:
    def release(self: Session) -> tuple[int, list[int]]:
        first, self.released = self.released, len(self.generated)
        return first, self.generated[first:]

    monkeypatch.setattr(Session, "release", release)
    assert "before it is on disk" in caught("calm")


def test_one_token_more_released_than_acknowledged(monkeypatch: Patch) -> None:
    acknowledged = Session.acknowledged

    def generous(self: Session, recorded: int) -> None:
        acknowledged(self, recorded)
        self.covered += 1

    monkeypatch.setattr(Session, "acknowledged", generous)
    assert "before it is on disk" in caught("calm")


def test_the_seed_used_from_its_start_again(monkeypatch: Patch) -> None:
    job = InstanceNode._job

    def forgetful(self: InstanceNode, *arguments: Any) -> Any:
        made = job(self, *arguments)
        if made.output:
            made.sampler = made.sampler.__class__(
                made.sampler.method, made.sampler.params, made.sampler.seed, 0, made.sampler.deterministic
            )
        return made

    monkeypatch.setattr(InstanceNode, "_job", forgetful)
    assert "another token" in caught("instances")


def test_a_second_run_under_an_epoch(monkeypatch: Patch) -> None:
    """An instance that restarted takes sessions before the controller has heard of it."""
    monkeypatch.setattr(InstanceState, "_admit", lambda self: lifecycle.require_active(self.state))
    assert "token" in caught("restarts", first=50, seeds=200)


# --- epochs ---------------------------------------------------------------------------


def test_checkpoints_of_an_old_epoch_taken(monkeypatch: Patch) -> None:
    """A zombie's checkpoint is recorded as if its epoch were current."""

    check = Placed.check

    def lenient(self: Placed, checkpoint: SessionCheckpoint, sender: Sequence[str]) -> SessionCheckpoint:
        return self.checkpoint or check(self, checkpoint, sender)

    monkeypatch.setattr(Placed, "check", lenient)
    assert caught("zombies")


def test_an_epoch_offered_twice(monkeypatch: Patch) -> None:
    def fence(self: Migration, session: Placed, now_ms: int) -> bool:
        self._sessions.move(session, NOBODY, 0)
        self._outbox.save(session.row())
        return True

    monkeypatch.setattr(Migration, "_fence", fence)
    assert caught("instances")


def test_a_front_end_that_takes_old_epochs(monkeypatch: Patch) -> None:
    """And every token as the next one: of two instances that run, both are heard."""

    def take(self: Delivery, epoch: int, first_index: int, tokens: Sequence[int]) -> list[int]:
        self.next_index += len(tokens)
        return list(tokens)

    monkeypatch.setattr(Delivery, "take", take)
    assert caught("zombies")


def test_a_status_of_a_former_life_believed(monkeypatch: Patch) -> None:
    status = PlacementState.status

    def credulous(self: PlacementState, reported: InstanceStatus, now_ms: int) -> str:
        known = self._fleet.get(reported.instance)
        if known is not None:
            known.epoch = min(known.epoch, reported.epoch)
        return status(self, reported, now_ms)

    monkeypatch.setattr(PlacementState, "status", credulous)
    assert "epoch" in caught("restarts")


def test_an_epoch_from_a_clock_that_goes_back(monkeypatch: Patch) -> None:
    def boot(self: InstanceNode, original: Callable[[InstanceNode], None] = InstanceNode.boot) -> None:
        self.counter_on_disk = 0
        original(self)

    monkeypatch.setattr(InstanceNode, "boot", boot)
    assert "restarts with epoch" in caught("restarts")


# --- the disk -------------------------------------------------------------------------


def test_an_answer_that_does_not_wait_for_the_disk(monkeypatch: Patch) -> None:
    """Rows stay in memory until the next event."""
    drain = Outbox.drain

    def late(self: Outbox) -> list[Any]:
        rows, self._rows = self._rows, getattr(self, "held", {})
        self.held = rows  # type: ignore[attr-defined]
        return drain(self)

    monkeypatch.setattr(Outbox, "drain", late)
    assert "on disk" in caught("calm")


def test_a_restart_that_forgets_epochs(monkeypatch: Patch) -> None:
    init = PlacementState.__init__

    def restored(self: PlacementState, *arguments: Any, rows: Sequence[Row] = (), **options: Any) -> None:
        init(self, *arguments, rows=(), **options)

    monkeypatch.setattr(PlacementState, "__init__", restored)
    assert caught("placement")


def test_a_lower_offset_recorded(monkeypatch: Patch) -> None:
    checkpoint = PlacementState.checkpoint

    def newest(
        self: PlacementState, sender: Sequence[str], sent: SessionCheckpoint, now_ms: int
    ) -> tuple[bool, CheckpointReply]:
        first, reply = checkpoint(self, sender, sent, now_ms)
        session = self._sessions.get(sent.session)
        assert session is not None
        session.checkpoint = sent
        self._outbox.save(session.row())
        return first, reply

    monkeypatch.setattr(PlacementState, "checkpoint", newest)
    assert "altered" in caught("rain")


# --- groups ---------------------------------------------------------------------------

GROUPED = len(PROFILES)
"""From this seed on contexts are sharded."""


def test_ranges_released_before_the_commit(monkeypatch: Patch) -> None:
    plan = Shards.plan

    def hasty(self: Shards, request: ReshardRequest) -> bool:
        is_new = self.under_way(request.map) is None
        done = plan(self, request)
        if is_new:
            self._drop(request.map, parts(request).release)
        return done

    monkeypatch.setattr(Shards, "plan", hasty)
    assert "does not hold" in caught("calm", first=GROUPED, seeds=9)


def test_a_decision_told_before_it_is_on_disk(monkeypatch: Patch) -> None:
    save = Groups._save

    def late(self: Groups, group: Any) -> None:
        if group.step is None or group.step.decision != "commit":
            save(self, group)

    monkeypatch.setattr(Groups, "_save", late)
    assert "before it is on disk" in caught("calm", first=GROUPED, seeds=9)


def test_a_commit_forgotten_by_a_restart(monkeypatch: Patch) -> None:
    def recover(self: Groups, group: Any, row: MapRow, new: ShardMap, now_ms: int) -> None:
        group.step = self._step(new, row.members, now_ms)
        self._decide(group, "abort", now_ms)

    monkeypatch.setattr(Groups, "_recover", recover)
    assert "aborts the committed version" in caught("storm", first=3 * GROUPED, seeds=9)


# --- lifecycle, liveness, what is left ------------------------------------------------


def test_work_for_an_instance_that_drains(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Instance, "is_active", property(lambda self: self.status is not None))
    assert "which is" in caught("instances")


def test_work_for_an_instance_that_has_expired(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Instance, "fail", lambda self: None)
    assert caught("instances")


def test_sessions_that_are_not_moved(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Migration, "begin", lambda self, session, now_ms: None)
    assert "never ends" in caught("instances") or "fails" in caught("instances")


def test_leases_that_do_not_run_out(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Leases, "expire", lambda self, now_ms: [])
    assert "leases" in caught("storm", seeds=60)


def test_sessions_that_are_kept(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Sessions, "_expire", lambda self, now_ms, session: None)
    assert caught("calm").startswith("left over")
