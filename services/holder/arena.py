"""The shared memory file in which blocks lie."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path

from kvsp.protocol.names import party_id
from kvsp.rpc.config import ConfigError

_ID_CHARS = 16


class Arena:
    """A file of `octets`, readable and writable by this user alone, mapped into this process.

    Its name is random: readers and writers learn it over the control channel only. It is locked
    while the holder lives, so that what a crashed one left behind can be told from one in use.
    """

    def __init__(self, path: Path, fd: int, octets: int) -> None:
        self.path = path
        self._fd = fd
        # All pages at once: faults one by one would cost a fresh block's digests as much again.
        self._map = mmap.mmap(fd, octets, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, folder: Path, base_uri: str, octets: int) -> Arena:
        """Make the arena of a holder and remove what it left behind earlier.

        Raises ConfigError when the folder cannot take it: room is claimed now, as shared memory that
        runs out later kills the process that touches it.
        """
        prefix = f"kvsp-{party_id(base_uri)[:_ID_CHARS]}-"
        try:
            _remove_stale(folder, prefix)
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if octets > free:
                raise ConfigError(f"arena_octets is {octets}, but {folder} has only {free} octets free")
            return cls._made(folder / f"{prefix}{secrets.token_hex(8)}", octets)
        except OSError as error:
            raise ConfigError(f"arena in {folder}: {error.strerror}") from None

    @classmethod
    def _made(cls, path: Path, octets: int) -> Arena:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, octets)
            return cls(path, fd, octets)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Remove the file. Readers that have it mapped keep what they see. Idempotent."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def _remove_stale(folder: Path, prefix: str) -> None:
    for path in folder.glob(f"{prefix}*"):
        # In a folder for all, anybody can take our name: theirs we can neither open nor remove.
        if path.lstat().st_uid != os.geteuid():
            continue
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path}: another holder with this base_uri is running") from None
        else:
            path.unlink()
        finally:
            os.close(fd)
