"""An instance's rules with a clock in hand, and requests to give them."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

from kvsp.protocol import keys
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import (
    CheckpointReply,
    DirectiveBlock,
    InstanceStatus,
    PrefetchDirective,
    ResumeRequest,
    Sampler,
    SessionCheckpoint,
)
from services.instance.instructions import Instruction, SendCheckpoint, StartSession
from services.instance.settings import Settings
from services.instance.state import InstanceState

T = TypeVar("T")

BLOCK = 4
COMPAT = "11" * 32
KEY = ScopeKey(b"k" * 32)
SCOPE = keys.scope_id(KEY).hex()
FOREIGN = "cc" * 16
II1, H1, H2 = "https://ii1.example/", "https://h1.example/", "https://h2.example/"


def session_id(i: int = 1) -> str:
    return str(uuid.UUID(int=i))


def sampler(step: int = 0, *, deterministic: bool = False, **params: Any) -> Sampler:
    return Sampler("greedy", {"max_tokens": 200} | params, 7, step, deterministic)


def block_key(i: int) -> str:
    return f"{i:064x}"


def directive(i: int = 1, **changes: Any) -> PrefetchDirective:
    members: dict[str, Any] = {
        "directive": session_id(i),
        "scope_id": SCOPE,
        "compat_id": COMPAT,
        "blocks": [DirectiveBlock(block_key(n), [H1]) for n in range(2)],
        "deadline_ms": 1000,
        "lease_ms": 2000,
    }
    return PrefetchDirective(**(members | changes))


def checkpoint(
    session: str = session_id(), epoch: int = 1, generated: int = 3, **changes: Any
) -> SessionCheckpoint:
    prompt = list(range(10))
    names = keys.block_keys(KEY, bytes.fromhex(COMPAT), prompt, BLOCK)
    members: dict[str, Any] = {
        "session": session,
        "epoch": epoch,
        "compat_id": COMPAT,
        "scope_id": SCOPE,
        "prompt_blocks": [name.hex() for name in names],
        "prompt_tail": prompt[8:],
        "generated": list(range(100, 100 + generated)),
        "output_offset": generated,
        "sampler": sampler(generated),
    }
    return SessionCheckpoint(**(members | changes))


class Driver:
    """The state, its clock, and what it has asked for so far; the placement controller knows of its start."""

    def __init__(self, *, is_known: bool = True, **settings: Any) -> None:
        self.now = 1_000_000
        made: dict[str, Any] = {
            "base_uri": II1,
            "epoch": 5,
            "compat_id": COMPAT,
            "block_tokens": BLOCK,
            "positions_max": 1000,
            "status_ttl_ms": 1200,
        }
        self.state = InstanceState(Settings(**(made | settings)), {SCOPE: KEY}, lambda scope: {H1, H2}, self.now)
        self.asked: list[Instruction] = []
        if is_known:
            self.introduce()

    def introduce(self) -> None:
        """The placement controller answers a status."""
        status = InstanceStatus(II1, self.state.settings.epoch, "active", 0, 0, 16, 0.0, 0.0, 0.0, 1200)
        self.state.status_answered(self.now, status, "active")

    def take(self) -> list[Instruction]:
        """What it asks for since the last call."""
        new = self.state.instructions()
        self.asked += new
        return new

    def took(self, kind: type[T]) -> list[T]:
        """Of what it asks for since the last call, instructions of a kind."""
        return [each for each in self.take() if isinstance(each, kind)]

    def last(self, kind: type[T]) -> T:
        """The latest instruction of a kind."""
        self.take()
        return [each for each in self.asked if isinstance(each, kind)][-1]

    def wait(self, ms: int) -> None:
        """Let time pass, at every deadline of the state."""
        end = self.now + ms
        while (at := self.state.next_deadline()) <= end:
            self.now = max(self.now, at)
            self.state.tick(self.now)
        self.now = end

    def generate(self, session: str = session_id(), epoch: int = 1, **changes: Any) -> None:
        members: dict[str, Any] = {
            "from_index": 0,
            "scope_id": SCOPE,
            "compat_id": COMPAT,
            "prompt": list(range(10)),
            "sampler": sampler(),
        }
        self.state.sessions.generate(self.now, session=session, epoch=epoch, **(members | changes))

    def resume(self, epoch: int = 2, made: SessionCheckpoint | None = None) -> StartSession | None:
        reply = self.state.sessions.resume(self.now, ResumeRequest(epoch, made or checkpoint()))
        assert reply.epoch == epoch
        started = self.took(StartSession)
        return started[0] if started else None

    def sample(self, count: int, first: int = 0, session: str = session_id(), epoch: int = 1) -> None:
        for index in range(first, first + count):
            self.state.sessions.sampled(self.now, session, epoch, index, 100 + index)

    def acknowledge(self, recorded: int | None = None) -> int:
        """The placement controller records the latest checkpoint; its offset."""
        sent = self.last(SendCheckpoint).checkpoint
        offset = sent.output_offset if recorded is None else recorded
        self.state.sessions.acknowledged(self.now, sent.session, CheckpointReply(sent.epoch, offset))
        return sent.output_offset

    def finish(self, session: str = session_id(), epoch: int = 1, reason: Any = "length") -> None:
        self.state.sessions.finished(self.now, session, epoch, reason)
