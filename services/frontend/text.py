"""Text out of tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]

UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
PARTIAL_MAX: Final = 3
"""A character cut short has at most three octets, and a decoder shows each as at most one U+FFFD."""

WINDOW_MAX: Final = 64
CONTEXT: Final = 16
"""Tokens decoded again for the sake of those that follow; more than a character's octets by far."""


class Detokenizer:
    """Decodes a growing token sequence piece by piece; the pieces joined are the decoded whole.

    What a token looks like may depend on those before it (a leading space) and on those after it (the rest of
    a character), so a window of the last tokens is decoded again each time. While its text ends with U+FFFD,
    the next token may make a character of that; after more tokens than a character has octets it will not.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # leading characters of the window's text that are out, or were before it slid
        self._held = 0  # last tokens of the window that did not show as whole characters

    def push(self, token: int) -> str:
        """Another token. Returns what can be told of the text by now."""
        self._window.append(token)
        self._held += 1
        text = self._decode(self._window)
        if text.endswith(UNKNOWN) and self._held <= PARTIAL_MAX:
            return ""
        sure = _sure(text)
        piece = text[self._given : sure]
        self._given = max(self._given, sure)
        if sure == len(text):
            self._held = 0
        if len(self._window) > WINDOW_MAX:
            self._slide(text[sure:])
        return piece

    def flush(self) -> str:
        """No token will follow: what was held back, as it is."""
        piece = self._decode(self._window)[self._given :]
        self._given += len(piece)
        return piece

    def _slide(self, held: str) -> None:
        """Forget the window's older tokens, unless what is held back hangs on them."""
        recent = self._window[-CONTEXT:]
        text = self._decode(recent)
        sure = _sure(text)
        if text[sure:] == held:
            self._window = recent
            self._given = sure


def _sure(text: str) -> int:
    """Characters that no further token changes."""
    return max(len(text.rstrip(UNKNOWN)), len(text) - PARTIAL_MAX)


class Stops:
    """Cuts a text where a stop string begins, the one that is complete first.

    It may come in several pieces, and nothing of it is given out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """More text. Returns what can be given out; after a hit, nothing more."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.hit = bool(found)
        at = min(found)[1] if found else len(text) - self._partial(text)
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """No text will follow: what might have become a stop string."""
        return "" if self.hit else self._held

    def _partial(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
