"""Who reads and who writes what at the moment, by number and by control stream. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import count

from kvsp.protocol import registry
from kvsp.protocol.container import Header
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity
from services.holder.allocator import rounded
from services.holder.blocks import Account, Block, Name
from services.holder.timers import Timers


@dataclass(eq=False, slots=True)
class Pin:
    """A reader, until `deadline_ms`: `header` of the selected layers, their payload at `offset` of the arena."""

    id: int
    stream: int
    owner: str
    block: Block
    header: Header
    offset: int
    deadline_ms: int


@dataclass(eq=False, slots=True)
class Reservation:
    """A writer, until `deadline_ms`: `length` octets at `offset` of the arena.

    `shared`: the writer puts octets there itself. Then it is `lapsed` past its deadline: it can no longer
    become a block, but as its writer may still be writing, the extent is kept until the writer gives it
    back or its stream ends. Any other reservation just ends.
    """

    id: int
    stream: int
    owner: str
    name: Name
    offset: int
    length: int
    deadline_ms: int
    shared: bool
    lapsed: bool = False


Transfer = Pin | Reservation


class Transfers:
    """Open transfers, their deadlines, and the arena's octets that each identity holds with them (D4, D13)."""

    def __init__(self) -> None:
        self._open: dict[int, Transfer] = {}
        self._streams: defaultdict[int, set[int]] = defaultdict(set)
        self._deadlines: Timers[int] = Timers()
        self._ids = count(1)
        self._pinned: defaultdict[str, Account] = defaultdict(Account)
        self._reserved: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def next_id(self) -> int:
        """A number not used before."""
        return next(self._ids)

    def check_pin(self, identity: Identity, block: Block) -> None:
        """May the identity pin the block as well? Raises KvspError (429)."""
        pinned = self._pinned.get(identity.uri, Account())
        if pinned.octets + pinned.more([block]) > identity.quotas.pinned_octets:
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many octets being read", retry_after_s=1)

    def check_reservation(self, identity: Identity, length: int) -> None:
        """May the identity have room for `length` octets as well? Raises KvspError (429)."""
        if self._reserved[identity.uri] + rounded(length) > identity.quotas.reserved_octets:
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many octets being written", retry_after_s=1)

    def add(self, transfer: Transfer) -> None:
        """A transfer begins."""
        self._open[transfer.id] = transfer
        self._streams[transfer.stream].add(transfer.id)
        self._deadlines.set(transfer.id, transfer.deadline_ms)
        if isinstance(transfer, Pin):
            self._pinned[transfer.owner].add(transfer.block)
        else:
            self._reserved[transfer.owner] += rounded(transfer.length)

    def get(self, number: int) -> Transfer | None:
        """The open transfer of a number."""
        return self._open.get(number)

    def of_stream(self, stream: int) -> list[int]:
        """Numbers of what a stream has open."""
        return list(self._streams.get(stream, ()))

    def remove(self, transfer: Transfer) -> None:
        """A transfer is over."""
        del self._open[transfer.id]
        self._deadlines.cancel(transfer.id)
        of_stream = self._streams[transfer.stream]
        of_stream.remove(transfer.id)
        if not of_stream:
            del self._streams[transfer.stream]
        if isinstance(transfer, Pin):
            pinned = self._pinned[transfer.owner]
            pinned.remove(transfer.block)
            if not pinned.octets:
                del self._pinned[transfer.owner]
        else:
            self._reserved[transfer.owner] -= rounded(transfer.length)
            if not self._reserved[transfer.owner]:
                del self._reserved[transfer.owner]

    def due(self, now_ms: int) -> list[Transfer]:
        """Transfers whose deadline has come; each is named once."""
        return [self._open[number] for number in self._deadlines.due(now_ms)]

    def next_ms(self) -> int | None:
        """The earliest deadline."""
        return self._deadlines.next_ms()
