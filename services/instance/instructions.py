"""What the rules ask the shell to do (state.py). Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvsp.protocol.records import InstanceStatus, Sampler, SessionCheckpoint
from services.instance.session import Reason, Session


@dataclass(frozen=True, slots=True)
class StartSession:
    """Load what can be had of `block_keys` and let the engine compute and sample.

    `tokens` are those from position `known_from` on. `sampler.step` is the next output index.
    """

    session: str
    epoch: int
    scope_id: str
    block_keys: list[bytes]
    prompt_tokens: int
    known_from: int
    tokens: list[int]
    sampler: Sampler
    max_tokens: int
    stop_tokens: frozenset[int]

    @classmethod
    def of(cls, session: Session) -> StartSession:
        """Begin with a session, or go on after its last token."""
        return cls(
            session=session.id,
            epoch=session.epoch,
            scope_id=session.scope_id,
            block_keys=list(session.keys()),
            prompt_tokens=session.prompt_tokens,
            known_from=session.known_from,
            tokens=session.tokens,
            sampler=msgspec.structs.replace(session.sampler, step=len(session.generated)),
            max_tokens=session.max_tokens,
            stop_tokens=session.stop_tokens,
        )


@dataclass(frozen=True, slots=True)
class ProvidePrompt:
    """The engine waits for these tokens: all of the prompt."""

    session: str
    epoch: int
    prompt: list[int]


@dataclass(frozen=True, slots=True)
class StopSession:
    """The engine is to forget the session; it may have done so already."""

    session: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SendCheckpoint:
    """To the placement controller. Answer with `acknowledged`, `checkpoint_refused` or `unanswered`."""

    checkpoint: SessionCheckpoint


@dataclass(frozen=True, slots=True)
class Release:
    """These output tokens may leave."""

    session: str
    epoch: int
    first_index: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """All its output has left."""

    session: str
    epoch: int
    reason: Reason
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The session is no more this instance's under that epoch; whoever takes its tokens gets no more."""

    session: str
    epoch: int


@dataclass(frozen=True, slots=True)
class BeginDirective:
    """Load these blocks, each from one of its sources, in this order, until `StopDirective` or all are settled.

    Answer with `block_outcome` for each. A block without sources can be had only where it is held already.
    """

    directive: str
    scope_id: str
    blocks: list[tuple[bytes, tuple[str, ...]]]
    lease_ms: int


@dataclass(frozen=True, slots=True)
class StopDirective:
    """Load nothing more for it."""

    directive: str


@dataclass(frozen=True, slots=True)
class SendStatus:
    """To the placement controller. Answer with `status_answered` or `status_refused`, or with nothing."""

    status: InstanceStatus


@dataclass(frozen=True, slots=True)
class EmptyDevice:
    """Keep no block in the engine's own memory (U-49), until `UseDevice`."""


@dataclass(frozen=True, slots=True)
class UseDevice:
    """Keep hot blocks there again."""


Instruction = (
    StartSession | ProvidePrompt | StopSession | SendCheckpoint | Release | Ended | Fenced
    | BeginDirective | StopDirective | SendStatus | EmptyDevice | UseDevice
)  # fmt: skip
