"""Octets in the holder's shared memory: a reader sees them where they are, a writer puts them there."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

from kvsp.bulk.source import (
    PIECE_OCTETS,
    BlockReader,
    BlockWriter,
    Capabilities,
    Extent,
    Piece,
    SourceUnavailableError,
    Transfer,
)


class ShmSource:
    """Same host only. Arenas stay mapped read-only between transfers; a writer maps nothing."""

    scheme: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(same_host_only=True, zero_copy=True)

    def __init__(self) -> None:
        self._arenas: dict[str, tuple[tuple[int, int], memoryview]] = {}

    def reader(self, transfer: Transfer) -> BlockReader:
        """Views of the arena."""
        extent = _extent(transfer)
        arena = self._arena(extent.arena)
        end = extent.offset + extent.length
        if end > len(arena):
            raise SourceUnavailableError("extent lies outside the arena")
        return _Reader(arena[extent.offset : end])

    def writer(self, transfer: Transfer) -> BlockWriter:
        """The extent, writable."""
        return _Writer(_extent(transfer))

    def _arena(self, path: str) -> memoryview:
        try:
            found = Path(path).lstat()
        except OSError as error:
            raise SourceUnavailableError(f"arena: {error.strerror}") from error
        # A holder that restarted has another file; the inode says so even if the name were the same.
        file_id = found.st_dev, found.st_ino
        known = self._arenas.get(path)
        if known is not None and known[0] == file_id:
            return known[1]
        self._forget_removed()
        view = _map(path)
        self._arenas[path] = file_id, view
        return view

    def _forget_removed(self) -> None:
        """A mapping keeps the memory of a holder that is gone; views still out keep theirs alive."""
        self._arenas = {path: entry for path, entry in self._arenas.items() if Path(path).exists()}


class _Reader:
    def __init__(self, view: memoryview) -> None:
        self._view = view

    async def pieces(self) -> AsyncIterator[Piece]:
        for at in range(0, len(self._view), PIECE_OCTETS):
            yield self._view[at : at + PIECE_OCTETS]

    def close(self) -> None:
        self._view = memoryview(b"")


class _Writer:
    """Writes to the file: mapping the extent for one block costs more than this copy (0.28 against 0.17 ms
    for 2 MiB), and a fault for each page even more."""

    def __init__(self, extent: Extent) -> None:
        self._at = extent.offset
        self._end = extent.offset + extent.length
        self._fd = _open(extent.arena, os.O_WRONLY, self._end)

    async def write(self, piece: Piece) -> None:
        self.put(piece)

    def put(self, piece: Piece) -> None:
        view = memoryview(piece).cast("B")
        if self._at + len(view) > self._end:
            raise ValueError("more octets than the extent has")
        while view:
            written = os.pwrite(self._fd, view, self._at)
            self._at += written
            view = view[written:]

    async def finish(self) -> None:
        """Octets are in place as soon as they are written."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _extent(transfer: Transfer) -> Extent:
    if transfer.extent is None:
        raise SourceUnavailableError("the holder named no extent")
    return transfer.extent


def _map(path: str) -> memoryview:
    """The whole file, to be read. Raises SourceUnavailableError."""
    fd = _open(path, os.O_RDONLY, 1)
    try:
        return memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise SourceUnavailableError(f"arena: {error}") from error
    finally:
        os.close(fd)


def _open(path: str, access: int, octets: int) -> int:
    """A descriptor of an arena of at least `octets`. Raises SourceUnavailableError."""
    try:
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SourceUnavailableError(f"arena: {error}") from error
    found = os.fstat(fd)
    # Written past its end it would grow; it is the holder that says how large it is.
    if not stat.S_ISREG(found.st_mode) or found.st_size < octets:
        os.close(fd)
        raise SourceUnavailableError("not an arena, or too short for the extent")
    return fd
