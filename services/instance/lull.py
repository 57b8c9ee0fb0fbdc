"""When it is a good time for what can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import suppress
from typing import Final

WAIT_S: Final = 1.0
"""Nothing is put off for longer: there may always be a session that begins."""


class Lull:
    """The time in which no session waits for its first token.

    Python computes on one core at a time: measured on 2 cores, storing a 2,000-token prefix while the rest of the
    prompt is computed makes the first token come 40 % later.
    """

    def __init__(self) -> None:
        self._waiting: set[Hashable] = set()
        self._here = asyncio.Event()
        self._here.set()

    def begin(self, session: Hashable) -> None:
        """A session waits for its first token."""
        self._waiting.add(session)
        self._here.clear()

    def end(self, session: Hashable) -> None:
        """It has come, or will not."""
        self._waiting.discard(session)
        if not self._waiting:
            self._here.set()

    async def wait(self) -> None:
        """Return when no session waits, or after WAIT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._here.wait()
