"""How the octets of one block move: the interface that every transport fills (design: data plane).

A transfer is agreed on a control connection, which also names the scheme; a source then moves
exactly `length` octets. Sources register under the entry point group "kvsp.block_sources" by scheme and
are built without arguments: what a transfer needs travels in `Transfer`. Nothing here needs grpc.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar, Final, Protocol

ENTRY_POINTS: Final = "kvsp.block_sources"
SERVER_ENTRY_POINTS: Final = "kvsp.block_servers"
SCHEMES: Final = ("shm", "grpc")
"""What everybody has. Others open ports or need a library, so a configuration names them."""

PIECE_OCTETS: Final = 2 << 20
"""Sources cut what they read into pieces of at most this many octets."""

Piece = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a chooser needs to know of a source.

    `same_host_only`: both ends must share a host. `zero_copy`: pieces are views of the holder's own
    memory, valid only while the transfer is open. `direct`: octets have a way of their own beside the control
    channel. `places`: they go straight where the reader wants them. `rdma`: they move without either CPU. `cuda`:
    the place may be a tensor in the memory of a CUDA device.
    """

    same_host_only: bool = False
    zero_copy: bool = False
    direct: bool = False
    places: bool = False
    rdma: bool = False
    cuda: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """Octets `offset ... offset + length` of a shared memory file."""

    arena: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to take or give the octets of one transfer once, at `address` ("host:port"), seconds from now.

    It travels on the authenticated control channel alone. `token` (16 octets) names the offer, `key`
    (32 octets) proves possession and, when `sealed`, encrypts. The octets move as messages of `frames` octets.
    """

    address: str
    token: bytes = field(repr=False)
    key: bytes = field(repr=False)
    sealed: bool
    frames: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One agreed movement of `length` octets.

    `endpoint` is the connection it was agreed over (a gRPC channel, an HTTPS client), `principal` on
    whose behalf, `extent` where the octets lie for sources that share memory, `ticket` for those that
    connect to the holder by themselves.
    """

    id: int
    length: int
    principal: str = ""
    endpoint: Any = None
    extent: Extent | None = None
    ticket: Ticket | None = None


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


class SharingReader(BlockReader, Protocol):
    """A reader whose pieces are views of the holder's memory: that of every source with `zero_copy`."""

    def views(self) -> Iterator[Piece]:
        """`pieces` without waiting."""

    def check(self) -> None:
        """After looking at pieces: they were this block's. Raises KvspError (503) when their room is another's."""


class PlacingReader(BlockReader, Protocol):
    """A reader that puts octets where they are wanted: that of every source with `places`."""

    def into(self, target: Any) -> AsyncIterator[int]:
        """Instead of `pieces`: into writable memory of `length` octets; yields n when 0...n are in place."""


class SharingWriter(BlockWriter, Protocol):
    """A writer that never waits: that of every source with `zero_copy`."""

    def put(self, piece: Piece) -> None:
        """`write` without waiting."""


class ConnectingWriter(BlockWriter, Protocol):
    """A writer that connects by itself: that of every source that takes tickets."""

    async def begin(self) -> None:
        """Find the holder and have it prove itself, while another source may still be taken. Raises KvspError."""


class BlockSource(Protocol):
    """A transport. `reader` and `writer` raise SourceUnavailableError."""

    scheme: ClassVar[str]

    @property
    def capabilities(self) -> Capabilities:
        """What it can do here, which may depend on the machine."""

    def reader(self, transfer: Transfer) -> BlockReader:
        """Begin to take octets."""

    def writer(self, transfer: Transfer) -> BlockWriter:
        """Begin to give octets."""

    def close(self) -> None:
        """End what is kept between transfers. Idempotent; a later transfer makes it anew."""


class BlockServer(Protocol):
    """A holder's side of a transport that readers and writers connect to by themselves.

    Built from its table of the holder's configuration; raises ConfigError. `start` does too, and
    SourceUnavailableError where this machine cannot have it.
    """

    scheme: ClassVar[str]

    async def start(self) -> None:
        """Be ready for peers before the first offer."""

    def offer_read(self, view: memoryview, spans: Sequence[tuple[int, int]], lifetime_s: float) -> Ticket:
        """A ticket to read `view` once. `spans` are its layers (offset, length), ascending and gap-free.

        The offer ends by itself after `lifetime_s`.
        """

    def offer_write(self, view: memoryview, wrote: Callable[[int], None], lifetime_s: float) -> Ticket:
        """A ticket to fill `view` once; `wrote(n)` is called when octets 0...n are in place."""

    def revoke(self, ticket: Ticket) -> None:
        """End an offer, finished or not; idempotent. When it returns, the memory is not touched any more."""

    async def close(self) -> None:
        """End everything; idempotent."""


def load_source(scheme: str) -> BlockSource:
    """The registered source of a scheme. Raises SourceUnavailableError when there is none or it cannot load."""
    for entry in entry_points(group=ENTRY_POINTS, name=scheme):
        try:
            source: BlockSource = entry.load()()
        except ImportError as error:
            raise SourceUnavailableError(f"{scheme}: {error}") from error
        return source
    raise SourceUnavailableError(f"{scheme}: no such source is installed")


def load_server(scheme: str, table: Mapping[str, Any]) -> BlockServer:
    """The registered server of a scheme, not started. Raises SourceUnavailableError, ConfigError."""
    for entry in entry_points(group=SERVER_ENTRY_POINTS, name=scheme):
        try:
            kind = entry.load()
        except ImportError as error:
            raise SourceUnavailableError(f"{scheme}: {error}") from error
        server: BlockServer = kind(table)
        return server
    raise SourceUnavailableError(f"{scheme}: no such server is installed")
