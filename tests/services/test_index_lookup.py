"""Lookups over the index's control socket and over gRPC: the same answers, and nothing left over."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvsp.protocol import jsonio, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import LookupReply
from kvsp.rpc.channel import open_channel
from kvsp.rpc.lookup import LookupClient
from kvsp.v1 import index_pb2
from services.index.config import IndexConfig
from services.index.local import local_peers
from services.index.server import IndexServicer, register
from services.index.state import IndexState
from tests.services.index_records import COMPAT, NO_SCOPE, SCOPE, key, record
from tests.services.rpc import served
from tests.services.test_index_server import POLICY

CLIENT = "spiffe://t/client"
KEYS = 1500  # a reply of several hundred KiB


@dataclass
class Index:
    state: IndexState
    socket: Path
    local: LookupClient
    remote: LookupClient


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[Index]:
    config = IndexConfig(listen=f"unix:{tmp_path}/is.sock", policy="", principal="")
    state = IndexState(block_tokens={})
    servicer = IndexServicer(config, POLICY, state, lambda: 1)
    for i in range(KEYS):
        state.publish(record(i), KEYS, 1)
    async with (
        served(config.listen, lambda target: register(target, servicer, POLICY)),
        open_channel(config.listen) as channel,
        local_peers(POLICY, servicer.look_up, tmp_path / "c"),
    ):
        made = Index(state, tmp_path / "c", LookupClient(channel, tmp_path / "c"), LookupClient(channel))
        yield made
        await made.local.close()


async def ask_raw(client: LookupClient, block_keys: bytes) -> None:
    asked = request(0)
    asked.block_keys = block_keys
    async with client.lookup(CLIENT, asked):
        pass


def request(keys: int, scope: str = SCOPE) -> index_pb2.LookupRequest:
    return index_pb2.LookupRequest(
        scope_id=bytes.fromhex(scope),
        compat_id=bytes.fromhex(COMPAT),
        block_keys=b"".join(map(key, range(keys))),
    )


async def ask(client: LookupClient, keys: int, principal: str = CLIENT) -> bytes:
    async with client.lookup(principal, request(keys)) as found:
        text = b"".join([piece async for piece in found.pieces])
        assert len(text) == found.octets
        return text


@pytest.mark.spec("R-090", "R-092")
@pytest.mark.parametrize("keys", [0, 1, KEYS])
async def test_both_roads_give_the_same_octets(index: Index, keys: int) -> None:
    text = await ask(index.local, keys)
    assert text == await ask(index.remote, keys)
    assert jsonio.decode(text, LookupReply).matched == keys


async def test_a_connection_is_used_again(index: Index) -> None:
    for _ in range(3):
        await ask(index.local, 5)
    assert len(index.local._idle) == 1


async def test_lookups_run_side_by_side(index: Index) -> None:
    texts = await asyncio.gather(*(ask(index.local, keys) for keys in (1, KEYS, 3, KEYS)))
    assert [jsonio.decode(text, LookupReply).matched for text in texts] == [1, KEYS, 3, KEYS]


@pytest.mark.spec("R-094", "D1", "D8")
@pytest.mark.parametrize(
    ("principal", "scope", "problem"),
    [
        ("spiffe://t/nobody", SCOPE, registry.FORBIDDEN),
        ("spiffe://t/is", SCOPE, registry.FORBIDDEN),
        (CLIENT, NO_SCOPE, registry.SCOPE_DENIED),
    ],
)
async def test_refusals_arrive_and_the_connection_lives_on(
    index: Index, principal: str, scope: str, problem: registry.ProblemType
) -> None:
    with pytest.raises(KvspError) as caught:
        async with index.local.lookup(principal, request(1, scope)):
            pass
    assert caught.value.problem is problem
    assert len(index.local._idle) == 1
    await ask(index.local, 1)


async def test_an_answer_that_was_not_read_to_its_end_ends_its_connection(index: Index) -> None:
    async with index.local.lookup(CLIENT, request(KEYS)) as found:
        await anext(found.pieces)
    assert not index.local._idle
    with contextlib.suppress(RuntimeError):
        async with index.local.lookup(CLIENT, request(KEYS)) as found:
            raise RuntimeError
    assert not index.local._idle
    await ask(index.local, 1)


@pytest.mark.spec("R-095", "U-10")
async def test_far_too_many_keys_are_413_whatever_the_road(index: Index) -> None:
    for client in (index.local, index.remote):
        with pytest.raises(KvspError) as caught:
            await ask_raw(client, b"k" * 32 * 120_000)
        assert caught.value.problem is registry.CONTENT_TOO_LARGE


async def test_an_index_that_stops_finishes_the_answers_it_has_begun(tmp_path: Path) -> None:
    head = index_pb2.LookupHead(matched=1, json_octets=8 << 20)

    async def look_up(_: object, __: object) -> tuple[index_pb2.LookupHead, list[bytes]]:
        return head, [bytes(8 << 20)]

    async with (
        open_channel(f"unix:{tmp_path}/nobody") as channel,
        local_peers(POLICY, look_up, tmp_path / "c") as drain,
    ):
        client = LookupClient(channel, tmp_path / "c")
        async with client.lookup(CLIENT, request(1)) as found:
            first = await anext(found.pieces)
            draining = asyncio.create_task(drain())
            rest = [piece async for piece in found.pieces]
        await draining
        assert len(first) + sum(map(len, rest)) == head.json_octets
        assert not (tmp_path / "c").exists()
        await client.close()


async def test_an_index_that_goes_in_the_middle_is_503(index: Index) -> None:
    index.local._local = index.socket.with_name("short")

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        head = index_pb2.LookupChunk(head=index_pb2.LookupHead(matched=1, json_octets=100)).SerializeToString()
        writer.write(len(head).to_bytes(4) + head + b"{")
        writer.close()

    server = await asyncio.start_unix_server(half, str(index.local._local))
    with pytest.raises(KvspError) as caught:
        await ask(index.local, 1)
    assert caught.value.problem is registry.UNAVAILABLE
    server.close()


async def test_without_its_socket_an_index_is_asked_over_grpc(index: Index) -> None:
    index.local._local = index.socket.with_name("nothing")
    assert jsonio.decode(await ask(index.local, 2), LookupReply).matched == 2


@pytest.mark.spec("D14")
@pytest.mark.parametrize("octets", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
async def test_garbage_ends_the_connection_and_nothing_else(index: Index, octets: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(index.socket)
    writer.write(octets)
    assert await reader.read() == b""
    writer.close()
    await ask(index.local, 1)
