"""The JSON objects of KVSP as frozen types (R-040 ... R-055).

Building one, from JSON or by hand, checks every bound that can be seen in the object alone; a
violation is a ValueError (msgspec.ValidationError when decoding, which `jsonio` turns into a 400).
Bounds that depend on configuration (counts, quotas) are checked by the service that knows them.
Optional members are absent rather than null (`UNSET`), except where the text shows null.
"""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvsp.protocol import limits, registry
from kvsp.protocol.names import (
    check_base_uri,
    check_digest,
    check_hex16,
    check_hex32,
    check_hex32_list,
    check_holder_uri,
    check_moqt_namespace,
    check_token,
    normal_uuid,
)

Uint = Annotated[int, Meta(ge=0, le=limits.INT_MAX)]
Positive = Annotated[int, Meta(ge=1, le=limits.INT_MAX)]
CodecValue = Annotated[int, Meta(ge=1, le=registry.CODEC_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=limits.TOKEN_MAX)]
Rate = Annotated[float, Meta(gt=0, le=1e18)]
NonNegative = Annotated[float, Meta(ge=0, le=1e18)]
Text = Annotated[str, Meta(max_length=limits.NAME_OCTETS_MAX)]
LayerRange = tuple[Uint, Uint]  # inclusive
TokenRange = tuple[Uint, Uint]  # half-open


def check_range(first: int, last: int) -> None:
    """An inclusive layer range (R-005)."""
    if first > last:
        raise ValueError("layer range is reversed")
    if last > limits.LAYER_MAX:
        raise ValueError("layer out of bounds")


def check_token_ranges(ranges: list[TokenRange]) -> None:
    """Half-open, non-empty, non-overlapping token ranges (R-005)."""
    for start, end in ranges:
        if start >= end:
            raise ValueError("token range is empty or reversed")
    ordered = sorted(ranges)
    for (_, end), (start, _) in itertools.pairwise(ordered):
        if start < end:
            raise ValueError("token ranges overlap")


class Residency(Struct, frozen=True, omit_defaults=True):
    """Which layers of a replica lie in which tier, and how fast the holder reads that tier."""

    tier: str
    layers: LayerRange
    read_mbit_per_s: Rate | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_token(self.tier, "tier")
        check_range(*self.layers)

    @property
    def layer_count(self) -> int:
        """Number of layers in the range."""
        return self.layers[1] - self.layers[0] + 1


class ReplicaRecord(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A copy of a block at a holder (R-040 ... R-045). `size` is payload octets without header (U-26).

    `ttl_ms` stays the last member: the index stores the encoded record up to its value and splices
    the remaining time in at lookup.
    """

    block_key: str
    compat_id: str
    scope_id: str
    holder: str
    codec: CodecValue
    size: Positive
    digest: str
    residency: list[Residency]
    layer_digests: list[str] | UnsetType = UNSET
    moqt_namespace: str | UnsetType = UNSET
    ttl_ms: Positive

    def __post_init__(self) -> None:
        check_hex32(self.block_key, "block_key")
        check_hex32(self.compat_id, "compat_id")
        check_hex16(self.scope_id, "scope_id")
        check_holder_uri(self.holder)
        check_digest(self.digest, "digest")
        self._check_residency()
        if self.holder.startswith("moqt:") != (self.moqt_namespace is not UNSET):
            raise ValueError("moqt_namespace is required with, and only with, a moqt holder")
        if not isinstance(self.moqt_namespace, UnsetType):
            check_moqt_namespace(self.moqt_namespace)

    def _check_residency(self) -> None:
        if not self.residency:
            raise ValueError("residency is empty")
        if len(self.residency) > limits.RESIDENCY_RANGES_MAX:
            raise ValueError("too many residency entries")
        ordered = sorted(entry.layers for entry in self.residency)
        # "Layer ranges are inclusive and MUST NOT overlap."
        for (_, last), (first, _) in itertools.pairwise(ordered):
            if first <= last:
                raise ValueError("residency layer ranges overlap")
        if isinstance(self.layer_digests, UnsetType):
            # "layer_digests ... is REQUIRED for replicas that are served by layer range": a replica
            # that lacks layers can only be served by range. Without the list the layer count is
            # unknown, so what can be seen is a range that does not start at 0 or has a gap.
            if ordered[0][0] != 0 or any(a[1] + 1 != b[0] for a, b in itertools.pairwise(ordered)):
                raise ValueError("layer_digests is required for a replica that does not cover all layers")
            return
        if not 1 <= len(self.layer_digests) <= limits.CONTAINER_LAYERS_MAX:
            raise ValueError("layer_digests has a bad length")
        check_hex32_list(self.layer_digests, "layer_digests")
        if ordered[-1][1] >= len(self.layer_digests):
            raise ValueError("residency names a layer beyond layer_digests")

    @property
    def layer_count(self) -> int:
        """All layers of the block, resident here or not."""
        if isinstance(self.layer_digests, UnsetType):
            return max(entry.layers[1] for entry in self.residency) + 1
        return len(self.layer_digests)


class Link(Struct, frozen=True):
    """What an instance measured of its path to a holder."""

    holder: str
    mbit_per_s: Rate
    rtt_us: NonNegative

    def __post_init__(self) -> None:
        check_holder_uri(self.holder)


class InstanceStatus(Struct, frozen=True):
    """Instance Status Record (R-046)."""

    instance: str
    epoch: Uint
    state: str
    running: Uint
    queued: Uint
    batch_size: Uint
    kv_utilization: Annotated[float, Meta(ge=0, le=1)]
    prefill_tokens_per_s: NonNegative
    decode_tokens_per_s: NonNegative
    ttl_ms: Positive
    links: list[Link] = []
    requested_state: str | None = None

    def __post_init__(self) -> None:
        check_base_uri(self.instance)
        check_token(self.state, "state")
        if self.requested_state is not None:
            check_token(self.requested_state, "requested_state")


class Sampler(Struct, frozen=True):
    """Everything needed to continue sampling (R-047)."""

    method: Text
    params: dict[str, Any]
    seed: Annotated[int, Meta(ge=-limits.INT_MAX, le=limits.INT_MAX)]
    step: Uint
    deterministic: bool


class SessionCheckpoint(Struct, frozen=True):
    """Session Checkpoint (R-047, R-048, U-33)."""

    session: str
    epoch: Uint
    compat_id: str
    scope_id: str
    prompt_blocks: list[str]
    prompt_tail: list[TokenId]
    generated: list[TokenId]
    output_offset: Uint
    sampler: Sampler

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "session", normal_uuid(self.session))
        check_hex32(self.compat_id, "compat_id")
        check_hex16(self.scope_id, "scope_id")
        check_hex32_list(self.prompt_blocks, "prompt_blocks")
        if len(self.generated) != self.output_offset:
            raise ValueError("generated does not hold output_offset tokens")


class CheckpointReply(Struct, frozen=True):
    """What the placement controller has recorded of a session (U-34)."""

    epoch: Uint
    output_offset: Uint


class ResumeRequest(Struct, frozen=True):
    """Continue a session under a new epoch (R-179, U-35)."""

    epoch: Uint
    checkpoint: SessionCheckpoint

    def __post_init__(self) -> None:
        if self.checkpoint.epoch >= self.epoch:
            raise ValueError("checkpoint.epoch is not below epoch")


class ResumeReply(Struct, frozen=True):
    """The session is admitted; generation goes on at `output_offset` (U-35)."""

    session: str
    epoch: Uint
    output_offset: Uint

    def __post_init__(self) -> None:
        normal_uuid(self.session)


class LookupRequest(Struct, frozen=True, omit_defaults=True):
    """Longest-prefix lookup (R-050)."""

    scope_id: str
    compat_id: str
    block_keys: list[str]
    targets: list[str] | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_hex16(self.scope_id, "scope_id")
        check_hex32(self.compat_id, "compat_id")
        check_hex32_list(self.block_keys, "block_keys")
        if not isinstance(self.targets, UnsetType):
            for target in self.targets:
                check_base_uri(target)


class TargetEstimate(Struct, frozen=True, omit_defaults=True):
    """Estimates for one target; members are absent when unknown (U-11)."""

    instance: str
    fetch_us: Uint | UnsetType = UNSET
    recompute_us: Uint | UnsetType = UNSET


class LookupReply(Struct, frozen=True, omit_defaults=True):
    """Lookup response (U-11): `replicas[i]` holds every record of `block_keys[i]`, i < matched."""

    matched: Uint
    replicas: list[list[ReplicaRecord]]
    targets: list[TargetEstimate] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if len(self.replicas) != self.matched:
            raise ValueError("replicas is not aligned with matched")


class Granted(Struct, frozen=True):
    """Publish reply: the TTL that the index granted (U-12)."""

    ttl_ms: Positive


class LeaseRequest(Struct, frozen=True, omit_defaults=True):
    """Create a lease (U-14). Duplicates collapse; an empty list is an error (U-10)."""

    block_keys: list[str]
    ttl_ms: Positive
    scope_id: str | UnsetType = UNSET
    compat_id: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not self.block_keys:
            raise ValueError("block_keys is empty")
        check_hex32_list(self.block_keys, "block_keys")
        if not isinstance(self.scope_id, UnsetType):
            check_hex16(self.scope_id, "scope_id")
        if not isinstance(self.compat_id, UnsetType):
            check_hex32(self.compat_id, "compat_id")


class LeaseRenewal(Struct, frozen=True):
    """Renew a lease (U-14); counted from receipt."""

    ttl_ms: Positive


class LeaseReply(Struct, frozen=True):
    """Identifier and granted TTL of a lease (U-14)."""

    lease: str
    ttl_ms: Positive

    def __post_init__(self) -> None:
        normal_uuid(self.lease)


class DirectiveBlock(Struct, frozen=True, gc=False):  # a directive has hundreds, and they refer to nothing
    """One block of a prefetch directive and where it may be loaded from."""

    block_key: str
    sources: list[str]

    def __post_init__(self) -> None:
        check_hex32(self.block_key, "block_key")
        if not self.sources:
            raise ValueError("sources is empty")
        for source in self.sources:
            check_holder_uri(source)


class PrefetchDirective(Struct, frozen=True, omit_defaults=True):
    """Prefetch directive (R-051)."""

    directive: str
    scope_id: str
    compat_id: str
    blocks: list[DirectiveBlock]
    deadline_ms: Positive
    lease_ms: Positive
    request_ref: Text | UnsetType = UNSET
    layer_order: str = "ascending"

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "directive", normal_uuid(self.directive))
        check_hex16(self.scope_id, "scope_id")
        check_hex32(self.compat_id, "compat_id")
        if not self.blocks:
            raise ValueError("blocks is empty")
        if self.layer_order != "ascending":
            raise ValueError("unknown layer_order")


DIRECTIVE_STATES: Final = frozenset({"pending", "partial", "complete", "failed"})


class DirectiveStatus(Struct, frozen=True):
    """State of a prefetch directive (R-052, U-18)."""

    directive: str
    state: str
    loaded: list[str]

    def __post_init__(self) -> None:
        normal_uuid(self.directive)
        if self.state not in DIRECTIVE_STATES:
            raise ValueError("unknown directive state")
        check_hex32_list(self.loaded, "loaded")


class Shard(Struct, frozen=True):
    """One token range of a sharded context and the instance that holds it."""

    tokens: TokenRange
    instance: str

    def __post_init__(self) -> None:
        check_base_uri(self.instance)


class ShardMap(Struct, frozen=True):
    """Shard Map (R-054): "Token ranges are half-open, contiguous, and non-overlapping."."""

    map: Text
    version: Uint
    shards: list[Shard]

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError("shards is empty")
        check_token_ranges([shard.tokens for shard in self.shards])
        for left, right in pairwise(self.shards):
            if left.tokens[1] != right.tokens[0]:
                raise ValueError("shards are not contiguous")


class ReshardFetch(Struct, frozen=True):
    """A token range to load and the instance to load it from."""

    tokens: TokenRange
    source: str = msgspec.field(name="from")

    def __post_init__(self) -> None:
        check_base_uri(self.source)


class ReshardRequest(Struct, frozen=True, omit_defaults=True):
    """Plan, commit or abort: exactly one of the three (R-055, U-38)."""

    map: Text
    old: Uint | UnsetType = msgspec.field(name="from", default=UNSET)
    new: Uint | UnsetType = msgspec.field(name="to", default=UNSET)
    deadline_ms: Positive | UnsetType = UNSET
    retain: list[TokenRange] | UnsetType = UNSET
    fetch: list[ReshardFetch] | UnsetType = UNSET
    release: list[TokenRange] | UnsetType = UNSET
    commit: Uint | UnsetType = UNSET
    abort: Uint | UnsetType = UNSET

    def __post_init__(self) -> None:
        plan = (self.old, self.new, self.deadline_ms, self.retain, self.fetch, self.release)
        is_plan = any(member is not UNSET for member in plan)
        if is_plan + (self.commit is not UNSET) + (self.abort is not UNSET) != 1:
            raise ValueError("exactly one of plan, commit and abort is required")
        if is_plan:
            self._check_plan()

    def _check_plan(self) -> None:
        if (
            isinstance(self.old, UnsetType)
            or isinstance(self.new, UnsetType)
            or isinstance(self.deadline_ms, UnsetType)
            or isinstance(self.retain, UnsetType)
            or isinstance(self.fetch, UnsetType)
            or isinstance(self.release, UnsetType)
        ):
            raise ValueError("a plan needs from, to, deadline_ms, retain, fetch and release")
        if self.new != self.old + 1:
            raise ValueError("to is not from + 1")
        check_token_ranges(self.retain + [entry.tokens for entry in self.fetch])
        check_token_ranges(self.retain + self.release)


class ReshardReply(Struct, frozen=True, omit_defaults=True):
    """Acknowledged plan: `to`; commit or abort: `version` (U-38)."""

    map: Text
    to: Uint | UnsetType = UNSET
    version: Uint | UnsetType = UNSET


class StateChange(Struct, frozen=True):
    """Body of PUT state and of the reply to a status PUT (R-104, R-107, U-36)."""

    state: str

    def __post_init__(self) -> None:
        if self.state not in registry.INSTANCE_STATES:
            raise ValueError("unknown state")
