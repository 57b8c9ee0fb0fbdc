"""The JSON resources: a record in, one RPC, a record out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import UNSET, UnsetType

from gateway.backend import Call
from gateway.exchange import json_fields
from kvsp.protocol import jsonio, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import normal_uuid
from kvsp.protocol.records import (
    CheckpointReply,
    Granted,
    InstanceStatus,
    LeaseRenewal,
    LeaseReply,
    LeaseRequest,
    LookupRequest,
    PrefetchDirective,
    ReplicaRecord,
    ReshardReply,
    ReshardRequest,
    ResumeReply,
    ResumeRequest,
    SessionCheckpoint,
    StateChange,
)
from kvsp.protocol.registry import MEDIA_JSON
from kvsp.rpc import convert
from kvsp.rpc.channel import DEFAULT_TIMEOUT_S
from kvsp.rpc.errors import translated
from kvsp.v1 import common_pb2, holder_pb2, index_pb2, instance_pb2, placement_pb2

UNASKED_OCTETS_MAX: Final = 256 << 10
"""A longer body is read only for callers that may send it at all; the check costs a call."""

RESHARD_S_MAX: Final = 300.0
"""Nobody waits longer for a plan, whatever its deadline."""

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


async def put_status(call: Call, record: InstanceStatus) -> None:
    """An instance reports; the answer is the state that the controller gives it (R-104, U-37)."""
    request = placement_pb2.PutStatusRequest(
        instance_id=call.segments["instance_id"], status=convert.status_to_message(record)
    )
    reply = await call.backend.placement.PutStatus(request, **call.rpc)
    await call.exchange.json(200, StateChange(reply.state))


async def put_checkpoint(call: Call, record: SessionCheckpoint) -> None:
    """Record a checkpoint: 201 the session's first, else 200, with what is recorded (U-34)."""
    request = placement_pb2.PutCheckpointRequest(
        session=normal_uuid(call.segments["session"]), checkpoint=convert.checkpoint_to_message(record)
    )
    reply = await call.backend.placement.PutCheckpoint(request, **call.rpc)
    await call.exchange.json(201 if reply.created else 200, CheckpointReply(reply.epoch, reply.output_offset))


async def prefetch(call: Call, record: PrefetchDirective) -> None:
    """Accept a directive, with the place where its state can be read (R-125, U-18)."""
    async with call.checking():
        _bound("blocks", len(record.blocks), limits.DIRECTIVE_BLOCKS_MAX)
        _bound("sources", max(len(block.sources) for block in record.blocks), limits.DIRECTIVE_SOURCES_MAX)
    reply = await call.backend.instance.Prefetch(convert.directive_to_message(record), **call.rpc)
    status = convert.directive_status_from_message(reply)
    await call.exchange.json(202, status, f"prefetch/{status.directive}")


async def get_directive(call: Call, _: None) -> None:
    """The state of a directive (R-129)."""
    request = instance_pb2.GetDirectiveRequest(directive=normal_uuid(call.segments["directive"]))
    reply = await call.backend.instance.GetDirective(request, **call.rpc)
    await call.exchange.json(200, convert.directive_status_from_message(reply))


async def resume(call: Call, record: ResumeRequest) -> None:
    """Continue a session: 202 once it is admitted, its progress is seen in checkpoints (U-35)."""
    request = instance_pb2.ResumeRequest(
        session=normal_uuid(call.segments["session"]),
        epoch=record.epoch,
        checkpoint=convert.checkpoint_to_message(record.checkpoint),
    )
    reply = await call.backend.instance.Resume(request, **call.rpc)
    await call.exchange.json(202, ResumeReply(reply.session, reply.epoch, reply.output_offset))


async def reshard(call: Call, record: ReshardRequest) -> None:
    """Plan, commit or abort. "200 only after all `fetch` ranges are loaded" (R-192): a plan may take its time."""
    message = convert.reshard_to_message(record)
    plan = message.plan
    async with call.checking():
        _bound("ranges", max(len(plan.retain), len(plan.fetch), len(plan.release)), limits.RESHARD_RANGES_MAX)
    timeout = min(DEFAULT_TIMEOUT_S + plan.deadline_ms / 1000, RESHARD_S_MAX)
    reply = await call.backend.instance.Reshard(message, **call.rpc | {"timeout": timeout})
    members = {name: getattr(reply, name) for name in ("to", "version") if reply.HasField(name)}
    await call.exchange.json(200, ReshardReply(reply.map, **members))


async def put_state(call: Call, record: StateChange) -> None:
    """Change the state of an instance; the answer is the one in effect (U-36)."""
    reply = await call.backend.instance.PutState(common_pb2.StateChange(state=record.state), **call.rpc)
    await call.exchange.json(200, StateChange(reply.state))


def _bound(what: str, count: int, most: int) -> None:
    """U-10: over is 413."""
    if count > most:
        raise KvspError(registry.CONTENT_TOO_LARGE, f"more than {most} {what}")
