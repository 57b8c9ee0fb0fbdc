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
from kvsp.protocol.registry import ProblemType
from services.placement.instructions import NOBODY, Binding, SessionRow
from services.placement.quota import Bucket
from services.placement.settings import Settings

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
    last gave a sign of life, `followed_ms` when it was last seen to be followed; `refused` are the instances that
    did not take it since it was last placed, with their reasons.
    """

    id: str
    epoch: int
    owner: str
    prompt_tokens: int
    block_tokens: int
    checkpoint: SessionCheckpoint | None
    scope_id: str
    heard_ms: int
    phase: Phase = Phase.WAITING
    instance: str = NOBODY
    instance_epoch: int = 0
    began_ms: int | None = None
    runs: Sequence[Run] = ()
    refused: dict[str, ProblemType] = field(default_factory=dict)
    bucket: Bucket | None = None
    followed_ms: int = field(init=False)

    def __post_init__(self) -> None:
        self.followed_ms = self.heard_ms

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
            self.scope_id,
        )

    @classmethod
    def of_row(cls, row: SessionRow, now_ms: int) -> Session:
        """The session that a row keeps, after a restart."""
        phase = Phase.BOUND if row.bound else Phase.OFFERED if row.instance else Phase.WAITING
        scope_id = row.checkpoint.scope_id if row.checkpoint else row.scope_id
        return cls(
            row.session, row.epoch, row.owner, row.prompt_tokens, row.block_tokens, row.checkpoint, scope_id,
            now_ms, phase, row.instance, row.instance_epoch,
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

    @property
    def octets(self) -> int:
        """About what it costs to keep."""
        return octets_of(self.checkpoint) if self.checkpoint else 0

    def check(self, checkpoint: SessionCheckpoint, sender: Collection[str]) -> SessionCheckpoint:
        """May this checkpoint be recorded? `sender` are the base URIs of who sent it. What is recorded so far.

        In this order (U-34): raises KvspError kvsp-scope-denied, 409 for another scope, kvsp-incompatible,
        kvsp-stale-epoch, 409, 403.
        """
        # What a session of another scope is up to is nobody's business, its end included: the answer is that for a
        # scope of others (D8). Whose session it is knows it, and has erred.
        if self.scope_id and checkpoint.scope_id != self.scope_id:
            if self.instance in sender:
                raise KvspError(registry.CONFLICT, "scope_id is not the session's")
            raise KvspError(registry.SCOPE_DENIED)
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
        return recorded


class _Kept:
    """The running sessions of an identity or at an instance."""

    __slots__ = ("octets", "sessions")

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.octets = 0  # of their checkpoints


class Sessions:
    """All sessions, by id, by owner and by instance, in the order in which they came; and how many may be."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._all: dict[str, Session] = {}
        self._at: dict[str, _Kept] = {}
        self._owned: dict[str, _Kept] = {}
        self._buckets: dict[str, tuple[Bucket, Bucket]] = {}
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
        there = self._at.get(instance)
        return list(there.sessions.values()) if there else []

    def check_owner(self, owner: str, start: SessionCheckpoint) -> None:
        """May this owner have one more? Raises KvspError (429) (D13)."""
        self._check_room(self._owned.get(owner), octets_of(start), is_new=True)

    def check_instance(self, instance: str, checkpoint: SessionCheckpoint) -> None:
        """May an instance bring one more? Raises KvspError (429) (D13)."""
        self._check_room(self._at.get(instance), octets_of(checkpoint), is_new=True)

    def take_allowance(self, session: Session, checkpoint: SessionCheckpoint, now_ms: int) -> None:
        """Checkpoint floods end here, before the disk (D13). Raises KvspError (429)."""
        rules = self._settings
        if session.bucket is None:
            session.bucket = Bucket(rules.session_rate, now_ms)
        session.bucket.take(1, now_ms)
        if session.instance not in self._buckets:
            self._buckets[session.instance] = (
                Bucket(rules.instance_rate, now_ms), Bucket(rules.octet_rate, now_ms)
            )  # fmt: skip
        calls, octets = self._buckets[session.instance]
        calls.take(1, now_ms)
        octets.take(octets_of(checkpoint), now_ms)

    def record(self, session: Session, checkpoint: SessionCheckpoint) -> None:
        """Keep a checkpoint of a session instead of the last one. Raises KvspError (429) (D13)."""
        more = octets_of(checkpoint) - session.octets
        there, owned = self._at[session.instance], self._owned[session.owner]
        self._check_room(there, more, is_new=False)
        if session.owner != NOBODY:
            self._check_room(owned, more, is_new=False)
        there.octets += more
        owned.octets += more
        session.checkpoint = checkpoint

    def add(self, session: Session) -> None:
        """A new session."""
        self._all[session.id] = session
        if session.checkpoint is not None:
            self.running += 1
            _join(self._owned, session.owner, session)
            _join(self._at, session.instance, session)

    def move(self, session: Session, instance: str, instance_epoch: int) -> None:
        """It is another's now, or NOBODY's."""
        _leave(self._at, session.instance, session)
        session.instance, session.instance_epoch = instance, instance_epoch
        _join(self._at, instance, session)

    def end(self, session: Session) -> None:
        """Keep its epoch alone."""
        _leave(self._at, session.instance, session)
        _leave(self._owned, session.owner, session)
        session.instance, session.instance_epoch, session.phase = NOBODY, 0, Phase.WAITING
        session.checkpoint, session.runs, session.bucket = None, (), None
        session.refused.clear()
        self.running -= 1

    def forget(self, session: Session) -> None:
        """Remove a session that has ended."""
        del self._all[session.id]

    def _check_room(self, kept: _Kept | None, octets: int, *, is_new: bool) -> None:
        """May one keep so much more, in a new session or in one there is? Raises KvspError (429)."""
        sessions, known = (len(kept.sessions), kept.octets) if kept else (0, 0)
        if is_new and sessions >= self._settings.sessions_max:
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many sessions", retry_after_s=1)
        if octets > 0 and known + octets > self._settings.kept_octets_max:
            raise KvspError(registry.TOO_MANY_REQUESTS, "the checkpoints are too large together", retry_after_s=1)


def _join(kept: dict[str, _Kept], name: str, session: Session) -> None:
    there = kept.setdefault(name, _Kept())
    there.sessions[session.id] = session
    there.octets += session.octets


def _leave(kept: dict[str, _Kept], name: str, session: Session) -> None:
    there = kept[name]
    del there.sessions[session.id]
    there.octets -= session.octets
    if not there.sessions:
        del kept[name]


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


def check_start(start: SessionCheckpoint, prompt_tokens: int, block_tokens: int | None) -> None:
    """A session of so long a prompt, of which nothing has come. Raises KvspError: 400, 413."""
    check_bounds(start, block_tokens)
    if start.epoch or start.output_offset:
        raise bad_request("a session starts with epoch 0 and output_offset 0")
    tokens = tokens_per_block(start, prompt_tokens)
    if block_tokens is not None and tokens not in (0, block_tokens):
        raise bad_request("prompt_tokens does not match prompt_blocks and the descriptor")


def tokens_per_block(start: SessionCheckpoint, prompt_tokens: int) -> int:
    """What `prompt_tokens` tells of a block's length; 0 without blocks. Raises KvspError (400)."""
    in_blocks = prompt_tokens - len(start.prompt_tail)
    count = len(start.prompt_blocks)
    if in_blocks < 0 or (in_blocks % count if count else in_blocks):
        raise bad_request("prompt_tokens does not match prompt_blocks and prompt_tail")
    tokens = in_blocks // count if count else 0
    if count and tokens <= len(start.prompt_tail):
        raise bad_request("prompt_tail holds a whole block")
    return tokens


def octets_of(checkpoint: SessionCheckpoint) -> int:
    """About what a checkpoint costs to keep."""
    tokens = len(checkpoint.prompt_tail) + len(checkpoint.generated)
    return 512 + 32 * len(checkpoint.prompt_blocks) + 4 * tokens
