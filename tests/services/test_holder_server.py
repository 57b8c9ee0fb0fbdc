"""The holder over a real Unix socket, with a real index."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvsp.protocol import registry
from kvsp.protocol.container import parse_header
from kvsp.protocol.errors import KvspError
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, common_pb2_grpc, holder_pb2
from tests.services.holder_harness import (
    CLIENT,
    CLIENT2,
    COMPAT,
    FOREIGN,
    HOLDER,
    OTHER,
    OTHER_CLIENT,
    SCOPE,
    Rig,
    block,
    describe,
    name,
    refused,
    rig,
    until,
)  # fmt: skip

NOWHERE = bytes.fromhex("dd" * 16)


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, with_index=False, arena_octets=64 << 10) as made:
        yield made


async def lease(
    holder: Rig, keys: list[int], ttl_ms: int = 60_000, principal: str = CLIENT, **members: Any
) -> str:
    request = holder_pb2.CreateLeaseRequest(
        block_keys=b"".join(name(i).block_key for i in keys), ttl_ms=ttl_ms, **members
    )
    async with translated():
        reply = await holder.stub.CreateLease(request, metadata=speak_for(principal))
    assert reply.ttl_ms == ttl_ms
    return reply.lease


async def renew(holder: Rig, lease_id: str, ttl_ms: int, principal: str = CLIENT) -> None:
    request = holder_pb2.RenewLeaseRequest(lease=lease_id, ttl_ms=ttl_ms)
    async with translated():
        await holder.stub.RenewLease(request, metadata=speak_for(principal))


async def release(holder: Rig, lease_id: str, principal: str = CLIENT) -> None:
    async with translated():
        await holder.stub.ReleaseLease(
            holder_pb2.ReleaseLeaseRequest(lease=lease_id), metadata=speak_for(principal)
        )


# --- GET and HEAD ---


@pytest.mark.spec("R-150", "R-151", "R-153", "U-30", "U-31")
async def test_a_block_and_its_layer_ranges_come_with_their_digest(holder: Rig) -> None:
    stored = block(1)
    assert await holder.put(1) == hashlib.sha256(stored).digest()
    assert await holder.get(1) == stored
    for layers in [(0, 3), (0, 0), (1, 2), (3, 3), (1, 2)]:
        part = await holder.get(1, layers=layers)
        header = parse_header(part)
        assert header.layers == layers
        assert len(part) == header.total_octets
        head = await describe(holder, 1, layers=layers)
        assert head.sha256 == hashlib.sha256(part).digest()
        assert head.total_octets == len(part)
        assert head.header == part[: header.header_octets]
        assert head.max_age_s == 600  # never published here
    await until(lambda: holder.pins(1) == 0)


@pytest.mark.spec("R-151", "U-22", "U-23", "R-200")
async def test_what_is_not_held_is_404(holder: Rig) -> None:
    await holder.put(1)
    await refused(registry.NOT_FOUND, describe(holder, 2))
    await refused(registry.NOT_FOUND, describe(holder, 1, codec=2))
    await refused(registry.NOT_FOUND, describe(holder, 1, compat=b"\x22" * 32))
    await refused(registry.LAYERS_UNAVAILABLE, describe(holder, 1, layers=(2, 4)))
    await refused(registry.LAYERS_UNAVAILABLE, holder.get(1, layers=(0, 2**32 - 1)))
    assert (await describe(holder, 1, codec=1)).payload_octets == 8000


@pytest.mark.spec("R-210", "R-158", "R-211", "D8", "D1")
async def test_authorization_comes_before_existence(holder: Rig) -> None:
    await holder.put(1)
    # foreign, nonexistent, and one that this holder is not trusted for: one and the same answer
    problems = [
        (await refused(registry.SCOPE_DENIED, call)).to_problem()
        for call in (
            describe(holder, 1, scope=OTHER),
            describe(holder, 1, scope=NOWHERE),
            describe(holder, 1, scope=FOREIGN),
            holder.get(1, OTHER_CLIENT),
            holder.client.reserve(CLIENT, name(1, OTHER), 100),
            holder.client.reserve(CLIENT, name(1, NOWHERE), 0),
            holder.client.reserve(OTHER_CLIENT, name(1), 0),
        )
    ]
    assert all(problem == problems[0] for problem in problems)
    await refused(registry.FORBIDDEN, holder.get(1, "spiffe://t/nobody"))
    await refused(registry.FORBIDDEN, holder.get(1, "spiffe://t/is"))
    await refused(registry.FORBIDDEN, holder.client.reserve("spiffe://t/is", name(1), 0))
    await refused(registry.FORBIDDEN, lease(holder, [1], principal="spiffe://t/is"))


async def test_a_malformed_name_is_400(holder: Rig) -> None:
    bad = common_pb2.BlockName(compat_id=COMPAT, scope_id=SCOPE, block_key=b"short")
    await refused(registry.BAD_REQUEST, holder.client.open(CLIENT, bad))
    await refused(registry.BAD_REQUEST, holder.client.reserve(CLIENT, bad, 0))


@pytest.mark.spec("U-27", "R-143")
async def test_corruption_at_rest_is_a_miss(tmp_path: Path) -> None:
    async with rig(tmp_path) as holder:
        await holder.put(1)
        await until(lambda: holder.listed(1))
        stored = holder.stored(1)
        assert stored is not None
        holder.host.arena.view[stored.offset + 5000] ^= 1
        assert len(await holder.get(1, layers=(0, 0))) > 0
        # two find it at once; neither is told before the record is gone
        for error in await asyncio.gather(
            holder.get(1, layers=(1, 3)), describe(holder, 1, layers=(1, 3)), return_exceptions=True
        ):
            assert isinstance(error, KvspError)
            assert error.problem is registry.NOT_FOUND
            assert not holder.listed(1)
        await refused(registry.NOT_FOUND, describe(holder, 1))
        assert holder.host.state.store.used_octets == 0


@pytest.mark.spec("D11")
async def test_the_holder_itself_may_purge_even_what_is_leased(tmp_path: Path) -> None:
    async with rig(tmp_path) as holder:
        await holder.put(1)
        await lease(holder, [1])
        await until(lambda: holder.listed(1))

        async def purge(principal: str, i: int) -> None:
            async with translated():
                await holder.stub.PurgeBlock(
                    holder_pb2.PurgeBlockRequest(name=name(i)), metadata=speak_for(principal)
                )

        await refused(registry.FORBIDDEN, purge(CLIENT, 1))
        await purge(HOLDER, 1)
        await refused(registry.NOT_FOUND, purge(HOLDER, 1))
        await refused(registry.NOT_FOUND, describe(holder, 1))
        await until(lambda: not holder.listed(1))
        await holder.put(1)


# --- leases ---


@pytest.mark.spec("R-140", "R-142", "U-14", "U-16", "U-17", "R-214")
async def test_leases_over_the_socket(holder: Rig) -> None:
    for i in range(2):
        await holder.put(i)
    lease_id = await lease(holder, [0, 1, 0], scope_id=SCOPE, compat_id=COMPAT)
    await renew(holder, lease_id, 1000)
    await refused(registry.LEASE_QUOTA, renew(holder, lease_id, 60_001))
    await refused(registry.NOT_FOUND, renew(holder, lease_id, 1000, CLIENT2))
    await refused(registry.NOT_FOUND, release(holder, lease_id, CLIENT2))
    error = await refused(registry.NOT_FOUND, lease(holder, [0, 7]))
    assert error.extensions == {"block_keys": [name(7).block_key.hex()]}
    await refused(registry.SCOPE_DENIED, lease(holder, [0], scope_id=OTHER))
    await refused(registry.NOT_FOUND, lease(holder, [0], principal=OTHER_CLIENT))
    await refused(registry.LEASE_QUOTA, lease(holder, [0], 60_001))
    for _ in range(2):
        await lease(holder, [0])
    await refused(registry.LEASE_QUOTA, lease(holder, [0]))
    await lease(holder, [0], principal=CLIENT2)
    await release(holder, lease_id)
    await refused(registry.NOT_FOUND, release(holder, lease_id))
    await lease(holder, [1])


@pytest.mark.spec("U-10", "U-17")
async def test_bad_lease_requests(holder: Rig) -> None:
    await holder.put(0)
    await refused(registry.BAD_REQUEST, lease(holder, []))
    await refused(registry.BAD_REQUEST, lease(holder, [0], 0))
    await refused(registry.BAD_REQUEST, renew(holder, "x", 0))
    await refused(registry.CONTENT_TOO_LARGE, lease(holder, list(range(1025))))


@pytest.mark.spec("R-210")
async def test_the_authority_is_served(holder: Rig) -> None:
    stub = common_pb2_grpc.AuthorityStub(holder.channel)
    request = common_pb2.AuthorizeRequest(method="GET", path="blocks/{compat}/{scope}/{block_key}", scope_id=OTHER)

    async def authorize() -> None:
        async with translated():
            await stub.Authorize(request, metadata=speak_for(CLIENT))

    await refused(registry.SCOPE_DENIED, authorize())


@pytest.mark.spec("U-32", "R-087", "R-142")
async def test_an_arena_full_of_leased_blocks_is_503_with_retry_after(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False, arena_octets=4 * 8192) as holder:
        for i in range(2):
            await holder.put(i, block(i, 4, 2000))
        await refused(registry.CONTENT_TOO_LARGE, holder.put(2, block(2, 4, 4200)))
        lease_id = await lease(holder, [0], 9_000)
        error = await refused(registry.UNAVAILABLE, holder.put(2, block(2, 3, 3600)))
        assert error.retry_after_s in (8, 9)
        assert (await describe(holder, 0)).payload_octets == 16_000
        await release(holder, lease_id)
        await holder.put(2, block(2, 3, 3600))
        await refused(registry.NOT_FOUND, describe(holder, 0))
