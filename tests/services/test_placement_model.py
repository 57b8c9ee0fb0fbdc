"""Epochs, sessions and checkpoints in any order of events, with crashes, against a model that only remembers.

The model knows what was promised: the highest epoch of each instance, the tokens acknowledged of each session, and
to whom each epoch was offered. It knows nothing of how instances are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from services.placement.instructions import Bind, Binding, Ended, SendPrefetch, SendResume, SendState, Survey
from services.placement.settings import Settings
from tests.services.placement_records import (
    OWNER,
    A,
    B,
    C,
    Driven,
    checkpoint,
    run,
    session_id,
    status,
)

INSTANCES = (A, B, C)
instances = st.sampled_from(INSTANCES)
numbers = st.integers(1, 2)
TTL_MS = 10_000


@dataclass
class Promised:
    """A session as the world knows it."""

    epoch: int
    instance: str
    offset: int = 0
    checkpoints: int = 0
    offers: dict[int, str] = field(default_factory=dict)


def problem_of(call: Callable[..., Any], *arguments: Any) -> tuple[Any, registry.ProblemType | None]:
    """What a call returns, or the problem that it is refused with."""
    try:
        return call(*arguments), None
    except KvspError as error:
        return None, error.problem


class PlacementMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.pc = Driven(Settings(sleep_allowed=True, ended_ms=10**9, session_idle_ms=10**9))
        self.epochs: dict[str, int] = dict.fromkeys(INSTANCES, 1)
        self.reported: dict[str, tuple[int, str]] = {}
        self.sessions: dict[str, Promised] = {}
        self.ended: dict[str, int] = {}
        self.pending: list[Any] = []
        for instance in INSTANCES:
            self.report(instance, 0, "active", None)
        self.assign(1, [])

    # --- instances --------------------------------------------------------------------

    @rule(
        instance=instances,
        later=st.sampled_from([0, 0, 0, 0, 1, -1]),
        state=st.sampled_from(["active"] * 5 + ["draining", "sleeping", "failed"]),
        asks=st.sampled_from([None, None, None, "sleeping"]),
    )
    def report(self, instance: str, later: int, state: str, asks: str | None) -> None:
        epoch = self.epochs[instance] + later
        made = status(instance, epoch, state=state, requested_state=asks, ttl_ms=TTL_MS)
        known = self.epochs[instance]
        view, problem = problem_of(self.pc.status, made)
        assert problem == (registry.STALE_EPOCH if epoch < known else None)
        if problem is None:
            assert view == state or (view == "draining" and state == "active")
            self.epochs[instance] = epoch
            self.reported[instance] = (self.pc.now_ms, state)
            if epoch > known:
                self.lost(instance)
        self.look()

    def lost(self, instance: str) -> None:
        """A new process of an instance has none of its sessions."""
        for promised in self.sessions.values():
            if promised.instance == instance:
                promised.instance = ""

    @rule(instance=instances, state=st.sampled_from(["draining", "active"]))
    def order(self, instance: str, state: str) -> None:
        _, problem = problem_of(self.pc.state.order, instance, state, self.pc.now_ms)
        assert problem in (None, registry.NOT_FOUND, registry.INVALID_STATE)
        self.pc.drain()
        self.look()

    @rule()
    def report_all(self) -> None:
        for instance in INSTANCES:
            self.report(instance, 0, "active", None)

    @rule(ms=st.sampled_from([1, 500, 1_000, 4_000, TTL_MS]))
    def wait(self, ms: int) -> None:
        self.pc.tick(self.pc.now_ms + ms)
        self.look()

    @rule()
    def crash(self) -> None:
        """Every row handed out is on disk; everything else, answers under way included, is gone."""
        self.pc.restart()
        self.pending.clear()
        self.reported.clear()
        for name, promised in self.sessions.items():
            binding = self.pc.state.binding(OWNER, name)
            assert binding is None or binding.epoch >= promised.epoch
        self.look()

    # --- sessions ---------------------------------------------------------------------

    @rule(number=numbers, held=st.lists(instances, unique=True, max_size=2))
    def assign(self, number: int, held: list[str]) -> None:
        name = session_id(number)
        made, problem = problem_of(self.pc.assign, number, [run(1, *held)] if held else [])
        assert problem in (None, registry.UNAVAILABLE, registry.CONFLICT)
        assert (problem == registry.CONFLICT) == (name in self.sessions or name in self.ended)
        if problem is None:
            self.require_active(made.binding.instance)
            self.sessions[name] = Promised(1, made.binding.instance, offers={1: made.binding.instance})
        self.look()

    @rule(
        number=numbers,
        other=st.none() | st.none() | instances,
        epoch=st.sampled_from([0, 0, 0, 1, -1]),
        more=st.integers(-1, 3),
    )
    def checkpoint(self, number: int, other: str | None, epoch: int, more: int) -> None:
        name = session_id(number)
        promised = self.sessions.get(name)
        if promised is None:
            if name in self.ended:
                with pytest.raises(KvspError) as error:
                    self.pc.checkpoint(other or A, checkpoint(number, max(0, self.ended[name] + epoch), 1))
                assert error.value.problem == registry.STALE_EPOCH
            return
        current = self.epoch_of(number)
        sender = other or promised.offers.get(current, A)
        made = checkpoint(number, max(0, current + epoch), max(0, promised.offset + more))
        reply, problem = problem_of(self.pc.checkpoint, sender, made)
        wanted = {-1: registry.STALE_EPOCH, 0: registry.FORBIDDEN, 1: registry.CONFLICT}
        is_its_own = epoch == 0 and promised.offers.get(current) == sender
        assert problem == (None if is_its_own else wanted[epoch])
        if problem is None:
            _, at, recorded = reply
            assert at == current
            assert recorded == max(promised.offset, made.output_offset)
            promised.offset = recorded
            promised.epoch, promised.instance = current, sender
        self.look()

    @rule(number=numbers)
    def end(self, number: int) -> None:
        name = session_id(number)
        if name in self.sessions:
            epoch = self.epoch_of(number)
            self.pc.end(number)
            assert [each.session for each in self.pc.take(Ended)] == [name]
            del self.sessions[name]
            self.ended[name] = epoch
        else:
            with pytest.raises(KvspError) as error:
                self.pc.end(number)
            assert error.value.problem == registry.NOT_FOUND
        self.look()

    # --- answers from outside, in any order -------------------------------------------

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), good=st.booleans(), held=instances)
    def answer(self, data: st.DataObject, good: bool, held: str) -> None:
        each = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        state, now_ms = self.pc.state, self.pc.now_ms
        match each:
            case Survey():
                state.surveyed(each.session, each.epoch, [run(1, held)] if good else [], now_ms)
            case SendResume() if good:
                state.resumed(each.request.checkpoint.session, each.request.epoch, now_ms)
            case SendResume():
                session, epoch = each.request.checkpoint.session, each.request.epoch
                state.resume_failed(session, epoch, registry.UNAVAILABLE, now_ms)
            case SendState() if good:
                state.ordered(each.instance, each.state, now_ms)
                if each.instance in self.reported:
                    self.reported[each.instance] = (self.reported[each.instance][0], each.state)
            case SendState():
                state.order_failed(each.instance, refused=False)
        self.pc.drain()
        self.look()

    def look(self) -> None:
        """Every instruction since the last look is one that may be given."""
        for each in self.pc.done:
            match each:
                case SendResume():
                    self.offered(each)
                    self.pending.append(each)
                case Survey() | SendState():
                    self.pending.append(each)
                case SendPrefetch():
                    self.require_active(each.instance)
                case Bind(Binding(session, epoch, instance)) if session in self.sessions:
                    promised = self.sessions[session]
                    assert promised.offers[epoch] == instance
                    assert epoch >= promised.epoch
                    promised.epoch, promised.instance = epoch, instance
        self.pc.done = [each for each in self.pc.done if isinstance(each, Ended)]

    def offered(self, send: SendResume) -> None:
        request = send.request
        promised = self.sessions.get(request.checkpoint.session)
        assert promised is not None
        # One epoch, one instance; never an old epoch; never less than what was acknowledged.
        assert promised.offers.setdefault(request.epoch, send.instance) == send.instance
        assert request.epoch == max(promised.offers)
        assert request.epoch > request.checkpoint.epoch
        assert request.checkpoint.output_offset == promised.offset

    def require_active(self, instance: str) -> None:
        """ "MUST NOT assign new requests or send prefetch directives to an instance that is not active" ."""
        since_ms, state = self.reported[instance]
        assert state == "active"
        assert self.pc.now_ms - since_ms < TTL_MS

    def epoch_of(self, number: int) -> int:
        row = self.pc.disk["session", session_id(number)]
        assert row.epoch >= self.sessions[session_id(number)].epoch  # type: ignore[union-attr]
        return row.epoch  # type: ignore[union-attr, no-any-return]

    @invariant()
    def followers_are_told_of_what_was_offered(self) -> None:
        for name, promised in getattr(self, "sessions", {}).items():
            binding = self.pc.state.binding(OWNER, name)
            if binding is not None:
                assert promised.offers[binding.epoch] == binding.instance


TestPlacement = pytest.mark.spec(
    "R-103", "R-108", "R-172", "R-173", "R-174", "R-179", "R-181", "U-34", "U-35", "U-36", "U-37"
)(PlacementMachine.TestCase)
TestPlacement.settings = settings(max_examples=400, stateful_step_count=80, deadline=None)
