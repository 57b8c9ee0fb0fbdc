"""Reply fields: the little syntax of them that a client reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Fields = Mapping[str, str]
"""Names in lower case; the values of a repeated field are joined by commas."""

DIGITS_MAX: Final = 15
"""Whatever is counted in decimal here stays within 2^53."""


def decimal(text: str) -> int | None:
    """A count such as Content-Length. None: not 1 to DIGITS_MAX ASCII digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else None


def media_type(fields: Fields) -> str:
    """The media type of the body in lower case, without parameters; empty when there is none."""
    return fields.get("content-type", "").partition(";")[0].strip().lower()
