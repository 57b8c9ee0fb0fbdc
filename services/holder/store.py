"""Which blocks lie where, which may be evicted, and how much that would free. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

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
        self._evictable_octets = 0
        self._blocks: dict[Name, Block] = {}
        self._by_key: defaultdict[bytes, set[Block]] = defaultdict(set)

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
        """Every block that is found by name."""
        return self._blocks.values()

    def of_key(self, block_key: bytes) -> Collection[Block]:
        """Blocks that share a key: more than one only when some were stored under a wrong name (U-15)."""
        return self._by_key.get(block_key, ())

    def allocate(self, octets: int) -> int | None:
        """Offset of a fresh extent; None: no room."""
        return self._allocator.allocate(octets)

    def free(self, offset: int) -> None:
        """Give an extent back that never became a block."""
        self._allocator.free(offset)

    def victim(self, octets: int) -> Block | None:
        """What to evict next for an extent of `octets`; None: nothing, or all of it would not be enough."""
        if self._evictable_octets + self._allocator.free_octets < octets:
            return None
        return self._eviction.victim()

    def add(self, block: Block) -> None:
        """A new block, in an extent allocated before."""
        self._blocks[block.name] = block
        self._by_key[block.name.block_key].add(block)
        self.let_go(block)

    def remove(self, block: Block) -> bool:
        """No longer found by name. True: its extent is free; False: it will be with the last reader."""
        block.gone = True
        del self._blocks[block.name]
        same_key = self._by_key[block.name.block_key]
        same_key.remove(block)
        if not same_key:
            del self._by_key[block.name.block_key]
        if block.pins:
            return False
        self._protect(block)
        self._allocator.free(block.offset)
        return True

    def hold(self, block: Block) -> None:
        """The block has gained a pin or a lease."""
        if block.pins + block.leases == 1:
            self._protect(block)

    def let_go(self, block: Block) -> bool:
        """The block has lost its last pin or its last lease. True: it was gone and its extent is free now."""
        if block.pins or block.leases:
            return False
        if block.gone:
            self._allocator.free(block.offset)
            return True
        self._eviction.add(block)
        self._evictable_octets += block.extent_octets
        return False

    def _protect(self, block: Block) -> None:
        self._eviction.remove(block)
        self._evictable_octets -= block.extent_octets
