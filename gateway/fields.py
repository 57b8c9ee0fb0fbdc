"""Request fields and query parameters that HTTP and KVSP define: syntax only, no input or output."""

from __future__ import annotations

import base64
import re
from typing import Final
from urllib.parse import parse_qsl

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError, bad_request

_LAYERS: Final = re.compile(r"(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})")
_CODEC: Final = re.compile(r"[1-9][0-9]{0,4}")
_ENTITY_TAG: Final = re.compile(r'(?:W/)?("[!#-~\x80-\xff]*")')


def parse_selection(query: bytes) -> tuple[tuple[int, int] | None, int | None]:
    """The `layers` (inclusive) and `codec` parameters. Raises KvspError (400). Others are ignored (U-23)."""
    if not query:
        return None, None
    values: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in values and name in ("layers", "codec"):
            raise bad_request(f"{name} is given more than once")
        values[name] = value
    return _layers(values.get("layers")), _codec(values.get("codec"))


def _layers(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = _LAYERS.fullmatch(text)
    if match is None:
        raise bad_request("layers is not of the form a-b")
    first, last = int(match[1]), int(match[2])
    if first > last or last > limits.LAYER_MAX:
        raise bad_request("layers is reversed or out of bounds")
    return first, last


def _codec(text: str | None) -> int | None:
    if text is None:
        return None
    if not _CODEC.fullmatch(text) or int(text) > registry.CODEC_MAX:
        raise bad_request("codec is not a registered 16-bit value other than 0")  # U-22
    return int(text)


def entity_tag(sha256: bytes) -> str:
    """The strong ETag of a representation (U-30)."""
    return f'"{base64.urlsafe_b64encode(sha256).rstrip(b"=").decode()}"'


def none_match(value: str | None, tag: str) -> bool:
    """True when an `If-None-Match` of a GET names `tag`, compared weakly (RFC 9110, 13.1.2)."""
    return value is not None and (value.strip() == "*" or tag in _ENTITY_TAG.findall(value))


def require_create_only(value: str | None) -> None:
    """A PUT of a block needs `If-None-Match: *`: a block is immutable (U-21). Raises KvspError (428, 400)."""
    if value is None:
        raise KvspError(registry.PRECONDITION_REQUIRED, "If-None-Match: * is required")
    if value.strip() != "*":
        raise bad_request("If-None-Match must be *")


def is_media(value: str | None, media: str) -> bool:
    """True when a Content-Type names `media`; parameters are tolerated (R-064)."""
    return value is not None and value.partition(";")[0].strip().lower() == media
