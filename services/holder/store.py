"""Which blocks lie where, and which to evict for room. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from services.holder.allocator import Allocator
from services.holder.blocks import Block, EvictionPolicy, Name


class Store:
    """Blocks by name and by key, in extents of one arena.

    A block is a candidate for eviction exactly while it is found by name, unpinned and unleased:
    `hold` after each gain of a pin or lease, `let_go` after each loss.
    """

    def __init__(self, arena_octets: int, eviction: EvictionPolicy) -> None:
        self._allocator = Allocator(arena_octets)
        self._eviction = eviction
        self._blocks: dict[Name, Block] = {}
        self._by_key: defaultdict[bytes, dict[Block, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: Name) -> bool:
        return name in self._blocks

    @property
    def capacity(self) -> int:
        """Octets of the arena that can be used."""
        return self._allocator.capacity

    @property
    def used_octets(self) -> int:
        """Octets of the arena in use, by blocks, by readers of blocks that are gone, and by writers."""
        return self._allocator.used_octets

    def get(self, name: Name) -> Block | None:
        """The block of a name."""
        return self._blocks.get(name)

    def all(self) -> Collection[Block]:
        """Every block that is found by name, in the order of their arrival."""
        return self._blocks.values()

    def of_key(self, block_key: bytes) -> Collection[Block]:
        """Blocks that share a key, in the order of their arrival.

        More than one only when some were stored under a wrong name (U-15).
        """
        return self._by_key.get(block_key, {}).keys()

    def listed(self, block_key: bytes) -> Block | None:
        """The block that the index is to list under a key: it has one record for holder and key (U-13)."""
        return next((block for block in self._by_key.get(block_key, ()) if not block.withdrawn), None)

    def allocate(self, octets: int) -> int | None:
        """Offset of a fresh extent; None: no room."""
        return self._allocator.allocate(octets)

    def free(self, offset: int) -> None:
        """Give an extent back that never became a block."""
        self._allocator.free(offset)

    def victims(self, octets: int) -> list[Block] | None:
        """Neighbours whose eviction makes an extent of `octets`; None: no eviction would.

        Of all such the ones of which the last to be evicted would be evicted first; no block is evicted
        that does not help.
        """
        passed: dict[int, Block] = {}

        def offsets() -> Iterator[int]:
            for block in self._eviction.order():
                passed[block.offset] = block
                yield block.offset

        hole = self._allocator.hole(offsets(), octets)
        if hole is None:
            return None
        begin, end = hole
        inside = [passed[offset] for offset in sorted(passed) if begin <= offset < end]
        while end - (inside[0].offset + inside[0].extent_octets) >= octets:
            begin = inside[0].offset + inside.pop(0).extent_octets
        while inside[-1].offset - begin >= octets:
            end = inside.pop().offset
        return inside

    def add(self, block: Block) -> None:
        """A new block, in an extent allocated before."""
        self._blocks[block.name] = block
        self._by_key[block.name.block_key][block] = None
        self.let_go(block)

    def remove(self, block: Block) -> None:
        """No longer found by name; its extent is free, or will be with the last reader."""
        block.gone = True
        del self._blocks[block.name]
        same_key = self._by_key[block.name.block_key]
        del same_key[block]
        if not same_key:
            del self._by_key[block.name.block_key]
        if block.pins:
            return
        self._eviction.remove(block)
        self._allocator.free(block.offset)

    def hold(self, block: Block) -> None:
        """The block has gained a pin or a lease."""
        if block.pins + block.leases == 1:
            self._eviction.remove(block)

    def let_go(self, block: Block) -> None:
        """The block has lost a pin or a lease: without any it may be evicted, or is freed when it is gone."""
        if block.pins or block.leases:
            return
        if block.gone:
            self._allocator.free(block.offset)
        else:
            self._eviction.add(block)
