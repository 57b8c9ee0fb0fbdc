"""What a client has been given of a session, and what may be given next (R-176 ... R-178, R-181)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

EARLY_MAX: Final = 4096
"""Tokens kept that came before their turn; what is beyond must be asked for again."""


class Delivery:
    """The output of one session: each index once, in order, whatever instances send and send again.

    `epoch` is the highest seen, `next_index` the first output index not yet delivered. Tokens and ends
    of a lower epoch count for nothing. Where tokens were lost, attach again from `next_index`.
    """

    __slots__ = ("_early", "_end", "epoch", "next_index", "stale")

    def __init__(self, epoch: int = 0, next_index: int = 0) -> None:
        self.epoch = epoch
        self.next_index = next_index
        self.stale = 0  # tokens dropped for their epoch
        self._early: dict[int, int] = {}
        self._end: tuple[str, int] | None = None

    def bind(self, epoch: int) -> bool:
        """The session is bound under `epoch`. True when that is newer than all seen."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        # What an older epoch sent ahead may not be what this one goes on from.
        self._early.clear()
        self._end = None
        return True

    def take(self, epoch: int, first_index: int, tokens: Sequence[int]) -> list[int]:
        """Tokens came, the first of them output number `first_index`. Returns what is to be delivered now."""
        # "front ends MUST discard tokens that carry a lower epoch than one they have already seen"
        if epoch < self.epoch:
            self.stale += len(tokens)
            return []
        self.bind(epoch)
        # "the front end discards the duplicates by index"
        known = max(0, self.next_index - first_index)
        self._keep(first_index + known, tokens[known:])
        ready: list[int] = []
        while self.next_index in self._early:
            ready.append(self._early.pop(self.next_index))
            self.next_index += 1
        return ready

    def finish(self, epoch: int, reason: str, output_tokens: int) -> None:
        """The instance has ended the session after `output_tokens` tokens, all of which may not be here yet."""
        if epoch >= self.epoch:
            self.bind(epoch)
            self._end = (reason, output_tokens)

    @property
    def finished(self) -> str | None:
        """Why the session ended, once every token of it is delivered."""
        if self._end is None or self.next_index < self._end[1]:
            return None
        return self._end[0]

    def _keep(self, first_index: int, tokens: Sequence[int]) -> None:
        end = min(first_index + len(tokens), self.next_index + max(EARLY_MAX, len(tokens)))
        for index in range(first_index, end):
            self._early.setdefault(index, tokens[index - first_index])
