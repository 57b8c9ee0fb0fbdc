"""Strict JSON for the wire (U-03, D7).

The one place where octets become records. A first pass by the standard library rejects what msgspec
lets through: duplicate names, and what stands in members that nobody asked for.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from kvsp.protocol import limits
from kvsp.protocol.errors import bad_request

T = TypeVar("T")

# Unterminated strings match to the end: were they tried again at every quote, the time would be quadratic.
_STRINGS = re.compile(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?')
_BRACKETS = re.compile(rb"[\[\]{}]")


def decode(octets: bytes, record: type[T]) -> T:
    """Parse one JSON object into `record`. Raises KvspError (400) with a precise reason.

    Accepts any JSON number with an integral value where an integer is asked for (U-03).
    """
    _check_text(octets)
    try:
        return msgspec.json.decode(octets, type=record)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise bad_request(str(error)) from None
    except msgspec.DecodeError as error:
        raise bad_request(str(error)) from None
    return _decode_integral(octets, record)


def encode(record: Any) -> bytes:
    """The JSON octets of a record."""
    return msgspec.json.encode(record)


def _decode_integral(octets: bytes, record: type[T]) -> T:
    """`32.0` is the integer 32 (JCS makes them one); take the slow road only when one is met."""
    try:
        return msgspec.convert(_integral(msgspec.json.decode(octets)), type=record)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise bad_request(str(error)) from None


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= limits.INT_MAX:
        return int(value)
    if isinstance(value, list):
        return [_integral(item) for item in value]
    if isinstance(value, dict):
        return {name: _integral(item) for name, item in value.items()}
    return value


def _check_text(octets: bytes) -> None:
    """What msgspec does not check, above all in members that nobody asked for."""
    if len(octets) > limits.JSON_OCTETS_MAX:
        raise bad_request("JSON text too long")
    opened = octets.count(b"[") + octets.count(b"{")
    if opened > limits.JSON_DEPTH_MAX and _depth(octets) > limits.JSON_DEPTH_MAX:
        raise bad_request(f"JSON nested deeper than {limits.JSON_DEPTH_MAX}")
    try:
        json.loads(
            octets.decode(), object_pairs_hook=_check_names, parse_int=_check_integer, parse_float=_check_float
        )
    except UnicodeDecodeError:
        raise bad_request("JSON text is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"JSON is malformed: {error}") from None


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    """I-JSON forbids duplicate names; parsers disagree on which one counts."""
    if len({name for name, _ in pairs}) != len(pairs):
        raise bad_request("JSON object holds a name twice")


def _check_integer(digits: str) -> int:
    if len(digits) > len(str(-limits.INT_MAX)) or abs(value := int(digits)) > limits.INT_MAX:
        raise bad_request("JSON integer beyond 2^53-1")
    return value


def _check_float(digits: str) -> float:
    # "no NaN/Infinity": what no double can hold, such as 1e400, would be one (U-03, D7).
    if math.isinf(value := float(digits)):
        raise bad_request("JSON number out of range")
    return value


def _depth(octets: bytes) -> int:
    deepest = depth = 0
    for match in _BRACKETS.finditer(_STRINGS.sub(b'""', octets)):
        depth += 1 if match.group() in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest
