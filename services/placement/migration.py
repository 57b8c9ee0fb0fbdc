"""Sessions that lose their instance: fence, find another, have it continue (R-179 ... R-181). Pure.

An epoch is offered to one instance once. A session that loses its instance gets the next epoch at that moment,
before anyone is asked to continue it, and another one before anyone else is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsp.protocol import limits
from kvsp.protocol.estimate import Run
from kvsp.protocol.records import ResumeRequest
from services.placement.cost import Request
from services.placement.instructions import NOBODY, Bind, Ended, SendResume, Survey
from services.placement.outbox import Outbox
from services.placement.placing import Placer
from services.placement.sessions import Phase, Session, Sessions
from services.placement.settings import Settings, Totals


class Migration:
    """Moves sessions."""

    def __init__(
        self, settings: Settings, totals: Totals, sessions: Sessions, placer: Placer, outbox: Outbox
    ) -> None:
        self.retry_ms: int | None = None
        self._settings = settings
        self._totals = totals
        self._sessions = sessions
        self._placer = placer
        self._outbox = outbox

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

    def resume_failed(self, session: str, epoch: int, now_ms: int) -> None:
        """The instance refused, or did not answer and may have accepted: the next one gets another epoch."""
        found = self._find(session, epoch, Phase.OFFERED)
        if found is not None:
            found.refused[found.instance] = None
            if self._fence(found, now_ms):
                self._place(found, now_ms)

    def repeat(self, session: Session) -> None:
        """It may not have been asked, by an earlier process: "Same epoch repeated -> 202 no restart" (U-35)."""
        if session.phase is Phase.OFFERED:
            self._send(session)

    def became_active(self, instance: str) -> None:
        """Sessions that nobody took have somebody to ask."""
        for session in self._sessions.at(NOBODY):
            session.refused.pop(instance, None)
            if session.phase is Phase.WAITING:
                self.survey(session)

    def tick(self, now_ms: int) -> None:
        """Ask again those who refused."""
        if self.retry_ms is not None and self.retry_ms <= now_ms:
            self.retry_ms = None
            for session in self._sessions.at(NOBODY):
                if session.phase is Phase.WAITING:
                    session.refused.clear()
                    self.survey(session)

    def end(self, session: Session, now_ms: int) -> None:
        """It is over; its epoch is remembered for a while."""
        self._sessions.end(session)
        session.heard_ms = now_ms
        self._outbox.save(session.row())
        self._outbox.do(Ended(session.id))

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
        self._outbox.save(session.row())
        return True

    def _place(self, session: Session, now_ms: int) -> None:
        """Offer it to the cheapest instance that has not refused it, or wait for one."""
        assert session.checkpoint is not None  # noqa: S101 - ended sessions are nobody's
        request = Request(session.runs, session.tokens, session.block_tokens)
        candidates, instance = self._placer.choose(request, session.checkpoint, session.refused)
        if instance is None:
            session.phase = Phase.WAITING
            if session.refused and self.retry_ms is None:
                self.retry_ms = now_ms + self._settings.retry_ms
            self._placer.want(session.checkpoint, now_ms)
            return
        session.phase = Phase.OFFERED
        self._sessions.move(session, instance.uri, instance.epoch)
        self._outbox.save(session.row())
        instance.take(candidates[0])
        self._send(session)

    def _send(self, session: Session) -> None:
        assert session.checkpoint is not None  # noqa: S101 - ended sessions are nobody's
        self._outbox.do(SendResume(session.instance, ResumeRequest(session.epoch, session.checkpoint)))
