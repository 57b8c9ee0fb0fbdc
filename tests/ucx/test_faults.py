"""Peers and machines that fail: an error in time, and everything given back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from kvsp.bulk.source import SourceUnavailableError, Ticket, load_source
from kvsp.rpc.config import ConfigError
from tests.ucx.rig import LIFETIME_S, Rig, refused, rig, rogue_holder, until
from ucx_transport import engine as engine_module
from ucx_transport import session
from ucx_transport.engine import Connection, Engine
from ucx_transport.server import UcxServer

ROOT = Path(__file__).parents[2]
LARGE = 128 << 20

HOLDER = f"""
import asyncio, msgspec, sys
from ucx_transport.server import UcxServer
async def main():
    server = UcxServer({{"listen": sys.argv[1], "fabric": "trusted"}})
    await server.start()
    view = memoryview(bytes({LARGE}))
    print(msgspec.json.encode(server.offer_read(view, [(0, len(view))], 60)).decode(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
CLIENT = """
import asyncio, msgspec, sys
from kvsp.bulk.source import Ticket, Transfer
from ucx_transport.source import UcxSource
async def main():
    ticket = msgspec.json.decode(sys.argv[1], type=Ticket)
    transfer = Transfer(1, sum(ticket.frames), ticket=ticket)
    if sys.argv[2] == "read":
        async for _ in UcxSource().reader(transfer).pieces():
            print("moving", flush=True)
    else:
        writer = UcxSource().writer(transfer)
        for i in range(1000):
            await writer.write(bytes(1 << 20))
            if i == 16:
                print("moving", flush=True)
asyncio.run(main())
"""


@asynccontextmanager
async def process(code: str, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *args, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STALL_S", 1.5)  # a busy machine is no stalled peer
    monkeypatch.setattr(engine_module, "TICK_S", 0.1)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.usefixtures("_impatient")
async def test_a_holder_that_dies_or_stops_midway_ends_the_read(fault: signal.Signals) -> None:
    async with rig() as made, process(HOLDER, "127.0.0.1:0") as holder:
        assert holder.stdout is not None
        async with asyncio.timeout(20):
            ticket = msgspec.json.decode(await holder.stdout.readline(), type=Ticket)
        reader = made.reader(ticket)
        async with aclosing(reader.pieces()) as pieces:  # type: ignore[type-var]
            assert len(await anext(pieces)) > 0
            holder.send_signal(fault)

            async def rest() -> None:
                async for _ in pieces:
                    pass

            async with asyncio.timeout(20):
                await refused(rest())
        reader.close()
        assert await made.read(made.offer(b"next")) == b"next"


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.usefixtures("_impatient")
async def test_a_client_that_dies_or_stops_midway_gives_the_offer_back(
    fault: signal.Signals, direction: str
) -> None:
    async with rig() as made:
        room = memoryview(bytearray(LARGE))
        if direction == "read":
            ticket = made.offer(room)
        else:
            ticket = made.server.offer_write(room, lambda _: None, LIFETIME_S)
        async with process(CLIENT, msgspec.json.encode(ticket).decode(), direction) as client:
            assert client.stdout is not None
            async with asyncio.timeout(20):
                assert await client.stdout.readline() == b"moving\n"
            client.send_signal(fault)
            await made.gone()
            await until(lambda: made.server.connections == 0)
        assert await made.read(made.offer(b"next")) == b"next"


def _flood(host: str, port: int) -> None:
    with socket.socket() as peer:
        peer.settimeout(5)
        try:
            peer.connect((host, port))
            for _ in range(64):
                peer.sendall(os.urandom(1 << 16))
        except OSError:
            pass  # hung up on, as it should be, or the port of an engine before, which is gone by now


@pytest.mark.spec("D14")
async def test_garbage_on_the_listener_disturbs_nobody() -> None:
    async with rig() as made:
        octets = os.urandom(1 << 20)
        assert await made.read(made.offer(octets)) == octets  # both ends have a worker, with ports of its own
        listening = [each.laddr for each in psutil.Process().net_connections("tcp4") if each.status == "LISTEN"]
        assert len(listening) >= 3
        floods = [
            asyncio.to_thread(_flood, each.ip.replace("0.0.0.0", "127.0.0.1"), each.port)
            for each in listening
            for _ in range(2)
        ]
        reads = [made.read(made.offer(octets)) for _ in range(8)]
        done = await asyncio.gather(*floods, *reads)
        assert done[-8:] == [octets] * 8
        assert await made.read(made.offer(octets)) == octets


async def test_messages_that_nobody_awaits_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "TICK_S", 0.02)
    async with rig() as made:
        link = await made.source._dialer.link(made.server.address)
        for size in (10, 100_000):
            for i in range(20):
                with_deadline = asyncio.wait_for(link.connection.send(memoryview(bytes(size)), i), 5)
                if size == 10:
                    await with_deadline
                else:
                    # A large one waits for its receiver, and is told that there is none.
                    await asyncio.gather(with_deadline, return_exceptions=True)
        worker = made.server._engine
        assert worker is not None
        found = worker._worker.tag_probe(worker.tag(0), worker._bindings.UCXXTagMask(0))
        await until(lambda: not worker._worker.tag_probe(worker.tag(0), worker._bindings.UCXXTagMask(0)).matched)
        del found
        assert await made.read(made.offer(b"still there")) == b"still there"


async def test_a_peer_that_is_silent_amid_a_transfer_costs_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """While frames move, the loop is kept from waiting, but not for longer."""
    rounds = []
    progress = Engine._progress
    monkeypatch.setattr(Engine, "_progress", lambda engine: (rounds.append(engine), progress(engine)))

    async def silent(connection: Connection, keys: session.Keys) -> None:
        await connection.send(memoryview(bytes(100)), keys.first_tag)
        await asyncio.sleep(60)

    async with rig() as made, rogue_holder(False, (100, 100), silent) as ticket:
        reading = asyncio.ensure_future(made.read(ticket))

        async def at_rest() -> bool:
            before = len(rounds)
            await asyncio.sleep(0.4)
            # Every engine looks once in TICK_S.
            return len(rounds) - before <= 4 * len(set(rounds))

        async with asyncio.timeout(20):  # on a busy machine the greeting takes a while
            while not await at_rest():
                pass
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_nobody_there_is_an_error() -> None:
    async with rig() as made:
        ticket = made.offer(b"1234")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound but not listening: connecting to it is refused
            gone = Ticket(f"127.0.0.1:{taken.getsockname()[1]}", ticket.token, ticket.key, True, (4,))
            async with asyncio.timeout(20):
                await refused(made.read(gone))


async def test_a_restarted_holder_is_found_again() -> None:
    async with rig() as made:
        listen = "127.0.0.1:0"
        for _ in range(2):
            async with process(HOLDER, listen) as holder:
                assert holder.stdout is not None
                async with asyncio.timeout(20):
                    ticket = msgspec.json.decode(await holder.stdout.readline(), type=Ticket)
                assert len(await made.read(ticket)) == LARGE
            listen = ticket.address
            (kept,) = made.source._dialer._idle[listen]
            await until(lambda link=kept: not link.connection.alive)  # type: ignore[misc]


async def test_a_taken_port_is_a_clear_error() -> None:
    async with rig() as made:
        second = UcxServer({"listen": made.server.address})
        with pytest.raises(ConfigError, match=r"cannot listen on port \d+"):
            await second.start()
        await second.close()


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"listen": "4242"},
        {"listen": "host:port"},
        {"listen": "0.0.0.0:4242"},
        {"listen": "h:70000"},
        {"listen": "h:1", "fabric": "open"},
        {"listen": "h:1", "unknown": 1},
        {"listen": "h:1", "rails": -1},
    ],
)
def test_a_bad_table_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"bulk\.ucx"):
        UcxServer(table)


async def test_ucx_that_does_not_start_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    server = UcxServer({"listen": "127.0.0.1:0", "transports": "nonesuch"})
    with pytest.raises(SourceUnavailableError):
        await server.start()
    monkeypatch.setenv("UCX_TLS", "nonesuch")
    with pytest.raises(SourceUnavailableError):
        load_source("ucx")


def test_open_and_cancel_leave_nothing_behind() -> None:
    """In a process of its own: what other tests have left in this one moves its memory up and down."""
    code = "import asyncio; from tests.ucx.test_faults import open_and_cancel; asyncio.run(open_and_cancel())"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


async def open_and_cancel() -> None:
    cycles = int(os.environ.get("KVSP_UCX_CYCLES", "1000"))
    octets = os.urandom(3 << 20)

    async def cycle(made: Rig, i: int) -> None:
        ticket = made.offer(octets)
        reader = made.reader(ticket)
        if i % 4:
            task = asyncio.ensure_future(anext(reader.pieces()))  # type: ignore[arg-type]
            for _ in range(i % 7):
                await asyncio.sleep(0)
            if i % 4 == 1:
                await asyncio.wait([task])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        reader.close()
        made.server.revoke(ticket)

    here = psutil.Process()

    async def settled(made: Rig) -> None:
        assert await made.read(made.offer(octets)) == octets
        await until(lambda: made.server.connections == 1 and not made.server.offers)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later is no leak

    async with rig() as made:
        for i in range(500):  # until the kept buffers are as many as they get
            await cycle(made, i)
        await settled(made)
        descriptors, memory = here.num_fds(), here.memory_info().rss
        for i in range(cycles):
            await cycle(made, i)
        await settled(made)
        # A socket that UCX has not done with, or a connection that is only being made, is gone a little later.
        await until(lambda: here.num_fds() <= descriptors)
        memory_after = here.memory_info().rss
    assert memory_after - memory < 48 << 20
