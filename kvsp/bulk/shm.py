"""Octets in the holder's shared memory: a reader sees them where they are, a writer puts them there.

An arena is a file: room for blocks, then a generation for each page of it, then a trailer. The holder gives the
pages of an extent a new generation before it lets somebody fill it, so a reader finds out afterwards whether what
it has looked at was still the block it was given, however long it was held up.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from kvsp.bulk import descriptors
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
from kvsp.protocol.errors import unavailable

PAGE_OCTETS: Final = 4096
GENERATION_OCTETS: Final = 8
_TRAILER: Final = struct.Struct(">8sQ")
_MAGIC: Final = b"KVARENA1"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the file of an arena for `room` octets of blocks."""

    room: int

    @property
    def generations(self) -> slice:
        """The table of generations."""
        return slice(self._whole_pages, self.octets - _TRAILER.size)

    @property
    def octets(self) -> int:
        """Of the whole file."""
        return self._whole_pages + self._whole_pages // PAGE_OCTETS * GENERATION_OCTETS + _TRAILER.size

    @property
    def _whole_pages(self) -> int:
        return -(-self.room // PAGE_OCTETS) * PAGE_OCTETS

    def trailer(self) -> bytes:
        """The last octets of the file."""
        return _TRAILER.pack(_MAGIC, self.room)

    @classmethod
    def of(cls, view: memoryview) -> Layout:
        """That of a mapped file. Raises SourceUnavailableError when it is no arena."""
        if len(view) >= _TRAILER.size:
            magic, room = _TRAILER.unpack(view[-_TRAILER.size :])
            layout = cls(room)
            if magic == _MAGIC and layout.octets == len(view):
                return layout
        raise SourceUnavailableError("not an arena")


def pages(offset: int, length: int) -> slice:
    """The generations, within their table, of an extent."""
    first, end = offset // PAGE_OCTETS, -(-(offset + length) // PAGE_OCTETS)
    return slice(first * GENERATION_OCTETS, end * GENERATION_OCTETS)


class _Arena:
    """One arena as this process sees it. `file_id` is None when its descriptors came over the control socket."""

    def __init__(self, fd: int, file_id: tuple[int, int] | None = None) -> None:
        try:
            whole = memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise SourceUnavailableError(f"arena: {error}") from error
        layout = Layout.of(whole)
        self.room = whole[: layout.room]
        self.generations = whole[layout.generations]
        self.file_id = file_id
        self.write_fd = -1

    def close(self) -> None:
        """No more writers; views keep the memory."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1


class ShmSource:
    """Same host only. Arenas stay mapped between transfers, for reading alone."""

    scheme: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(same_host_only=True, zero_copy=True, direct=True)

    def __init__(self) -> None:
        self._arenas: dict[str, _Arena] = {}

    async def admit(self, name: str, control: Path) -> None:
        """Have the descriptors of an arena that goes by no path, once. Raises SourceUnavailableError."""
        if name.startswith("/") or name in self._arenas:
            return
        files = await descriptors.ask(control)
        try:
            if files.name != name:
                raise SourceUnavailableError("arena: the holder is another one by now")
            _check_file(files.read)
            arena = _Arena(files.read)
            arena.write_fd = os.dup(files.write)
        finally:
            files.close()
        self._forget_removed()
        self._arenas[name] = arena

    def reader(self, transfer: Transfer) -> BlockReader:
        """Views of the arena."""
        extent, arena = self._place(transfer)
        view = arena.room[extent.offset : extent.offset + extent.length]
        return _Reader(view, arena.generations[pages(extent.offset, extent.length)])

    def writer(self, transfer: Transfer) -> BlockWriter:
        """The extent, writable."""
        extent, arena = self._place(transfer)
        if arena.write_fd >= 0:
            return _Writer(os.dup(arena.write_fd), extent)
        return _Writer(_open(extent.arena, os.O_WRONLY), extent)

    def close(self) -> None:
        """Forget all arenas; views still out keep theirs alive."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _place(self, transfer: Transfer) -> tuple[Extent, _Arena]:
        extent = transfer.extent
        if extent is None:
            raise SourceUnavailableError("the holder named no extent")
        if extent.length != transfer.length:
            raise SourceUnavailableError("the extent has another length than the transfer")
        arena = self._arena(extent.arena)
        if extent.offset + extent.length > len(arena.room):
            raise SourceUnavailableError("extent lies outside the arena")
        return extent, arena

    def _arena(self, path: str) -> _Arena:
        known = self._arenas.get(path)
        if known is not None and known.file_id is None:
            return known
        try:
            found = Path(path).lstat()
        except OSError as error:
            raise SourceUnavailableError(f"arena: {error.strerror}") from error
        # A holder that restarted has another file; the inode says so even if the name were the same.
        file_id = found.st_dev, found.st_ino
        if known is not None and known.file_id == file_id:
            return known
        self._forget_removed()
        fd = _open(path, os.O_RDONLY)
        try:
            arena = self._arenas[path] = _Arena(fd, file_id)
        finally:
            os.close(fd)
        return arena

    def _forget_removed(self) -> None:
        """A mapping keeps the memory of a holder that is gone; of arenas without a path the newest is kept."""
        for path, arena in list(self._arenas.items()):
            if arena.file_id is None or not Path(path).exists():
                del self._arenas[path]
                arena.close()


class _Reader:
    def __init__(self, view: memoryview, generations: memoryview) -> None:
        self._view = view
        self._generations = generations
        # Taken while the pin is fresh: whoever opened it checks that it still is.
        self._expected = bytes(generations)

    async def pieces(self) -> AsyncIterator[Piece]:
        for piece in self.views():
            yield piece

    def views(self) -> Iterator[Piece]:
        for at in range(0, len(self._view), PIECE_OCTETS):
            yield self._view[at : at + PIECE_OCTETS]

    def check(self) -> None:
        if bytes(self._generations) != self._expected:  # views compare one octet at a time
            raise unavailable("the room has been given to another block")

    def close(self) -> None:
        self._view = memoryview(b"")


class _Writer:
    """Writes to the file: mapping the extent for one block costs more than this copy (0.28 against 0.17 ms
    for 2 MiB), and a fault for each page even more. So a writer has no mapping to write astray with."""

    def __init__(self, fd: int, extent: Extent) -> None:
        self._at = extent.offset
        self._end = extent.offset + extent.length
        self._fd = fd

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


def _open(path: str, access: int) -> int:
    """A descriptor of an arena. Raises SourceUnavailableError."""
    try:
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SourceUnavailableError(f"arena: {error}") from error
    try:
        _check_file(fd)
    except SourceUnavailableError:
        os.close(fd)
        raise
    return fd


def _check_file(fd: int) -> None:
    """Raises SourceUnavailableError unless it is a file with something in it."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or not found.st_size:
        raise SourceUnavailableError("not an arena")
