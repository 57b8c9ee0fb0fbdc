"""What a holder holds. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvsp.protocol.container import Header
from services.holder.allocator import rounded


class Name(NamedTuple):
    """Raw identifiers of a block: 32, 16 and 32 octets."""

    compat_id: bytes
    scope_id: bytes
    block_key: bytes


@dataclass(frozen=True, slots=True)
class Digested:
    """What reading a whole container through once tells."""

    header: Header
    layer_digests: tuple[bytes, ...]
    sha256: bytes


class Kept(NamedTuple):
    """Layers first..last of a block that the engine beside the holder keeps in a tier of its own."""

    tier: str
    first: int
    last: int


@dataclass(eq=False, slots=True)
class Block:
    """A stored block: its container lies at `offset` of the arena.

    `pins` are readers at work, `leases` cover it; either keeps its extent. `gone`: no longer found
    by name, the extent goes when the last reader has finished. `withdrawn`: the index is to list it
    no more. `published_until_ms`: the index lists it until then, by the last grant; None before the first.
    `kept`: what the engine beside the holder keeps of it, too; the arena has all layers nevertheless.
    """

    name: Name
    offset: int
    digested: Digested = field(repr=False)
    pins: int = 0
    leases: int = 0
    gone: bool = False
    withdrawn: bool = False
    published_until_ms: int | None = None
    kept: Kept | None = None

    def keep(self, kept: Kept | None) -> bool:
        """Note what of `kept` are layers of this block; True when that is news."""
        first, last = self.digested.header.layers
        if kept is not None:
            kept = Kept(kept.tier, max(kept.first, first), min(kept.last, last))
            if kept.first > kept.last:
                kept = None
        is_news, self.kept = kept != self.kept, kept
        return is_news

    @property
    def residency(self) -> list[tuple[str, tuple[int, int]]]:
        """Tiers and their layers (inclusive), without overlap: what is kept elsewhere, and "host" for the rest."""
        first, last = self.digested.header.layers
        if self.kept is None:
            return [("host", (first, last))]
        kept = self.kept
        rest = [(first, kept.first - 1), (kept.last + 1, last)]
        return [(kept.tier, (kept.first, kept.last)), *(("host", each) for each in rest if each[0] <= each[1])]

    @property
    def octets(self) -> int:
        """Octets of the container."""
        return self.digested.header.total_octets

    @property
    def extent_octets(self) -> int:
        """Octets of the arena that the container takes."""
        return rounded(self.octets)


class Account:
    """Octets of the arena under some blocks: whole extents, each once, however often it is covered."""

    def __init__(self) -> None:
        self.octets = 0
        self._covers: Counter[Block] = Counter()

    def more(self, blocks: Iterable[Block]) -> int:
        """Octets that these distinct blocks would add."""
        return sum(block.extent_octets for block in blocks if block not in self._covers)

    def add(self, block: Block) -> None:
        """Cover a block once more."""
        self._covers[block] += 1
        if self._covers[block] == 1:
            self.octets += block.extent_octets

    def remove(self, block: Block) -> None:
        """Cover a block once less."""
        self._covers[block] -= 1
        if not self._covers[block]:
            del self._covers[block]
            self.octets -= block.extent_octets


class EvictionPolicy(Protocol):
    """Orders the blocks that may be evicted; the state adds and removes them, so none of these is in use."""

    def add(self, block: Block) -> None:
        """The block has just been used and may be evicted from now on."""

    def remove(self, block: Block) -> None:
        """The block may no longer be evicted, or is gone."""

    def order(self) -> Iterable[Block]:
        """All of them, what to evict first first."""


class Lru:
    """Evicts what was used longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()

    def add(self, block: Block) -> None:
        """The most recently used."""
        self._order[block] = None
        self._order.move_to_end(block)

    def remove(self, block: Block) -> None:
        """No longer a candidate."""
        del self._order[block]

    def order(self) -> Iterable[Block]:
        """The least recently used first."""
        return self._order
