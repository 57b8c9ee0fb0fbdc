"""Who waits for the next binding of which session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.registry import ProblemType
from services.placement.instructions import Binding

FOLLOWERS_MAX: Final = 16
"""Of one session: a front end needs one, and for a moment two after a reconnect."""


class Follower:
    """One stream of bindings; each epoch comes once."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[Binding | None] = asyncio.Queue()
        self._epoch = -1
        self._error: KvspError | None = None

    def tell(self, binding: Binding) -> None:
        """The session is bound anew, or this is how it is bound."""
        if binding.epoch > self._epoch:
            self._epoch = binding.epoch
            self._news.put_nowait(binding)

    def end(self, error: KvspError | None = None) -> None:
        """The session has ended, or there is a reason why no more is told of it."""
        self._error = error
        self._news.put_nowait(None)

    async def bindings(self) -> AsyncIterator[Binding]:
        """Each binding. Raises KvspError: why the session could not go on, or 503 when this controller goes."""
        while (binding := await self._news.get()) is not None:
            yield binding
        if self._error is not None:
            raise self._error


class Followers:
    """All of them, by session."""

    def __init__(self) -> None:
        self._sessions: dict[str, list[Follower]] = {}

    def __contains__(self, session: str) -> bool:
        """Does anybody follow it right now?"""
        return session in self._sessions

    @contextmanager
    def follow(self, session: str) -> Iterator[Follower]:
        """One more follower of a session. Raises KvspError (429)."""
        there = self._sessions.setdefault(session, [])
        if len(there) >= FOLLOWERS_MAX:
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many follow this session", retry_after_s=1)
        follower = Follower()
        there.append(follower)
        try:
            yield follower
        finally:
            there.remove(follower)
            if not there:
                self._sessions.pop(session, None)

    def bound(self, binding: Binding) -> None:
        """A session has a new binding."""
        for follower in self._sessions.get(binding.session, ()):
            follower.tell(binding)

    def ended(self, session: str, problem: ProblemType | None) -> None:
        """A session is over, for this reason if not as usual."""
        error = None if problem is None else KvspError(problem, "no instance can continue the session")
        for follower in self._sessions.get(session, ()):
            follower.end(error)

    def close(self) -> None:
        """This controller is going, and its successor will tell the rest."""
        for followers in self._sessions.values():
            for follower in followers:
                follower.end(unavailable("the controller is restarting"))
