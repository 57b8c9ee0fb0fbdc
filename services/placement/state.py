"""The rules of the placement controller: instances, sessions, assignment, migration (A9, A10, A14). Pure.

Events are methods with `now_ms`, milliseconds of a clock that never goes back within a process. Replies are
returned, refusals are KvspError; what is to be done is drained with `instructions()` after every event, also after
a refused one:

    try: reply = state.checkpoint(...)
    finally: todo = state.instructions()

A `Persist`, if any, comes first: its rows must be on disk before what follows is done and before the reply leaves
(rows that an earlier event left unwritten likewise). Afterwards the shell answers

    Survey      -> surveyed(session, epoch, runs, now_ms)    runs: `estimate.survey` of the keys' replicas, or ()
    SendResume  -> resumed(session, epoch, now_ms) or resume_failed(session, epoch, problem, now_ms)
    SendState   -> ordered(instance, state, now_ms) or order_failed(instance, refused=...)
    Form, Reshard, SendLeave -> see grouping.py; the methods are those of `groups`

and calls `tick(now_ms)` at `next_deadline()`. What else there is wants no answer.
A restart is `PlacementState(..., rows=all rows ever persisted, the last of a key, now_ms=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.estimate import Run
from kvsp.protocol.records import CheckpointReply, InstanceStatus, SessionCheckpoint
from kvsp.protocol.registry import ProblemType
from services.placement.cost import Candidate, Request
from services.placement.fleet import DRAINING, FAILED, SLEEPING, UNREPORTED, Fleet, Instance
from services.placement.grouping import Grouping
from services.placement.groups import MapRow
from services.placement.instructions import (
    NOBODY,
    Binding,
    Feed,
    InstanceRow,
    Instruction,
    Row,
    SessionRow,
)
from services.placement.migration import Migration
from services.placement.outbox import Outbox
from services.placement.placing import Placer
from services.placement.sessions import Phase, Session, Sessions, check_bounds, check_start, tokens_per_block
from services.placement.settings import Settings, Totals
from services.placement.widths import GroupPolicy

FIRST_EPOCH: Final = 1
SWEEP_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome of `assign`: the first of `candidates` was chosen; `directive` "": none was sent, or none yet.

    `matched` counts leading prompt blocks that are held somewhere. `members` are asked to join a group (Form).
    """

    binding: Binding
    matched: int
    candidates: list[Candidate]
    directive: str
    members: tuple[str, ...] = ()


def _everyone(_scope_id: str, _compat_id: str) -> Collection[str] | None:
    return None


def _always(_session: str) -> bool:
    return True


class PlacementState:
    """One controller.

    `new_id` makes UUIDs for directives. `block_tokens` are the tokens per block by compat_id (hex32) as far as
    descriptors are configured: if any are, others are refused. `serves(scope_id, compat_id)` gives the base URIs
    of the instances that may be given such a session; None: all. `is_followed(session)` says whether a front end
    follows it right now.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        new_id: Callable[[], str],
        block_tokens: Mapping[str, int] | None = None,
        serves: Callable[[str, str], Collection[str] | None] = _everyone,
        is_followed: Callable[[str], bool] = _always,
        widths: GroupPolicy | None = None,
        rows: Iterable[Row] = (),
        now_ms: int = 0,
    ) -> None:
        self.totals = Totals()
        self._block_tokens = block_tokens or {}
        self._outbox = Outbox()
        self._fleet = Fleet(settings, self._outbox)
        self._sessions = Sessions(settings)
        self._placer = Placer(settings, self.totals, self._fleet, self._outbox, new_id=new_id, serves=serves)
        self.groups = Grouping(
            settings.groups, totals=self.totals, fleet=self._fleet, sessions=self._sessions, placer=self._placer,
            outbox=self._outbox, policy=widths, migrate=self._migrate,
        )  # fmt: skip
        self._migration = Migration(
            settings, self.totals, self._sessions, self._placer, self._outbox,
            is_followed=is_followed, left=self.groups.drop,
        )  # fmt: skip
        self._sweep_ms = now_ms + SWEEP_MS
        self._restore(rows, now_ms)

    def instructions(self) -> list[Instruction]:
        """What is to be done since the last call."""
        return self._outbox.drain()

    # --- instances (A9) ---------------------------------------------------------------

    def status(self, status: InstanceStatus, now_ms: int) -> str:
        """An instance reports: the controller's view (R-104, U-37). Raises KvspError (kvsp-stale-epoch)."""
        self.tick(now_ms)
        known = self._fleet.get(status.instance)
        # "The PC MUST discard records with an epoch lower than the highest it has seen for that instance"
        if known is not None and status.epoch < known.epoch:
            raise KvspError(registry.STALE_EPOCH)
        instance = known or self._fleet.add(status.instance)
        is_first, is_new = instance.status is None, status.epoch != instance.epoch
        was_active = instance.is_active and not is_new  # a new process comes anew
        self._fleet.report(instance, status, now_ms)
        self._outbox.do(Feed(status))
        self._migration.reported(instance, is_first=is_first, now_ms=now_ms)
        if is_new or instance.state == FAILED:
            self.groups.restarted(instance.uri, now_ms)
        self._fleet.order_again(instance)
        if instance.is_active and status.requested_state == SLEEPING and self._fleet.may_sleep(instance):
            instance.state = DRAINING  # "After accepting, PC treats it as draining at once." (U-37)
        if instance.is_active and not was_active:
            self._became_active(instance, now_ms)
        return instance.reply()

    def order(self, instance: str, state: str, now_ms: int) -> None:
        """An operator wants the instance "draining" or "active": SendState (R-107).

        Raises KvspError: 400, kvsp-not-found for an unknown instance, kvsp-invalid-state for a failed one.
        """
        self.tick(now_ms)
        self._fleet.order(instance, state)

    def ordered(self, instance: str, state: str, now_ms: int) -> None:
        """The instance has carried out an order and says which state is in effect (U-36)."""
        self.tick(now_ms)
        awake = self._fleet.ordered(instance, state)
        if awake is not None:
            self._became_active(awake, now_ms)

    def order_failed(self, instance: str, *, refused: bool) -> None:
        """It did not: refused, it is not asked again; unreachable, it is with its next report."""
        self._fleet.order_failed(instance, refused=refused)

    def reset_epoch(self, instance: str, now_ms: int) -> int:
        """An operator has an instance that an absurd epoch locked out begin anew: the highest epoch so far (D12).

        Raises KvspError: kvsp-not-found for one that never reported, kvsp-invalid-state while its last one counts.
        """
        self.tick(now_ms)
        epoch = self._fleet.reset_epoch(instance)
        for session in self._sessions.at(instance):  # its checkpoints were taken: who reports next has the session
            session.instance_epoch = UNREPORTED
            self._outbox.save(session.row())
        return epoch

    def is_active(self, instance: str) -> bool:
        """May the instance be sent directives and sessions right now? (R-108)"""
        known = self._fleet.get(instance)
        return known is not None and known.is_active

    def overview(self) -> list[InstanceStatus]:
        """Every instance as the controller sees it."""
        return [instance.overview() for instance in self._fleet]

    # --- assignment (A10) -------------------------------------------------------------

    def check_start(self, start: SessionCheckpoint, prompt_tokens: int) -> None:
        """What can be seen in the request alone. Raises KvspError: 400, 413."""
        check_start(start, prompt_tokens, self._block_tokens.get(start.compat_id))

    def check_assign(self, owner: str, start: SessionCheckpoint, prompt_tokens: int) -> None:
        """All that can refuse an assignment but the want of an instance.

        Raises KvspError, in this order: as `check_start`, kvsp-incompatible, 409 for a session that exists, 429.
        """
        self.check_start(start, prompt_tokens)
        self._require_compat(start.compat_id)
        if self._sessions.get(start.session) is not None:
            raise KvspError(registry.CONFLICT, "the session exists")
        self._sessions.check_owner(owner, start)

    def assign(
        self, owner: str, start: SessionCheckpoint, prompt_tokens: int, runs: Sequence[Run], now_ms: int
    ) -> Assignment:
        """Choose an instance for a request and bind its session to it (R-119).

        `owner` is the identity that asks, `start` the session before its first token, `runs` its leading blocks
        that are held somewhere. Raises KvspError as `check_assign`; 503 when no active instance can take it.
        """
        self.tick(now_ms)
        self.check_assign(owner, start, prompt_tokens)
        block_tokens = tokens_per_block(start, prompt_tokens) or self._block_tokens.get(start.compat_id, 0)
        request = Request(runs, prompt_tokens, block_tokens)
        candidates, instance = self._placer.choose(request, start)
        if instance is None or self._placer.is_too_dear(candidates[0]):
            self._placer.keep_unplaced(start, request, now_ms)
            self._placer.want(start, now_ms)
        if instance is None:
            self.totals.refusals += 1
            raise unavailable("no active instance")
        session = Session(
            start.session, FIRST_EPOCH, owner, prompt_tokens, block_tokens, start, start.scope_id, now_ms,
            Phase.BOUND, instance.uri, instance.epoch, now_ms,
        )  # fmt: skip
        self._add(session)
        best, matched = candidates[0], sum(count for _, count in runs)
        instance.take(best)
        self.totals.assignments += 1
        self.totals.prompt_tokens += prompt_tokens
        self.totals.matched_tokens += matched * block_tokens
        members = self.groups.offer(session, request, candidates)
        loads = best.fetches and not members  # a group computes its context
        directive = self._placer.prefetch(instance, start, request, best.usable) if loads else ""
        return Assignment(session.binding, matched, candidates, directive, members)

    # --- sessions (A14) ---------------------------------------------------------------

    def check_bounds(self, checkpoint: SessionCheckpoint) -> None:
        """What can be seen in the checkpoint alone. Raises KvspError: 400, 413."""
        check_bounds(checkpoint, self._block_tokens.get(checkpoint.compat_id))

    def checkpoint(
        self, sender: Sequence[str], checkpoint: SessionCheckpoint, now_ms: int
    ) -> tuple[bool, CheckpointReply]:
        """Record a checkpoint of an identity with base URIs `sender`: (first of its session, what is recorded).

        Raises KvspError, in this order: 400, 413, kvsp-scope-denied and 409 for another scope than the session's,
        kvsp-incompatible, kvsp-stale-epoch, 409, 403, 429.
        """
        self.tick(now_ms)
        self.check_bounds(checkpoint)
        self._require_compat(checkpoint.compat_id)
        session = self._sessions.get(checkpoint.session)
        if session is None:
            return self._adopt(sender, checkpoint, now_ms)
        recorded = session.check(checkpoint, sender)
        self._sessions.take_allowance(session, checkpoint, now_ms)
        session.heard_ms = now_ms
        is_first = not session.has_reported
        # Whoever checkpoints an epoch has accepted it.
        self._migration.resumed(session.id, session.epoch, now_ms)
        # "records the checkpoint with the highest output_offset": what an earlier epoch had acknowledged
        # is never given up for less, as its tokens may have been delivered.
        if checkpoint.output_offset > recorded.output_offset or is_first:
            self._sessions.record(session, checkpoint)
            recorded = checkpoint
            self._outbox.save(session.row())
            self.totals.checkpoints += 1
            self.groups.checkpointed(session, now_ms)
        return is_first, CheckpointReply(session.epoch, recorded.output_offset)

    def binding(self, owner: str, session: str) -> Binding | None:
        """Who runs the session; None while nobody does. Raises KvspError (kvsp-not-found): not the owner's."""
        found = self._sessions.of(owner, session)
        return found.binding if found.phase is Phase.BOUND else None

    def end(self, owner: str, session: str, now_ms: int) -> None:
        """The session is over. Raises KvspError (kvsp-not-found): not the owner's."""
        self.tick(now_ms)
        found = self._sessions.of(owner, session)
        if found.began_ms is not None and found.has_reported:  # not one that was given up before it ran
            self._fleet[found.instance].served(now_ms - found.began_ms)
        self._migration.end(found, now_ms)

    def surveyed(self, session: str, epoch: int, runs: Sequence[Run], now_ms: int) -> None:
        """Who holds the blocks of a session that needs an instance; no runs when that cannot be known."""
        self.tick(now_ms)
        self._migration.surveyed(session, epoch, runs, now_ms)

    def resumed(self, session: str, epoch: int, now_ms: int) -> None:
        """The instance has admitted the session."""
        self.tick(now_ms)
        self._migration.resumed(session, epoch, now_ms)

    def resume_failed(self, session: str, epoch: int, problem: ProblemType, now_ms: int) -> None:
        """The instance refused, or (503, 504) did not answer and may have accepted."""
        self.tick(now_ms)
        self._migration.resume_failed(session, epoch, problem, now_ms)

    def is_offered(self, session: str, epoch: int) -> bool:
        """Is an answer to a SendResume still waited for?"""
        return self._migration.is_offered(session, epoch)

    @property
    def sessions(self) -> int:
        """How many have not ended."""
        return self._sessions.running

    # --- time -------------------------------------------------------------------------

    def next_deadline(self) -> int:
        """When `tick` has something to do."""
        expiries = [each.expires_ms for each in self._fleet if each.expires_ms is not None]
        others = [self._migration.retry_ms, self.groups.next_deadline()]
        return min([self._sweep_ms, *expiries, *(each for each in others if each is not None)])

    def tick(self, now_ms: int) -> None:
        """Do what is due; every event does so first."""
        for instance in self._fleet:
            if instance.expires_ms is not None and instance.expires_ms <= now_ms:
                self.totals.failures += instance.status is not None
                self._fleet.fail(instance)
                for session in self._sessions.at(instance.uri):
                    self._migration.begin(session, now_ms)
                self.groups.restarted(instance.uri, now_ms)
        self._migration.tick(now_ms)
        self.groups.tick(now_ms)
        if self._sweep_ms <= now_ms:
            self._sweep_ms = now_ms + SWEEP_MS
            self._migration.sweep(now_ms)

    # --- inside -----------------------------------------------------------------------

    def _became_active(self, instance: Instance, now_ms: int) -> None:
        self._migration.became_active(instance.uri)
        self._placer.became_active(instance, now_ms)

    def _adopt(
        self, sender: Sequence[str], checkpoint: SessionCheckpoint, now_ms: int
    ) -> tuple[bool, CheckpointReply]:
        """ "Unknown session: accept any epoch, bind to sender (the PC assigned it)." (U-34)"""
        known = [each for uri in sender if (each := self._fleet.get(uri)) is not None]
        known.sort(key=lambda each: each.status is None)
        instance = known[0] if known else self._fleet.add(sender[0])
        self._sessions.check_instance(instance.uri, checkpoint)
        block_tokens = self._block_tokens.get(checkpoint.compat_id, 0)
        prompt_tokens = len(checkpoint.prompt_blocks) * block_tokens + len(checkpoint.prompt_tail)
        session = Session(
            checkpoint.session, checkpoint.epoch, NOBODY, prompt_tokens, block_tokens, checkpoint,
            checkpoint.scope_id, now_ms, Phase.BOUND, instance.uri, instance.epoch,
        )  # fmt: skip
        self._sessions.take_allowance(session, checkpoint, now_ms)
        instance.expect(now_ms)
        self._add(session)
        self.totals.checkpoints += 1
        return True, CheckpointReply(session.epoch, checkpoint.output_offset)

    def _migrate(self, session: Session, now_ms: int) -> None:
        self._migration.begin(session, now_ms)

    def _add(self, session: Session) -> None:
        self._sessions.add(session)
        self._outbox.save(session.row())

    def _require_compat(self, compat_id: str) -> None:
        if self._block_tokens and compat_id not in self._block_tokens:
            raise KvspError(registry.INCOMPATIBLE, "no descriptor of this compatibility id is configured")

    def _restore(self, rows: Iterable[Row], now_ms: int) -> None:
        """What an earlier process persisted; every instance that has sessions gets its TTL to report in."""
        maps: list[MapRow] = []
        for row in rows:
            match row:
                case InstanceRow():
                    self._fleet.restore(row)
                case SessionRow():
                    self._sessions.add(Session.of_row(row, now_ms))
                case MapRow():
                    maps.append(row)
        for uri in self.groups.restore(maps, now_ms):
            (self._fleet.get(uri) or self._fleet.add(uri)).expect(now_ms)
        for session in self._sessions:
            if session.checkpoint is None or session.instance == NOBODY:
                continue
            instance = self._fleet.get(session.instance) or self._fleet.add(session.instance)
            if UNREPORTED < session.instance_epoch < instance.epoch:
                self._migration.begin(session, now_ms)
            else:
                instance.expect(now_ms)
