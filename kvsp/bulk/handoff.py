"""One long message to a reader on the same host: a file in shared memory instead of a gRPC stream.

Through Python gRPC a lookup reply of 2.6 MB costs both sides together some 6 ms of CPU, this way under 2.
The writer names the file in its reply; the reader maps it and removes its name at once, and what nobody
took in KEEP_S seconds the writer removes.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

OCTETS_MIN: Final = 256 << 10
"""Shorter messages are cheaper inside the reply."""

KEEP_S: Final = 30.0
IOV_MAX: Final = 1024  # pieces that one system call takes; they are not joined first
OUTSTANDING_OCTETS_MAX: Final = 256 << 20
"""So much may wait for its readers; what comes on top goes another way."""

DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - that is where shared memory is


class Outbox:
    """Messages of one writer, each readable by its own user alone.

    `owner` tells writers of one directory apart: what an earlier process of the same owner left behind is removed.
    """

    def __init__(
        self, owner: str, directory: Path = DIRECTORY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix = f"kvsp-message-{hashlib.sha256(owner.encode()).hexdigest()[:16]}-"
        self._directory = directory
        self._clock = clock
        self._octets = 0
        self._given: deque[tuple[float, Path, int]] = deque()
        for left_behind in directory.glob(self._prefix + "*"):
            with suppress(OSError):  # in a directory for all, the name may be somebody else's
                left_behind.unlink()

    def put(self, pieces: Sequence[bytes]) -> str:
        """Write a message; the path for its one reader. Raises OSError when there is no room."""
        octets = sum(map(len, pieces))
        if self._outstanding() + octets > OUTSTANDING_OCTETS_MAX:
            raise OSError(errno.ENOSPC, "too many octets wait for their readers")
        path = self._directory / (self._prefix + secrets.token_hex(16))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._given.append((self._clock() + KEEP_S, path, octets))
        self._octets += octets
        try:
            for first in range(0, len(pieces), IOV_MAX):
                batch = pieces[first : first + IOV_MAX]
                if os.writev(fd, batch) != sum(map(len, batch)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        return str(path)

    def sweep(self) -> None:
        """Remove what was not taken in time."""
        while self._given and self._given[0][0] <= self._clock():
            _, path, octets = self._given.popleft()
            path.unlink(missing_ok=True)
            self._octets -= octets

    def _outstanding(self) -> int:
        """Octets not taken yet; who took what is looked up only when it matters."""
        if self._octets > OUTSTANDING_OCTETS_MAX // 2:
            self._given = deque(each for each in self._given if each[1].exists())
            self._octets = sum(octets for _, _, octets in self._given)
        return self._octets


def take(path: str, octets: int) -> memoryview:
    """A message of that length, which ceases to exist when the view does. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        Path(path).unlink(missing_ok=True)
        if os.fstat(fd).st_size != octets:
            raise OSError("the message has another length")
        return memoryview(mmap.mmap(fd, octets, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
    finally:
        os.close(fd)
