"""The sessions: whose they are, who runs them, what is recorded of them (A14). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.estimate import Run
from kvsp.protocol.jsonio import encode
from kvsp.protocol.records import SessionCheckpoint
from services.placement.instructions import NOBODY, Binding, SessionRow
from services.placement.quota import Bucket

GENERATED_MAX: Final = 1 << 20
"""Output tokens of one session; a checkpoint holds them all (U-33)."""
PROMPT_TAIL_MAX: Final = 1 << 16
PARAMS_OCTETS_MAX: Final = 64 << 10


class Phase(Enum):
    """Where a session stands."""

    BOUND = "an instance runs it"
    SURVEYED = "it is being found out where its blocks are"
    OFFERED = "an instance was asked to continue it"
    WAITING = "no instance takes it"


@dataclass(slots=True)
class Session:
    """One session; `checkpoint` None: it has ended, and only its epoch is kept.

    `began_ms` is when its instance was given it, None if that was another process of ours; `heard_ms` when it
    last gave a sign of life; `refused` are the instances that did not take it since it was last placed.
    """

    id: str
    epoch: int
    owner: str
    prompt_tokens: int
    block_tokens: int
    checkpoint: SessionCheckpoint | None
    heard_ms: int
    phase: Phase = Phase.WAITING
    instance: str = NOBODY
    instance_epoch: int = 0
    began_ms: int | None = None
    runs: Sequence[Run] = ()
    refused: dict[str, None] = field(default_factory=dict)
    bucket: Bucket | None = None

    def row(self) -> SessionRow:
        """The session at rest."""
        return SessionRow(
            self.id,
            self.epoch,
            self.instance,
            self.instance_epoch,
            self.phase is Phase.BOUND,
            self.owner,
            self.prompt_tokens,
            self.block_tokens,
            self.checkpoint,
        )

    @classmethod
    def of_row(cls, row: SessionRow, now_ms: int) -> Session:
        """The session that a row keeps, after a restart."""
        phase = Phase.BOUND if row.bound else Phase.OFFERED if row.instance else Phase.WAITING
        return cls(
            row.session, row.epoch, row.owner, row.prompt_tokens, row.block_tokens, row.checkpoint, now_ms,
            phase, row.instance, row.instance_epoch,
        )  # fmt: skip

    @property
    def binding(self) -> Binding:
        """Who runs it."""
        return Binding(self.id, self.epoch, self.instance)

    @property
    def tokens(self) -> int:
        """All its tokens so far: what an instance without any block would have to compute."""
        return self.prompt_tokens + (self.checkpoint.output_offset if self.checkpoint else 0)

    @property
    def has_reported(self) -> bool:
        """Has an instance ever sent a checkpoint of it?"""
        return self.owner == NOBODY or (self.checkpoint is not None and self.checkpoint.epoch > 0)

    def check(self, checkpoint: SessionCheckpoint, sender: Collection[str]) -> SessionCheckpoint:
        """May this checkpoint be recorded? `sender` are the base URIs of who sent it. What is recorded so far.

        In this order (U-34): raises KvspError kvsp-incompatible, kvsp-stale-epoch, 409, 403.
        """
        recorded = self.checkpoint
        # Whose session has ended runs it no longer; so has whose epoch has passed.
        if recorded is None:
            raise KvspError(registry.STALE_EPOCH, "the session has ended")
        if checkpoint.compat_id != recorded.compat_id:
            raise KvspError(registry.INCOMPATIBLE, "compat_id is not the session's")
        # "MUST reject a checkpoint with a lower epoch with problem type kvsp-stale-epoch"; before the
        # binding, "so a zombie always sees stale-epoch" (U-34).
        if checkpoint.epoch < self.epoch:
            raise KvspError(registry.STALE_EPOCH)
        # "only the PC increments; accepting it would permit session takeover" (U-34)
        if checkpoint.epoch > self.epoch:
            raise KvspError(registry.CONFLICT, "epoch is above the session's")
        if self.instance not in sender:
            raise KvspError(registry.FORBIDDEN, "not the session's instance")
        if checkpoint.scope_id != recorded.scope_id:
            raise KvspError(registry.CONFLICT, "scope_id is not the session's")
        return recorded


class Sessions:
    """All sessions, by id and by instance, in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[str, Session] = {}
        self._at: dict[str, dict[str, Session]] = {}
        self._owned: dict[str, int] = {}
        self.running = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._all.values()))

    def get(self, session: str) -> Session | None:
        """The session, ended or not."""
        return self._all.get(session)

    def of(self, owner: str, session: str) -> Session:
        """A running session of this owner. Raises KvspError (kvsp-not-found): others' do not exist for it (D8)."""
        found = self._all.get(session)
        if found is None or found.checkpoint is None or found.owner != owner or owner == NOBODY:
            raise KvspError(registry.NOT_FOUND, "no such session")
        return found

    def at(self, instance: str) -> list[Session]:
        """The running sessions that an instance has or was asked to continue."""
        return list(self._at.get(instance, {}).values())

    def check_room(self, owner: str, most: int) -> None:
        """May there be one more of this owner? Raises KvspError (429) (D13)."""
        if self._owned.get(owner, 0) >= most:
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many sessions", retry_after_s=1)

    def add(self, session: Session) -> None:
        """A new session."""
        self._all[session.id] = session
        if session.checkpoint is not None:
            self.running += 1
            self._owned[session.owner] = self._owned.get(session.owner, 0) + 1
            self._at.setdefault(session.instance, {})[session.id] = session

    def move(self, session: Session, instance: str, instance_epoch: int) -> None:
        """It is another's now, or NOBODY's."""
        self._leave(session)
        session.instance, session.instance_epoch = instance, instance_epoch
        self._at.setdefault(instance, {})[session.id] = session

    def end(self, session: Session) -> None:
        """Keep its epoch alone."""
        self._leave(session)
        session.instance, session.instance_epoch, session.phase = NOBODY, 0, Phase.WAITING
        session.checkpoint, session.runs, session.bucket = None, (), None
        session.refused.clear()
        self.running -= 1
        left = self._owned[session.owner] - 1
        if left:
            self._owned[session.owner] = left
        else:
            del self._owned[session.owner]

    def forget(self, session: Session) -> None:
        """Remove a session that has ended."""
        del self._all[session.id]

    def _leave(self, session: Session) -> None:
        there = self._at[session.instance]
        del there[session.id]
        if not there:
            del self._at[session.instance]


def check_bounds(checkpoint: SessionCheckpoint, block_tokens: int | None) -> None:
    """A sane size, and a tail shorter than a block (R-047) if that is known. Raises KvspError: 400, 413."""
    if len(checkpoint.prompt_blocks) > limits.LOOKUP_KEYS_MAX:
        raise KvspError(registry.CONTENT_TOO_LARGE, "too many prompt_blocks")
    if len(checkpoint.prompt_tail) > PROMPT_TAIL_MAX or len(checkpoint.generated) > GENERATED_MAX:
        raise KvspError(registry.CONTENT_TOO_LARGE, "too many tokens")
    if len(encode(checkpoint.sampler)) > PARAMS_OCTETS_MAX:
        raise KvspError(registry.CONTENT_TOO_LARGE, "sampler is too large")
    if block_tokens is not None and len(checkpoint.prompt_tail) >= block_tokens:
        raise bad_request("prompt_tail holds a whole block")


def octets_of(checkpoint: SessionCheckpoint) -> int:
    """About what a checkpoint costs to keep."""
    tokens = len(checkpoint.prompt_tail) + len(checkpoint.generated)
    return 512 + 32 * len(checkpoint.prompt_blocks) + 4 * tokens
