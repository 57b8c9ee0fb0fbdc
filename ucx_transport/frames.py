"""The octets of one transfer as messages, several on their way at a time, in ascending order."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate
from typing import Final, NamedTuple

from ucx_transport import memory
from ucx_transport.engine import Connection, Request
from ucx_transport.errors import lost
from ucx_transport.memory import Buffers, Octets
from ucx_transport.session import Keys

FRAME_OCTETS: Final = 2 << 20
"""Measured, sealed or not: larger frames leave the cache, smaller ones cost 0.05 ms more each, on either side."""
WINDOW: Final = 2
"""Frames on their way: one is sealed or opened while one travels. The buffers of more leave the cache."""
THREADED_OCTETS: Final = (256 << 10) if (os.cpu_count() or 1) >= 4 else 1 << 62
"""Frames of fewer octets are sealed at once: handing them to a thread costs more. So it does, measured, for
all frames where both ends share two cores."""
_CANARY_OCTETS: Final = 8


def cut(lengths: Iterable[int]) -> tuple[int, ...]:
    """Frames for layers of these lengths: whole layers together, or parts of one that is longer than a frame."""
    frames = []
    gathered = 0
    for length in lengths:
        if gathered and gathered + length > FRAME_OCTETS:
            frames.append(gathered)
            gathered = 0
        gathered += length
        while gathered > FRAME_OCTETS:
            frames.append(FRAME_OCTETS)
            gathered -= FRAME_OCTETS
    if gathered:
        frames.append(gathered)
    return tuple(frames)


class _Coming(NamedTuple):
    """A frame that is awaited, where it goes, and what lies at its end until it is there (if anything does)."""

    request: Request
    octets: Octets
    canary: bytes


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
        self._sending: deque[Request] = deque()
        self._stopped = False
        self._begun = 0
        self._tags = range(keys.first_tag, keys.first_tag + len(frames))
        connection.engine.expected.add(self._tags)

    async def send(self) -> None:
        """Send all frames. Raises KvspError (503)."""
        for i in range(len(self._frames)):
            await self.send_frame(i, self._part(i))
        await self.sent()

    async def send_frame(self, i: int, part: memoryview) -> None:
        """Send frame i, whose octets must not change before `sent` has returned. Raises KvspError (503)."""
        if self._keys.sealed:
            sealed = self._buffers.take(len(part) + self._keys.overhead)
            await self._crypt(self._keys.seal, i, part, sealed)
            part = sealed
        self._begun += 1
        self._sending.append(self._connection.send(part, self._tags[i]))
        if len(self._sending) == WINDOW:
            await self._sending.popleft()
            await asyncio.sleep(0)  # however fast the peer is, others have their turn

    async def sent(self) -> None:
        """Wait for the frames that are still on their way. Raises KvspError (503)."""
        while self._sending:
            await self._sending.popleft()

    async def receive(self, arrived: Callable[[int], None]) -> None:
        """Receive all frames; `arrived(n)`: octets 0...n are in place. Raises KvspError (503)."""
        take = self._take_sealed if self._keys.sealed else self._take_plain
        coming: deque[_Coming] = deque()
        for i in range(len(self._frames)):
            while self._begun < min(len(self._frames), i + WINDOW):
                coming.append(self._expect(self._begun))
            await take(i, coming.popleft())
            arrived(self._offsets[i + 1])

    def _expect(self, i: int) -> _Coming:
        self._check_going()
        part = self._part(i)
        canary = b""
        if self._keys.sealed:
            part = self._buffers.take(len(part) + self._keys.overhead)
        elif len(part) >= _CANARY_OCTETS:
            # ucxx does not tell how long a message was. What is not overwritten was not sent; where less than the
            # canary is missing, digests tell.
            canary = secrets.token_bytes(_CANARY_OCTETS)
            memory.put(bytearray(canary), part[-_CANARY_OCTETS:])
        self._begun += 1
        return _Coming(self._connection.receive(part, self._tags[i]), part, canary)

    async def _take_plain(self, _: int, coming: _Coming) -> None:
        await coming.request
        if coming.canary and memory.get(coming.octets[-_CANARY_OCTETS:]) == coming.canary:
            raise lost("a frame is shorter than agreed")

    async def _take_sealed(self, i: int, coming: _Coming) -> None:
        await coming.request
        self._check_going()
        part = self._part(i)
        # Seals are opened by the CPU.
        plain = part if memory.is_host(part) else self._buffers.take(len(part))
        await self._crypt(self._keys.open, i, coming.octets, plain)
        if plain is not part:
            self._check_going()
            memory.put(plain, part)

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
        self._connection.engine.kick()  # what was posted moves meanwhile
        await asyncio.wrap_future(job)
