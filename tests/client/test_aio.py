from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from kvsp.bulk.source import SourceUnavailableError, Transfer, load_source
from kvsp.client import AsyncClient, Credentials, Endpoints, Lease, Options
from kvsp.client.source import HttpsEndpoint
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError
from tests.client.peers import COMPAT, KEY, LEASE, SCOPE, Peer, record_of

Serve = Callable[..., Peer]


@pytest.fixture
async def connect(credentials: Credentials) -> AsyncIterator[Callable[..., AsyncClient]]:
    opened: list[AsyncClient] = []

    def open_client(index: Peer | None = None, *holders: Peer) -> AsyncClient:
        endpoints = Endpoints(index.base if index else None, frozenset(peer.base for peer in holders))
        opened.append(AsyncClient(credentials, endpoints, Options(pool_size=4)))
        return opened[-1]

    yield open_client
    for client in opened:
        await client.close()


@pytest.mark.spec("R-155", "R-157", "U-12")
async def test_every_call_does_what_the_synchronous_one_does(
    serve: Serve, connect: Callable[..., AsyncClient], octets: bytes
) -> None:
    index, holder = serve(), serve(octets=octets)
    record = record_of(holder.base, octets)
    index.replies |= {
        "POST lookup": (200, {"matched": 0, "replicas": []}),
        "PUT replicas": (200, {"ttl_ms": 5}),
        "DELETE replicas": (204, None),
    }
    holder.replies |= {
        "POST leases": (201, {"lease": LEASE, "ttl_ms": 90}),
        "PUT leases": (200, {"lease": LEASE, "ttl_ms": 60}),
        "DELETE leases": (204, None),
    }
    async with connect(index, holder) as client:
        assert (await client.lookup(SCOPE, COMPAT, [KEY])).matched == 0
        assert await client.publish(record) == 5
        assert await client.withdraw(holder.base, KEY)
        assert (await client.get(record)).payload == octets[container.parse_header(octets).header_octets :]
        assert (await client.get_from(holder.base, COMPAT, SCOPE, KEY)).verified
        assert (await client.head(holder.base, COMPAT, SCOPE, KEY)).octets == len(octets)
        assert await client.put(holder.base, COMPAT, SCOPE, KEY, octets)
        assert [layer.number async for layer in client.get_layers(record, layers=(0, 2))] == [0, 1, 2]
        async with client.lease(holder.base, [KEY], 90) as lease:
            assert await asyncio.to_thread(lease.wait_renewed, 1, 30)
    assert holder.seen[-1][0] == "DELETE"


async def test_many_at_once_share_the_connections_of_the_pool(
    serve: Serve, connect: Callable[..., AsyncClient], octets: bytes
) -> None:
    holder = serve(octets=octets)
    client = connect(None, holder)
    record = record_of(holder.base, octets)
    blocks = await asyncio.gather(*(client.get(record) for _ in range(12)))
    assert len({bytes(block.payload[:100]) for block in blocks}) == 1
    assert holder.connections <= 4


async def test_cancelling_stops_the_transfer(
    serve: Serve, connect: Callable[..., AsyncClient], octets: bytes
) -> None:
    holder = serve("stalled", octets)
    room = bytearray(len(octets))
    call = asyncio.create_task(connect(None, holder).get(record_of(holder.base, octets), into=room))
    await asyncio.to_thread(holder.wait_count, "GET", 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    before = bytes(room)
    holder.gate.set()
    assert room == before


async def test_cancelling_while_waiting_for_a_layer_stops_the_transfer(
    serve: Serve, connect: Callable[..., AsyncClient], octets: bytes
) -> None:
    holder = serve("gated", octets)
    seen: list[int] = []
    first = asyncio.Event()

    async def consume() -> None:
        async with aclosing(connect(None, holder).get_layers(record_of(holder.base, octets))) as layers:
            async for layer in layers:
                seen.append(layer.number)
                first.set()

    task = asyncio.create_task(consume())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [0]
    assert not holder.gate.is_set()


async def test_calls_that_wait_for_a_thread_are_cancelled_at_once(
    serve: Serve, connect: Callable[..., AsyncClient], octets: bytes
) -> None:
    holder = serve("stalled", octets)
    client = connect(None, holder)
    calls = [asyncio.create_task(client.get(record_of(holder.base, octets))) for _ in range(6)]
    await asyncio.to_thread(holder.wait_count, "GET", 4)
    for call in calls:
        call.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert holder.count("GET") == 4


@pytest.mark.spec("R-141")
async def test_a_lease_cancelled_while_it_is_entered_is_given_back(
    serve: Serve, connect: Callable[..., AsyncClient]
) -> None:
    holder = serve()
    holder.replies |= {
        "POST leases": (201, {"lease": LEASE, "ttl_ms": 60000}),
        "DELETE leases": (204, None),
    }
    client = connect(None, holder)
    own = await client._run(lambda: client._sync.lease(holder.base, [KEY], 60000))
    entered, leave = threading.Event(), threading.Event()
    enter = own.__enter__

    def slowly() -> Lease:
        lease = enter()
        entered.set()
        leave.wait()
        return lease

    own.__enter__ = slowly
    client._sync.lease = lambda *_, **__: own

    async def hold() -> None:
        async with client.lease(holder.base, [KEY], 60000):
            pytest.fail("entered")

    task = asyncio.create_task(hold())
    await asyncio.to_thread(entered.wait)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # nor does a second one leave it behind
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not own._thread.is_alive()
    assert holder.seen[-1] == ("DELETE", f"/leases/{LEASE}")


@pytest.mark.spec("R-142")
async def test_a_refused_lease_is_raised(serve: Serve, connect: Callable[..., AsyncClient]) -> None:
    holder = serve()
    holder.replies["POST leases"] = (404, {"type": registry.NOT_FOUND.uri, "status": 404})
    with pytest.raises(KvspError) as caught:
        async with connect(None, holder).lease(holder.base, [KEY], 60000):
            pytest.fail("entered")
    assert caught.value.problem == registry.NOT_FOUND
    assert holder.count("DELETE") == 0


@pytest.mark.spec("R-075")
async def test_the_https_block_source_moves_exactly_what_was_agreed(
    serve: Serve, connect: Callable[..., AsyncClient], octets: bytes
) -> None:
    holder = serve(octets=octets)
    record = record_of(holder.base, octets)
    header = container.parse_header(octets)
    source = load_source("https")
    at = HttpsEndpoint(connect(None, holder), record)
    reader = source.reader(Transfer(1, header.payload_octets, endpoint=at))
    assert b"".join([bytes(piece) async for piece in reader.pieces()]) == octets[header.header_octets :]
    reader.close()
    with pytest.raises(KvspError):
        [piece async for piece in source.reader(Transfer(1, 5, endpoint=at)).pieces()]
    writer = source.writer(Transfer(2, len(octets), endpoint=at))
    await writer.write(octets[:1000])
    await writer.write(memoryview(octets)[1000:])
    with pytest.raises(KvspError):
        await writer.write(b"x")
    await writer.finish()
    writer.close()
    assert list(holder.stored.values()) == [octets]
    with pytest.raises(SourceUnavailableError):
        source.reader(Transfer(3, 1))
