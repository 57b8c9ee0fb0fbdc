"""A gateway on a real Unix socket in front of a real index and a small holder that keeps blocks in a dict."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import mmap
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec

from gateway.app import SERVED
from gateway.config import GatewayConfig, load
from gateway.server import serve
from kvsp.protocol import access, container, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.rpc import errors
from kvsp.rpc.authority import Authority
from kvsp.rpc.identity import caller
from kvsp.rpc.interceptors import Guard
from kvsp.v1 import common_pb2, common_pb2_grpc, holder_pb2, holder_pb2_grpc
from services.index import server as index_server
from services.index.config import IndexConfig
from services.index.state import IndexState

COMPAT = "ab" * 32
SCOPE = "11" * 16
FOREIGN = "22" * 16
NOWHERE = "33" * 16
H1 = "https://localhost/h1/"
ARENA_OCTETS = 256 << 20
CLIENT = "spiffe://test/client"
POLICY = f"""
[identities."{CLIENT}"]
roles = ["client"]
scopes = ["{SCOPE}"]
[identities."spiffe://test/other"]
roles = ["client"]
scopes = ["{FOREIGN}"]
[identities."spiffe://test/is"]
roles = ["index"]
[identities."spiffe://test/h1"]
roles = ["holder"]
base_uris = ["{H1}"]
scopes = ["{SCOPE}"]
"""
CONFIG = """
listen = "unix:{folder}/gateway.sock"
principal = "spiffe://test/gateway"
[[roles]]
role = "index"
base_uri = "https://localhost/is/"
backend.address = "unix:{folder}/index.sock"
[[roles]]
role = "holder"
base_uri = "{holder}"
backend.address = "unix:{folder}/holder.sock"
"""


def make_block(octets: int = 4096, layers: int = 2, fill: int = 0) -> bytes:
    """A container whose payload has `octets` octets."""
    section = octets // layers // 2
    parts = [(bytes([fill + n]) * section, bytes([fill + n + 100]) * section) for n in range(layers)]
    return container.build(0, 16, parts)


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
        with arena.open("wb") as file:
            file.truncate(ARENA_OCTETS)

    def _extent(self, length: int) -> int:
        offset = self._at
        self._at += -(-length // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        assert self._at <= ARENA_OCTETS
        return offset

    def _location(self, offset: int, length: int) -> holder_pb2.Location:
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
            opened.location.CopyFrom(self._location(offset, len(payload)))
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
        self._write[number] = key, bytearray() if self.scheme == "grpc" else None, offset, request.length
        return holder_pb2.ReservedBlock(
            transfer=number, location=self._location(offset, request.length), deadline_ms=self.deadline_ms
        )

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


@dataclass
class Response:
    """A parsed HTTP/1.1 response; `body` may be short, `complete` says whether it is all there."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    complete: bool = True
    head: bytes = b""

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        assert self.headers["cache-control"] == "no-store"
        body: dict[str, Any] = msgspec.json.decode(self.body)
        assert body["status"] == self.status
        return body

    @property
    def type(self) -> str:
        return self.problem["type"].removeprefix(registry.PROBLEM_URI_BASE)


async def read_response(reader: asyncio.StreamReader, method: str = "GET") -> Response:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields: dict[str, str] = {}
    for line in lines[1:-2]:
        name, value = line.split(": ", 1)
        assert name not in fields, f"{name} sent twice"
        fields[name] = value
    response = Response(int(lines[0].split()[1]), fields, head=head)
    length = int(fields.get("content-length", 0))
    if method != "HEAD" and length:
        try:
            response.body = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            response.body = getattr(error, "partial", b"")
            response.complete = False
    return response


@dataclass
class World:
    """Everything that runs, and a client."""

    folder: Path
    holder: Holder
    policy: Policy
    servers: list[grpc.aio.Server] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    gateway: asyncio.Task[None] | None = None
    runner: Any = None

    @classmethod
    async def start(cls, folder: Path) -> World:
        policy = Policy.load(POLICY)
        world = cls(folder, Holder(policy, folder / "arena"), policy)
        await world.start_index()
        await world.start_holder()
        world.gateway = asyncio.create_task(serve(world.config(), world.stop))
        while not (folder / "gateway.sock").exists():
            await asyncio.sleep(0)
        return world

    def config(self) -> GatewayConfig:
        path = self.folder / "gateway.toml"
        path.write_text(CONFIG.format(folder=self.folder, holder=H1))
        return load(path, SERVED)

    async def start_index(self) -> None:
        config = IndexConfig(listen="", policy="", principal="spiffe://test/is", lookup_keys_max=100)
        server = grpc.aio.server(interceptors=(Guard(),))
        state = IndexState(replica_ttl_ms_max=config.replica_ttl_ms_max, block_tokens={})
        index_server.register(server, index_server.IndexServicer(config, self.policy, state), self.policy)
        server.add_insecure_port(f"unix:{self.folder}/index.sock")
        await server.start()
        self.servers.append(server)

    async def start_holder(self) -> None:
        server = grpc.aio.server(interceptors=(Guard(),))
        holder_pb2_grpc.add_HolderServicer_to_server(self.holder, server)
        common_pb2_grpc.add_AuthorityServicer_to_server(Authority(self.policy), server)
        server.add_insecure_port(f"unix:{self.folder}/holder.sock")
        await server.start()
        self.servers.append(server)

    async def close(self) -> None:
        self.stop.set()
        assert self.gateway is not None
        await self.gateway
        for server in self.servers:
            await server.stop(None)

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def connect(self) -> Any:
        return asyncio.open_unix_connection(str(self.folder / "gateway.sock"), limit=1 << 20)

    def request(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        principal: str | None = CLIENT,
    ) -> Response:
        """One request on its own connection."""
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        if principal is not None:
            pairs.insert(0, ("x-forwarded-client-cert", f"Hash=aa;URI={principal}"))
        return self.run(self._request(method, target, body, pairs))

    async def _request(
        self, method: str, target: str, body: bytes | None, pairs: list[tuple[str, str]]
    ) -> Response:
        if body is not None and not any(name.lower() == "content-length" for name, _ in pairs):
            pairs.append(("content-length", str(len(body))))
        text = "".join(f"{name}: {value}\r\n" for name, value in pairs)
        reader, writer = await self.connect()
        try:
            writer.write(f"{method} {target} HTTP/1.1\r\nhost: x\r\n{text}\r\n".encode("latin-1") + (body or b""))
            return await read_response(reader, method)
        finally:
            writer.close()

    def json(self, method: str, target: str, value: Any, principal: str | None = CLIENT) -> Response:
        return self.request(
            method, target, msgspec.json.encode(value), {"content-type": "application/kvsp+json"}, principal
        )

    def block_path(self, key: str, scope: str = SCOPE, compat: str = COMPAT) -> str:
        return f"/h1/blocks/{compat}/{scope}/{key}"

    def put(self, key: str, block: bytes, headers: Mapping[str, str] | None = None, **changes: Any) -> Response:
        fields = {"if-none-match": "*", "content-type": "application/kvsp-block", **(headers or {})}
        return self.request("PUT", self.block_path(key), block, fields, **changes)


H1_ID = party_id(H1)


def store(world: World, key: str, block: bytes) -> str:
    world.holder.blocks[COMPAT, SCOPE, key] = block
    return world.block_path(key)


def sha(octets: bytes) -> str:
    return base64.b64encode(hashlib.sha256(octets).digest()).decode()


async def wait_for(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)
