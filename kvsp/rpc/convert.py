"""Records <-> protobuf, all of it.

A record built from a message is checked like one parsed from JSON: the peer may be another
maker's, and a bound holds on every road.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UnsetType

from kvsp.protocol.errors import bad_request
from kvsp.protocol.names import DIGEST_PREFIX
from kvsp.protocol.records import InstanceStatus, ReplicaRecord, Residency
from kvsp.v1 import common_pb2

T = TypeVar("T")


def _checked(members: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(members, kind)
    except ValueError as error:
        raise bad_request(str(error)) from None


def replica_to_message(record: ReplicaRecord) -> common_pb2.ReplicaRecord:
    """A Replica Record as a message."""
    message = common_pb2.ReplicaRecord(
        name=block_name(record.compat_id, record.scope_id, record.block_key),
        holder=record.holder,
        codec=record.codec,
        size=record.size,
        digest=bytes.fromhex(record.digest.removeprefix(DIGEST_PREFIX)),
        residency=[_residency_to_message(entry) for entry in record.residency],
        ttl_ms=record.ttl_ms,
    )
    if not isinstance(record.layer_digests, UnsetType):
        message.layer_digests = bytes.fromhex("".join(record.layer_digests))
    if not isinstance(record.moqt_namespace, UnsetType):
        message.moqt_namespace = record.moqt_namespace
    return message


def replica_from_message(message: common_pb2.ReplicaRecord) -> ReplicaRecord:
    """A Replica Record from a message. Raises KvspError (400) when it breaks a bound."""
    members: dict[str, Any] = {
        "block_key": message.name.block_key.hex(),
        "compat_id": message.name.compat_id.hex(),
        "scope_id": message.name.scope_id.hex(),
        "holder": message.holder,
        "codec": message.codec,
        "size": message.size,
        "digest": DIGEST_PREFIX + message.digest.hex(),
        "residency": [_residency_members(entry) for entry in message.residency],
        "ttl_ms": message.ttl_ms,
    }
    if message.layer_digests:
        members["layer_digests"] = [key.hex() for key in split_keys(message.layer_digests)]
    if message.moqt_namespace:
        members["moqt_namespace"] = message.moqt_namespace
    return _checked(members, ReplicaRecord)


def _residency_to_message(entry: Residency) -> common_pb2.Residency:
    message = common_pb2.Residency(
        tier=entry.tier, layers=common_pb2.LayerRange(first=entry.layers[0], last=entry.layers[1])
    )
    if not isinstance(entry.read_mbit_per_s, UnsetType):
        message.read_mbit_per_s = entry.read_mbit_per_s
    return message


def _residency_members(message: common_pb2.Residency) -> dict[str, Any]:
    members: dict[str, Any] = {"tier": message.tier, "layers": (message.layers.first, message.layers.last)}
    if message.HasField("read_mbit_per_s"):
        members["read_mbit_per_s"] = message.read_mbit_per_s
    return members


def status_to_message(status: InstanceStatus) -> common_pb2.InstanceStatus:
    """An Instance Status Record as a message."""
    links = [
        common_pb2.InstanceLink(holder=link.holder, mbit_per_s=link.mbit_per_s, rtt_us=link.rtt_us)
        for link in status.links
    ]
    message = common_pb2.InstanceStatus(
        instance=status.instance,
        epoch=status.epoch,
        state=status.state,
        running=status.running,
        queued=status.queued,
        batch_size=status.batch_size,
        kv_utilization=status.kv_utilization,
        prefill_tokens_per_s=status.prefill_tokens_per_s,
        decode_tokens_per_s=status.decode_tokens_per_s,
        links=links,
        ttl_ms=status.ttl_ms,
    )
    if status.requested_state is not None:
        message.requested_state = status.requested_state
    return message


def status_from_message(message: common_pb2.InstanceStatus) -> InstanceStatus:
    """An Instance Status Record from a message. Raises KvspError (400) when it breaks a bound."""
    names = (
        "instance", "epoch", "state", "running", "queued", "batch_size", "kv_utilization",
        "prefill_tokens_per_s", "decode_tokens_per_s", "ttl_ms",
    )  # fmt: skip
    members: dict[str, Any] = {name: getattr(message, name) for name in names}
    members["links"] = [
        {"holder": link.holder, "mbit_per_s": link.mbit_per_s, "rtt_us": link.rtt_us} for link in message.links
    ]
    if message.HasField("requested_state"):
        members["requested_state"] = message.requested_state
    return _checked(members, InstanceStatus)


def block_name(compat_id: str, scope_id: str, block_key: str) -> common_pb2.BlockName:
    """A block name from its hex ids, already checked."""
    return common_pb2.BlockName(
        compat_id=bytes.fromhex(compat_id),
        scope_id=bytes.fromhex(scope_id),
        block_key=bytes.fromhex(block_key),
    )


def split_keys(joined: bytes, octets: int = 32) -> list[bytes]:
    """Fixed-length keys that travel joined. Raises KvspError (400) when a key is cut."""
    if len(joined) % octets:
        raise bad_request("a key is cut")
    return [joined[i : i + octets] for i in range(0, len(joined), octets)]
