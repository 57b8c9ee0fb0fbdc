"""What one caller may have under way (D13). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from services.frontend.errors import invalid, too_many


class Quota:
    """At most `most` of something (`what`) under way for each caller."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, caller: str, amount: int, param: str) -> Iterator[None]:
        """`amount` more while it is open. Raises ApiError: 400 for what is never possible, 429 for now."""
        if amount > self._most:
            raise invalid(f"more than {self._most} {self._what}", param, "too_large")
        if self._held[caller] + amount > self._most:
            raise too_many(f"more than {self._most} {self._what} of one caller at once")
        self._held[caller] += amount
        try:
            yield
        finally:
            self._held[caller] -= amount
            if not self._held[caller]:
                del self._held[caller]
