"""The octets of one transfer as messages, several on their way at a time, in ascending order."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate
from typing import Any, Final

from ucx_transport import memory
from ucx_transport.engine import Connection
from ucx_transport.errors import lost
from ucx_transport.memory import Buffers, Octets
from ucx_transport.session import Keys

FRAME_OCTETS: Final = 2 << 20
"""Measured: larger frames leave the cache, smaller ones cost more calls."""
SEALED_FRAME_OCTETS: Final = 1 << 20
"""Smaller, so that of a block of few frames one can be sealed while another travels."""
WINDOW: Final = 4
"""Frames on their way: one is sealed while one travels and one is opened."""
THREADED_OCTETS: Final = (256 << 10) if (os.cpu_count() or 1) >= 4 else 1 << 62
"""Frames of fewer octets are sealed at once: handing them to a thread costs more. So it does, measured, for
all frames where both ends share two cores."""
_CANARY_OCTETS: Final = 8


def cut(lengths: Iterable[int], frame_octets: int = FRAME_OCTETS) -> tuple[int, ...]:
    """Frames for layers of these lengths: whole layers together, or parts of one that is longer than a frame."""
    frames = []
    gathered = 0
    for length in lengths:
        if gathered and gathered + length > frame_octets:
            frames.append(gathered)
            gathered = 0
        gathered += length
        while gathered > frame_octets:
            frames.append(frame_octets)
            gathered -= frame_octets
    if gathered:
        frames.append(gathered)
    return tuple(frames)


class Movement:
    """Frames of one transfer on one connection, from or to `view`.

    A receiver makes it before it lets the sender begin. It ends with `stop`, or `done` on success.
    """

    def __init__(
        self, connection: Connection, keys: Keys, frames: Sequence[int], view: Octets, buffers: Buffers
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._frames = frames
        self._offsets = [0, *accumulate(frames)]
        self._view = view
        self._buffers = buffers
        self._jobs: set[Future[None]] = set()
        self._stopped = False
        self._begun = 0
        self._tags = range(keys.first_tag, keys.first_tag + len(frames))
        connection.engine.expected.add(self._tags)

    async def send(self) -> None:
        """Send all frames. Raises KvspError (503)."""
        await _windowed(lambda i: self.send_frame(i, self._part(i)), len(self._frames), lambda _: None)

    async def receive(self, arrived: Callable[[int], None]) -> None:
        """Receive all frames; `arrived(n)`: octets 0...n are in place. Raises KvspError (503)."""
        await _windowed(
            lambda i: self._receive_frame(i, self._part(i)),
            len(self._frames),
            lambda i: arrived(self._offsets[i + 1]),
        )

    async def send_frame(self, i: int, part: memoryview) -> None:
        """Send frame i, whose octets must not change before this returns. Raises KvspError (503)."""
        if self._keys.sealed:
            sealed = self._buffers.take(len(part) + self._keys.overhead)
            await self._crypt(self._keys.seal, i, part, sealed)
            part = sealed
        self._begun += 1
        await self._connection.send(part, self._tags[i])

    async def _receive_frame(self, i: int, part: Octets) -> None:
        tag = self._tags[i]
        self._begun += 1
        if self._keys.sealed:
            sealed = self._buffers.take(len(part) + self._keys.overhead)
            await self._connection.receive(sealed, tag)
            self._check_going()
            # Seals are opened by the CPU.
            plain = part if memory.is_host(part) else self._buffers.take(len(part))
            await self._crypt(self._keys.open, i, sealed, plain)
            if plain is not part:
                self._check_going()
                memory.put(plain, part)
            return
        # ucxx does not tell how long a message was. What is not overwritten was not sent; where less than the
        # canary is missing, digests tell.
        self._check_going()
        canary = secrets.token_bytes(_CANARY_OCTETS)
        checked = len(part) >= _CANARY_OCTETS
        if checked:
            memory.put(bytearray(canary), part[-_CANARY_OCTETS:])
        await self._connection.receive(part, tag)
        if checked and memory.get(part[-_CANARY_OCTETS:]) == canary:
            raise lost("a frame is shorter than agreed")

    def done(self) -> None:
        """All frames have moved; the connection can take the next transfer."""
        self._connection.engine.expected.discard(self._tags)

    def stop(self) -> None:
        """End it, finished or not: when this returns, `view` is neither read nor written any more."""
        self._stopped = True
        self.done()
        self._connection.close()
        wait(self._jobs)

    def leave(self) -> None:
        """`stop`, but a connection on which everything has moved is left to the next transfer.

        The peer may know that before the task here that moved it has had its turn, and end the transfer.
        """
        if self._begun < len(self._frames) or self._connection.busy:
            self.stop()
            return
        self._stopped = True
        wait(self._jobs)

    def _check_going(self) -> None:
        if self._stopped:
            raise lost("the transfer was ended")

    def _part(self, i: int) -> Octets:
        return self._view[self._offsets[i] : self._offsets[i + 1]]

    async def _crypt(
        self,
        work: Callable[[int, int, memoryview, memoryview], None],
        i: int,
        source: memoryview,
        into: memoryview,
    ) -> None:
        offset = self._offsets[i]
        if len(source) < THREADED_OCTETS:
            work(i, offset, source, into)
            return
        job = self._connection.engine.threads.submit(work, i, offset, source, into)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        await asyncio.wrap_future(job)


async def _windowed(
    step: Callable[[int], Coroutine[Any, Any, None]], count: int, done: Callable[[int], None]
) -> None:
    """Run step(0)...step(count - 1), up to WINDOW at a time; report each when it and all before it are done."""
    if count == 1:  # most transfers of small blocks: no need of a task
        await step(0)
        done(0)
        return
    running: deque[asyncio.Task[None]] = deque()
    begun = 0
    try:
        while begun < count or running:
            while begun < count and len(running) < WINDOW:
                running.append(asyncio.ensure_future(step(begun)))
                begun += 1
            await running[0]
            done(begun - len(running))
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
