"""A gateway on a real Unix socket in front of a real index and a small holder that keeps blocks in a dict."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import grpc
import msgspec

from gateway.app import SERVED
from gateway.config import GatewayConfig, load
from gateway.server import serve
from kvsp.protocol import container, registry
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.rpc.authority import Authority
from kvsp.rpc.channel import OPTIONS
from kvsp.rpc.interceptors import Guard
from kvsp.v1 import common_pb2_grpc, holder_pb2_grpc
from services.index import server as index_server
from services.index.config import IndexConfig
from services.index.state import IndexState
from tests.services.gateway_holder import Holder

COMPAT = "ab" * 32
SCOPE = "11" * 16
FOREIGN = "22" * 16
NOWHERE = "33" * 16
H1 = "https://localhost/h1/"
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

    policy_text: ClassVar[str] = POLICY
    config_text: ClassVar[str] = CONFIG
    folder: Path
    holder: Holder
    policy: Policy
    servers: list[grpc.aio.Server] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    gateway: asyncio.Task[None] | None = None
    runner: Any = None

    @classmethod
    async def start(cls, folder: Path) -> World:
        policy = Policy.load(cls.policy_text)
        world = cls(folder, Holder(policy, folder / "arena"), policy)
        await world.start_services()
        world.gateway = asyncio.create_task(serve(world.config(), world.stop))
        while not (folder / "gateway.sock").exists():
            await asyncio.sleep(0)
        return world

    def chunked(self, method: str, target: str, principal: str) -> int:
        """Status of a JSON body that does not say how long it is, and is more than the limit."""

        async def send() -> int:
            reader, writer = await self.connect()
            head = f"{method} {target} HTTP/1.1\r\nhost: x\r\nx-forwarded-client-cert: URI={principal}\r\n"
            fields = "content-type: application/kvsp+json\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write((head + fields).encode())
            for _ in range(9):
                writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
            response = await read_response(reader)
            writer.close()
            return response.status

        status: int = self.run(send())
        return status

    def config(self) -> GatewayConfig:
        path = self.folder / "gateway.toml"
        path.write_text(self.config_text.format(folder=self.folder, holder=H1))
        return load(path, SERVED)

    async def start_services(self) -> None:
        await self.start_index()
        await self.start_holder()

    async def start_index(self) -> None:
        config = IndexConfig(listen="", policy="", principal="spiffe://test/is", lookup_keys_max=100)
        server = grpc.aio.server(interceptors=(Guard(),))
        state = IndexState(replica_ttl_ms_max=config.replica_ttl_ms_max, block_tokens={})
        index_server.register(server, index_server.IndexServicer(config, self.policy, state), self.policy)
        server.add_insecure_port(f"unix:{self.folder}/index.sock")
        await server.start()
        self.servers.append(server)

    async def start_holder(self) -> None:
        await self.serve("holder", lambda to: holder_pb2_grpc.add_HolderServicer_to_server(self.holder, to))

    async def serve(
        self,
        name: str,
        add: Callable[[grpc.aio.Server], None],
        authority: common_pb2_grpc.AuthorityServicer | None = None,
    ) -> None:
        """A role with the authority beside it, at NAME.sock."""
        server = grpc.aio.server(interceptors=(Guard(),), options=OPTIONS)
        add(server)
        common_pb2_grpc.add_AuthorityServicer_to_server(authority or Authority(self.policy), server)
        server.add_insecure_port(f"unix:{self.folder}/{name}.sock")
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
