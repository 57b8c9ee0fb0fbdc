"""The holder over a real Unix socket, with a real index."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvsp.bulk.holder import HolderClient, OpenedTransfer
from kvsp.protocol import registry
from kvsp.protocol.container import parse_header
from kvsp.protocol.errors import KvspError
from kvsp.rpc.channel import open_channel
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
    name,
    rig,
    until,
)  # fmt: skip

NOWHERE = bytes.fromhex("dd" * 16)


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, with_index=False, arena_octets=64 << 10) as made:
        yield made


async def refused(problem: registry.ProblemType, call: Any) -> KvspError:
    with pytest.raises(KvspError) as caught:
        await call
    assert caught.value.problem is problem
    return caught.value


async def describe(holder: Rig, i: int, principal: str = CLIENT, **options: Any) -> OpenedTransfer:
    where = {each: options.pop(each) for each in ("scope", "compat") if each in options}
    return await holder.client.open(principal, name(i, **where), pin=False, **options)


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
    await until(lambda: holder.host.state.store.get(_name(1)).pins == 0)  # type: ignore[union-attr]


def _name(i: int) -> Any:
    from services.holder.stream import name_of

    return name_of(name(i))


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
        stored = holder.host.state.store.get(_name(1))
        assert stored is not None
        holder.host.arena.view[stored.offset + 5000] ^= 1
        assert len(await holder.get(1, layers=(0, 0))) > 0
        await refused(registry.NOT_FOUND, holder.get(1, layers=(1, 3)))
        await refused(registry.NOT_FOUND, describe(holder, 1))
        await until(lambda: not holder.listed(1))
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


# --- PUT ---


@pytest.mark.spec("R-157", "U-21")
async def test_an_existing_block_is_never_overwritten(holder: Rig) -> None:
    await holder.put(1)
    await refused(registry.PRECONDITION_FAILED, holder.put(1, block(2)))
    await refused(registry.PRECONDITION_FAILED, holder.put(1))
    await refused(registry.PRECONDITION_FAILED, holder.client.reserve(CLIENT, name(1), 0))
    assert await holder.client.reserve(CLIENT, name(2), 0) is None
    assert await holder.get(1) == block(1)


@pytest.mark.spec("R-160", "U-27")
async def test_declared_digests_are_compared(holder: Rig) -> None:
    octets = block(1)
    sha256, sha512 = hashlib.sha256(octets).digest(), hashlib.sha512(octets).digest()

    async def put(*digests: tuple[str, bytes]) -> bytes:
        reserved = await holder.client.reserve(CLIENT, name(1), len(octets))
        assert reserved is not None
        await reserved.write(octets)
        return await reserved.commit(digests)

    for wrong in (
        [("sha-256", bytes(32))],
        [("sha-512", bytes(64))],
        [("sha-256", sha256), ("sha-512", sha256)],
        [("sha-256", sha256), ("sha-256", bytes(32))],
    ):
        await refused(registry.DIGEST_MISMATCH, put(*wrong))
        await refused(registry.NOT_FOUND, describe(holder, 1))
    assert holder.host.state.store.used_octets == 0
    assert await put(("sha-256", sha256), ("sha-512", sha512), ("md5", b"whatever")) == sha256


@pytest.mark.spec("U-27")
async def test_a_digest_can_be_required(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False, require_put_digest=True) as holder:
        await refused(registry.BAD_REQUEST, holder.put(1))
        assert holder.host.state.store.used_octets == 0


@pytest.mark.spec("D5", "R-030", "U-25")
@pytest.mark.parametrize("schemes", [("shm",), ("grpc",)])
async def test_bad_containers_store_nothing(tmp_path: Path, schemes: tuple[str, ...]) -> None:
    good = block(1)
    layers_2_32 = good[:12] + b"\xff" * 4 + good[16:]
    bad = [good[:-1], good + b"x", b"KVB2" + good[4:], good[:19], layers_2_32, b"x"]
    async with rig(tmp_path, schemes=schemes, with_index=False) as holder:
        for octets in bad:
            await refused(registry.BAD_REQUEST, holder.put(1, octets))
        # from layer 1 on: not a whole block
        await refused(registry.INCOMPATIBLE, holder.put(1, good[:8] + b"\0\0\0\1" + good[12:]))
        assert holder.host.state.store.used_octets == 0
        await holder.put(1)


async def test_fewer_octets_than_announced_store_nothing(holder: Rig) -> None:
    reserved = await holder.client.reserve(CLIENT, name(1), 10_000)
    assert reserved is not None
    await reserved.write(block(1))  # whole, but not what was announced
    await refused(registry.BAD_REQUEST, reserved.commit())
    with pytest.raises(ValueError, match="over"):
        await reserved.write(b"x")
    assert holder.host.state.store.used_octets == 0


@pytest.mark.parametrize("schemes", [("shm",), ("grpc",)])
async def test_more_octets_than_announced_are_refused(tmp_path: Path, schemes: tuple[str, ...]) -> None:
    async with rig(tmp_path, schemes=schemes, with_index=False) as holder:
        reserved = await holder.client.reserve(CLIENT, name(1), 5000)
        assert reserved is not None
        await reserved.write(bytes(5000))
        await refused(registry.BAD_REQUEST, reserved.write(b"x"))
        reserved.abort()
        await until(lambda: holder.host.state.store.used_octets == 0)


async def test_a_writer_that_oversteps_without_asking_is_refused(holder: Rig) -> None:
    reserved = await holder.client.reserve(CLIENT, name(1), 100)
    assert reserved is not None

    async def write(principal: str, octets: int) -> None:
        request = holder_pb2.WriteBlockRequest(transfer=reserved._id, octets=bytes(octets))
        async with translated():
            await holder.stub.WriteBlock(iter([request]), metadata=speak_for(principal))

    await refused(registry.BAD_REQUEST, write(CLIENT, 101))
    await refused(registry.NOT_FOUND, write(CLIENT2, 1))
    reserved._stream.tell(wrote=holder_pb2.WroteOctets(transfer=reserved._id, octets=101))
    await refused(registry.BAD_REQUEST, reserved.commit())


async def test_octets_go_only_to_who_opened(holder: Rig) -> None:
    await holder.put(1)
    opened = await holder.client.open(CLIENT, name(1))

    async def read(principal: str) -> None:
        async with translated():
            async for _ in holder.stub.ReadBlock(
                holder_pb2.ReadBlockRequest(transfer=opened._id), metadata=speak_for(principal)
            ):
                pass

    await read(CLIENT)
    await refused(registry.NOT_FOUND, read(CLIENT2))
    opened.close()
    await until(lambda: holder.host.state.store.get(_name(1)).pins == 0)  # type: ignore[union-attr]
    await refused(registry.NOT_FOUND, read(CLIENT))


@pytest.mark.spec("R-159")
async def test_of_two_parallel_uploads_exactly_one_succeeds(holder: Rig) -> None:
    octets = block(1)
    first = await holder.client.reserve(CLIENT, name(1), len(octets))
    assert first is not None
    second = asyncio.create_task(holder.client.reserve(CLIENT2, name(1), len(octets)))
    await first.write(octets[:5000])
    assert not second.done()
    await first.write(octets[5000:])
    await first.commit()
    await refused(registry.PRECONDITION_FAILED, second)


@pytest.mark.spec("R-159")
async def test_when_the_first_upload_breaks_off_the_second_is_taken(holder: Rig) -> None:
    first = await holder.client.reserve(CLIENT, name(1), 5000)
    assert first is not None
    second = asyncio.create_task(holder.put(1, principal=CLIENT2))
    await first.write(bytes(100))
    first.abort()
    first.abort()
    assert await second == hashlib.sha256(block(1)).digest()


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


# --- ends ---


@pytest.mark.spec("D4")
async def test_a_peer_that_dies_leaves_nothing_open(holder: Rig) -> None:
    store = holder.host.state.store
    await holder.put(1)
    used = store.used_octets
    async with open_channel(holder.config.listen) as channel:
        client = HolderClient(channel)
        reserved = await client.reserve(CLIENT, name(2), 30_000)
        assert reserved is not None
        await reserved.write(bytes(10_000))
        opened = await client.open(CLIENT, name(1))
        assert store.used_octets > used
        assert store.get(_name(1)).pins == 1  # type: ignore[union-attr]
    await until(lambda: store.used_octets == used and store.get(_name(1)).pins == 0)  # type: ignore[union-attr]
    await until(lambda: not opened._stream.alive)
    await refused(registry.UNAVAILABLE, _read(opened))
    await refused(registry.UNAVAILABLE, reserved.write(b"x"))
    await refused(registry.UNAVAILABLE, reserved.commit())
    opened.close()
    await client.close()
    await holder.put(2)


async def _read(opened: OpenedTransfer) -> int:
    return sum([len(piece) async for piece in opened.pieces()])


async def test_cancelled_requests_give_back_what_they_are_granted(holder: Rig) -> None:
    await holder.put(1)
    store = holder.host.state.store
    used = store.used_octets
    for moment in range(8):
        calls = [holder.client.open(CLIENT, name(1)), holder.client.reserve(CLIENT, name(2), 5000)]
        tasks = [asyncio.create_task(call) for call in calls]
        for _ in range(3 * moment):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                result.close() if isinstance(result, OpenedTransfer) else result.abort()
        await until(lambda: store.used_octets == used and store.get(_name(1)).pins == 0)  # type: ignore[union-attr]


async def test_a_cancelled_commit_stores_a_block_or_nothing(holder: Rig) -> None:
    octets = block(1)
    reserved = await holder.client.reserve(CLIENT, name(1), len(octets))
    assert reserved is not None
    await reserved.write(octets)
    task = asyncio.create_task(reserved.commit())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store = holder.host.state.store
    await until(lambda: not holder.host.state._writing)
    assert store.used_octets == (8192 if len(store) else 0)


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
