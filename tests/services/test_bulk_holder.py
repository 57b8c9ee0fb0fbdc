"""The client of a holder: which source it takes, and what becomes of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvsp.bulk import holder as bulk_holder
from kvsp.bulk.chooser import FALLBACKS, RETRY_S, Chooser
from kvsp.bulk.holder import HolderClient
from kvsp.bulk.shm import Layout, ShmSource
from kvsp.bulk.source import Extent, SourceUnavailableError, Transfer
from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from services.holder.metrics import TRANSFERS
from tests.services.holder_harness import CLIENT, CLIENT2, OTHER, OTHER_CLIENT, Rig, block, name, rig, until


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, with_index=False) as made:
        yield made


def transfers(scheme: str) -> float:
    return sum(TRANSFERS.labels(direction, scheme)._value.get() for direction in ("in", "out"))


def fallbacks(scheme: str) -> float:
    return float(FALLBACKS.labels(scheme)._value.get())


def test_sources_that_copy_nothing_come_first_and_need_the_same_host() -> None:
    assert Chooser(["grpc", "shm"], same_host=True).ranked() == ["shm", "grpc"]
    assert Chooser(["grpc", "shm"], same_host=False).ranked() == ["grpc"]


def test_a_failed_source_is_left_out_for_a_while_and_is_reported() -> None:
    now = [100.0]
    chooser = Chooser(["shm", "grpc"], same_host=True, clock=lambda: now[0])
    before = fallbacks("shm")
    with capture_logs() as logs:
        chooser.failed("shm", SourceUnavailableError("arena: gone"))
    assert [(entry["event"], entry["scheme"]) for entry in logs] == [("bulk fallback", "shm")]
    assert fallbacks("shm") == before + 1
    assert chooser.ranked() == ["grpc"]
    now[0] += RETRY_S
    assert chooser.ranked() == ["shm", "grpc"]
    with pytest.raises(SourceUnavailableError):
        chooser.source("ucx")


def test_a_source_that_is_not_installed_is_reported() -> None:
    with capture_logs() as logs:
        assert Chooser(["carrier-pigeon", "grpc"], same_host=True).ranked() == ["grpc"]
    assert logs[0]["scheme"] == "carrier-pigeon"


async def test_when_shared_memory_is_out_of_reach_grpc_carries_on(holder: Rig) -> None:
    shm, grpc = transfers("shm"), transfers("grpc")
    await holder.put(1)
    assert await holder.get(1) == block(1)
    assert (transfers("shm"), transfers("grpc")) == (shm + 2, grpc)
    holder.host.arena.path.rename(holder.folder / "moved")
    with capture_logs() as logs:
        await holder.put(2)
        assert await holder.get(2) == block(2)
    assert [entry["event"] for entry in logs] == ["bulk fallback"]
    assert transfers("grpc") == grpc + 2
    await until(lambda: not holder.host.state._writing)
    assert holder.host.state.store.used_octets == 2 * 8192


async def test_no_transport_in_common_is_503(tmp_path: Path) -> None:
    async with rig(tmp_path, schemes=("shm",), with_index=False) as holder:
        await holder.put(1)
        other = HolderClient(holder.channel, ("shm",), same_host=False)
        with pytest.raises(KvspError) as caught:
            await other.open(CLIENT, name(1))
        assert caught.value.problem is registry.UNAVAILABLE
        with pytest.raises(ValueError, match="pin"):
            [piece async for piece in (await other.open(CLIENT, name(1), pin=False)).pieces()]
        await other.close()


async def test_pieces_are_views_of_shared_memory_that_cannot_be_written(holder: Rig) -> None:
    await holder.put(1)
    opened = await holder.client.open(CLIENT, name(1))
    [piece] = [each async for each in opened.pieces()]
    assert isinstance(piece, memoryview)
    assert piece.readonly
    opened.close()
    opened.close()


@pytest.mark.parametrize("target", [b"x" * 8000, bytearray(7999), bytearray(8001)])
async def test_an_unfit_target_is_refused(holder: Rig, target: object) -> None:
    await holder.put(1)
    opened = await holder.client.open(CLIENT, name(1))
    with pytest.raises(ValueError, match="target"):
        [end async for end in opened.into(target)]
    opened.close()


async def test_one_stream_for_each_principal_and_each_sees_its_own(holder: Rig) -> None:
    await holder.put(1)
    await holder.put(1, principal=OTHER_CLIENT, scope=OTHER)
    await asyncio.gather(*(holder.get(1, principal=who) for who in (CLIENT, CLIENT2) for _ in range(20)))
    assert set(holder.client._streams) == {CLIENT, CLIENT2, OTHER_CLIENT}
    with pytest.raises(KvspError) as caught:
        await holder.get(1, principal=OTHER_CLIENT)
    assert caught.value.problem is registry.SCOPE_DENIED


async def test_idle_streams_are_closed_and_busy_ones_are_not(holder: Rig) -> None:
    client = HolderClient(holder.channel, idle_s=0.05)
    await holder.put(1)
    opened = await client.open(CLIENT, name(1))
    await client.open(CLIENT2, name(1), pin=False)
    await until(lambda: set(client._streams) == {CLIENT})
    assert len([piece async for piece in opened.pieces()]) == 1
    opened.close()
    await until(lambda: not client._streams)
    assert (await client.open(CLIENT, name(1), pin=False)).payload_octets == 8000
    await client.close()


async def test_no_more_idle_streams_than_the_cap(holder: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_holder, "STREAMS_MAX", 1)
    await holder.put(1)
    await holder.client.open(CLIENT2, name(1), pin=False)
    assert set(holder.client._streams) == {CLIENT2}


async def test_after_a_break_the_next_call_opens_a_new_stream(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False) as first:
        await first.put(1)
        client, channel = first.client, first.channel
        opened = await client.open(CLIENT, name(1))
        [stream] = client._streams.values()
        stream._link._call.cancel()
        await until(lambda: not stream.alive)
        with pytest.raises(KvspError) as caught:
            [piece async for piece in opened.pieces()]
        assert caught.value.problem is registry.UNAVAILABLE
        opened.close()
        assert await first.get(1) == block(1)
        assert stream not in client._streams.values()
        assert channel is first.channel


async def test_a_waiting_call_fails_with_503_when_the_stream_breaks(holder: Rig) -> None:
    first = await holder.client.reserve(CLIENT, name(1), 100)
    assert first is not None
    waiting = asyncio.create_task(holder.client.reserve(CLIENT, name(1), 100))
    await asyncio.sleep(0)
    [stream] = holder.client._streams.values()
    await until(lambda: bool(stream._pending))
    stream._link._call.cancel()
    with pytest.raises(KvspError) as caught:
        await waiting
    assert caught.value.problem is registry.UNAVAILABLE
    assert caught.value.retry_after_s == 1
    await until(lambda: holder.host.state.store.used_octets == 0)


async def test_a_holder_that_is_not_there_is_503(tmp_path: Path) -> None:
    from kvsp.rpc.channel import open_channel

    async with open_channel(f"unix:{tmp_path}/nobody.sock") as channel:
        client = HolderClient(channel)
        with pytest.raises(KvspError) as caught:
            await client.open(CLIENT, name(1))
        assert caught.value.problem is registry.UNAVAILABLE
        await client.close()


async def test_past_its_deadline_no_octet_is_read_or_written(holder: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await holder.put(1)
    monkeypatch.setattr(limits, "transfer_ms", lambda octets: 0)
    opened = await holder.client.open(CLIENT, name(1))
    reserved = await holder.client.reserve(CLIENT, name(2), 100)
    assert reserved is not None
    with pytest.raises(KvspError):
        [piece async for piece in opened.pieces()]
    target = bytearray(opened.payload_octets)
    with pytest.raises(KvspError):
        [end async for end in opened.into(target)]
    assert not any(target)
    with pytest.raises(KvspError):
        await reserved.write(b"x")
    opened.close()
    reserved.abort()
    await until(lambda: holder.host.state.store.used_octets == 8192)


def make_arena(path: Path, octets: bytes) -> Path:
    layout = Layout(len(octets))
    table = bytes(layout.octets - len(octets) - len(layout.trailer()))
    path.write_bytes(octets + table + layout.trailer())
    return path


def test_shared_memory_refuses_what_is_no_arena(tmp_path: Path) -> None:
    source = ShmSource()
    path = make_arena(tmp_path / "arena", bytes(8192))
    (tmp_path / "file").write_bytes(bytes(16384))
    (tmp_path / "link").symlink_to(path)

    def transfer(where: Path, offset: int, length: int) -> Transfer:
        return Transfer(1, length, extent=Extent(str(where), offset, length))

    bad = [
        Transfer(1, 10),
        Transfer(1, 10, extent=Extent(str(path), 0, 11)),
        transfer(tmp_path / "missing", 0, 10),
        transfer(tmp_path / "link", 0, 10),
        transfer(path, 4096, 4097),
        transfer(path, 1 << 40, 1),
        transfer(tmp_path, 0, 1),
        transfer(tmp_path / "file", 0, 10),
    ]
    for each in bad:
        with pytest.raises(SourceUnavailableError):
            source.reader(each)
        with pytest.raises(SourceUnavailableError):
            source.writer(each)


async def test_shared_memory_is_not_written_outside_the_extent(tmp_path: Path) -> None:
    path = make_arena(tmp_path / "arena", bytes(8192))
    writer = ShmSource().writer(Transfer(1, 10, extent=Extent(str(path), 100, 10)))
    await writer.write(b"x" * 9)
    with pytest.raises(ValueError):
        await writer.write(b"yy")
    writer.close()
    assert path.read_bytes()[:8192] == bytes(100) + b"x" * 9 + bytes(8192 - 109)


async def test_the_arena_of_a_holder_that_is_gone_is_let_go(tmp_path: Path) -> None:
    source = ShmSource()
    for i in range(3):
        path = make_arena(tmp_path / f"arena{i}", bytes([i]) * 8192)
        reader = source.reader(Transfer(1, 5, extent=Extent(str(path), 4096, 5)))
        assert [bytes(piece) async for piece in reader.pieces()] == [bytes([i]) * 5]
        path.unlink()
        assert len(source._arenas) == 1
    # the same name again is another file
    make_arena(path, b"x" * 8192)
    reader = source.reader(Transfer(1, 5, extent=Extent(str(path), 0, 5)))
    assert [bytes(piece) async for piece in reader.pieces()] == [b"xxxxx"]
