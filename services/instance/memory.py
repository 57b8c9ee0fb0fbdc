"""KV memory of sessions, counted in positions and kept for them in the order in which they ask. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvsp.protocol.descriptor import Descriptor

Key = tuple[str, int]
"""A session and its epoch."""


def positions_in(octets: int, descriptor: Descriptor) -> int:
    """Positions whose KV has room in so many octets."""
    return octets * descriptor.block_tokens // descriptor.payload_octets


class Memory:
    """Room for `positions` positions. Who asks first is served first, also where a later one would fit earlier."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.taken = 0
        self._kept: dict[Key, int] = {}
        self._waiting: dict[Key, tuple[int, Callable[[], object]]] = {}

    @property
    def waiting(self) -> list[Key]:
        """Those whose turn has not come, in order."""
        return list(self._waiting)

    def ask(self, key: Key, positions: int, granted: Callable[[], object]) -> None:
        """Keep so many, from when `granted` is called until `free`. Raises ValueError when it asks twice."""
        if key in self:
            raise ValueError("has asked already")
        self._waiting[key] = positions, granted
        self._grant()

    def has(self, key: Key) -> bool:
        """Is what it has asked for kept?"""
        return key in self._kept

    def free(self, key: Key) -> None:
        """It needs nothing any more, if it has asked for anything."""
        self._waiting.pop(key, None)
        self.taken -= self._kept.pop(key, 0)
        self._grant()

    def __contains__(self, key: Key) -> bool:
        """Has it asked?"""
        return key in self._kept or key in self._waiting

    def _grant(self) -> None:
        while self._waiting:
            key, (positions, granted) = next(iter(self._waiting.items()))
            if self.taken + positions > self.positions:
                return
            del self._waiting[key]
            self._kept[key] = positions
            self.taken += positions
            granted()
