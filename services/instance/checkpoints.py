"""Carries checkpoints to the placement controller, and what it answers back to the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import SessionCheckpoint
from kvsp.rpc.clock import now_ms
from services.instance import metrics
from services.instance.controller import Controller
from services.instance.sessions import Sessions

TRANSIENT: Final = frozenset({408, 429})
"""Statuses of 4xx after which a checkpoint is sent again, as after 5xx."""

SETTLE_S: Final = 1.0

log = structlog.get_logger()


class Checkpoints:
    """Those under way. `answered` is called when the rules have heard of an answer, or of none."""

    def __init__(self, controller: Controller, sessions: Sessions, answered: Callable[[], None]) -> None:
        self._controller = controller
        self._sessions = sessions
        self._answered = answered
        self._tasks: dict[asyncio.Task[None], str] = {}

    def send(self, checkpoint: SessionCheckpoint) -> None:
        """Send it; the rules have one of a session under way at a time."""
        task = asyncio.create_task(self._send(checkpoint))
        self._tasks[task] = checkpoint.session
        task.add_done_callback(self._tasks.pop)

    async def settled(self, session: str) -> None:
        """Wait, but not for long, until none of the session is under way."""
        if under_way := [task for task, each in self._tasks.items() if each == session]:
            await asyncio.wait(under_way, timeout=SETTLE_S)

    async def close(self) -> None:
        """End those under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, checkpoint: SessionCheckpoint) -> None:
        session, epoch = checkpoint.session, checkpoint.epoch
        try:
            reply = await self._controller.put_checkpoint(checkpoint)
        except KvspError as error:
            metrics.CHECKPOINTS.labels(str(error.status)).inc()
            if error.status < 500 and error.status not in TRANSIENT:
                log.warning(
                    "checkpoint refused, session stopped", status=error.status, problem=error.problem.suffix
                )
                metrics.SESSIONS.labels("fenced").inc()
                self._sessions.checkpoint_refused(now_ms(), session, epoch)
            else:
                self._sessions.unanswered(now_ms(), session, epoch)
        else:
            metrics.CHECKPOINTS.labels("done").inc()
            # A controller that answers for another epoch knows of another run of the session.
            if reply.epoch != epoch:
                self._sessions.checkpoint_refused(now_ms(), session, epoch)
            self._sessions.acknowledged(now_ms(), session, reply)
        self._answered()
