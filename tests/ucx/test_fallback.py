"""A transport that fails under a transfer is replaced by the next, and the reader gets each octet once."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvsp.bulk.chooser import FALLBACKS
from kvsp.bulk.holder import HolderClient, OpenedTransfer, ReservedTransfer
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError
from services.holder.metrics import TRANSFERS
from tests.services.holder_harness import CLIENT, Rig, block, name, rig, until

pytest.importorskip("ucxx", reason="the ucx extra is not installed")

from ucx_transport import session
from ucx_transport.engine import Connection, Request
from ucx_transport.server import UcxServer

LAYERS, SECTION = 12, 1 << 20
MADE = block(1, LAYERS, SECTION)


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(
        tmp_path,
        schemes=("ucx", "grpc"),
        with_index=False,
        arena_octets=64 << 20,
        bulk={"ucx": {"listen": "127.0.0.1:0"}},
    ) as made:
        await made.put(1, MADE)
        yield made


def server(holder: Rig) -> UcxServer:
    found = holder.host.offers._servers["ucx"]
    assert isinstance(found, UcxServer)
    return found


def sent(scheme: str) -> float:
    return float(TRANSFERS.labels("out", scheme)._value.get())


@contextmanager
def one_fallback() -> Iterator[list[Any]]:
    """Exactly one count and one line, whatever happens to the transfer."""
    before = FALLBACKS.labels("ucx")._value.get()
    with capture_logs() as logs:
        yield logs
    assert FALLBACKS.labels("ucx")._value.get() == before + 1
    lines = [entry for entry in logs if entry["event"] == "bulk fallback"]
    assert [entry["scheme"] for entry in lines] == ["ucx"]
    logs[:] = lines


@contextmanager
def nobody_listens(holder: Rig) -> Iterator[None]:
    """Tickets name a port at which connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        kept, server(holder)._address = server(holder).address, f"127.0.0.1:{taken.getsockname()[1]}"
        yield
        server(holder)._address = kept


def cut(holder: Rig) -> None:
    """Every transfer under way breaks off; the control channel does not."""
    for offered in list(server(holder)._offers.values()):
        server(holder).revoke(offered.ticket)


async def rest(pieces: AsyncIterator[Any], into: bytearray) -> None:
    async for piece in pieces:
        into += piece


async def write_on(reserved: ReservedTransfer, at: int) -> None:
    for begin in range(at, len(MADE), 1 << 20):
        await reserved.write(MADE[begin : begin + (1 << 20)])


async def read(opened: OpenedTransfer, at: int = 0, then: Callable[[], Any] = lambda: None) -> bytes:
    """Everything; once `at` octets are there, `then` happens."""
    got = bytearray(opened.header)
    done = False
    try:
        async for piece in opened.pieces():
            got += piece
            if not done and len(got) >= at:
                done = True
                await asyncio.ensure_future(asyncio.sleep(0, then()))
        return bytes(got)
    finally:
        opened.close()


async def test_before_the_first_octet_the_next_scheme_carries_it_all(holder: Rig) -> None:
    opened = await holder.client.open(CLIENT, name(1))
    assert opened.scheme == "ucx"
    opened.close()
    holder.client._chooser.close()  # no kept connection
    with nobody_listens(holder), one_fallback() as logs:
        opened = await holder.client.open(CLIENT, name(1))
        assert await read(opened) == MADE
        over_grpc = sent("grpc")
        assert await holder.get(1) == MADE  # and is left out for a while
        assert sent("grpc") == over_grpc + 1
    assert logs[0]["octets"] == 0
    await until(lambda: holder.pins(1) == 0)


async def fill(opened: OpenedTransfer, at: int, then: Callable[[], Any]) -> bytes:
    """Everything, into one place; once `at` octets are there, `then` happens."""
    target, ends = bytearray(opened.payload_octets), [0]
    async for end in opened.into(target):
        if ends[-1] < at <= end:
            then()
        ends.append(end)
    assert ends == sorted(set(ends))
    opened.close()
    return opened.header + bytes(target)


@pytest.mark.parametrize("into", [read, fill])
@pytest.mark.parametrize("at", [1, 5 << 20, 17 << 20])
async def test_after_it_the_rest_begins_at_the_first_incomplete_layer(
    holder: Rig, at: int, into: Callable[..., Awaitable[bytes]]
) -> None:
    asked = []
    real = holder.host.open

    async def open_noted(*args: Any, **options: Any) -> Any:
        asked.append(args[3])
        return await real(*args, **options)

    holder.host.open = open_noted  # type: ignore[method-assign]
    with one_fallback() as logs:
        opened = await holder.client.open(CLIENT, name(1))

        assert await into(opened, at, lambda: cut(holder)) == MADE
    given = logs[0]["octets"]
    assert at <= given + len(opened.header)
    assert given < len(MADE)
    # The same block again from that layer on, then a look whether it still is the same block.
    assert asked == [None, (given // (2 * SECTION), LAYERS - 1), (0, LAYERS - 1)]
    await until(lambda: holder.pins(1) == 0)


async def test_a_layer_corrupted_on_its_way_is_fetched_by_the_next_scheme(
    holder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = session.Keys.seal

    def corrupting(self: session.Keys, frame: int, offset: int, plain: memoryview, into: memoryview) -> None:
        seal(self, frame, offset, plain, into)
        if frame == 4:
            into[1000] ^= 1

    monkeypatch.setattr(session.Keys, "seal", corrupting)
    with one_fallback() as logs:
        assert await holder.get(1) == MADE
    assert "changed" in logs[0]["reason"]
    assert 0 < logs[0]["octets"] < len(MADE)


async def test_layers_of_a_range_keep_their_numbers(holder: Rig) -> None:
    header = container.parse_header(MADE)
    with one_fallback():
        opened = await holder.client.open(CLIENT, name(1), layers=(3, 9))

        got = await read(opened, 5 << 20, lambda: cut(holder))
    start = header.header_octets + header.layer_span(3)[0]
    assert got[len(opened.header) :] == MADE[start : start + 7 * 2 * SECTION]


async def test_another_block_under_the_same_name_is_not_taken_for_the_rest(holder: Rig) -> None:
    opened = await holder.client.open(CLIENT, name(1))

    async def swap() -> None:
        await holder.host.purge(holder.stored(1).name)  # type: ignore[union-attr]
        other = HolderClient(holder.channel, ("grpc",))
        reserved = await other.reserve(CLIENT, name(1), len(MADE))
        assert reserved is not None
        await reserved.write(block(2, LAYERS, SECTION))
        await reserved.commit()
        await other.close()

    pieces = opened.pieces()
    got = bytearray(await anext(pieces))
    cut(holder)
    await swap()
    with pytest.raises(KvspError) as caught:
        await rest(pieces, got)
    assert caught.value.problem is registry.UNAVAILABLE
    assert MADE[len(opened.header) :].startswith(got)
    opened.close()


async def test_without_another_scheme_the_error_is_the_transports(holder: Rig) -> None:
    client = HolderClient(holder.channel, ("ucx",))
    with nobody_listens(holder):
        opened = await client.open(CLIENT, name(1))
        with pytest.raises(KvspError, match="ucx"):
            await read(opened)
    assert client._chooser.ranked() == ["ucx"]  # it is not known whether the holder or the transport is to blame
    await client.close()


async def test_a_holder_that_is_gone_is_no_failure_of_the_transport(holder: Rig) -> None:
    opened = await holder.client.open(CLIENT, name(1))
    pieces = opened.pieces()
    await anext(pieces)
    [stream] = holder.client._streams.values()
    stream.close()
    await stream.closed()
    with capture_logs() as logs, pytest.raises(KvspError) as caught:
        await rest(pieces, bytearray())
    assert caught.value.problem is registry.UNAVAILABLE
    assert [entry for entry in logs if entry["event"] == "bulk fallback"] == []
    opened.close()


async def test_an_upload_finds_another_way_before_its_first_octet(holder: Rig) -> None:
    holder.client._chooser.close()
    with nobody_listens(holder), one_fallback():
        reserved = await holder.client.reserve(CLIENT, name(2), len(MADE))
        assert reserved is not None
        assert reserved.scheme == "grpc"
        await reserved.write(MADE)
        await reserved.commit()
    assert await holder.get(2) == MADE
    await until(lambda: not holder.host.state._writing)


async def test_an_upload_that_breaks_goes_another_way_next_time(holder: Rig) -> None:
    reserved = await holder.client.reserve(CLIENT, name(2), len(MADE))
    assert reserved is not None
    assert reserved.scheme == "ucx"
    await reserved.write(MADE[: 5 << 20])
    cut(holder)
    with one_fallback(), pytest.raises(KvspError) as caught:
        await write_on(reserved, 5 << 20)
    assert caught.value.problem is registry.UNAVAILABLE
    reserved.abort()
    again = await holder.client.reserve(CLIENT, name(2), len(MADE))
    assert again is not None
    assert again.scheme == "grpc"
    await again.write(MADE)
    await again.commit()


async def test_closing_the_client_closes_the_connections(holder: Rig) -> None:
    assert await holder.get(1) == MADE
    assert server(holder).connections == 1
    await holder.client.close()
    await until(lambda: server(holder).connections == 0)
    assert await holder.get(1) == MADE  # a later call makes new ones


@pytest.mark.spec("D14", "R-042")
async def test_in_the_clear_the_layer_digests_find_a_corrupted_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trusted fabric has no seals: what is corrupted there is not given out, and comes by the next scheme."""
    async with rig(
        tmp_path,
        schemes=("ucx", "grpc"),
        with_index=False,
        arena_octets=64 << 20,
        bulk={"ucx": {"listen": "127.0.0.1:0", "fabric": "trusted"}},
    ) as holder:
        await holder.put(1, MADE)
        header = container.parse_header(MADE)
        payload = MADE[header.header_octets :]
        spans = [header.layer_span(layer) for layer in range(LAYERS)]
        expected = [hashlib.sha256(payload[at : at + octets]).digest() for at, octets in spans]
        send = Connection.send

        def corrupting(self: Connection, view: memoryview, tag: int) -> Request:
            if len(view) == 2 << 20:
                view = memoryview(bytearray(view))
                view[77] ^= 1
            return send(self, view, tag)

        monkeypatch.setattr(Connection, "send", corrupting)
        with one_fallback() as logs:
            opened = await holder.client.open(CLIENT, name(1), digests=expected)
            assert await read(opened) == MADE
        assert "digest" in logs[0]["reason"]
        assert logs[0]["octets"] == 0
