"""The sessions of an instance: started, resumed, fenced by epoch, ended (A14, U-35). Pure.

`Sessions` is reached as `InstanceState.sessions`; its instructions come out there.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvsp.protocol import keys, registry
from kvsp.protocol.errors import KvspError, bad_request, unavailable
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import CheckpointReply, ResumeReply, ResumeRequest, Sampler
from services.instance.instructions import (
    Ended,
    Fenced,
    Instruction,
    ProvidePrompt,
    Release,
    SendCheckpoint,
    StartSession,
    StopSession,
)
from services.instance.session import Name, Reason, Session, bounds_of, kept, naming
from services.instance.settings import Settings

FIRST_EPOCH: Final = 1
"""Of a session that the placement controller has just assigned; every later one begins with a resume."""

FENCES_MAX: Final = 65_536
"""Sessions that are gone and whose epochs are remembered, the latest."""


@dataclass(frozen=True, slots=True)
class Output:
    """What may leave of a session's output from an index on, and whether that is the end of it."""

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt, not computed here; None: not known yet."""
    ended: Ended | None


class Sessions:
    """Every session under the highest epoch known here, its output kept for a while after its end.

    `emit` takes instructions, `admit` raises KvspError unless new sessions are taken, `changed(now_ms)` is told
    when a session came or ended.
    """

    def __init__(
        self,
        settings: Settings,
        scopes: Mapping[str, ScopeKey],
        emit: Callable[[Instruction], None],
        admit: Callable[[], None],
        changed: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._scopes = scopes
        self._emit = emit
        self._admit = admit
        self._changed = changed
        self._all: dict[str, Session] = {}
        self.grouped: set[str] = set()
        """Sessions whose context is sharded: what they compute is not, to the bit, what one instance computes."""
        self._fences: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By session and scope: who may not see a scope must not learn of its sessions."""

    def __len__(self) -> int:
        """Sessions known, those included whose output has ended."""
        return len(self._all)

    @property
    def running(self) -> int:
        """Sessions whose output has not ended."""
        return sum(not each.ended for each in self._all.values())

    def get(self, session: str, epoch: int) -> Session | None:
        """The session, if this is its current epoch."""
        found = self._all.get(session)
        return found if found is not None and found.epoch == epoch else None

    def check(self, scope_id: str, compat_id: str) -> None:
        """Is this of a scope and of the model that the instance has? Raises KvspError: 403, 409."""
        # "scope not held by II -> 403" (U-20): without its key no block of it can be named.
        if scope_id not in self._scopes:
            raise KvspError(registry.SCOPE_DENIED)
        if not hmac.compare_digest(compat_id, self._settings.compat_id):
            raise KvspError(registry.INCOMPATIBLE, "not the model of this instance")

    # --- front end and placement controller ---

    def generate(
        self,
        now_ms: int,
        *,
        session: str,
        epoch: int,
        from_index: int,
        scope_id: str,
        compat_id: str,
        prompt: Sequence[int],
        sampler: Sampler,
    ) -> None:
        """Start a session, or attach to it: then `output` has its tokens.

        Raises KvspError: 400, 403 kvsp-scope-denied, 409 kvsp-incompatible, 409 kvsp-stale-epoch, 404, 409
        kvsp-invalid-state, 503.
        """
        bounds_of(sampler)
        self.check(scope_id, compat_id)
        known = self._all.get(session)
        if known is not None and not hmac.compare_digest(known.scope_id, scope_id):
            raise _unknown()
        if epoch < self._floor(session, scope_id):
            raise _stale()
        if known is not None and known.epoch == epoch:
            known.give_prompt(prompt)
            self._provide(known)
            return
        # A session that has got further than its first token starts nowhere but from its checkpoint: an instance
        # that restarted knows nothing of it, and must not begin it anew.
        if known is not None or epoch != FIRST_EPOCH or from_index:
            raise _unknown()
        self._admit()
        if sampler.step:
            raise bad_request("a new session's sampler is at step 0")
        self._require_room(len(prompt), self.running)
        blocks = self._name(scope_id)(prompt, keys.ZERO)
        made = Session(
            id=session,
            epoch=epoch,
            scope_id=scope_id,
            compat_id=compat_id,
            block_tokens=self._settings.block_tokens,
            name=self._name(scope_id),
            sampler=kept(sampler, batch_invariant=self._settings.batch_invariant and session not in self.grouped),
            prompt_blocks=[key.hex() for key in blocks],
            prompt_tail=list(prompt[len(blocks) * self._settings.block_tokens :]),
            prompt=list(prompt),
        )
        self._start(now_ms, made)

    def resume(self, now_ms: int, request: ResumeRequest) -> ResumeReply:
        """Continue a session from its checkpoint under a new epoch (R-180, U-35).

        Raises KvspError: 400, 403 kvsp-scope-denied, 409 kvsp-incompatible, 409 kvsp-stale-epoch, 409
        kvsp-invalid-state, 404, 503.
        """
        checkpoint = request.checkpoint
        bounds_of(checkpoint.sampler)
        self.check(checkpoint.scope_id, checkpoint.compat_id)
        if len(checkpoint.prompt_tail) >= self._settings.block_tokens:
            raise bad_request("prompt_tail holds a complete block")
        if checkpoint.sampler.step != checkpoint.output_offset:
            raise bad_request("the sampler's step is not the number of output tokens")
        known = self._all.get(checkpoint.session)
        if known is not None and not hmac.compare_digest(known.scope_id, checkpoint.scope_id):
            raise _unknown()
        reply = ResumeReply(checkpoint.session, request.epoch, checkpoint.output_offset)
        if known is not None and known.epoch == request.epoch and known.origin == checkpoint:
            return reply  # "Same epoch repeated -> 202 no restart"
        floor = self._floor(checkpoint.session, checkpoint.scope_id)
        if request.epoch < floor or (known and known.epoch == request.epoch):
            raise _stale()
        self._admit()
        made = Session(
            id=checkpoint.session,
            epoch=request.epoch,
            scope_id=checkpoint.scope_id,
            compat_id=checkpoint.compat_id,
            block_tokens=self._settings.block_tokens,
            name=self._name(checkpoint.scope_id),
            sampler=kept(checkpoint.sampler, batch_invariant=self._settings.batch_invariant),
            prompt_blocks=checkpoint.prompt_blocks,
            prompt_tail=checkpoint.prompt_tail,
            generated=list(checkpoint.generated),
            origin=checkpoint,
            covered=checkpoint.output_offset,
            released=checkpoint.output_offset,
            due=True,  # progress is "visible as checkpoints under the new epoch"
        )
        self._require_room(made.prompt_tokens, self.running - (known is not None and not known.ended))
        if known is not None:
            if known.prompt_blocks == made.prompt_blocks and known.prompt_tail == made.prompt_tail:
                made.prompt = known.prompt
            self._fence(known)
        self._start(now_ms, made)
        return reply

    def end(self, now_ms: int, session: str, scopes: Collection[str]) -> None:
        """Nobody waits for the session any more. Raises KvspError (404), also when it is of none of `scopes`."""
        found = self._all.get(session)
        if found is None or found.scope_id not in scopes:
            raise _unknown()
        self._fence(found)
        self._changed(now_ms)

    def output(self, session: str, epoch: int, from_index: int) -> Output:
        """What may leave from `from_index` on. Raises KvspError (kvsp-stale-epoch) when the session has gone."""
        found = self.get(session, epoch)
        if found is None:
            raise _stale()
        ended = None
        if found.ended and found.reason is not None:
            ended = Ended(session, epoch, found.reason, len(found.generated))
        tokens = found.generated[from_index : found.released]
        return Output(tokens, found.prompt_tokens, found.cached_tokens, ended)

    def block_key(self, session: str, epoch: int, block: int) -> tuple[str, bytes] | None:
        """Scope and key of a complete block of a session, by number. None: the session has gone."""
        found = self.get(session, epoch)
        if found is None or block >= len(found.keys()):
            return None
        return found.scope_id, found.keys()[block]

    # --- engine ---

    def started(self, session: str, epoch: int, cached_tokens: int) -> None:
        """The prompt has been computed, but for `cached_tokens` of it."""
        found = self.get(session, epoch)
        if found is not None:
            found.cached_tokens = cached_tokens

    def sampled(self, now_ms: int, session: str, epoch: int, index: int, token: int) -> None:
        """The engine sampled an output token."""
        found = self.get(session, epoch)
        if found is not None and found.add(index, token):
            self._advance(now_ms, found)

    def restart(self, session: str, epoch: int) -> None:
        """What computed the session has ended without its doing: the engine begins with it again."""
        found = self.get(session, epoch)
        if found is not None and found.reason is None:
            self._emit(StartSession.of(found))

    def prefix_lost(self, now_ms: int, session: str, epoch: int) -> None:
        """Blocks could not be loaded, and the tokens of the prompt are needed to compute them."""
        found = self.get(session, epoch)
        if found is not None and found.reason is None:
            found.needs_prompt = True
            found.ends_ms = now_ms + self._settings.prompt_wait_ms
            self._provide(found)

    def finished(self, now_ms: int, session: str, epoch: int, reason: Reason) -> None:
        """The engine is done with the session."""
        found = self.get(session, epoch)
        if found is not None and found.reason is None:
            found.reason = reason
            self._advance(now_ms, found)

    # --- checkpoints ---

    def acknowledged(self, now_ms: int, session: str, reply: CheckpointReply) -> None:
        """The placement controller's reply to the checkpoint under way. Under another epoch it means nothing."""
        found = self.get(session, reply.epoch)
        if found is None:
            return
        try:
            found.acknowledged(reply.output_offset)
        except KvspError:
            self._fence(found)
            self._changed(now_ms)
        else:
            self._advance(now_ms, found)

    def checkpoint_refused(self, now_ms: int, session: str, epoch: int) -> None:
        """It will never be recorded (409, 403, other 4xx): the session is another's, and stops here.

        "Any message from the failed instance carrying the old epoch MUST be rejected"; what was not released is
        dropped.
        """
        found = self.get(session, epoch)
        if found is not None:
            self._fence(found)
            self._changed(now_ms)

    def unanswered(self, now_ms: int, session: str, epoch: int) -> None:
        """Nobody answered the checkpoint under way, or with "later" (5xx, 429): another follows after a pause.

        When that goes on for too long (session.SILENCE_MS_MAX) the session ends here as if it had been refused.
        """
        found = self.get(session, epoch)
        if found is None:
            return
        if found.unanswered(now_ms):
            self._advance(now_ms, found)
        else:
            self.checkpoint_refused(now_ms, session, epoch)

    # --- time ---

    def deadlines(self) -> Iterator[int]:
        """When `tick` has something to do."""
        for session in self._all.values():
            if session.ends_ms is not None:
                yield session.ends_ms
            if session.due and session.in_flight is None and not session.ended:
                yield session.retry_ms

    def tick(self, now_ms: int) -> None:
        """Send what was to be sent later; forget what was kept long enough."""
        for session in list(self._all.values()):
            if session.ends_ms is not None and session.ends_ms <= now_ms:
                self._expire(now_ms, session)
            else:
                self._advance(now_ms, session)

    def fence_all(self) -> None:
        """None of the sessions is this instance's any more."""
        for session in list(self._all.values()):
            self._fence(session)

    # --- inside ---

    def _require_room(self, prompt_tokens: int, running: int) -> None:
        if not 0 < prompt_tokens < self._settings.positions_max:
            raise bad_request("the prompt is empty or too long")
        if running >= self._settings.batch_size + self._settings.queue_max:
            raise unavailable("the queue is full")

    def _floor(self, session: str, scope_id: str) -> int:
        """The lowest epoch of a session that is not fenced."""
        known = self._all.get(session)
        return self._fences.get((session, scope_id), FIRST_EPOCH) if known is None else known.epoch

    def _name(self, scope_id: str) -> Name:
        return naming(self._scopes[scope_id], self._settings.compat_id, self._settings.block_tokens)

    def _start(self, now_ms: int, session: Session) -> None:
        bounds = bounds_of(session.sampler)
        session.max_tokens = min(bounds.max_tokens, self._settings.positions_max - session.prompt_tokens)
        session.stop_tokens = frozenset(bounds.stop_tokens)
        self._fences.pop((session.id, session.scope_id), None)
        self._all[session.id] = session
        self._changed(now_ms)
        if session.generated and session.generated[-1] in session.stop_tokens:
            session.reason = "stop"
        elif len(session.generated) >= session.max_tokens:
            session.reason = "length"
        else:
            self._emit(StartSession.of(session))
        self._advance(now_ms, session)

    def _fence(self, session: Session) -> None:
        """Forget a session under its epoch and all before."""
        del self._all[session.id]
        self._fences[session.id, session.scope_id] = session.epoch + 1
        if len(self._fences) > FENCES_MAX:
            self._fences.popitem(last=False)
        if session.reason is None:
            self._emit(StopSession(session.id, session.epoch))
        self._emit(Fenced(session.id, session.epoch))

    def _provide(self, session: Session) -> None:
        if session.needs_prompt and session.prompt is not None:
            session.needs_prompt, session.ends_ms = False, None
            self._emit(ProvidePrompt(session.id, session.epoch, session.prompt))

    def _advance(self, now_ms: int, session: Session) -> None:
        """Let out what may leave, checkpoint what must be, and end what is complete."""
        first, tokens = session.release()
        if tokens:
            self._emit(Release(session.id, session.epoch, first, tokens))
        if session.checkpoint_wanted(now_ms):
            self._emit(SendCheckpoint(session.take_checkpoint()))
        if session.complete and session.reason is not None and not session.ended:
            session.end(now_ms + self._settings.keep_output_ms)
            self._emit(Ended(session.id, session.epoch, session.reason, len(session.generated)))
            self._changed(now_ms)

    def _expire(self, now_ms: int, session: Session) -> None:
        """Its output was kept long enough, or the prompt that it needs did not come."""
        if session.ended:
            self._fence(session)
            return
        self._emit(StopSession(session.id, session.epoch))
        session.needs_prompt, session.ends_ms, session.reason = False, None, "failed"
        self._advance(now_ms, session)


def _stale() -> KvspError:
    return KvspError(registry.STALE_EPOCH, "the session has a higher epoch")


def _unknown() -> KvspError:
    return KvspError(registry.NOT_FOUND, "no such session")
