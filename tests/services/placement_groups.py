"""A driven state with groups: three instances, prompts of eight blocks and a tail."""

from __future__ import annotations

from typing import Any

from kvsp.protocol.records import ReshardRequest, ShardMap
from services.placement.instructions import Form, Reshard, SendLeave
from services.placement.settings import GroupSettings, Settings
from services.placement.widths import View
from tests.services.placement_records import BLOCK_TOKENS, A, B, C, Driven, checkpoint, keys, session_id, status

S = session_id(1)
PROMPT = 8 * BLOCK_TOKENS + 3
INSTANCES = (A, B, C)
GROUPS = GroupSettings(
    instances=frozenset(INSTANCES), tokens=PROMPT, prefill_tokens=48, decode_tokens=200, deadline_ms=1_000
)


class Wanted:
    """A policy that says what a test says."""

    def __init__(self, width: int) -> None:
        self.wanted = width
        self.seen: list[View] = []

    def width(self, view: View) -> int:
        self.seen.append(view)
        return self.wanted


class Grouped(Driven):
    """Session 1 may have a group; A is its home, as it is named first among equals."""

    def __init__(self, width: int | None = None, groups: GroupSettings = GROUPS, **settings: Any) -> None:
        self.policy = Wanted(1 if width is None else width)
        super().__init__(Settings(groups=groups, **settings), widths=None if width is None else self.policy)
        for uri in INSTANCES:
            self.report(uri)

    def report(self, uri: str, epoch: int = 10, **changes: Any) -> None:
        self.status(status(uri, epoch, ttl_ms=60_000, **changes))

    def ask(self, session: int = 1, runs: Any = ()) -> tuple[str, ...]:
        """Assign: who is asked to join."""
        return self.assign(session, runs, tokens=PROMPT, prompt_blocks=keys(8)).members

    def form(self, *, ok: bool = True) -> tuple[str, ...]:
        """Answer the newest Form: the members."""
        (form,) = self.take(Form)
        members = self.state.groups.formed(form.context.map, self.now_ms, ok=ok)
        self.drain()
        return members

    def output(self, offset: int, session: int = 1, sender: str = A) -> None:
        """The home has generated so much."""
        self.checkpoint(sender, checkpoint(session, 1, offset, prompt_blocks=keys(8)))

    def map(self, session: int = 1) -> ShardMap:
        return next(each for each in self.state.groups if each.map == session_id(session))

    def resize(self, members: int, session: int = 1) -> ShardMap:
        try:
            return self.state.groups.resize(session_id(session), members, self.now_ms)
        finally:
            self.drain()

    def answer(self, send: Reshard, *, ok: bool = True) -> None:
        self.state.groups.answered(send.request.map, send.step, send.instance, self.now_ms, ok=ok)
        self.drain()

    def plans(self) -> dict[str, Reshard]:
        """The plans handed out since it was last asked for them, by instance."""
        sends = self.take(Reshard)
        assert all(each.context is not None for each in sends)
        return {each.instance: each for each in sends}

    def decisions(self) -> dict[str, Reshard]:
        """The commits or aborts handed out, by instance."""
        sends = self.take(Reshard)
        assert all(each.context is None for each in sends)
        return {each.instance: each for each in sends}

    def settle(self) -> None:
        """Everybody does what is asked until nothing is."""
        while sends := self.take(Reshard):
            for each in sends:
                self.answer(each)


def kinds(sends: dict[str, Reshard]) -> set[str]:
    return {kind_of(each.request) for each in sends.values()}


def kind_of(request: ReshardRequest) -> str:
    """Plan, commit or abort."""
    if isinstance(request.new, int):
        return "plan"
    return "commit" if isinstance(request.commit, int) else "abort"


def leaves(pc: Grouped) -> set[str]:
    sends = pc.take(SendLeave)
    assert all(each.map == S for each in sends)
    return {each.instance for each in sends}


def formed(width: int = 3, offset: int = 1) -> Grouped:
    """Session 1 has a group of that width with A as home, and some output."""
    pc = Grouped(width)
    pc.ask()
    assert len(pc.form()) == width
    if offset:
        pc.output(offset)
    return pc
