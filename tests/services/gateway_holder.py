"""A small holder that keeps blocks in a dict, for the gateway's tests."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsp.bulk.shm import Layout
from kvsp.protocol import access, container, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Policy
from kvsp.rpc import errors
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2, holder_pb2, holder_pb2_grpc

ARENA_OCTETS = 256 << 20


class Holder(holder_pb2_grpc.HolderServicer):
    """Serves shm from a file, or grpc; says in `closed` which pins were dropped."""

    def __init__(self, policy: Policy, arena: Path) -> None:
        self.policy = policy
        self.scheme = "shm"
        self.blocks: dict[tuple[str, str, str], bytes] = {}
        self.pinned: list[int] = []
        self.closed: list[int] = []
        self.aborted: list[int] = []
        self.opens = 0
        self.deadline_ms = 60_000
        self.break_after: int | None = None
        self.leases: dict[str, str] = {}
        self._ids = itertools.count(1)
        self._at = 0
        self._read: dict[int, bytes] = {}
        self._offsets: dict[int, int] = {}
        self._write: dict[int, tuple[tuple[str, str, str], bytearray | None, int, int]] = {}
        self.arena = arena
        layout = Layout(ARENA_OCTETS)
        with arena.open("wb") as file:
            file.seek(layout.octets - len(layout.trailer()))
            file.write(layout.trailer())

    def _extent(self, length: int) -> int:
        offset = self._at
        self._at += -(-length // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        assert self._at <= ARENA_OCTETS
        return offset

    def _location(self, offered: Iterable[str], offset: int, length: int) -> holder_pb2.Location:
        if self.scheme not in offered:
            raise KvspError(registry.UNAVAILABLE, "no transport in common")
        if self.scheme == "grpc":
            return holder_pb2.Location(scheme="grpc")
        return holder_pb2.Location(
            scheme="shm", shm=holder_pb2.ShmExtent(arena=str(self.arena), offset=offset, length=length)
        )

    async def Transfer(self, request_iterator: Any, context: Any) -> Any:
        identity = caller(context, self.policy)
        async for request in request_iterator:
            try:
                reply = self._answer(request, identity)
            except KvspError as error:
                reply = holder_pb2.TransferReply(problem=errors.to_message(error))
            if reply is not None:
                reply.id = request.id
                yield reply

    def _answer(self, request: holder_pb2.TransferRequest, identity: Any) -> holder_pb2.TransferReply | None:
        kind = request.WhichOneof("request")
        if kind == "open":
            return holder_pb2.TransferReply(opened=self._open(request.open, identity))
        if kind == "reserve":
            return holder_pb2.TransferReply(reserved=self._reserve(request.reserve, identity))
        if kind == "commit":
            return holder_pb2.TransferReply(committed=self._commit(request.commit))
        if kind == "close":
            self._scribble(request.close.transfer)
            self.closed.append(request.close.transfer)
        elif kind == "abort":
            self._write.pop(request.abort.transfer, None)
            self.aborted.append(request.abort.transfer)
        return None

    def _check(self, identity: Any, route: Any, name: common_pb2.BlockName) -> tuple[str, str, str]:
        access.authorize(self.policy, identity, route, scope_id=name.scope_id.hex())
        return name.compat_id.hex(), name.scope_id.hex(), name.block_key.hex()

    def _open(self, request: holder_pb2.OpenBlock, identity: Any) -> holder_pb2.OpenedBlock:
        key = self._check(identity, access.GET_BLOCK, request.name)
        self.opens += 1
        block = self.blocks.get(key)
        header = container.parse_header(block) if block else None
        if header is None or (request.HasField("codec") and request.codec != header.codec):
            raise KvspError(registry.NOT_FOUND)
        first, last = header.layers
        if request.HasField("layers"):
            first, last = request.layers.first, request.layers.last
        part = header.select(first, last)
        start = header.header_octets + header.layer_span(first)[0]
        payload = block[start : start + part.payload_octets]
        opened = holder_pb2.OpenedBlock(
            header=part.encode(), payload_octets=len(payload), max_age_s=7, deadline_ms=self.deadline_ms,
            sha256=hashlib.sha256(part.encode() + payload).digest(),
        )  # fmt: skip
        if request.pin:
            opened.transfer = next(self._ids)
            self.pinned.append(opened.transfer)
            self._read[opened.transfer] = payload
            offset = self._offsets[opened.transfer] = self._extent(len(payload))
            opened.location.CopyFrom(self._location(request.schemes, offset, len(payload)))
            self.fill(offset, payload)
        return opened

    def _scribble(self, transfer: int) -> None:
        """Extents are given to others the moment a pin is dropped: whoever still reads sees garbage."""
        self.fill(self._offsets[transfer], b"\xee" * len(self._read[transfer]))

    def fill(self, offset: int, payload: bytes) -> None:
        with self.arena.open("r+b") as file:
            file.seek(offset)
            file.write(payload)

    def _reserve(self, request: holder_pb2.ReserveBlock, identity: Any) -> holder_pb2.ReservedBlock:
        key = self._check(identity, access.PUT_BLOCK, request.name)
        if key in self.blocks or any(key == entry[0] for entry in self._write.values()):
            raise KvspError(registry.PRECONDITION_FAILED)
        if not request.length:
            return holder_pb2.ReservedBlock()
        number = next(self._ids)
        offset = self._extent(request.length)
        location = self._location(request.schemes, offset, request.length)
        self._write[number] = key, bytearray() if self.scheme == "grpc" else None, offset, request.length
        return holder_pb2.ReservedBlock(transfer=number, location=location, deadline_ms=self.deadline_ms)

    def _commit(self, request: holder_pb2.CommitBlock) -> holder_pb2.CommittedBlock:
        key, pieces, offset, length = self._write.pop(request.transfer)
        octets = bytes(pieces) if pieces is not None else self.arena.read_bytes()[offset : offset + length]
        if container.parse_header(octets).total_octets != length:
            raise KvspError(registry.BAD_REQUEST, "framing")
        for digest in request.digests:
            if hashlib.new(digest.algorithm.replace("-", ""), octets).digest() != digest.value:
                raise KvspError(registry.DIGEST_MISMATCH)
        self.blocks[key] = octets
        return holder_pb2.CommittedBlock(sha256=hashlib.sha256(octets).digest())

    async def ReadBlock(self, request: holder_pb2.ReadBlockRequest, context: Any) -> Any:
        payload = self._read[request.transfer]
        for at in range(0, len(payload), 1 << 16):
            if self.break_after is not None and at >= self.break_after:
                raise KvspError(registry.UNAVAILABLE)
            yield holder_pb2.BlockChunk(octets=payload[at : at + (1 << 16)])

    async def WriteBlock(self, request_iterator: Any, context: Any) -> holder_pb2.WriteBlockReply:
        octets = 0
        async for request in request_iterator:
            pieces = self._write[request.transfer][1]
            assert pieces is not None
            pieces += request.octets
            octets += len(request.octets)
        return holder_pb2.WriteBlockReply(octets=octets)

    async def CreateLease(self, request: holder_pb2.CreateLeaseRequest, context: Any) -> holder_pb2.LeaseReply:
        identity = caller(context, self.policy)
        access.authorize(
            self.policy,
            identity,
            access.CREATE_LEASE,
            scope_id=request.scope_id.hex() if request.scope_id else None,
        )
        lease = str(uuid.uuid4())
        self.leases[lease] = identity.uri
        return holder_pb2.LeaseReply(lease=lease, ttl_ms=request.ttl_ms)

    async def RenewLease(self, request: holder_pb2.RenewLeaseRequest, context: Any) -> holder_pb2.LeaseReply:
        if self.leases.get(request.lease) != caller(context, self.policy).uri:
            raise KvspError(registry.NOT_FOUND)
        if request.ttl_ms > 600_000:
            raise KvspError(registry.LEASE_QUOTA, "ttl_ms", {"limit": 600_000}, 3)
        return holder_pb2.LeaseReply(lease=request.lease, ttl_ms=request.ttl_ms)

    async def ReleaseLease(self, request: Any, context: Any) -> holder_pb2.ReleaseLeaseReply:
        if self.leases.get(request.lease) != caller(context, self.policy).uri:
            raise KvspError(registry.NOT_FOUND)
        del self.leases[request.lease]
        return holder_pb2.ReleaseLeaseReply()
