"""The JSON resources: a record in, one RPC, a record out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import UNSET, UnsetType

from gateway.backend import Call
from gateway.exchange import json_fields
from kvsp.protocol import jsonio, limits
from kvsp.protocol.names import normal_uuid
from kvsp.protocol.records import Granted, LeaseRenewal, LeaseReply, LeaseRequest, LookupRequest, ReplicaRecord
from kvsp.protocol.registry import MEDIA_JSON
from kvsp.rpc import convert
from kvsp.rpc.errors import translated
from kvsp.v1 import holder_pb2, index_pb2

UNASKED_OCTETS_MAX: Final = 256 << 10
"""A longer body is read only for callers that may send it at all; the check costs a call."""

Translate = Callable[[Call, Any], Awaitable[None]]


def handler(translate: Translate) -> Callable[[Call], Awaitable[None]]:
    """Reads and checks the body of a JSON route, then lets `translate` make the RPC and answer."""

    async def handle(call: Call) -> None:
        record: Any = None
        if call.route.request is not None:
            async with call.checking():
                call.exchange.check_content(MEDIA_JSON, limits.JSON_OCTETS_MAX)
                length = call.exchange.content_length()
                if length is None or length > UNASKED_OCTETS_MAX:
                    await call.authorize()
                record = jsonio.decode(await call.exchange.body(limits.JSON_OCTETS_MAX), call.route.request)
        async with translated():
            await translate(call, record)

    return handle


async def lookup(call: Call, record: LookupRequest) -> None:
    """The index's JSON goes through as it comes."""
    targets = [] if isinstance(record.targets, UnsetType) else record.targets
    request = index_pb2.LookupRequest(
        scope_id=bytes.fromhex(record.scope_id),
        compat_id=bytes.fromhex(record.compat_id),
        block_keys=bytes.fromhex("".join(record.block_keys)),
        targets=targets,
        want_targets=record.targets is not UNSET,
    )
    async with call.backend.lookups.lookup(call.principal, request) as found:
        await call.exchange.start(200, json_fields(found.octets))
        async for piece in found.pieces:
            await call.exchange.write(piece)
    await call.exchange.finish()


async def put_replica(call: Call, record: ReplicaRecord) -> None:
    """Publish or refresh: 201 or 200 with the granted TTL (U-12)."""
    request = index_pb2.PutReplicaRequest(
        holder_id=call.segments["holder_id"],
        block_key=bytes.fromhex(call.segments["block_key"]),
        record=convert.replica_to_message(record),
    )
    reply = await call.backend.index.PutReplica(request, **call.rpc)
    await call.exchange.json(201 if reply.created else 200, Granted(reply.ttl_ms))


async def delete_replica(call: Call, _: None) -> None:
    """Withdraw."""
    request = index_pb2.DeleteReplicaRequest(
        holder_id=call.segments["holder_id"], block_key=bytes.fromhex(call.segments["block_key"])
    )
    await call.backend.index.DeleteReplica(request, **call.rpc)
    await call.exchange.empty(204)


async def create_lease(call: Call, record: LeaseRequest) -> None:
    """Lease, with the place where it can be renewed (U-14)."""
    request = holder_pb2.CreateLeaseRequest(
        block_keys=bytes.fromhex("".join(record.block_keys)),
        ttl_ms=record.ttl_ms,
        scope_id=b"" if isinstance(record.scope_id, UnsetType) else bytes.fromhex(record.scope_id),
        compat_id=b"" if isinstance(record.compat_id, UnsetType) else bytes.fromhex(record.compat_id),
    )
    reply = await call.backend.holder.CreateLease(request, **call.rpc)
    await call.exchange.json(201, LeaseReply(reply.lease, reply.ttl_ms), f"leases/{reply.lease}")


async def renew_lease(call: Call, record: LeaseRenewal) -> None:
    """Renew, counted from receipt."""
    request = holder_pb2.RenewLeaseRequest(lease=normal_uuid(call.segments["lease"]), ttl_ms=record.ttl_ms)
    reply = await call.backend.holder.RenewLease(request, **call.rpc)
    await call.exchange.json(200, LeaseReply(reply.lease, reply.ttl_ms))


async def release_lease(call: Call, _: None) -> None:
    """Release."""
    request = holder_pb2.ReleaseLeaseRequest(lease=normal_uuid(call.segments["lease"]))
    await call.backend.holder.ReleaseLease(request, **call.rpc)
    await call.exchange.empty(204)
