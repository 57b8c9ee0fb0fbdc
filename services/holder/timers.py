"""Deadlines by key, in memory bounded by the number of keys. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SLACK: Final = 64


class Timers(Generic[K]):
    """At most one deadline a key, in milliseconds of the caller's clock."""

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._serial = count()  # keys need not be ordered

    def set(self, key: K, at_ms: int) -> None:
        """Set or move the deadline of a key."""
        self._at[key] = at_ms
        heappush(self._heap, (at_ms, next(self._serial), key))
        # Moved and cancelled entries stay in the heap until they surface; a storm of renewals must not grow it.
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, next(self._serial), key) for key, at in self._at.items()]
            heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Forget a key; unknown is fine."""
        self._at.pop(key, None)

    def next_ms(self) -> int | None:
        """The earliest deadline."""
        while self._heap:
            at_ms, _, key = self._heap[0]
            if self._at.get(key) == at_ms:
                return at_ms
            heappop(self._heap)
        return None

    def due(self, now_ms: int) -> list[K]:
        """Keys whose deadline has come, earliest first; they are forgotten."""
        keys: list[K] = []
        while (at_ms := self.next_ms()) is not None and at_ms <= now_ms:
            key = heappop(self._heap)[2]
            del self._at[key]
            keys.append(key)
        return keys
