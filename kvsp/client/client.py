"""The synchronous SDK (R-060 ... R-095, R-140 ... R-162): lookup, publish, withdraw, get, put, lease, and what
instances and the placement controller tell each other (R-100 ... R-129, R-170 ... R-182).

Every method raises KvspError: the peer's own problem, or 503/504 when the peer cannot be reached in
time. No token, key or scope key is ever part of its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeVar

from msgspec import UNSET

from kvsp.client import wire
from kvsp.client.block import Block, Expectation, Layer, Layers
from kvsp.client.config import Credentials, Endpoints, Options
from kvsp.client.download import WritableBuffer
from kvsp.client.fetch import Fetcher, Source
from kvsp.client.fields import decimal
from kvsp.client.lease import HolderLeases, Lease
from kvsp.client.transport import EXPECT_CONTINUE, Deadline, Progress, Transport
from kvsp.protocol import access, container, digests, jsonio, registry, routes
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.names import check_hex16, check_hex32, normal_uuid, party_id
from kvsp.protocol.records import (
    CheckpointReply,
    DirectiveStatus,
    Granted,
    InstanceStatus,
    LeaseRequest,
    LookupReply,
    LookupRequest,
    PrefetchDirective,
    ReplicaRecord,
    ResumeReply,
    ResumeRequest,
    SessionCheckpoint,
    StateChange,
)
from kvsp.protocol.registry import MEDIA_BLOCK

_CHECKPOINT: Final = access.find("PUT", "sessions/{session}/checkpoint")
_PREFETCH: Final = access.find("POST", "prefetch")
_DIRECTIVE: Final = access.find("GET", "prefetch/{directive}")
_RESUME: Final = access.find("POST", "sessions/{session}/resume")
_STATE: Final = access.find("PUT", "state")

T = TypeVar("T")
ASK_FIRST_OCTETS: Final = 8 << 20
"""From here on a PUT asks before it sends. A shorter block is there before the answer would be: asking costs a
2 MiB PUT 0.6 of 7 ms (measured through Envoy), and saves 4 ms when the holder has the block already."""

Replicas = ReplicaRecord | Sequence[ReplicaRecord]


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What HEAD tells of a block: octets of the container, SHA-256 of it, and how long it may be kept."""

    octets: int
    sha256: bytes
    max_age_s: int


class Client:
    """One party's access to the roles that `endpoints` name. Thread-safe; close it, or use it in `with`."""

    def __init__(self, credentials: Credentials, endpoints: Endpoints, options: Options | None = None) -> None:
        self.endpoints = endpoints
        self.options = options or Options()
        self._transport = Transport(credentials, self.options)
        self._hashers = ThreadPoolExecutor(self.options.pool_size, "kvsp-hash")
        reports = self.options.report_mismatch and endpoints.index is not None
        self._fetcher = Fetcher(self._transport, self.options, self._hashers, self.withdraw if reports else None)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()
        self._hashers.shutdown()

    # --- index ------------------------------------------------------------------------

    def lookup(
        self, scope_id: str, compat_id: str, keys: Sequence[str], targets: Sequence[str] | None = None
    ) -> LookupReply:
        """The longest prefix of `keys` that is held somewhere, with every replica record (R-090 ... R-093)."""
        asked = UNSET if targets is None else list(targets)
        request = _checked(lambda: LookupRequest(scope_id, compat_id, list(keys), asked))
        url = self.endpoints.require_index() + access.LOOKUP.path
        reply = self._transport.json("POST", url, self._deadline(), jsonio.encode(request))
        return wire.decode_lookup(reply.body, request)

    def publish(self, record: ReplicaRecord) -> int:
        """Publish or refresh a record; the granted TTL in ms (U-12)."""
        url = self._replica_url(access.PUBLISH.path, record.holder, record.block_key)
        return self._record("PUT", url, Granted, record).ttl_ms

    def withdraw(self, holder: str, block_key: str) -> bool:
        """Withdraw a record. False: there was none, which is as good (U-12)."""
        url = self._replica_url(access.WITHDRAW.path, holder, block_key)
        try:
            self._transport.json("DELETE", url, self._deadline())
        except KvspError as error:
            if error.problem == registry.NOT_FOUND:
                return False
            raise
        return True

    # --- blocks -----------------------------------------------------------------------

    def get(
        self,
        replicas: Replicas,
        *,
        layers: Layers | None = None,
        codec: int | None = None,
        descriptor: Descriptor | None = None,
        into: WritableBuffer | None = None,
        progress: Progress | None = None,
    ) -> Block:
        """One block, or layers first..last of it, from the first replica that delivers (R-088, R-161).

        `replicas` are records of one key from a lookup. Everything is verified before it is returned
        (R-155): Repr-Digest; in the record's codec also each layer and, of all layers, the replica
        digest. With the `descriptor` of the block also its tokens and where each K ends, which no digest
        covers. `into` receives the payload and holds anything after a failure; too small is a ValueError
        when the descriptor tells the size (codec raw), else a replica that does not fit is passed over.
        Raises BlockUnavailable.
        """
        return self._fetcher.first(self._sources(replicas, layers, codec, descriptor), into, progress)

    def get_from(
        self,
        holder: str,
        compat_id: str,
        scope_id: str,
        block_key: str,
        *,
        layers: Layers | None = None,
        codec: int | None = None,
        descriptor: Descriptor | None = None,
        into: WritableBuffer | None = None,
        progress: Progress | None = None,
    ) -> Block:
        """One block from one holder, without a record: only Repr-Digest can be verified, and what is pinned.

        `descriptor` and `into` as in `get`. Raises BlockUnavailable.
        """
        url = self._block_url(holder, compat_id, scope_id, block_key) + _query(layers, codec)
        pinned = self.options.pinned.get(block_key)
        expect = Expectation.of_holder(layers, codec, descriptor, pinned=pinned)
        return self._fetcher.first([Source(holder, block_key, url, expect)], into, progress)

    def get_layers(
        self,
        replicas: Replicas,
        *,
        layers: Layers | None = None,
        descriptor: Descriptor | None = None,
        into: WritableBuffer | None = None,
    ) -> Generator[Layer, None, None]:
        """Each layer as soon as its own digest matched the record, while the rest arrives (U-54).

        Fails over to the next replica until the first layer was given out. After that a failure,
        a final Repr-Digest mismatch included, raises KvspError: discard the block and all work built
        on it. Closing the iterator early stops the transfer. `descriptor` and `into` as in `get`.
        """
        return self._fetcher.layers(self._sources(replicas, layers, None, descriptor), into)

    def head(self, holder: str, compat_id: str, scope_id: str, block_key: str) -> BlockInfo:
        """What the holder has, without its octets. Raises KvspError (404 when it has none)."""
        url = self._block_url(holder, compat_id, scope_id, block_key)
        reply = self._transport.exchange("HEAD", url, self._deadline()).require_ok()
        sha256 = digests.parse_digest_field(reply.fields.get("repr-digest", "")).get("sha-256", b"")
        return BlockInfo(
            decimal(reply.fields.get("content-length", "")) or 0,
            sha256,
            _max_age(reply.fields.get("cache-control", "")),
        )

    def put(
        self,
        holder: str,
        compat_id: str,
        scope_id: str,
        block_key: str,
        octets: bytes | bytearray | memoryview,
        *,
        sha256: bytes | None = None,
        progress: Progress | None = None,
    ) -> bool:
        """Store a container. True: stored; False: the holder keeps the copy it had (412, R-157).

        `sha256` of the container saves computing it here; the holder compares it (R-160). `octets` is
        not copied and must not change meanwhile; `bytes` is a little faster than other buffers.
        """
        body = octets if isinstance(octets, bytes) else memoryview(octets).cast("B")
        if len(body) != container.parse_header(body).total_octets:
            raise bad_request("container truncated or followed by other octets")
        url = self._block_url(holder, compat_id, scope_id, block_key)
        digest = sha256 or hashlib.sha256(body).digest()
        fields = [
            f"Content-Type: {MEDIA_BLOCK}",
            "If-None-Match: *",
            f"Repr-Digest: {digests.repr_digest_field(digest)}",
        ]
        if len(body) >= ASK_FIRST_OCTETS:
            fields.append(EXPECT_CONTINUE)
        reply = self._transport.exchange(
            "PUT", url, self._deadline(), fields=fields, body=body, progress=progress, block=True
        )
        if reply.status == registry.PRECONDITION_FAILED.status:
            return False
        reply.require_ok()
        return True

    # --- leases -----------------------------------------------------------------------

    def lease(
        self,
        holder: str,
        keys: Sequence[str],
        ttl_ms: int,
        *,
        scope_id: str | None = None,
        compat_id: str | None = None,
    ) -> Lease:
        """A context manager that keeps the blocks from eviction while it is open (R-140 ... R-142)."""
        self.endpoints.require_holder(holder, scope_id)
        request = _checked(lambda: LeaseRequest(list(keys), ttl_ms, scope_id or UNSET, compat_id or UNSET))
        return Lease(HolderLeases(self._transport, self._deadline, holder, request))

    # --- placement controller, called by instances --------------------------------------

    def put_status(self, status: InstanceStatus) -> str:
        """Report the status of this instance; the state in which the controller sees it (R-100 ... R-106).

        That is the reported one, unless "sleeping" was requested and is accepted ("draining").
        Raises KvspError (kvsp-stale-epoch) when a later start of this instance has reported.
        """
        url = self.endpoints.require_placement()
        url += routes.path(access.STATUS.path, instance_id=party_id(status.instance))
        return self._record("PUT", url, StateChange, status).state

    def put_checkpoint(self, checkpoint: SessionCheckpoint) -> CheckpointReply:
        """Record a session's checkpoint; epoch and output tokens that are recorded now (R-170 ... R-175).

        Raises KvspError (kvsp-stale-epoch): the session goes on elsewhere, stop it here.
        """
        url = self.endpoints.require_placement()
        url += routes.path(_CHECKPOINT.path, session=checkpoint.session)
        return self._record("PUT", url, CheckpointReply, checkpoint)

    # --- instances, called by the placement controller -----------------------------------

    def prefetch(self, instance: str, directive: PrefetchDirective) -> DirectiveStatus:
        """Direct an instance to load blocks; returns as soon as it has accepted (R-125, U-18).

        The same directive may be sent again (U-19). Raises KvspError: kvsp-invalid-state, kvsp-incompatible,
        kvsp-scope-denied, 429 with `retry_after_s` when too many are pending.
        """
        url = self.endpoints.require_instance(instance) + _PREFETCH.path
        return self._record("POST", url, DirectiveStatus, directive)

    def directive(self, instance: str, directive_id: str) -> DirectiveStatus:
        """How far a directive has come (R-129). Raises KvspError (kvsp-not-found)."""
        known = _checked(lambda: normal_uuid(directive_id))
        url = self.endpoints.require_instance(instance) + routes.path(_DIRECTIVE.path, directive=known)
        return self._record("GET", url, DirectiveStatus)

    def resume(self, instance: str, epoch: int, checkpoint: SessionCheckpoint) -> ResumeReply:
        """Let an instance continue a session under a new epoch; returns once it is admitted (R-179, U-35).

        Raises KvspError: kvsp-stale-epoch, kvsp-invalid-state, kvsp-incompatible, kvsp-scope-denied.
        """
        request = _checked(lambda: ResumeRequest(epoch, checkpoint))
        url = self.endpoints.require_instance(instance)
        url += routes.path(_RESUME.path, session=checkpoint.session)
        return self._record("POST", url, ResumeReply, request)

    def set_state(self, instance: str, state: str) -> str:
        """Ask for a state: "active", "draining" or "sleeping"; the one in effect (R-107, U-36).

        Raises KvspError (kvsp-invalid-state).
        """
        change = _checked(lambda: StateChange(state))
        url = self.endpoints.require_instance(instance) + _STATE.path
        return self._record("PUT", url, StateChange, change).state

    # --- inside -----------------------------------------------------------------------

    def _record(self, method: str, url: str, reply: type[T], request: Any = None) -> T:
        """A record sent, or none, and the record that is the answer."""
        body = None if request is None else jsonio.encode(request)
        return wire.decode(self._transport.json(method, url, self._deadline(), body).body, reply)

    def _deadline(self) -> Deadline:
        return Deadline(self.options.total_s)

    def _replica_url(self, path: str, holder: str, block_key: str) -> str:
        _checked(lambda: check_hex32(block_key, "block_key"))
        return self.endpoints.require_index() + routes.path(path, holder_id=party_id(holder), block_key=block_key)

    def _block_url(self, holder: str, compat_id: str, scope_id: str, block_key: str) -> str:
        def check() -> None:
            check_hex32(compat_id, "compat_id")
            check_hex16(scope_id, "scope_id")
            check_hex32(block_key, "block_key")

        _checked(check)
        self.endpoints.require_holder(holder, scope_id)
        return holder + routes.path(access.GET_BLOCK.path, compat=compat_id, scope=scope_id, block_key=block_key)

    def _sources(
        self, replicas: Replicas, layers: Layers | None, codec: int | None, descriptor: Descriptor | None
    ) -> Iterator[Source]:
        for record in [replicas] if isinstance(replicas, ReplicaRecord) else replicas:
            pinned = self.options.pinned.get(record.block_key)
            try:
                url = self._block_url(record.holder, record.compat_id, record.scope_id, record.block_key)
                expect = Expectation.of_record(record, layers, codec, descriptor, pinned=pinned)
                yield Source(record.holder, record.block_key, url + _query(layers, codec), expect)
            except KvspError as refused:
                yield Source(record.holder, record.block_key, refused=refused)


def _checked(make: Callable[[], T]) -> T:
    """A bad argument is a 400 of our own making."""
    try:
        return make()
    except ValueError as error:
        raise bad_request(str(error)) from None


def _query(layers: Layers | None, codec: int | None) -> str:
    terms = [] if layers is None else [f"layers={layers[0]}-{layers[1]}"]
    terms += [] if codec is None else [f"codec={codec}"]
    return "?" + "&".join(terms) if terms else ""


def _max_age(cache_control: str) -> int:
    for directive in cache_control.split(","):
        name, _, value = directive.strip().partition("=")
        if name.lower() == "max-age":
            return decimal(value) or 0
    return 0
