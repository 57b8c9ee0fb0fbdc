"""Records <-> protobuf, all of it.

A record built from a message is checked like one parsed from JSON: the peer may be another
maker's, and a bound holds on every road.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UnsetType

from kvsp.protocol import jsonio
from kvsp.protocol.errors import bad_request
from kvsp.protocol.estimate import Run, Source
from kvsp.protocol.names import DIGEST_PREFIX, normal_uuid
from kvsp.protocol.records import (
    DirectiveStatus,
    InstanceStatus,
    PrefetchDirective,
    ReplicaRecord,
    ReshardRequest,
    Residency,
    Sampler,
    SessionCheckpoint,
)
from kvsp.v1 import common_pb2, index_pb2, instance_pb2

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


def sampler_to_message(sampler: Sampler) -> common_pb2.Sampler:
    """A sampler's state as a message."""
    return common_pb2.Sampler(
        method=sampler.method,
        params_json=jsonio.encode(sampler.params),
        seed=sampler.seed,
        step=sampler.step,
        deterministic=sampler.deterministic,
    )


def sampler_from_message(message: common_pb2.Sampler) -> Sampler:
    """A sampler's state from a message. Raises KvspError (400) when it breaks a bound."""
    return _checked(_sampler_members(message), Sampler)


def _sampler_members(message: common_pb2.Sampler) -> dict[str, Any]:
    return {
        "method": message.method,
        "params": jsonio.decode(message.params_json or b"{}", dict[str, Any]),
        "seed": message.seed,
        "step": message.step,
        "deterministic": message.deterministic,
    }


def checkpoint_to_message(checkpoint: SessionCheckpoint) -> common_pb2.SessionCheckpoint:
    """A Session Checkpoint as a message."""
    return common_pb2.SessionCheckpoint(
        session=checkpoint.session,
        epoch=checkpoint.epoch,
        compat_id=bytes.fromhex(checkpoint.compat_id),
        scope_id=bytes.fromhex(checkpoint.scope_id),
        prompt_blocks=join_keys(checkpoint.prompt_blocks),
        prompt_tail=checkpoint.prompt_tail,
        generated=checkpoint.generated,
        output_offset=checkpoint.output_offset,
        sampler=sampler_to_message(checkpoint.sampler),
    )


def checkpoint_from_message(message: common_pb2.SessionCheckpoint) -> SessionCheckpoint:
    """A Session Checkpoint from a message. Raises KvspError (400) when it breaks a bound."""
    members: dict[str, Any] = {
        "session": message.session,
        "epoch": message.epoch,
        "compat_id": message.compat_id.hex(),
        "scope_id": message.scope_id.hex(),
        "prompt_blocks": [key.hex() for key in split_keys(message.prompt_blocks)],
        "prompt_tail": list(message.prompt_tail),
        "generated": list(message.generated),
        "output_offset": message.output_offset,
        "sampler": _sampler_members(message.sampler),
    }
    return _checked(members, SessionCheckpoint)


def directive_to_message(directive: PrefetchDirective) -> instance_pb2.PrefetchDirective:
    """A prefetch directive as a message."""
    message = instance_pb2.PrefetchDirective(
        directive=directive.directive,
        scope_id=bytes.fromhex(directive.scope_id),
        compat_id=bytes.fromhex(directive.compat_id),
        deadline_ms=directive.deadline_ms,
        lease_ms=directive.lease_ms,
        layer_order=directive.layer_order,
    )
    for block in directive.blocks:  # in place: half the time of making each and copying it
        added = message.blocks.add()
        added.block_key = bytes.fromhex(block.block_key)
        added.sources.extend(block.sources)
    if not isinstance(directive.request_ref, UnsetType):
        message.request_ref = directive.request_ref
    return message


def directive_from_message(message: instance_pb2.PrefetchDirective) -> PrefetchDirective:
    """A prefetch directive from a message. Raises KvspError (400) when it breaks a bound."""
    members: dict[str, Any] = {
        "directive": message.directive,
        "scope_id": message.scope_id.hex(),
        "compat_id": message.compat_id.hex(),
        "blocks": [
            {"block_key": block.block_key.hex(), "sources": list(block.sources)} for block in message.blocks
        ],
        "deadline_ms": message.deadline_ms,
        "lease_ms": message.lease_ms,
        "layer_order": message.layer_order,
    }
    if message.HasField("request_ref"):
        members["request_ref"] = message.request_ref
    return _checked(members, PrefetchDirective)


def directive_status_to_message(status: DirectiveStatus) -> instance_pb2.DirectiveStatus:
    """The state of a directive as a message."""
    return instance_pb2.DirectiveStatus(
        directive=status.directive, state=status.state, loaded=join_keys(status.loaded)
    )


def directive_status_from_message(message: instance_pb2.DirectiveStatus) -> DirectiveStatus:
    """The state of a directive from a message. Raises KvspError (400) when it breaks a bound."""
    loaded = [key.hex() for key in split_keys(message.loaded)]
    return _checked({"directive": message.directive, "state": message.state, "loaded": loaded}, DirectiveStatus)


def reshard_to_message(request: ReshardRequest) -> instance_pb2.ReshardRequest:
    """A reshard plan, commit or abort as a message."""
    message = instance_pb2.ReshardRequest(map=request.map)
    if not isinstance(request.commit, UnsetType):
        message.commit = request.commit
    elif not isinstance(request.abort, UnsetType):
        message.abort = request.abort
    else:
        members = msgspec.to_builtins(request)
        plan = message.plan
        setattr(plan, "from", members["from"])
        plan.to, plan.deadline_ms = members["to"], members["deadline_ms"]
        plan.retain.extend(map(token_range, members["retain"]))
        plan.release.extend(map(token_range, members["release"]))
        for entry in members["fetch"]:
            plan.fetch.append(
                instance_pb2.ReshardFetch(tokens=token_range(entry["tokens"]), **{"from": entry["from"]})
            )
    return message


def reshard_from_message(message: instance_pb2.ReshardRequest) -> ReshardRequest:
    """A reshard plan, commit or abort from a message. Raises KvspError (400) when it breaks a bound."""
    step = message.WhichOneof("step")
    members: dict[str, Any] = {"map": message.map}
    if step == "plan":
        plan = message.plan
        members |= {
            "from": getattr(plan, "from"),
            "to": plan.to,
            "deadline_ms": plan.deadline_ms,
            "retain": [(each.first, each.end) for each in plan.retain],
            "fetch": [
                {"tokens": (each.tokens.first, each.tokens.end), "from": getattr(each, "from")}
                for each in plan.fetch
            ],
            "release": [(each.first, each.end) for each in plan.release],
        }
    elif step is not None:
        members[step] = getattr(message, step)
    return _checked(members, ReshardRequest)


def survey_to_message(runs: Sequence[Run]) -> index_pb2.SurveyReply:
    """Runs of blocks with equal sources as a message."""
    # By identity: the index has equal sources of a holder once, and to hash them all costs more than the rest.
    known = {id(source): source for sources, _ in runs for source in sources}
    positions = {identity: position for position, identity in enumerate(known)}
    return index_pb2.SurveyReply(
        matched=sum(blocks for _, blocks in runs),
        runs=[
            index_pb2.SurveyRun(blocks=blocks, sources=[positions[id(source)] for source in sources])
            for sources, blocks in runs
        ],
        sources=map(_source_to_message, known.values()),
    )


def _source_to_message(source: Source) -> index_pb2.SurveySource:
    tiers = []
    for first, end, rate in source.tiers:
        layers = common_pb2.LayerRange(first=first, last=end - 1)
        stated = rate if math.isfinite(rate) else None
        tiers.append(common_pb2.Residency(layers=layers, read_mbit_per_s=stated))
    return index_pb2.SurveySource(
        holder=source.holder, layer_count=source.layer_count, layer_bits=source.layer_bits, tiers=tiers
    )


def survey_from_message(message: index_pb2.SurveyReply) -> list[Run]:
    """Runs of blocks with equal sources from the index's own message. Raises KvspError (400)."""
    known = list(map(_source_from_message, message.sources))
    kinds: dict[tuple[int, ...], tuple[Source, ...]] = {}
    runs: list[Run] = []
    try:
        for run in message.runs:
            positions = tuple(run.sources)
            if positions not in kinds:
                kinds[positions] = tuple([known[position] for position in positions])
            runs.append((kinds[positions], run.blocks))
    except IndexError:
        raise bad_request("a run names a source that is not there") from None
    return runs


def _source_from_message(message: index_pb2.SurveySource) -> Source:
    tiers = tuple(
        (
            tier.layers.first,
            tier.layers.last + 1,
            tier.read_mbit_per_s if tier.HasField("read_mbit_per_s") else math.inf,
        )
        for tier in message.tiers
    )
    return Source(message.holder, message.layer_count, message.layer_bits, tiers)


def token_range(tokens: tuple[int, int]) -> common_pb2.TokenRange:
    """A token range as a message."""
    return common_pb2.TokenRange(first=tokens[0], end=tokens[1])


def join_keys(keys: Iterable[str]) -> bytes:
    """Keys in hex, already checked, as they travel: joined octets."""
    return bytes.fromhex("".join(keys))


def session_id(text: str) -> str:
    """A session's UUID as it is stored and compared. Raises KvspError (400)."""
    try:
        return normal_uuid(text)
    except ValueError as error:
        raise bad_request(f"session: {error}") from None


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
