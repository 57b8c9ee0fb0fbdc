"""A real holder and a real index on Unix sockets, and blocks to put into it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvsp.bulk.holder import HolderClient, OpenedTransfer
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.rpc.channel import open_channel
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import Peer
from kvsp.v1 import common_pb2, holder_pb2_grpc
from services.holder import server as holder_server
from services.holder.blocks import Block
from services.holder.config import HolderConfig
from services.holder.host import Host
from services.holder.stream import name_of
from services.index import server as index_server
from services.index.config import IndexConfig
from services.index.state import IndexState
from tests.services.rpc import served

BASE_URI = "https://h1.example/kvsp/"
SCOPE, OTHER, FOREIGN = bytes.fromhex("aa" * 16), bytes.fromhex("bb" * 16), bytes.fromhex("cc" * 16)
COMPAT = bytes.fromhex("11" * 32)
CLIENT, CLIENT2, OTHER_CLIENT = "spiffe://t/client", "spiffe://t/client2", "spiffe://t/other"
HOLDER = "spiffe://t/h1"

POLICY_TEXT = f"""
[identities."spiffe://t/is"]
roles = ["index"]
[identities."{HOLDER}"]
roles = ["holder"]
base_uris = ["{BASE_URI}"]
scopes = ["{SCOPE.hex()}", "{OTHER.hex()}"]
[identities."{CLIENT}"]
roles = ["client"]
scopes = ["{SCOPE.hex()}", "{FOREIGN.hex()}"]
[identities."{CLIENT}".quotas]
leases = 3
lease_ttl_ms = 60000
[identities."{CLIENT2}"]
roles = ["client"]
scopes = ["{SCOPE.hex()}"]
[identities."{OTHER_CLIENT}"]
roles = ["client"]
scopes = ["{OTHER.hex()}"]
"""
POLICY = Policy.load(POLICY_TEXT)


def name(i: int, scope: bytes = SCOPE, compat: bytes = COMPAT) -> common_pb2.BlockName:
    return common_pb2.BlockName(
        compat_id=compat, scope_id=scope, block_key=hashlib.sha256(b"block %d" % i).digest()
    )


def block(i: int, layers: int = 4, section: int = 1000) -> bytes:
    """A container whose octets depend on i."""
    return container.build(
        0,
        16,
        [
            (bytes([i % 251, layer]) * (section // 2), bytes([layer, i % 251]) * (section // 2))
            for layer in range(layers)
        ],
    )


@dataclass
class Rig:
    """What a test works with; `index` is the state of the index that the holder tells."""

    folder: Path
    config: HolderConfig
    host: Host
    channel: grpc.aio.Channel
    client: HolderClient
    stub: holder_pb2_grpc.HolderStub
    index: IndexState = field(default_factory=lambda: IndexState(block_tokens={}))

    async def put(self, i: int, octets: bytes | None = None, principal: str = CLIENT, **where: Any) -> bytes:
        octets = block(i) if octets is None else octets
        reserved = await self.client.reserve(principal, name(i, **where), len(octets))
        assert reserved is not None
        await reserved.write(octets)
        return await reserved.commit()

    async def get(self, i: int, principal: str = CLIENT, **options: Any) -> bytes:
        where = {each: options.pop(each) for each in ("scope", "compat") if each in options}
        opened = await self.client.open(principal, name(i, **where), **options)
        try:
            return opened.header + b"".join([bytes(piece) async for piece in opened.pieces()])
        finally:
            opened.close()

    def stored(self, i: int) -> Block | None:
        return self.host.state.store.get(name_of(name(i)))

    def pins(self, i: int) -> int:
        found = self.stored(i)
        assert found is not None
        return found.pins

    def listed(self, i: int) -> bool:
        """Does the index list the block?"""
        found = self.index.table.find(party_id(BASE_URI), name(i).block_key, now_ms())
        return found is not None


async def refused(problem: registry.ProblemType, call: Any) -> KvspError:
    with pytest.raises(KvspError) as caught:
        await call
    assert caught.value.problem is problem
    return caught.value


async def describe(holder: Rig, i: int, principal: str = CLIENT, **options: Any) -> OpenedTransfer:
    where = {each: options.pop(each) for each in ("scope", "compat") if each in options}
    return await holder.client.open(principal, name(i, **where), pin=False, **options)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks bring about."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def index_at(folder: Path, state: IndexState) -> AsyncIterator[None]:
    config = IndexConfig(listen="", policy="", principal="")
    servicer = index_server.IndexServicer(config, POLICY, state)
    async with served(f"unix:{folder}/is.sock", lambda target: index_server.register(target, servicer, POLICY)):
        yield


@asynccontextmanager
async def rig(
    folder: Path, *, schemes: tuple[str, ...] = ("shm", "grpc"), with_index: bool = True, **config: Any
) -> AsyncIterator[Rig]:
    made = HolderConfig(
        listen=f"unix:{folder}/h1.sock",
        policy="",
        principal=HOLDER,
        base_uri=BASE_URI,
        index=Peer(f"unix:{folder}/is.sock"),
        arena_dir=str(folder),
        **({"arena_octets": 1 << 20} | config),
    )
    state = IndexState(block_tokens={})
    async with AsyncExitStack() as stack:
        if with_index:
            await stack.enter_async_context(index_at(folder, state))
        host = await stack.enter_async_context(holder_server.hosted(made, POLICY))
        await stack.enter_async_context(served(made.listen, lambda target: holder_server.register(target, host)))
        channel = await stack.enter_async_context(open_channel(made.listen))
        client = HolderClient(channel, schemes)
        stack.push_async_callback(client.close)
        yield Rig(folder, made, host, channel, client, holder_pb2_grpc.HolderStub(channel), state)
