"""The holder's control socket: the same stream as `Holder.Transfer`, framed, for peers on its host."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvsp.bulk.holder import HolderClient
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.framed import MESSAGE_OCTETS_MAX
from kvsp.v1 import holder_pb2
from services.holder.local import local_peers
from tests.services.holder_harness import CLIENT, OTHER_CLIENT, Rig, block, name, rig, until


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    """A holder whose client uses the control socket."""
    async with rig(tmp_path, with_index=False) as made, local_peers(made.host, tmp_path / "c"):
        grpc_client = made.client
        made.client = HolderClient(made.channel, local=tmp_path / "c")
        yield made
        await made.client.close()
        made.client = grpc_client


async def raw(holder: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(holder.folder / "c")


async def test_blocks_are_written_and_read_over_it(holder: Rig) -> None:
    await holder.put(1)
    assert await holder.get(1) == block(1)
    assert await holder.get(1, layers=(1, 2)) != block(1)
    await until(lambda: holder.pins(1) == 0)


@pytest.mark.spec("D1", "R-210")
async def test_a_principal_that_the_policy_does_not_know_is_refused(holder: Rig) -> None:
    with pytest.raises(KvspError) as caught:
        await holder.client.open("spiffe://t/nobody", name(1))
    assert caught.value.problem is registry.FORBIDDEN


@pytest.mark.spec("R-158", "R-150")
async def test_scopes_are_checked_as_over_grpc(holder: Rig) -> None:
    await holder.put(1)
    with pytest.raises(KvspError) as caught:
        await holder.client.open(OTHER_CLIENT, name(1))
    assert caught.value.problem is registry.SCOPE_DENIED


async def test_a_peer_that_goes_leaves_no_pin_and_no_room_taken(holder: Rig) -> None:
    await holder.put(1)
    used = holder.host.state.store.used_octets
    await holder.client.open(CLIENT, name(1))
    assert await holder.client.reserve(CLIENT, name(2), 100) is not None
    assert holder.pins(1) == 1
    await holder.client.close()
    await until(lambda: holder.pins(1) == 0 and holder.host.state.store.used_octets == used)


async def test_a_holder_that_goes_fails_waiting_calls_with_503(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False) as made:
        async with local_peers(made.host, tmp_path / "c"):
            client = HolderClient(made.channel, local=tmp_path / "c")
            assert await client.reserve(CLIENT, name(1), 100) is not None
            waiting = asyncio.create_task(client.reserve(CLIENT, name(1), 100))
            [stream] = client._streams.values()
            await until(lambda: bool(stream._pending))
            stream._link._connection._transport.abort()
            with pytest.raises(KvspError) as caught:
                await waiting
        assert caught.value.problem is registry.UNAVAILABLE
        await until(lambda: made.host.state.store.used_octets == 0)
        await client.close()


async def test_without_the_socket_grpc_carries_the_stream(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False) as made:
        client = HolderClient(made.channel, local=tmp_path / "nothing")
        with pytest.raises(KvspError) as caught:
            await client.open(CLIENT, name(1))
        assert caught.value.problem is registry.NOT_FOUND
        await client.close()


@pytest.mark.spec("D14")
@pytest.mark.parametrize(
    "octets",
    [
        (MESSAGE_OCTETS_MAX + 1).to_bytes(4),  # claims more than any message has
        b"\x00\x00\x00\x03\xff\xff\xff",  # no message of ours
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_garbage_ends_the_connection_and_nothing_else(
    holder: Rig, octets: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # what the connection says of its peer
    reader, writer = await raw(holder)
    writer.write(octets)
    assert await reader.read() == b""
    writer.close()
    await holder.put(1)
    assert await holder.get(1) == block(1)


async def test_messages_may_come_in_any_pieces(holder: Rig) -> None:
    await holder.put(1)
    opening = holder_pb2.TransferRequest(id=7, open=holder_pb2.OpenBlock(name=name(1)))
    hello = holder_pb2.TransferHello(principal=CLIENT)
    octets = b"".join(len(m).to_bytes(4) + m for m in (hello.SerializeToString(), opening.SerializeToString()))
    reader, writer = await raw(holder)
    for at in range(len(octets)):
        writer.write(octets[at : at + 1])
        await writer.drain()
    length = int.from_bytes(await reader.readexactly(4))
    reply = holder_pb2.TransferReply.FromString(await reader.readexactly(length))
    assert (reply.id, reply.WhichOneof("reply")) == (7, "opened")
    writer.close()


async def test_a_reply_that_comes_with_the_timeout_is_given_back(
    holder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is busy across the deadline: reply and timer fall into one turn."""
    await holder.put(1)
    [stream] = holder.client._streams.values()
    answered = stream._answered

    def late(reply: holder_pb2.TransferReply) -> None:
        time.sleep(0.1)  # the point: nothing else runs meanwhile
        answered(reply)

    monkeypatch.setattr(stream._link, "_on_reply", late)
    monkeypatch.setattr("kvsp.bulk.holder.OPEN_TIMEOUT_S", 0.05)
    with contextlib.suppress(KvspError):
        (await holder.client.open(CLIENT, name(1))).close()
    await until(lambda: holder.pins(1) == 0)
    assert stream.idle
