"""Sessions that lose their instance: fence, find another, have it continue (R-179 ... R-181). Pure.

An epoch is offered to one instance once. A session that loses its instance gets the next epoch at that moment,
before anyone is asked to continue it, and another one before anyone else is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvsp.protocol import limits, registry
from kvsp.protocol.estimate import Run
from kvsp.protocol.records import ResumeRequest
from kvsp.protocol.registry import ProblemType
from services.placement.cost import Request
from services.placement.fleet import FAILED, UNREPORTED, Instance
from services.placement.instructions import NOBODY, Bind, Ended, Forget, SendResume, Survey
from services.placement.outbox import Outbox
from services.placement.placing import Placer
from services.placement.sessions import Phase, Session, Sessions
from services.placement.settings import Settings, Totals

FOR_GOOD: Final = frozenset(
    {registry.BAD_REQUEST, registry.CONTENT_TOO_LARGE, registry.SCOPE_DENIED, registry.INCOMPATIBLE}
)
"""Refusals of a session that the same process would only repeat."""


class Migration:
    """Moves sessions, and ends those that nobody can continue or wants any more.

    `is_followed(session)` says whether a front end follows it right now; `left(session, now_ms)` is told when a
    session leaves its instance.
    """

    def __init__(
        self,
        settings: Settings,
        totals: Totals,
        sessions: Sessions,
        placer: Placer,
        outbox: Outbox,
        *,
        is_followed: Callable[[str], bool],
        left: Callable[[str, int], None],
    ) -> None:
        self.retry_ms: int | None = None
        self._settings = settings
        self._totals = totals
        self._sessions = sessions
        self._placer = placer
        self._outbox = outbox
        self._is_followed = is_followed
        self._left = left

    def reported(self, instance: Instance, *, is_first: bool, now_ms: int) -> None:
        """A restarted instance has lost its sessions; one that says so has failed (R-101, U-37)."""
        for session in self._sessions.at(instance.uri):
            if session.instance_epoch == UNREPORTED:
                session.instance_epoch = instance.epoch
                self._outbox.save(session.row())
            if session.instance_epoch < instance.epoch or instance.state == FAILED:
                self.begin(session, now_ms)
            elif is_first and session.phase is Phase.OFFERED:
                # It may not have been asked, by an earlier process. "Same epoch repeated -> 202 no restart" (U-35)
                self._send(session, again=True)

    def begin(self, session: Session, now_ms: int) -> None:
        """Its instance has failed."""
        session.refused.clear()
        if self._fence(session, now_ms):
            self.survey(session)

    def survey(self, session: Session) -> None:
        """Find out where its blocks are; `surveyed` goes on."""
        assert session.checkpoint is not None  # noqa: S101 - ended sessions are nobody's
        session.phase = Phase.SURVEYED
        self._outbox.do(Survey(session.epoch, session.checkpoint, session.block_tokens))

    def surveyed(self, session: str, epoch: int, runs: Sequence[Run], now_ms: int) -> None:
        """Who holds its blocks is known."""
        found = self._find(session, epoch, Phase.SURVEYED)
        if found is not None:
            found.runs = runs
            self._place(found, now_ms)

    def resumed(self, session: str, epoch: int, now_ms: int) -> None:
        """The instance has admitted the session: whoever follows it may turn there."""
        found = self._find(session, epoch, Phase.OFFERED)
        if found is not None:
            found.phase = Phase.BOUND
            found.runs = ()
            found.refused.clear()
            found.heard_ms = now_ms
            self._totals.migrations += 1
            self._outbox.save(found.row())
            self._outbox.do(Bind(found.binding))

    def resume_failed(self, session: str, epoch: int, problem: ProblemType, now_ms: int) -> None:
        """The instance refused, or did not answer and may have accepted: the next one gets another epoch."""
        found = self._find(session, epoch, Phase.OFFERED)
        if found is not None:
            found.refused[found.instance] = problem
            if self._fence(found, now_ms):
                self._place(found, now_ms)

    def is_offered(self, session: str, epoch: int) -> bool:
        """Is an answer to the offer of the session under this epoch still waited for?"""
        return self._find(session, epoch, Phase.OFFERED) is not None

    def became_active(self, instance: str) -> None:
        """Sessions that nobody took have somebody to ask."""
        for session in self._sessions.at(NOBODY):
            session.refused.pop(instance, None)
            if session.phase is Phase.WAITING:
                self.survey(session)

    def tick(self, now_ms: int) -> None:
        """Ask again those who refused, but for good."""
        if self.retry_ms is not None and self.retry_ms <= now_ms:
            self.retry_ms = None
            for session in self._sessions.at(NOBODY):
                if session.phase is Phase.WAITING:
                    session.refused = {uri: why for uri, why in session.refused.items() if why in FOR_GOOD}
                    self.survey(session)

    def sweep(self, now_ms: int) -> None:
        """End sessions that nobody seems to want any more; forget those that ended long ago."""
        rules = self._settings
        for session in self._sessions:
            idle_ms = now_ms - session.heard_ms
            if session.checkpoint is None:
                if idle_ms >= rules.ended_ms:
                    self._sessions.forget(session)
                    self._outbox.save(Forget(session.id))
                continue
            # A front end follows each of its sessions; what it had under way when it crashed, no client waits for.
            if session.owner == NOBODY or self._is_followed(session.id):
                session.followed_ms = now_ms
            if idle_ms >= rules.session_idle_ms or now_ms - session.followed_ms >= rules.unfollowed_ms:
                self.end(session, now_ms)

    def end(self, session: Session, now_ms: int, problem: ProblemType | None = None) -> None:
        """It is over, for this reason if not as usual; its epoch is remembered for a while."""
        self._sessions.end(session)
        self._left(session.id, now_ms)
        session.heard_ms = now_ms
        self._outbox.save(session.row())
        self._outbox.do(Ended(session.id, problem))

    def _find(self, session: str, epoch: int, phase: Phase) -> Session | None:
        """The session, if what is reported of it is not overtaken."""
        found = self._sessions.get(session)
        return found if found is not None and (found.epoch, found.phase) == (epoch, phase) else None

    def _fence(self, session: Session, now_ms: int) -> bool:
        """The next epoch, which nobody has. False: there is none, and the session ends.

        "Any message from the failed instance carrying the old epoch MUST be rejected." (R-181)
        """
        if session.epoch >= limits.INT_MAX:
            self.end(session, now_ms)
            return False
        session.epoch += 1
        session.phase = Phase.WAITING
        session.began_ms = None
        self._sessions.move(session, NOBODY, 0)
        self._left(session.id, now_ms)
        self._outbox.save(session.row())
        return True

    def _place(self, session: Session, now_ms: int) -> None:
        """Offer it to the cheapest instance that has not refused it, or wait for one."""
        assert session.checkpoint is not None  # noqa: S101 - ended sessions are nobody's
        request = Request(session.runs, session.tokens, session.block_tokens)
        candidates, instance = self._placer.choose(request, session.checkpoint, session.refused)
        if instance is None:
            self._wait(session, now_ms)
            return
        session.phase = Phase.OFFERED
        self._sessions.move(session, instance.uri, instance.epoch)
        self._outbox.save(session.row())
        instance.take(candidates[0])
        self._send(session)

    def _wait(self, session: Session, now_ms: int) -> None:
        """Nobody takes it now. It ends if nobody ever will: one more instance like these would not either."""
        assert session.checkpoint is not None  # noqa: S101 - ended sessions are nobody's
        session.phase = Phase.WAITING
        able = {offer.instance for offer in self._placer.offers(session.checkpoint)}
        for_good = {uri: why for uri, why in session.refused.items() if why in FOR_GOOD}
        if able and able <= for_good.keys():
            self._totals.lost += 1
            self.end(session, now_ms, list(for_good.values())[-1])
        elif len(for_good) < len(session.refused):
            self.retry_ms = self.retry_ms or now_ms + self._settings.retry_ms
        else:
            self._placer.want(session.checkpoint, now_ms)

    def _send(self, session: Session, *, again: bool = False) -> None:
        assert session.checkpoint is not None  # noqa: S101 - ended sessions are nobody's
        self._outbox.do(SendResume(session.instance, ResumeRequest(session.epoch, session.checkpoint), again))
