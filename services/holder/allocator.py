"""Extents in one arena: best fit, neighbours coalesce at once. Pure.

Offsets and sizes are multiples of ALIGN, so that a writer can map the pages of its extent and of no
other. A search is a bisection; keeping the free list sorted moves 8 octets per free extent behind.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

ALIGN: Final = 4096


def rounded(octets: int) -> int:
    """Octets that an extent for `octets` takes."""
    return -(-octets // ALIGN) * ALIGN


class Allocator:
    """Hands out extents of `capacity` octets (rounded down to ALIGN)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGN * ALIGN
        self.used_octets = 0
        self._taken: dict[int, int] = {}  # offset -> size
        self._free_at: dict[int, int] = {}  # offset -> size
        self._free_end: dict[int, int] = {}  # end -> offset
        self._by_size: list[tuple[int, int]] = []  # (size, offset), ascending
        if self.capacity:
            self._add_free(0, self.capacity)

    def allocate(self, octets: int) -> int | None:
        """Offset of an extent that holds `octets` >= 1, the lowest of the best fitting; None: no such room."""
        if octets < 1:
            raise ValueError("an extent holds at least one octet")
        size = rounded(octets)
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        found, offset = self._by_size[at]
        self._remove_free(offset, found)
        if found > size:
            self._add_free(offset + size, found - size)
        self._taken[offset] = size
        self.used_octets += size
        return offset

    def free(self, offset: int) -> None:
        """Give an extent back. Raises KeyError when it was not handed out."""
        size = self._taken.pop(offset)
        self.used_octets -= size
        before = self._free_end.get(offset)
        if before is not None:
            size += self._remove_free(before, offset - before)
            offset = before
        after = self._free_at.get(offset + size)
        if after is not None:
            size += self._remove_free(offset + size, after)
        self._add_free(offset, size)

    def hole(self, offsets: Iterable[int], octets: int) -> tuple[int, int] | None:
        """The first hole, as (begin, end), with room for `octets` if these extents were freed in turn.

        None: there would be none after all of them. Changes nothing.
        """
        size = rounded(octets)
        # Holes that have grown, over those that are there; a boundary inside a hole is never asked for again.
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        for offset in offsets:
            end = offset + self._taken[offset]
            begin = ends.get(offset, self._free_end.get(offset, offset))
            end = begins.get(end, end + self._free_at.get(end, 0))
            if end - begin >= size:
                return begin, end
            begins[begin], ends[end] = end, begin
        return None

    def _add_free(self, offset: int, size: int) -> None:
        self._free_at[offset] = size
        self._free_end[offset + size] = offset
        insort(self._by_size, (size, offset))

    def _remove_free(self, offset: int, size: int) -> int:
        del self._free_at[offset]
        del self._free_end[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return size
