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
    """Same host only. Arenas stay mapped read-only between transfers; a writer maps its extent alone."""

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
        view = memoryview(_map(path, writable=False))
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
    def __init__(self, extent: Extent) -> None:
        if extent.offset % mmap.ALLOCATIONGRANULARITY:
            raise SourceUnavailableError("extent does not begin on a page of this host")
        self._map = _map(extent.arena, extent.offset, extent.length, writable=True)
        self._at = 0

    async def write(self, piece: Piece) -> None:
        view = memoryview(piece).cast("B")
        self._map[self._at : self._at + len(view)] = view
        self._at += len(view)

    async def finish(self) -> None:
        """Octets are in place as soon as they are written."""

    def close(self) -> None:
        self._map.close()


def _extent(transfer: Transfer) -> Extent:
    if transfer.extent is None:
        raise SourceUnavailableError("the holder named no extent")
    return transfer.extent


def _map(path: str, offset: int = 0, length: int = 0, *, writable: bool) -> mmap.mmap:
    """Map `length` octets (0: all) of a file. Raises SourceUnavailableError."""
    access, protection, flags = os.O_RDONLY, mmap.PROT_READ, mmap.MAP_SHARED
    if writable:
        access, protection = os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE
        flags |= mmap.MAP_POPULATE  # one fault a page would cost more than the copy
    try:
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            # A mapping past the end of a file is a fault at use instead of an error here.
            if not stat.S_ISREG(found.st_mode) or offset + length > found.st_size:
                raise SourceUnavailableError("not an arena, or too short for the extent")
            return mmap.mmap(fd, length or found.st_size, flags, protection, offset=offset)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise SourceUnavailableError(f"arena: {error}") from error
