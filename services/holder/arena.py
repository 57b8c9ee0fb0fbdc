"""The shared memory file in which blocks lie."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from msgspec import Struct

from kvsp.bulk.descriptors import ArenaFiles
from kvsp.bulk.shm import GENERATION_OCTETS, Layout, pages
from kvsp.protocol.names import party_id
from kvsp.rpc.config import ConfigError

_ID_CHARS = 16
_MADV_POPULATE_WRITE: Final = 23  # of Linux 5.14; the mmap module does not name it

log = structlog.get_logger()


class ShmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[bulk.shm]` of holder.toml. `huge_pages`: ask for 2 MiB pages, which need fewer entries of the TLB."""

    huge_pages: bool = False

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> ShmConfig:
        """From a TOML table. Raises ConfigError."""
        try:
            return msgspec.convert(table, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"bulk.shm: {error}") from None


class Arena:
    """A file with room for `octets` of blocks, readable and writable by this user alone, mapped into this process.

    Peers on the control socket are handed `files`, others learn the path, which is random, over the control
    channel. It is locked while the holder lives: what a crashed one left behind can be told from one in use.
    """

    def __init__(self, path: Path, fd: int, octets: int, *, huge_pages: bool) -> None:
        self.path = path
        self._fd = fd
        layout = Layout(octets)
        # All pages at once: faults one by one would cost a fresh block's digests as much again.
        populate = 0 if huge_pages else mmap.MAP_POPULATE
        self._map = mmap.mmap(fd, layout.octets, mmap.MAP_SHARED | populate)
        if huge_pages:
            _advise_huge(self._map, path)
        os.posix_fallocate(fd, 0, layout.octets)
        whole = memoryview(self._map)
        self.view = whole[:octets]
        self._generations = whole[layout.generations]
        self._fresh = count(1)
        whole[-len(layout.trailer()) :] = layout.trailer()
        read, write = (os.open(path, access | os.O_CLOEXEC) for access in (os.O_RDONLY, os.O_WRONLY))
        self.files = ArenaFiles(path.name, read, write)

    @classmethod
    def create(cls, folder: Path, base_uri: str, octets: int, table: Mapping[str, Any] | None = None) -> Arena:
        """Make the arena of a holder, as `[bulk.shm]` says, and remove what it left behind earlier.

        Raises ConfigError when the folder cannot take it: room is claimed now, as shared memory that
        runs out later kills the process that touches it.
        """
        config = ShmConfig.of(table or {})
        prefix = f"kvsp-{party_id(base_uri)[:_ID_CHARS]}-"
        try:
            _remove_stale(folder, prefix)
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if Layout(octets).octets > free:
                raise ConfigError(f"arena_octets is {octets}, but {folder} has only {free} octets free")
            return cls._made(folder / f"{prefix}{secrets.token_hex(8)}", octets, config.huge_pages)
        except OSError as error:
            raise ConfigError(f"arena in {folder}: {error.strerror}") from None

    @classmethod
    def _made(cls, path: Path, octets: int, huge_pages: bool) -> Arena:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if huge_pages:  # the mapping decides what pages it gets, so they are claimed through it
                os.truncate(fd, Layout(octets).octets)
            else:
                os.posix_fallocate(fd, 0, Layout(octets).octets)
            return cls(path, fd, octets, huge_pages=huge_pages)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    def renew(self, offset: int, length: int) -> None:
        """The extent is about to be filled: who still looks at what was there finds out afterwards."""
        table = pages(offset, length)
        generation = next(self._fresh).to_bytes(GENERATION_OCTETS)
        self._generations[table] = generation * ((table.stop - table.start) // GENERATION_OCTETS)

    def close(self) -> None:
        """Remove the file. Readers that have it mapped keep what they see. Idempotent."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)
        self.files.close()
        os.close(self._fd)
        self._fd = -1


def _advise_huge(mapped: mmap.mmap, path: Path) -> None:
    """Have the mapping filled with huge pages; where the kernel has none for it, with others, and say so."""
    reason = "none to be had: is arena_dir a tmpfs mounted with huge=advise?"
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        mapped.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        reason = str(error)
    if not huge_octets(path):
        log.warning("arena without huge pages", reason=reason)


def huge_octets(path: Path) -> int:
    """Octets of a file that this process has mapped in huge pages."""
    mapping = ""
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            if "-" in line.partition(" ")[0]:
                mapping = line
            elif line.startswith("ShmemPmdMapped:") and mapping.rstrip().endswith(str(path)):
                return int(line.split()[1]) << 10
    return 0


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
