"""What becomes of uploads: stored, refused, broken off, and of readers whose peer dies."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsp.bulk.holder import HolderClient, OpenedTransfer
from kvsp.protocol import limits, registry
from kvsp.protocol.digests import ContainerDigester
from kvsp.protocol.errors import KvspError
from kvsp.rpc.channel import open_channel
from kvsp.rpc.clock import now_ms
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import holder_pb2
from services.holder.hashing import RangeDigests
from tests.services.holder_harness import (
    CLIENT,
    CLIENT2,
    OTHER,
    OTHER_CLIENT,
    POLICY,
    Rig,
    block,
    describe,
    name,
    refused,
    rig,
    until,
)  # fmt: skip


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, with_index=False, arena_octets=64 << 10) as made:
        yield made


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
    await until(lambda: holder.host.state.store.used_octets == 0)


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
    client = HolderClient(holder.channel, ("grpc",))
    reserved = await client.reserve(CLIENT, name(1), 100)
    shared = await holder.client.reserve(CLIENT, name(2), 100)
    assert reserved is not None
    assert shared is not None

    async def write(number: int, principal: str, octets: int) -> None:
        request = holder_pb2.WriteBlockRequest(transfer=number, octets=bytes(octets))
        async with translated():
            await holder.stub.WriteBlock(iter([request]), metadata=speak_for(principal))

    await refused(registry.BAD_REQUEST, write(reserved._id, CLIENT, 101))
    await refused(registry.NOT_FOUND, write(reserved._id, CLIENT2, 1))
    await refused(registry.BAD_REQUEST, write(shared._id, CLIENT, 1))
    shared._stream.tell(wrote=holder_pb2.WroteOctets(transfer=shared._id, octets=101))
    await shared.write(bytes(100))
    await refused(registry.BAD_REQUEST, shared.commit())
    reserved.abort()
    await client.close()


@pytest.mark.spec("D14", "D8")
async def test_octets_that_were_not_sent_are_not_believed(tmp_path: Path) -> None:
    """Room still holds the octets of an evicted block; a writer must not get at them by not writing."""
    async with rig(tmp_path, with_index=False, arena_octets=8192, schemes=("grpc",)) as holder:
        secret = block(1)
        await holder.put(1, secret, OTHER_CLIENT, scope=OTHER)
        reserved = await holder.client.reserve(CLIENT, name(2), len(secret))
        assert reserved is not None
        stream = reserved._stream
        stream.tell(wrote=holder_pb2.WroteOctets(transfer=reserved._id, octets=len(secret)))
        commit = holder_pb2.CommitBlock(transfer=reserved._id)
        await refused(registry.BAD_REQUEST, stream.ask(5, commit=commit))
        with pytest.raises(KvspError):
            holder.host.scheme(["shm"], same_host=False)  # shared memory is believed, so it is for this host alone
        assert holder.host.scheme(["shm", "grpc"], same_host=False) == "grpc"


async def test_octets_go_only_to_who_opened(holder: Rig) -> None:
    await holder.put(1)
    opened = await holder.client.open(CLIENT, name(1))
    transfer = opened._grants[0].opened.transfer

    async def read(principal: str) -> None:
        async with translated():
            async for _ in holder.stub.ReadBlock(
                holder_pb2.ReadBlockRequest(transfer=transfer), metadata=speak_for(principal)
            ):
                pass

    await read(CLIENT)
    await refused(registry.NOT_FOUND, read(CLIENT2))
    opened.close()
    await until(lambda: holder.pins(1) == 0)
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


async def test_however_many_wait_for_the_first_upload_it_can_finish(
    holder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.holder.stream.IN_PROGRESS_MAX", 3)
    octets = block(1)
    first = await holder.client.reserve(CLIENT, name(1), len(octets))
    assert first is not None
    waiting = [asyncio.create_task(holder.client.reserve(CLIENT, name(1), len(octets))) for _ in range(5)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await first.write(octets)
    await first.commit()
    problems = [error.problem for error in await asyncio.gather(*waiting, return_exceptions=True)]
    assert problems == [registry.PRECONDITION_FAILED] * 3 + [registry.UNAVAILABLE] * 2


@pytest.mark.spec("R-159")
async def test_when_the_first_upload_breaks_off_the_second_is_taken(holder: Rig) -> None:
    first = await holder.client.reserve(CLIENT, name(1), 5000)
    assert first is not None
    second = asyncio.create_task(holder.put(1, principal=CLIENT2))
    await first.write(bytes(100))
    first.abort()
    first.abort()
    assert await second == hashlib.sha256(block(1)).digest()


@pytest.mark.spec("D4", "R-159")
async def test_a_stalled_writer_keeps_others_waiting_only_until_its_deadline(
    holder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "transfer_ms", lambda octets: 300 if octets == 5000 else 60_000)
    stalled = await holder.client.reserve(CLIENT, name(1), 5000)
    assert stalled is not None
    assert await holder.put(1, principal=CLIENT2) == hashlib.sha256(block(1)).digest()
    with pytest.raises(KvspError):
        await stalled.write(b"x")
    stalled.abort()


@pytest.mark.spec("D4")
async def test_of_a_deadline_what_is_left_is_told(holder: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that counted it anew would read on after the holder has given the room to another block."""
    await holder.put(1)
    hashed = RangeDigests.sha256

    async def slowly(*args: Any) -> bytes | None:
        monkeypatch.setattr("services.holder.stream.now_ms", lambda: now_ms() + 4_000)
        return await hashed(*args)

    monkeypatch.setattr(RangeDigests, "sha256", slowly)
    loop = asyncio.get_running_loop()
    opened = await holder.client.open(CLIENT, name(1), layers=(0, 1))
    assert opened.deadline <= loop.time() + (limits.transfer_ms(5000) - 4_000) / 1000
    opened.close()


@pytest.mark.spec("D4", "D13")
async def test_a_quota_of_room_is_429(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = POLICY.identify(CLIENT)
    small = replace(identity, quotas=msgspec.structs.replace(identity.quotas, reserved_octets=8192))
    monkeypatch.setattr(POLICY, "identities", {**POLICY.identities, CLIENT: small})
    async with rig(tmp_path, with_index=False, arena_octets=16384) as holder:
        await holder.put(1)
        await refused(registry.TOO_MANY_REQUESTS, holder.client.reserve(CLIENT, name(2), 8193))
        assert holder.stored(1) is not None
        await holder.put(2)


async def test_a_commit_that_is_given_up_is_answered(holder: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    octets = block(1)
    hashing, go_on = threading.Event(), threading.Event()

    def feed(self: ContainerDigester, piece: memoryview) -> None:
        hashing.set()
        go_on.wait(10)

    monkeypatch.setattr(ContainerDigester, "feed", feed)
    reserved = await holder.client.reserve(CLIENT, name(1), len(octets))
    assert reserved is not None
    await reserved.write(octets)
    stream = reserved._stream
    commit = asyncio.create_task(stream.ask(5, commit=holder_pb2.CommitBlock(transfer=reserved._id)))
    try:
        await until(hashing.is_set)
        reserved.abort()
        await refused(registry.NOT_FOUND, commit)
    finally:
        go_on.set()
    assert not stream._pending


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
        assert holder.pins(1) == 1
    await until(lambda: store.used_octets == used and holder.pins(1) == 0)
    await until(lambda: not opened._stream.alive)
    await refused(registry.UNAVAILABLE, _read(opened))
    await refused(registry.UNAVAILABLE, reserved.write(b"x"))
    opened.close()
    reserved.abort()
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
        await until(lambda: store.used_octets == used and holder.pins(1) == 0)


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
