"""JSON replies into records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct, UnsetType

from kvsp.client.errors import unavailable
from kvsp.protocol import jsonio
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import LookupReply, LookupRequest, ReplicaRecord, TargetEstimate

T = TypeVar("T")


class _FlatLookupReply(Struct, frozen=True):
    """The other reading of "replica records per matched key": one flat list (U-11)."""

    matched: int
    replicas: list[ReplicaRecord]
    targets: list[TargetEstimate] | UnsetType = msgspec.UNSET


def decode(octets: bytes | bytearray, record: type[T]) -> T:
    """A peer's JSON object. Raises KvspError (503) when it is none of that type.

    The strict but slow reader is asked only about what the fast one refuses, such as `32.0`.
    """
    try:
        return msgspec.json.decode(octets, type=record)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return jsonio.decode(bytes(octets), record)
    except KvspError as error:
        raise unavailable(f"malformed reply: {error}") from None


def decode_lookup(octets: bytes | bytearray, request: LookupRequest) -> LookupReply:
    """A lookup reply in either form, checked against what was asked. Raises KvspError (503)."""
    try:
        reply = decode(octets, LookupReply)
    except KvspError:
        flat = decode(octets, _FlatLookupReply)
        reply = _group(flat, request.block_keys)
    if reply.matched > len(request.block_keys):
        raise unavailable("malformed reply: more keys matched than asked for")
    for key, found in zip(request.block_keys, reply.replicas, strict=False):
        for record in found:
            named = (record.block_key, record.scope_id, record.compat_id)
            if named != (key, request.scope_id, request.compat_id):
                raise unavailable("malformed reply: a record of another block")
    return reply


def _group(flat: _FlatLookupReply, keys: Sequence[str]) -> LookupReply:
    by_key: dict[str, list[ReplicaRecord]] = {}
    for record in flat.replicas:
        by_key.setdefault(record.block_key, []).append(record)
    rows = [by_key.get(key, []) for key in keys[: max(flat.matched, 0)]]
    if len(rows) != flat.matched or not all(rows):
        raise unavailable("malformed reply: matched keys without records")
    return LookupReply(flat.matched, rows, flat.targets)
