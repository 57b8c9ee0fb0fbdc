"""What every block source must do, for each source that a holder offers."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvsp.bulk.control import ControlStream
from kvsp.bulk.source import (
    PIECE_OCTETS,
    BlockSource,
    Extent,
    SourceUnavailableError,
    Ticket,
    Transfer,
    load_source,
)
from kvsp.protocol.container import FIXED_OCTETS
from kvsp.v1 import holder_pb2
from tests.services.holder_harness import CLIENT, Rig, block, name, rig, until

SOURCES = ["grpc", "shm", *(["ucx"] if find_spec("ucxx") else [])]
UCX = {"ucx": {"listen": "127.0.0.1:0"}} if find_spec("ucxx") else {}
LAYERS = 2
SIZES = [4, 4096, PIECE_OCTETS, PIECE_OCTETS + 4, 5 * PIECE_OCTETS - 4]
"""Octets of a payload: less than a piece, whole pieces, and a rest."""


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> BlockSource:
    return load_source(request.param)


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, with_index=False, arena_octets=(4 << 20) + 6 * PIECE_OCTETS, bulk=UCX) as made:
        yield made


@asynccontextmanager
async def stream_of(holder: Rig) -> AsyncIterator[ControlStream]:
    stream = ControlStream(holder.channel, CLIENT, 60, lambda _: None)
    yield stream
    stream.close()
    await stream.closed()


def transfer_of(holder: Rig, number: int, length: int, where: holder_pb2.Location) -> Transfer:
    extent = None
    if where.HasField("shm"):
        extent = Extent(where.shm.arena, where.shm.offset, where.shm.length)
    ticket = None
    if where.HasField("ticket"):
        given = where.ticket
        ticket = Ticket(given.address, given.token, given.key, given.sealed, tuple(given.frames))
    return Transfer(number, length, CLIENT, holder.channel, extent, ticket)


async def opened(holder: Rig, stream: ControlStream, source: BlockSource, i: int = 1) -> Transfer:
    request = holder_pb2.OpenBlock(name=name(i), pin=True, schemes=[source.scheme])
    reply = (await stream.ask(5, open=request)).opened
    assert reply.location.scheme == source.scheme
    return transfer_of(holder, reply.transfer, reply.payload_octets, reply.location)


async def reserved(holder: Rig, stream: ControlStream, source: BlockSource, length: int) -> Transfer:
    request = holder_pb2.ReserveBlock(name=name(1), length=length, schemes=[source.scheme])
    reply = (await stream.ask(5, reserve=request)).reserved
    return transfer_of(holder, reply.transfer, length, reply.location)


def test_it_is_registered_under_its_scheme(source: BlockSource) -> None:
    assert load_source(source.scheme).capabilities == source.capabilities


@pytest.mark.parametrize("octets", SIZES)
async def test_a_reader_gives_the_payload_in_order_and_no_more(
    holder: Rig, source: BlockSource, octets: int
) -> None:
    made = block(1, 1, octets // 2)
    await holder.put(1, made)
    async with stream_of(holder) as stream:
        reader = source.reader(await opened(holder, stream, source))
        pieces = [bytes(piece) async for piece in reader.pieces()]
        reader.close()
        reader.close()
    assert all(0 < len(piece) <= PIECE_OCTETS for piece in pieces)
    assert b"".join(pieces) == made[FIXED_OCTETS + 16 :]


@pytest.mark.parametrize("cut", [1_000_003, PIECE_OCTETS, 70_001])
async def test_what_a_writer_writes_arrives(holder: Rig, source: BlockSource, cut: int) -> None:
    made = block(1, LAYERS, 600_000)
    async with stream_of(holder) as stream:
        transfer = await reserved(holder, stream, source, len(made))
        writer = source.writer(transfer)
        await writer.write(b"")
        for at in range(0, len(made), cut):
            await writer.write(memoryview(made)[at : at + cut])
        await writer.finish()
        stream.tell(wrote=holder_pb2.WroteOctets(transfer=transfer.id, octets=len(made)))
        reply = await stream.ask(5, commit=holder_pb2.CommitBlock(transfer=transfer.id))
        writer.close()
        writer.close()
    assert reply.committed.sha256 == hashlib.sha256(made).digest()
    assert await holder.get(1) == made


async def test_a_reader_may_be_closed_halfway(holder: Rig, source: BlockSource) -> None:
    await holder.put(1, block(1, LAYERS, 600_000))
    async with stream_of(holder) as stream:
        reader = source.reader(await opened(holder, stream, source))
        async with aclosing(reader.pieces()) as pieces:  # type: ignore[type-var]
            assert len(await anext(pieces)) > 0
        reader.close()
        source.reader(await opened(holder, stream, source)).close()


async def test_a_writer_may_be_closed_halfway_and_leaves_nothing(holder: Rig, source: BlockSource) -> None:
    async with stream_of(holder) as stream:
        transfer = await reserved(holder, stream, source, 1_000_000)
        writer = source.writer(transfer)
        await writer.write(b"x" * 500_000)
        writer.close()
        stream.tell(abort=holder_pb2.AbortBlock(transfer=transfer.id))
        await until(lambda: holder.host.state.store.used_octets == 0)


async def test_transfers_of_one_source_do_not_disturb_each_other(holder: Rig, source: BlockSource) -> None:
    made = [block(i, LAYERS, 400_000) for i in range(3)]
    for i, octets in enumerate(made):
        await holder.put(i, octets)
    async with stream_of(holder) as stream:
        readers = [source.reader(await opened(holder, stream, source, i)) for i in range(3)]
        iterators = [reader.pieces() for reader in readers]
        gathered = [b""] * 3
        for _ in range(7):
            for i, iterator in enumerate(iterators):
                gathered[i] += bytes(await anext(iterator, b""))
        for reader in readers:
            reader.close()
    assert gathered == [octets[FIXED_OCTETS + 32 :] for octets in made]


def test_an_unknown_scheme_is_unavailable() -> None:
    with pytest.raises(SourceUnavailableError):
        load_source("carrier-pigeon")
