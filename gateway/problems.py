"""KvspError -> Problem Details (RFC 9457; R-065, R-067, R-200): the only place where one becomes the other."""

from __future__ import annotations

from typing import Final

import msgspec

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.registry import MEDIA_PROBLEM

Fields = list[tuple[bytes, bytes]]
NO_STORE: Final = (b"cache-control", b"no-store")


class FieldError(KvspError):
    """A KvspError whose response needs a field of its own: `Allow`, `Accept-Encoding`."""

    def __init__(self, problem: registry.ProblemType, detail: str, field: tuple[bytes, bytes]) -> None:
        super().__init__(problem, detail)
        self.field = field


def render(error: KvspError) -> tuple[int, Fields, bytes]:
    """Status, fields and body of the response."""
    body = msgspec.json.encode(error.to_problem())
    fields = [(b"content-type", MEDIA_PROBLEM.encode()), (b"content-length", b"%d" % len(body)), NO_STORE]
    if error.retry_after_s is not None:
        fields.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, FieldError):
        fields.append(error.field)
    return error.status, fields, body
