"""Statuses, checkpoints, runs and a driven state for the placement tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.estimate import Run, Source
from kvsp.protocol.records import InstanceStatus, Link, ResumeRequest, Sampler, SessionCheckpoint
from services.placement.groups import ForgetMap
from services.placement.instructions import Binding, Forget, Instruction, Persist, Row, SendResume, Survey, key_of
from services.placement.settings import Settings
from services.placement.state import Assignment, PlacementState
from services.placement.widths import GroupPolicy

H1, H2 = "https://h1.example/kvsp/", "https://h2.example/kvsp/"
A, B, C = (f"https://ii{n}.example/kvsp/" for n in (1, 2, 3))
SCOPE, OTHER_SCOPE = "aa" * 16, "bb" * 16
COMPAT, OTHER_COMPAT = "11" * 32, "22" * 32
OWNER = "spiffe://t/fe"
BLOCK_TOKENS = 16
MIB = 1 << 20


def session_id(n: int) -> str:
    return f"00000000-0000-4000-8000-{n:012x}"


def keys(count: int, first: int = 0) -> list[str]:
    return [f"{n:064x}" for n in range(first, first + count)]


def status(instance: str = A, epoch: int = 10, **changes: Any) -> InstanceStatus:
    """An idle, active instance with a fast link to both holders."""
    links = [Link(H1, 8_000, 100), Link(H2, 8_000, 100)]
    made = InstanceStatus(instance, epoch, "active", 0, 0, 8, 0.1, 10_000, 100, 3_000, links)
    return structs.replace(made, **changes)


def sampler(step: int = 0, **changes: Any) -> Sampler:
    return structs.replace(Sampler("top-p", {"p": 0.9}, 7, step, deterministic=False), **changes)


def checkpoint(session: str | int = 1, epoch: int = 1, offset: int = 0, **changes: Any) -> SessionCheckpoint:
    """A checkpoint of a session with a prompt of two blocks and three tokens more."""
    name = session_id(session) if isinstance(session, int) else session
    made = SessionCheckpoint(
        name, epoch, COMPAT, SCOPE, keys(2), [1, 2, 3], list(range(100, 100 + offset)), offset, sampler(offset)
    )
    return structs.replace(made, **changes)


PROMPT_TOKENS = 2 * BLOCK_TOKENS + 3


def source(holder: str, octets: int = MIB, layers: tuple[int, int] = (0, 3), layer_count: int = 4) -> Source:
    """A replica of a block of `octets` in all layers."""
    return Source(holder, layer_count, 8 * octets / layer_count, ((layers[0], layers[1] + 1, float("inf")),))


def run(blocks: int, *sources: Source | str) -> Run:
    made = [each if isinstance(each, Source) else source(each) for each in sources]
    return tuple(sorted(made)), blocks


@dataclass
class Driven:
    """A state whose rows go to `disk` as they are handed out, and whose instructions are kept in order."""

    settings: Settings = field(default_factory=Settings)
    block_tokens: Mapping[str, int] = field(default_factory=dict)
    serves: Any = None
    unfollowed: set[str] = field(default_factory=set)
    widths: GroupPolicy | None = None
    disk: dict[tuple[str, str], Row] = field(default_factory=dict)
    now_ms: int = 0
    done: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = (f"d1ec7000-0000-4000-8000-{n:012x}" for n in itertools.count(1))
        self.restart()

    def restart(self) -> None:
        """As after kill -9: only the disk survives, and the clock starts anew."""
        more = {} if self.serves is None else {"serves": self.serves}
        self.state = PlacementState(
            self.settings, new_id=lambda: next(self.ids), block_tokens=self.block_tokens,
            is_followed=lambda session: session not in self.unfollowed, widths=self.widths,
            rows=self.disk.values(), now_ms=self.now_ms, **more,
        )  # fmt: skip
        self.done = []
        self.drain()

    def drain(self) -> list[Instruction]:
        taken = self.state.instructions()
        assert not any(isinstance(each, Persist) for each in taken[1:])
        for row in taken[0].rows if taken and isinstance(taken[0], Persist) else ():
            if isinstance(row, Forget | ForgetMap):
                self.disk.pop(key_of(row), None)
            else:
                self.disk[key_of(row)] = row
        rest = [each for each in taken if not isinstance(each, Persist)]
        self.done += rest
        return rest

    def status(self, made: InstanceStatus) -> str:
        try:
            return self.state.status(made, self.now_ms)
        finally:
            self.drain()

    def checkpoint(self, sender: str | Sequence[str], made: SessionCheckpoint) -> tuple[bool, int, int]:
        named = [sender] if isinstance(sender, str) else sender
        try:
            created, reply = self.state.checkpoint(named, made, self.now_ms)
        finally:
            self.drain()
        return created, reply.epoch, reply.output_offset

    def assign(
        self, session: int = 1, runs: Sequence[Run] = (), owner: str = OWNER, tokens: int = 0, **changes: Any
    ) -> Assignment:
        start = checkpoint(session, 0, 0, **changes)
        try:
            return self.state.assign(owner, start, tokens or PROMPT_TOKENS, runs, self.now_ms)
        finally:
            self.drain()

    def end(self, session: int = 1, owner: str = OWNER) -> None:
        self.state.end(owner, session_id(session), self.now_ms)
        self.drain()

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.state.tick(now_ms)
        self.drain()

    def take(self, kind: type[Any]) -> list[Any]:
        """What of a kind was handed out since it was last asked for."""
        taken = [each for each in self.done if isinstance(each, kind)]
        self.done = [each for each in self.done if not isinstance(each, kind)]
        return taken

    def survey(self, runs: Sequence[Run] = ()) -> None:
        """Answer all surveys alike."""
        for each in self.take(Survey):
            self.state.surveyed(each.session, each.epoch, runs, self.now_ms)
        self.drain()

    def resumes(self) -> list[tuple[str, ResumeRequest]]:
        return [(each.instance, each.request) for each in self.take(SendResume)]

    def resumed(self, request: ResumeRequest) -> None:
        self.state.resumed(request.checkpoint.session, request.epoch, self.now_ms)
        self.drain()

    def resume_failed(self, request: ResumeRequest, problem: registry.ProblemType = registry.UNAVAILABLE) -> None:
        self.state.resume_failed(request.checkpoint.session, request.epoch, problem, self.now_ms)
        self.drain()


def refused(problem: registry.ProblemType) -> pytest.RaisesExc[KvspError]:
    return pytest.RaisesExc(KvspError, check=lambda error: error.problem == problem)


def assigned(*others: str, settings: Settings | None = None) -> Driven:
    """Session 1 runs at A; the others have come since."""
    pc = Driven(settings or Settings())
    pc.status(status(A))
    assert pc.assign(1).binding == Binding(session_id(1), 1, A)
    for uri in others:
        pc.status(status(uri))
    return pc


def fail(pc: Driven, instance: str = A) -> None:
    pc.status(status(instance, state="failed"))
