"""Octets over UCX on loopback: they arrive as they were, wherever they are wanted."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from itertools import accumulate
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsp.bulk.source import PIECE_OCTETS, SourceUnavailableError, Transfer
from tests.ucx.rig import FABRICS, LIFETIME_S, rig, until
from ucx_transport import library
from ucx_transport.frames import FRAME_OCTETS, cut
from ucx_transport.memory import Buffers

SIZES = [0, 1, 7, 8, 4096, 64 << 10, FRAME_OCTETS, FRAME_OCTETS + 1, 5 * FRAME_OCTETS - 4, 32 << 20]


@given(st.lists(st.integers(0, 3 * FRAME_OCTETS), max_size=20))
def test_frames_cover_the_layers_and_end_where_layers_end(lengths: list[int]) -> None:
    frames = cut(lengths)
    assert sum(frames) == sum(lengths)
    assert all(0 < frame <= FRAME_OCTETS for frame in frames)
    assert cut(lengths[:1]) == cut([sum(lengths[:1])])


def test_small_layers_share_a_frame_and_large_ones_are_cut() -> None:
    assert cut([FRAME_OCTETS // 2] * 4) == (FRAME_OCTETS, FRAME_OCTETS)
    assert cut([1, FRAME_OCTETS, 2 * FRAME_OCTETS + 5]) == (1, FRAME_OCTETS, FRAME_OCTETS, FRAME_OCTETS, 5)


@pytest.mark.spec("D14")
@pytest.mark.parametrize("fabric", FABRICS)
async def test_what_is_offered_is_read_and_what_is_written_arrives(fabric: str) -> None:
    async with rig(fabric) as made:
        for size in SIZES:
            octets = os.urandom(size)
            spans = [(0, size // 3), (size // 3, size - size // 3)]
            assert await made.read(made.server.offer_read(memoryview(octets), spans, LIFETIME_S)) == octets
            room, progress = bytearray(size), [0]
            await made.write(
                made.server.offer_write(memoryview(room), progress.append, LIFETIME_S), octets, 1_000_003
            )
            assert room == octets
            assert progress == sorted(progress)
            assert progress[-1] == size
        await made.gone()
        assert made.server.connections == 1  # kept, and used for all


@pytest.mark.parametrize("fabric", FABRICS)
async def test_pieces_are_bounded_and_keep_while_they_are_looked_at(fabric: str) -> None:
    octets = os.urandom(3 * FRAME_OCTETS + 5)
    async with rig(fabric) as made:
        reader = made.reader(made.offer(octets))
        pieces = [piece async for piece in reader.pieces()]
        reader.close()
        await made.read(made.offer(os.urandom(len(octets))))
        assert all(0 < len(piece) <= PIECE_OCTETS for piece in pieces)
        assert b"".join(pieces) == octets


@pytest.mark.parametrize("fabric", FABRICS)
async def test_octets_go_straight_where_they_are_wanted(fabric: str) -> None:
    size = FRAME_OCTETS + 6
    octets = os.urandom(size)
    shared = SharedMemory(create=True, size=size)
    tensor = torch.zeros((size // 2,), dtype=torch.bfloat16)
    targets = [bytearray(size), shared.buf[:size], tensor]
    try:
        async with rig(fabric) as made:
            for target in targets:
                ticket = made.offer(octets)
                ends = [end async for end in made.reader(ticket).into(target)]
                assert ends == list(accumulate(ticket.frames))
            assert targets[0] == octets
            assert shared.buf[:size] == octets
            assert tensor.view(torch.uint8).numpy().tobytes() == octets
    finally:
        del targets
        shared.close()
        shared.unlink()


@pytest.mark.parametrize("fabric", FABRICS)
async def test_octets_go_where_only_a_device_can_look(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is treated as a device's stands for one, as this machine may have none."""
    octets = os.urandom(2 * FRAME_OCTETS + 6)
    tensor = torch.zeros(len(octets), dtype=torch.uint8)
    given = library.array
    monkeypatch.setattr("ucx_transport.source.octets_of", lambda target, cuda: target)
    monkeypatch.setattr(library, "array", lambda view: given(getattr(view, "numpy", lambda: view)()))
    async with rig(fabric) as made:
        ticket = made.offer(octets)
        ends = [end async for end in made.reader(ticket).into(tensor)]
        assert ends == list(accumulate(ticket.frames))
    assert tensor.numpy().tobytes() == octets


@pytest.mark.parametrize(
    "target",
    [
        b"12345678",
        bytearray(9),
        torch.zeros(4, 4, dtype=torch.uint8)[:, :2],
        memoryview(bytearray(16))[::2],
        torch.zeros(8, dtype=torch.uint8, device="meta"),
    ],
)
async def test_an_unfit_target_is_refused(target: object) -> None:
    async with rig() as made:
        with pytest.raises(ValueError):
            [end async for end in made.reader(made.offer(b"12345678")).into(target)]


async def test_many_transfers_at_once_do_not_disturb_each_other() -> None:
    blocks = [os.urandom(200_000 + i) for i in range(24)]
    async with rig() as made:
        assert await asyncio.gather(*(made.read(made.offer(block)) for block in blocks)) == blocks
        await made.gone()


async def test_a_reader_and_a_writer_may_be_closed_at_any_time() -> None:
    octets = os.urandom(8 * FRAME_OCTETS)
    async with rig() as made:
        made.reader(made.offer(octets)).close()
        reader = made.reader(made.offer(octets))
        async with aclosing(reader.pieces()) as pieces:  # type: ignore[type-var]
            assert len(await anext(pieces)) > 0
        reader.close()
        reader.close()
        room = bytearray(len(octets))
        ticket = made.server.offer_write(memoryview(room), lambda _: None, LIFETIME_S)
        writer = made.source.writer(Transfer(1, len(octets), ticket=ticket))
        await writer.write(octets[: 3 * FRAME_OCTETS])
        writer.close()
        writer.close()
        await until(lambda: made.server.offers == 1)  # the one that was never presented
        await until(lambda: made.server.connections == 0)
        assert await made.read(made.offer(octets)) == octets


@pytest.mark.spec("D14")
@pytest.mark.parametrize("fabric", FABRICS)
async def test_revoked_memory_is_not_touched_any_more(fabric: str) -> None:
    async with rig(fabric) as made:
        room = bytearray(16 * FRAME_OCTETS)
        arrived: list[int] = []
        ticket = made.server.offer_write(memoryview(room), arrived.append, LIFETIME_S)
        writing = asyncio.ensure_future(made.write(ticket, b"\xff" * len(room)))
        await until(lambda: bool(arrived))
        made.server.revoke(ticket)
        made.server.revoke(ticket)
        room[:] = bytes(len(room))
        with pytest.raises(Exception, match="ucx"):
            await writing
        assert not any(room)


async def test_an_offer_lapses_by_itself() -> None:
    async with rig() as made:
        made.server.offer_read(memoryview(b"x"), [(0, 1)], 0.01)
        await made.gone()


async def test_a_transfer_without_a_ticket_or_of_another_length_needs_another_source() -> None:
    async with rig() as made:
        with pytest.raises(SourceUnavailableError):
            made.source.reader(Transfer(1, 5))
        with pytest.raises(SourceUnavailableError):
            made.reader(made.offer(b"12345"), 6)


def test_buffers_come_back_when_nobody_sees_them() -> None:
    buffers = Buffers()
    view = buffers.take(100_000)
    part = view[:10]
    del view
    assert buffers.idle_octets == 0
    del part
    assert buffers.idle_octets == 1 << 17
    again = buffers.take(70_000)
    assert (len(again), buffers.idle_octets) == (70_000, 0)


async def test_capabilities_are_those_of_this_machine() -> None:
    async with rig() as made:
        infiniband = list(Path("/sys/class/infiniband").glob("*"))
        assert made.source.capabilities.rdma == bool(infiniband)
        assert made.source.capabilities.cuda == torch.cuda.is_available()


@pytest.mark.parametrize("fabric", FABRICS)
async def test_who_has_everything_may_end_the_transfer_at_once(fabric: str) -> None:
    """Before the holder has noticed that all is sent; the connection is there for the next."""
    octets = os.urandom(3 * FRAME_OCTETS)
    async with rig(fabric) as made:
        await made.read(made.offer(octets))
        [kept] = made.source._dialer._idle[made.server.address]
        for i in range(100):
            ticket = made.offer(octets[: (1 + i % 3) * FRAME_OCTETS])
            reader = made.reader(ticket)
            ends = [end async for end in reader.into(bytearray(sum(ticket.frames)))]
            made.server.revoke(ticket)
            assert ends == list(accumulate(ticket.frames))
            assert made.source._dialer._idle[made.server.address] == [kept]
        assert kept.connection.alive
        assert made.server.connections == 1
