"""How the octets of one block move: the interface that every transport fills (design: data plane).

A transfer is agreed on a control connection, which also names the scheme; a source then moves
exactly `length` octets. Sources register under the entry point group "kvsp.block_sources" by scheme and
are built without arguments: what a transfer needs travels in `Transfer`. Nothing here needs grpc.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Final, Protocol

ENTRY_POINTS: Final = "kvsp.block_sources"
PIECE_OCTETS: Final = 1 << 20
"""Sources cut what they read into pieces of at most this many octets."""

Piece = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a chooser needs to know of a source.

    `same_host_only`: both ends must share a host. `zero_copy`: pieces are views of the holder's own
    memory, valid only while the transfer is open. `rdma`: octets move without either CPU.
    """

    same_host_only: bool = False
    zero_copy: bool = False
    rdma: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """Octets `offset ... offset + length` of a shared memory file."""

    arena: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One agreed movement of `length` octets.

    `endpoint` is the connection it was agreed over (a gRPC channel, an HTTPS client), `principal` on
    whose behalf, `extent` where the octets lie for sources that share memory.
    """

    id: int
    length: int
    principal: str = ""
    endpoint: Any = None
    extent: Extent | None = None


class SourceUnavailableError(Exception):
    """This source cannot carry this transfer, and nothing has moved: another may be tried."""


class BlockReader(Protocol):
    """Takes the octets of one transfer."""

    def pieces(self) -> AsyncIterator[Piece]:
        """Ascending, gap-free, exactly `length` octets in all. Raises KvspError when they end early."""

    def close(self) -> None:
        """Let go of everything; idempotent. Views handed out must not be used afterwards."""


class BlockWriter(Protocol):
    """Gives the octets of one transfer."""

    async def write(self, piece: Piece) -> None:
        """Append. The caller never writes more than `length` octets. Raises KvspError."""

    async def finish(self) -> None:
        """Return when all octets have arrived. Raises KvspError."""

    def close(self) -> None:
        """Let go of everything, finished or not; idempotent."""


class DirectWriter(BlockWriter, Protocol):
    """A writer that never waits: that of every source with `zero_copy`."""

    def put(self, piece: Piece) -> None:
        """`write` without waiting."""


class BlockSource(Protocol):
    """A transport. `reader` and `writer` raise SourceUnavailableError."""

    scheme: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def reader(self, transfer: Transfer) -> BlockReader:
        """Begin to take octets."""

    def writer(self, transfer: Transfer) -> BlockWriter:
        """Begin to give octets."""


def load_source(scheme: str) -> BlockSource:
    """The registered source of a scheme. Raises SourceUnavailableError when there is none or it cannot load."""
    for entry in entry_points(group=ENTRY_POINTS, name=scheme):
        try:
            source: BlockSource = entry.load()()
        except ImportError as error:
            raise SourceUnavailableError(f"{scheme}: {error}") from error
        return source
    raise SourceUnavailableError(f"{scheme}: no such source is installed")
