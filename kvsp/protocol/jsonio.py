"""Strict JSON (U-03, D7): the one place where octets become records.

msgspec checks grammar, types and bounds of the members that a record names. What it lets through is
checked here first, at a cost that grows with the length alone: encoding, depth, numbers in members
that nobody asked for, and duplicate names.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError, bad_request

T = TypeVar("T")

# Unterminated strings match to the end: were they tried again at every quote, the time would be quadratic.
_STRINGS = re.compile(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?')
# Numbers that may be too large for a double's exact integers, or for a double: long ones, high exponents.
_LARGE = re.compile(rb"[\s:,\[]-?(?:[0-9]{16,}|[0-9]+(?:\.[0-9]+)?[eE]\+?0*(?:[2-9][0-9]{2}|[0-9]{4,}))")
_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ONE_KIND = bytes.maketrans(b"[]{}", b"()()")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def decode(octets: bytes, record: type[T]) -> T:
    """Parse one JSON object into `record`. Raises KvspError (400, 413) with a precise reason.

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
    if len(octets) > limits.JSON_OCTETS_MAX:
        raise bad_request("JSON text too long")
    try:
        octets.isascii() or octets.decode()
    except UnicodeDecodeError:
        raise bad_request("JSON text is not UTF-8") from None
    bare = _without_strings(octets)
    _check_depth(bare)
    _check_numbers(bare)
    # Python code runs once an object in the pass below: no record of ours needs that many.
    if bare.count(b"{") > limits.JSON_OBJECTS_MAX:
        raise KvspError(registry.CONTENT_TOO_LARGE, "JSON text holds too many objects")
    try:
        json.loads(octets, object_pairs_hook=_check_names)
    except ValueError as error:
        raise bad_request(f"JSON is malformed: {error}") from None


def _without_strings(octets: bytes) -> bytes:
    """What stands outside of strings, which are most of a text of ours."""
    if b"\\" in octets:
        return _STRINGS.sub(b'""', octets)
    return b'""'.join(octets.split(b'"')[::2])


def _check_depth(bare: bytes) -> None:
    """Peel off one level of brackets at a time: what is left after the deepest allowed is too deep."""
    brackets = bare.translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(limits.JSON_DEPTH_MAX):
        brackets = brackets.replace(b"()", b"")
    # What is left otherwise is unbalanced: the parser's to refuse, unless it would have to go deep for it.
    if b"()" in brackets or brackets.count(b"(") > limits.JSON_DEPTH_MAX:
        raise bad_request(f"JSON nested deeper than {limits.JSON_DEPTH_MAX}")


def _check_numbers(bare: bytes) -> None:
    for large in _LARGE.finditer(bare):
        number = _NUMBER.match(bare, large.start() + 1)
        if number is None:
            continue
        digits = number[0]
        if number[1] or number[2]:
            # "no NaN/Infinity": what no double can hold, such as 1e400, would be one.
            if math.isinf(float(digits)):
                raise bad_request("JSON number out of range")
        elif len(digits) > len(str(-limits.INT_MAX)) or abs(int(digits)) > limits.INT_MAX:
            raise bad_request("JSON integer beyond 2^53-1")


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    """I-JSON forbids duplicate names; parsers disagree on which one counts."""
    if len({name for name, _ in pairs}) != len(pairs):
        raise bad_request("JSON object holds a name twice")
