"""Who reads and who writes what at the moment, by number and by control stream. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import count

from kvsp.protocol.container import Header
from services.holder.blocks import Block, Name
from services.holder.timers import Timers


@dataclass(eq=False, slots=True)
class Pin:
    """A reader: `header` of the selected layers, their payload at `offset` of the arena."""

    id: int
    stream: int
    owner: str
    block: Block
    header: Header
    offset: int


@dataclass(eq=False, slots=True)
class Reservation:
    """A writer: `length` octets at `offset` of the arena.

    Past its deadline it is `lapsed`: it can no longer become a block, but as its writer may still be
    writing, the extent is kept until the writer gives it back or its stream ends.
    """

    id: int
    stream: int
    owner: str
    name: Name
    offset: int
    length: int
    lapsed: bool = False


Transfer = Pin | Reservation


class Transfers:
    """Open transfers and their deadlines."""

    def __init__(self) -> None:
        self._open: dict[int, Transfer] = {}
        self._streams: defaultdict[int, set[int]] = defaultdict(set)
        self._deadlines: Timers[int] = Timers()
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._open)

    def next_id(self) -> int:
        """A number not used before."""
        return next(self._ids)

    def add(self, transfer: Transfer, deadline_ms: int) -> None:
        """A transfer begins."""
        self._open[transfer.id] = transfer
        self._streams[transfer.stream].add(transfer.id)
        self._deadlines.set(transfer.id, deadline_ms)

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

    def due(self, now_ms: int) -> list[Transfer]:
        """Transfers whose deadline has come; each is named once."""
        return [self._open[number] for number in self._deadlines.due(now_ms)]

    def next_ms(self) -> int | None:
        """The earliest deadline."""
        return self._deadlines.next_ms()
