"""UCX blocks beside a bare ucxx send/receive loop, sealed beside trusted, and beside gRPC, in one run.

    python -m benchmarks.ucx_probe

Client and server are two processes on loopback. Each round measures every contender once; the table shows
the median of the rounds, and ratios of medians.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import select
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from kvsp.bulk.grpc import GrpcSource
from kvsp.bulk.source import BlockReader, Ticket, Transfer
from kvsp.protocol import limits
from kvsp.v1 import holder_pb2, holder_pb2_grpc
from ucx_transport import library
from ucx_transport.server import UcxServer
from ucx_transport.source import UcxSource

SIZES = [64 << 10, 512 << 10, 2 << 20, 32 << 20]
ROUND_S = 0.5
ROUNDS = 5
BATCH = 16


# --- servers ---


class _Blocks(holder_pb2_grpc.HolderServicer):
    """ReadBlock as the holder does it; the transfer's number is the size."""

    async def ReadBlock(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        view = memoryview(bytes(request.transfer))
        for at in range(0, len(view), limits.GRPC_CHUNK_OCTETS):
            yield holder_pb2.BlockChunk(octets=bytes(view[at : at + limits.GRPC_CHUNK_OCTETS]))


def serve(pipe: Connection) -> None:
    uvloop.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    servers = {fabric: UcxServer({"listen": "127.0.0.1:0", "fabric": fabric}) for fabric in ("sealed", "trusted")}
    for server in servers.values():
        await server.start()
    over_grpc = grpc.aio.server()
    holder_pb2_grpc.add_HolderServicer_to_server(_Blocks(), over_grpc)  # type: ignore[abstract]
    port = over_grpc.add_insecure_port("127.0.0.1:0")
    await over_grpc.start()
    pipe.send(port)
    views = {size: memoryview(bytes(size)) for size in SIZES}
    asked: asyncio.Queue[Any] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: asked.put_nowait(pipe.recv()))
    while (request := await asked.get()) is not None:
        fabric, size, count = request
        pipe.send([servers[fabric].offer_read(views[size], [(0, size)], 60) for _ in range(count)])
    for server in servers.values():
        await server.close()
    await over_grpc.stop(0)


class _Bare:
    """One end of a bare tag send and receive loop, with our settings and nothing else."""

    def __init__(self) -> None:
        self.bindings = library.load()
        self.worker = self.bindings.UCXWorker(library.open_context({}))
        self.worker.init_blocking_progress_mode()
        self.ask, self.answer = self.bindings.UCXXTag(0), self.bindings.UCXXTag(1)
        self._poll = select.poll()
        self._poll.register(self.worker.epoll_file_descriptor, select.POLLIN)

    def wait(self, request: Any) -> None:
        """Until it is done."""
        while not request.completed:
            while self.worker.progress_once():
                pass
            if not request.completed and self.worker.arm():
                self._poll.poll(100)
        request.check_error()


def bare_client(port: int) -> Callable[[int, int, int], float]:
    """What fetches `count` messages of a size, so many in flight, into memory that is there before; seconds."""
    bare = _Bare()
    endpoint = bare.bindings.UCXEndpoint.create(bare.worker, "127.0.0.1", port, True)
    places: dict[int, list[Any]] = {}

    def fetch(size: int, at_once: int, count: int) -> float:
        ready = places.setdefault(size, [])
        ready += [library.array(bytearray(size)) for _ in range(at_once - len(ready))]
        asked = library.array(bytearray(size.to_bytes(8)))
        coming: deque[Any] = deque()
        began = time.perf_counter()
        for i in range(count):
            if len(coming) == at_once:
                bare.wait(coming.popleft())
            coming.append(endpoint.tag_recv(ready[i % at_once], bare.answer))
            bare.wait(endpoint.tag_send(asked, bare.ask))
        while coming:
            bare.wait(coming.popleft())
        return time.perf_counter() - began

    fetch(8, 1, 1)  # a thread of UCX keeps a core busy until somebody has looked after a new connection
    return fetch


def serve_bare(pipe: Connection) -> None:
    """Says its port, then answers what it is asked."""
    bare = _Bare()
    endpoints: list[Any] = []
    listener = bare.bindings.UCXListener.create(bare.worker, 0, endpoints.append, deliver_endpoint=True)
    pipe.send(listener.port)
    while not endpoints:
        bare.worker.progress()
        time.sleep(0.001)  # others are measured meanwhile
    asked = bytearray(8)
    buffers: dict[int, Any] = {}
    going: list[Any] = []
    while True:
        bare.wait(endpoints[0].tag_recv(library.array(asked), bare.ask))
        size = int.from_bytes(asked)
        if size not in buffers:
            buffers[size] = library.array(bytearray(size))
        going = [each for each in going if not each.completed]
        going.append(endpoints[0].tag_send(buffers[size], bare.answer))


# --- clients ---


async def read(reader: BlockReader) -> None:
    async for _ in reader.pieces():
        pass
    reader.close()


@asynccontextmanager
async def contenders() -> AsyncIterator[dict[str, Callable[[int], Awaitable[tuple[float, int]]]]]:
    spawn = multiprocessing.get_context("spawn")
    async with AsyncExitStack() as stack:
        here, there = spawn.Pipe()
        bare_here, bare_there = spawn.Pipe()
        processes = [
            spawn.Process(target=serve, args=(there,)),
            spawn.Process(target=serve_bare, args=(bare_there,)),
        ]
        for process in processes:
            process.start()
            stack.callback(process.kill)
        port, bare_port = here.recv(), bare_here.recv()
        fetch = bare_client(bare_port)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        over_grpc = GrpcSource()
        source = UcxSource()
        stack.callback(source.close)

        def bare(at_once: int) -> Callable[[int], Awaitable[tuple[float, int]]]:
            async def run(size: int) -> tuple[float, int]:
                return fetch(size, at_once, BATCH), BATCH

            return run

        def over_ucx(fabric: str, at_once: int) -> Callable[[int], Awaitable[tuple[float, int]]]:
            async def run(size: int) -> tuple[float, int]:
                here.send((fabric, size, BATCH))
                tickets: list[Ticket] = here.recv()

                async def some() -> None:
                    while tickets:
                        await read(source.reader(Transfer(1, size, ticket=tickets.pop())))

                began = time.perf_counter()
                await asyncio.gather(*(some() for _ in range(at_once)))
                return time.perf_counter() - began, BATCH

            return run

        async def grpc_read(size: int) -> tuple[float, int]:
            began = time.perf_counter()
            for _ in range(BATCH):
                await read(over_grpc.reader(Transfer(size, size, "spiffe://t/client", channel)))
            return time.perf_counter() - began, BATCH

        yield {
            "bare": bare(1),
            "bare x4": bare(4),
            "trusted": over_ucx("trusted", 1),
            "sealed": over_ucx("sealed", 1),
            "trusted x4": over_ucx("trusted", 4),
            "sealed x4": over_ucx("sealed", 4),
            "grpc": grpc_read,
        }
        here.send(None)


async def measure() -> None:
    async with contenders() as runs:
        print(f"{'size':>10} " + " ".join(f"{name:>10}" for name in runs) + "   GB/s")
        for size in SIZES:
            rates: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(ROUNDS):
                for name, run in runs.items():
                    spent, fetched = 0.0, 0
                    while spent < ROUND_S:
                        more = await run(size)
                        spent, fetched = spent + more[0], fetched + more[1]
                    rates[name].append(fetched * size / spent / 1e9)
            rate = {name: statistics.median(each) for name, each in rates.items()}
            print(
                f"{size:>10} " + " ".join(f"{each:>10.2f}" for each in rate.values()),
                f"  trusted/bare {rate['trusted'] / rate['bare']:.2f}, x4"
                f" {rate['trusted x4'] / rate['bare x4']:.2f};",
                f"sealed/trusted {rate['sealed'] / rate['trusted']:.2f}, x4"
                f" {rate['sealed x4'] / rate['trusted x4']:.2f};",
                f"sealed/grpc {rate['sealed'] / rate['grpc']:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    uvloop.run(measure())
