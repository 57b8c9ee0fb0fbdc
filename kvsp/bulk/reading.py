"""A block that is held for reading, and its octets, whichever transports bring them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

from kvsp.bulk.chooser import Chooser
from kvsp.bulk.control import ControlStream
from kvsp.bulk.source import (
    BlockReader,
    Capabilities,
    Piece,
    PlacingReader,
    SharingReader,
    SourceUnavailableError,
)
from kvsp.bulk.verified import verified
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.v1 import holder_pb2

TRANSPORT_FAILED: Final = (registry.UNAVAILABLE, registry.GATEWAY_TIMEOUT)
"""What another transport may do better at. All else is about the block or the caller."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A pin, and the reader that fetches what it covers. It lapses at `deadline`, by the event loop's clock."""

    opened: holder_pb2.OpenedBlock
    reader: BlockReader
    able: Capabilities
    deadline: float

    @property
    def scheme(self) -> str:
        """The transport's."""
        return self.opened.location.scheme


Again = Callable[[int, Set[str]], Awaitable[Grant]]
"""Opens the same block once more: its layers from this one on, by none of these schemes. Raises KvspError."""


class OpenedTransfer:
    """A described block, and when pinned, its payload.

    `header` is the container header of the selected layers, `sha256` covers header and payload.
    `max_age_s` is how long a cache may keep it; the pin lapses at `deadline`, in seconds of the event loop's
    clock. Close it when no piece is in use any more.
    """

    def __init__(
        self,
        stream: ControlStream,
        opened: holder_pb2.OpenedBlock,
        chooser: Chooser,
        grant: Grant | None = None,
        *,
        again: Again | None = None,
        digests: Sequence[bytes] | None = None,
    ) -> None:
        self.header = opened.header
        self.payload_octets = opened.payload_octets
        self.total_octets = len(opened.header) + opened.payload_octets
        self.sha256 = opened.sha256
        self.max_age_s = opened.max_age_s
        self.deadline = 0.0 if grant is None else grant.deadline
        self._now = asyncio.get_running_loop().time
        self._stream = stream
        self._chooser = chooser
        self._again = again
        self._digests = digests
        # All are kept to the end: pieces that the consumer still has may be views of what they pin.
        self._grants = [] if grant is None else [grant]
        self._failed: set[str] = set()
        if grant is not None:
            stream.users += 1

    @cached_property
    def parsed_header(self) -> container.Header:
        """`header`, parsed once. Raises KvspError (400)."""
        return container.parse_header(self.header)

    @property
    def scheme(self) -> str:
        """The transport that brings, or brought, the octets; empty without a pin and after `close`."""
        return self._grants[-1].scheme if self._grants else ""

    def pieces(self) -> AsyncIterator[Piece]:
        """The payload in order, each octet once. Raises KvspError (503) once the pin is gone.

        A transport that fails, or brings a layer that does not match its digest, is replaced by another, which
        begins at the first layer that was not given out as a whole. What has been looked at was this block's when
        the iteration has ended, or `check` returned. Raises KvspError (422) when no transport brings what matches.
        """
        return self._moved(None)

    async def into(self, target: Any) -> AsyncIterator[int]:
        """As `pieces`, but into a writable buffer of `payload_octets`: yields n when octets 0...n are in place.

        A transport that can puts them there itself. What lies there at the end is the caller's, whatever becomes
        of the pin. Raises ValueError for an unfit target, KvspError as `pieces` does.
        """
        view = memoryview(target).cast("B")
        if view.readonly or len(view) != self.payload_octets:
            raise ValueError("the target must be writable, and as long as the payload")
        placed = 0
        if self._digests is None and self._grants and self._grants[-1].able.zero_copy:
            for piece in self._shared():
                view[placed : placed + len(piece)] = piece
                placed += len(piece)
                yield placed
            return
        async for piece in self._moved(view):
            placed += len(piece)
            yield placed

    def _shared(self) -> Iterator[Piece]:
        """As `_moved`, without its price: there is nothing to wait for, nor to begin again."""
        began = self._now()
        for piece in cast(SharingReader, self._grants[-1].reader).views():
            if not self._held(self._now()):
                raise lapsed()
            yield piece
        self.check()
        self._measure(self._now() - began, 0.0)

    async def _moved(self, target: memoryview | None) -> AsyncIterator[Piece]:
        if not self._grants:
            raise ValueError("the block was opened without a pin")
        given, skip = 0, 0
        began = arrived = self._now()
        waited = 0.0
        pieces = self._octets(target)
        while True:
            asked = self._now()
            try:
                piece = await anext(pieces, None)
            except (KvspError, SourceUnavailableError) as error:
                if given == self.payload_octets:
                    break  # nothing is missing
                start = await self._restarted(given, error)
                pieces, skip = self._octets(target and target[start:]), given - start
                continue
            arrived = self._now()
            if not self._held(arrived):
                raise lapsed()
            waited += arrived - asked
            if piece is None:
                break
            dropped = min(skip, len(piece))
            skip -= dropped
            if dropped:
                piece = memoryview(piece)[dropped:]
            given += len(piece)
            if piece:
                yield piece
        if given != self.payload_octets:
            raise unavailable("the block has another length than agreed")
        self.check()
        self._measure(arrived - began, waited)

    def check(self) -> None:
        """The pieces looked at so far were this block's. Raises KvspError (503) when they may be another's.

        To be called, before octets are passed on, by who does not iterate to the end; and at the end by who has
        views of pieces still in use then.
        """
        for grant in self._grants:
            if grant.able.zero_copy:
                cast(SharingReader, grant.reader).check()

    def close(self) -> None:
        """Drop the pin. Idempotent, does not wait."""
        if not self._grants:
            return
        for grant in self._grants:
            grant.reader.close()
            self._stream.tell(close=holder_pb2.CloseBlock(transfer=grant.opened.transfer))
        self._grants.clear()
        self._stream.users -= 1

    async def _restarted(self, given: int, error: Exception) -> int:
        """Have another transport bring what follows the last layer that was given as a whole; returns where."""
        failed = self._grants[-1]
        failed.reader.close()
        reason = error if isinstance(error, KvspError) else unavailable(str(error))
        curable = reason.problem in TRANSPORT_FAILED or reason.problem is registry.DIGEST_MISMATCH
        if self._again is None or not curable or not self._held(self._now()):
            raise reason
        self._failed.add(failed.scheme)
        layer, start = _incomplete(self.parsed_header, given)
        try:
            grant = await self._again(layer, self._failed)
        except KvspError as later:
            raise reason from later
        self._grants.append(grant)
        # Only now is it known that the transport is to blame, and not a holder that is gone.
        self._chooser.failed(failed.scheme, error, given)
        return start

    def _octets(self, target: memoryview | None) -> AsyncIterator[Piece]:
        """Of the newest grant, in the target if there is one, and verified when there are digests to do so."""
        grant = self._grants[-1]
        pieces = grant.reader.pieces() if target is None else _placed(grant, target)
        if self._digests is None:
            return pieces
        lengths = [sum(section) for section in container.parse_header(grant.opened.header).sections]
        return verified(pieces, list(zip(lengths, self._digests[-len(lengths) :], strict=True)))

    def _measure(self, took_s: float, waited_s: float) -> None:
        [*others, grant] = self._grants
        # What a slow consumer takes says nothing of the transport, unless it is the consumer who moves the octets.
        if not others and (grant.able.zero_copy or waited_s >= took_s / 2):
            self._chooser.rates.moved(grant.scheme, self.payload_octets, took_s)

    def _held(self, now: float) -> bool:
        return self._stream.alive and now < self.deadline


async def _placed(grant: Grant, target: memoryview) -> AsyncIterator[Piece]:
    """Octets of a grant as views of the target, once they are there."""
    at = 0
    if grant.able.places:
        async for end in cast(PlacingReader, grant.reader).into(target):
            yield target[at:end]
            at = end
        return
    async for piece in grant.reader.pieces():
        if at + len(piece) > len(target):
            raise unavailable("the block is longer than agreed")
        target[at : at + len(piece)] = piece
        yield target[at : at + len(piece)]
        at += len(piece)


def lapsed() -> KvspError:
    """The holder may have given the room to another block (503)."""
    return unavailable("the transfer has lapsed")


def _incomplete(header: container.Header, given: int) -> tuple[int, int]:
    """The first layer of which not all octets are among the first `given` of the payload, and where it starts."""
    first, last = header.layers
    spans = ((layer, *header.layer_span(layer)) for layer in range(first, last + 1))
    return next((layer, start) for layer, start, octets in spans if start + octets > given)
