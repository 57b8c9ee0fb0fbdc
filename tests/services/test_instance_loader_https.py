"""A holder without an internal address, over real HTTPS with mutual TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvsp.client import AsyncClient, Endpoints, Options
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.convert import block_name
from services.instance.peers import HttpsHolder
from tests.client.peers import (
    COMPAT,
    GEOMETRY,
    KEY,
    LEASE,
    SCOPE,
    Authority,
    Peer,
    Server,
    container_of,
    record_of,
)

OCTETS = container_of(4, 128 << 10)
LAYER = 256 << 10


@asynccontextmanager
async def holder(folder: Path, mode: str) -> AsyncIterator[tuple[HttpsHolder, Peer]]:
    authority = Authority(folder)
    peer = Peer(mode, OCTETS)
    server = Server(peer, authority.issue("server"), None)
    endpoints = Endpoints(holders=frozenset({peer.base}))
    client = AsyncClient(authority.issue("client"), endpoints, Options(total_s=10))
    try:
        yield HttpsHolder(peer.base, client, GEOMETRY), peer
    finally:
        await client.close()
        server.stop()


@pytest.mark.spec("R-075", "R-128", "R-046")
async def test_leased_ranges_of_layers_over_https(tmp_path: Path) -> None:
    async with holder(tmp_path, "honest") as (made, peer):
        peer.replies["POST leases"] = (201, {"lease": LEASE, "ttl_ms": 60_000})
        peer.replies["DELETE leases"] = (204, None)
        record = record_of(peer.base, OCTETS)
        assert made.range_layers(record) == 1
        payload = memoryview(bytearray(4 * LAYER))
        async with made.leased(SCOPE, COMPAT, [bytes.fromhex(KEY)], 60_000):
            for layer in range(4):
                at = layer * LAYER
                await made.fetch(record, (layer, layer), payload[at : at + LAYER])
        header = container.parse_header(OCTETS)
        assert payload == OCTETS[header.header_octets :]
        assert [method for method, _ in peer.seen] == ["POST", "GET", "GET", "GET", "GET", "DELETE"]
        link = made.link()
        assert link is not None
        assert link.mbit_per_s > 0


@pytest.mark.spec("R-155", "R-161")
async def test_a_lie_over_https_is_a_digest_mismatch(tmp_path: Path) -> None:
    async with holder(tmp_path, "flipped") as (made, peer):
        with pytest.raises(KvspError) as caught:
            await made.fetch(record_of(peer.base, OCTETS), (3, 3), memoryview(bytearray(LAYER)))
        assert caught.value.problem is registry.DIGEST_MISMATCH


@pytest.mark.spec("R-171", "R-157")
async def test_a_new_block_over_https_twice(tmp_path: Path) -> None:
    async with holder(tmp_path, "honest") as (made, peer):
        for _ in range(2):  # "Existing -> 412, own copy kept": as good
            await made.put(block_name(COMPAT, SCOPE, KEY), [OCTETS[:100], OCTETS[100:]])
        assert list(peer.stored.values()) == [OCTETS]
