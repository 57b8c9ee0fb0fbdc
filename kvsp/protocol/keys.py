"""Scope keys and the chain of Block Keys (R-020 ... R-025). Octets in, octets out."""

from __future__ import annotations

import hashlib
import hmac
import re
import sys
from array import array
from collections.abc import Sequence
from typing import Final, NoReturn

SCOPE_LABEL: Final = b"KVSP-SCOPE-1\0"
BLOCK_LABEL: Final = b"KVSP-BLOCK-1\0"
SCOPE_KEY_OCTETS_MIN: Final = 32
KEY_OCTETS: Final = 32
ZERO: Final = bytes(KEY_OCTETS)
"""K[-1], the parent of the first block."""

_HEX_FILE: Final = re.compile(rb"([0-9A-Fa-f]*)\r?\n?")


class ScopeKey:
    """The secret of a scope. Never shown, pickled or encoded; `reveal` is the one way out (D15)."""

    __slots__ = ("_octets",)

    def __init__(self, octets: bytes) -> None:
        # "Each scope has a Scope Key of at least 32 random octets"
        if len(octets) < SCOPE_KEY_OCTETS_MIN:
            raise ValueError(f"a scope key has at least {SCOPE_KEY_OCTETS_MIN} octets")
        self._octets = bytes(octets)

    @classmethod
    def parse(cls, octets: bytes) -> ScopeKey:
        """The content of a key file: hexadecimal text with an optional final newline, or raw octets.

        Text of hexadecimal digits alone is always taken as hexadecimal, so that a short or odd one
        is an error and not a weak raw key. Raises ValueError.
        """
        text = _HEX_FILE.fullmatch(octets)
        if text is None:
            return cls(octets)
        digits = text.group(1)
        if len(digits) % 2:
            raise ValueError("a scope key in hexadecimal has an even number of digits")
        return cls(bytes.fromhex(digits.decode()))

    def reveal(self) -> bytes:
        """The raw octets."""
        return self._octets

    def __repr__(self) -> str:
        return "ScopeKey(<redacted>)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScopeKey):
            return NotImplemented
        return hmac.compare_digest(self._octets, other._octets)

    def __hash__(self) -> int:
        return hash(scope_id(self))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a scope key is not serialised")


def scope_id(key: ScopeKey) -> bytes:
    """The first 16 octets of SHA-256("KVSP-SCOPE-1" || 0x00 || scope_key) (R-021)."""
    return hashlib.sha256(SCOPE_LABEL + key.reveal()).digest()[:16]


def block_keys(
    key: ScopeKey,
    compat_id: bytes,
    tokens: Sequence[int],
    block_tokens: int,
    parent: bytes = ZERO,
) -> list[bytes]:
    """The 32-octet keys of the complete blocks of `tokens`, chained onto `parent` (R-022).

    "Only complete blocks have keys": the tokens after the last one are left out (R-023). Raises
    ValueError for a token outside unsigned 32 bits or ids of a wrong length.
    """
    if len(compat_id) != KEY_OCTETS or len(parent) != KEY_OCTETS:
        raise ValueError("compat_id and parent have 32 octets")
    if block_tokens < 1:
        raise ValueError("block_tokens is at least 1")
    packed = memoryview(pack_tokens(tokens))
    secret, label = key.reveal(), BLOCK_LABEL + compat_id
    step = 4 * block_tokens
    keys: list[bytes] = []
    for start in range(0, len(packed) - step + 1, step):
        parent = hmac.digest(secret, b"".join((label, parent, packed[start : start + step])), "sha256")
        keys.append(parent)
    return keys


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """uint32(t) of every token, in network byte order. Raises ValueError outside that range (R-008)."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        words = tokens[:]
    elif not set(map(type, tokens)) <= {int}:  # True is an int to isinstance, not here (D7)
        raise ValueError("tokens are integers")
    else:
        try:
            words = array("I", tokens)
        except OverflowError:
            raise ValueError("token outside unsigned 32 bits") from None
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


if array("I").itemsize != 4:
    raise ImportError("array('I') does not hold 32-bit words on this platform")
