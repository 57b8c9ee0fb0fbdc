"""Blocks from a holder process into memory of this one, by every transport, beside what else moves octets.

    python -m benchmarks bulk
    python -m benchmarks.bulk [--rounds 5] [--sizes 2M,32M] [--at-once 1,4] [--mooncake PYTHON] [--only NAME,...]

All contenders take turns in each round; the table shows medians. Transports are timed from the first octet asked
for to the last one in place, the transfers having been agreed before; `open+` adds the control channel.
`--mooncake` or KVSP_BENCH_MOONCAKE is the Python of an environment with `mooncake-transfer-engine-non-cuda`,
which is a peer then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import uvloop

from benchmarks import bulk_peers
from benchmarks.__main__ import cells
from benchmarks.holder_control import BASE_URI, CLIENT, POLICY, name
from benchmarks.measure import Row, Timing, summary
from kvsp.bulk.holder import HolderClient, OpenedTransfer
from kvsp.protocol import container
from kvsp.rpc.channel import open_channel
from kvsp.rpc.framed import local_socket

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, 512 * KIB, 2 * MIB, 32 * MIB]
AT_ONCE = [1, 4, 16]
LAYERS = 32
TURN_S = 0.2
COUNT_MAX = 1024  # transfers are agreed beforehand
CONFIG = """
listen = "unix:{folder}/{fabric}.sock"
policy = "{folder}/policy.toml"
principal = "spiffe://b/h1"
base_uri = "{base_uri}"
arena_octets = 268435456
arena_dir = "{folder}"
index = {{address = "unix:{folder}/none.sock"}}
log_level = "error"
[bulk.ucx]
listen = "127.0.0.1:0"
fabric = "{fabric}"
"""
START = "import pathlib, sys; from services.holder.server import run; run(pathlib.Path(sys.argv[1]))"

Contender = Callable[[int, int, int], Awaitable[float]]
"""(octets of a block, blocks in flight, blocks) -> seconds."""

TARGETS: list[tuple[str, str, float, list[int], list[int]]] = [
    # contender, beside which, the ratio asked for (0: none), sizes, in flight
    ("shm", "memcpy", 0.8, [2 * MIB, 32 * MIB], [1]),
    ("shm", "grpc", 4.0, [2 * MIB], [1, 4]),
    ("ucx trusted", "bare ucxx", 0.8, SIZES, AT_ONCE),
    ("ucx trusted", "perftest", 0, SIZES, [1]),
    ("ucx trusted", "grpc", 1.5, [2 * MIB], [1, 4]),
    ("ucx sealed", "grpc", 1.5, [2 * MIB], [1, 4]),
    ("ucx sealed", "ucx trusted", 0.65, SIZES, AT_ONCE),
    ("tcp sealed", "raw tcp", 0, SIZES, AT_ONCE),
    ("ucx sealed", "mooncake", 1.0, [2 * MIB, 32 * MIB], [1, 4]),
    ("ucx sealed", "raw tcp", 0, [2 * MIB, 32 * MIB], [1, 4]),
    ("ucx sealed", "redis", 0, [2 * MIB, 32 * MIB], [1, 4]),
    ("ucx verified", "ucx + sha256", 0.85, [2 * MIB, 32 * MIB], [1, 4]),
    ("shm verified", "shm + sha256", 0.85, [2 * MIB, 32 * MIB], [1, 4]),
]


def block(size: int) -> bytes:
    """A container with a payload of `size`."""
    section = size // LAYERS // 2
    return container.build(0, 16, [(os.urandom(section), os.urandom(section)) for _ in range(LAYERS)])


@contextlib.contextmanager
def holder(folder: Path, fabric: str) -> Iterator[str]:
    """A holder process with all transports; yields its address."""
    config = folder / f"{fabric}.toml"
    config.write_text(CONFIG.format(folder=folder, fabric=fabric, base_uri=BASE_URI.replace("h1", fabric)))
    process = subprocess.Popen([sys.executable, "-c", START, str(config)])
    try:
        while not (folder / f"{fabric}.sock.control").exists():
            time.sleep(0.02)
        yield f"unix:{folder}/{fabric}.sock"
    finally:
        process.terminate()
        process.wait()


class Blocks:
    """Reads blocks of a holder by one scheme.

    `whole`: each is opened, too. `verify`: by its digests. `hash_beside`: instead, as many octets are hashed
    meanwhile on threads that have nothing to do with it: the fastest that verification could be.
    """

    def __init__(
        self, client: HolderClient, *, whole: bool = False, verify: bool = False, hash_beside: bool = False
    ) -> None:
        self._client = client
        self._whole = whole
        self._verify = verify
        self._hash_beside = hash_beside
        self._digests: dict[int, list[bytes]] = {}

    async def __call__(self, size: int, at_once: int, count: int) -> float:
        await self._stored(size)
        buffers = [memoryview(bytearray(size)) for _ in range(at_once)]
        for buffer in buffers:  # its pages, and connections
            warm = await self._open(size)
            await self._read(warm, buffer)
            warm.close()
        opened = [] if self._whole else [await self._open(size) for _ in range(count)]
        waiting, left = list(opened), count

        async def some(buffer: memoryview) -> None:
            nonlocal left
            while left:
                left -= 1
                each = await self._open(size) if self._whole else waiting.pop()
                await self._read(each, buffer)
                if self._whole:
                    each.close()

        began = time.perf_counter()
        hashing = [asyncio.to_thread(sha256, size, at_once, count)] if self._hash_beside else []
        await asyncio.gather(*hashing, *(some(buffer) for buffer in buffers))
        took = time.perf_counter() - began
        for each in opened:
            each.close()
        return took

    async def _open(self, size: int) -> OpenedTransfer:
        digests = self._digests[size] if self._verify else None
        return await self._client.open(CLIENT, name(size), digests=digests)

    async def _read(self, opened: OpenedTransfer, buffer: memoryview) -> None:
        async for _ in opened.into(buffer):
            pass

    async def _stored(self, size: int) -> None:
        if size in self._digests:
            return
        made = block(size)
        with contextlib.suppress(Exception):  # another contender has put its own there; that is described then
            reserved = await self._client.reserve(CLIENT, name(size), len(made))
            assert reserved is not None
            await reserved.write(made)
            await reserved.commit()
        opened = await self._client.open(CLIENT, name(size))
        octets = b"".join([bytes(piece) async for piece in opened.pieces()])
        opened.close()
        span = size // LAYERS
        self._digests[size] = [hashlib.sha256(octets[at : at + span]).digest() for at in range(0, size, span)]


def _peer(run: bulk_peers.Run) -> Contender:
    async def turn(size: int, at_once: int, count: int) -> float:
        return run(size, at_once, count)

    return turn


def sha256(size: int, at_once: int, count: int) -> float:
    """As many cores as there are, each its own blocks: the fastest that verification can be."""
    octets = bytes(size)
    workers = min(at_once, os.cpu_count() or 1)
    return bulk_peers.in_threads(workers, count, lambda _: lambda: hashlib.sha256(octets))


@asynccontextmanager
async def contenders(mooncake: Path | None) -> AsyncIterator[dict[str, Contender]]:
    """Everything that takes part."""
    async with AsyncExitStack() as later:
        stack = later.enter_context(ExitStack())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        (folder / "policy.toml").write_text(
            POLICY.replace(f'["{BASE_URI}"]', str([BASE_URI.replace("h1", x) for x in ("sealed", "trusted")]))
        )
        clients: dict[str, HolderClient] = {}
        for fabric in ("sealed", "trusted"):
            address = stack.enter_context(holder(folder, fabric))
            channel = await later.enter_async_context(open_channel(address))
            for scheme in ("shm", "ucx", "grpc"):
                client = HolderClient(channel, (scheme,), local=local_socket(address))
                later.push_async_callback(client.close)
                clients[f"{scheme} {fabric}"] = client
        made: dict[str, Contender] = {
            "memcpy": _peer(bulk_peers.memcpy),
            "sha256": _peer(sha256),
            "shm": Blocks(clients["shm sealed"]),
            "open+shm": Blocks(clients["shm sealed"], whole=True),
            "shm verified": Blocks(clients["shm sealed"], verify=True),
            "shm + sha256": Blocks(clients["shm sealed"], hash_beside=True),
            "ucx trusted": Blocks(clients["ucx trusted"]),
            "ucx sealed": Blocks(clients["ucx sealed"]),
            "open+ucx": Blocks(clients["ucx sealed"], whole=True),
            "ucx verified": Blocks(clients["ucx sealed"], verify=True),
            "ucx + sha256": Blocks(clients["ucx sealed"], hash_beside=True),
            "grpc": Blocks(clients["grpc sealed"]),
            "raw tcp": _peer(stack.enter_context(bulk_peers.raw_tcp())),
            "tcp sealed": _peer(stack.enter_context(bulk_peers.raw_tcp(seal=True))),
            "bare ucxx": _peer(stack.enter_context(bulk_peers.bare_ucxx())),
            "perftest": _peer(bulk_peers.perftest),
            "redis": _peer(stack.enter_context(bulk_peers.redis(folder))),
        }
        if mooncake is not None:
            made["mooncake"] = _peer(stack.enter_context(bulk_peers.mooncake(mooncake)))
        yield made


async def measure(made: dict[str, Contender], size: int, at_once: int, rounds: int) -> dict[str, Timing]:
    """What a block takes with each, medians of turns."""
    counts: dict[str, int] = {}
    for label, contender in made.items():
        once = await contender(size, at_once, at_once) / at_once
        counts[label] = max(at_once, min(COUNT_MAX, int(TURN_S / max(once, 1e-9))))
    samples: dict[str, list[float]] = {label: [] for label in made}
    for _ in range(rounds):
        for label, contender in made.items():
            samples[label].append(await contender(size, at_once, counts[label]) / counts[label])
    return {label: summary(each) for label, each in samples.items()}


Measured = dict[tuple[int, int], dict[str, Timing]]
"""By octets of a block and blocks in flight."""


async def bench(arguments: argparse.Namespace) -> Measured:
    """Measure all, and print what each makes in GB/s."""
    found: Measured = {}
    async with contenders(arguments.mooncake) as all_of_them:
        made = (
            {label: all_of_them[label] for label in arguments.only.split(",")} if arguments.only else all_of_them
        )
        print("GB/s".ljust(14) + " ".join(f"{label:>12}" for label in made))
        for size in arguments.sizes:
            for at_once in arguments.at_once:
                timings = found[size, at_once] = await measure(made, size, at_once, arguments.rounds)
                row = " ".join(f"{size / each.seconds / 1e9:>12.2f}" for each in timings.values())
                print(f"{text(size):>8} x{at_once:<3} " + row, flush=True)
    return found


def rows(found: Measured) -> list[Row]:
    """Ours beside what each was compared with, and what was asked for."""
    made = []
    for ours, beside, factor, sizes, flights in TARGETS:
        for (size, at_once), timings in found.items():
            if size in sizes and at_once in flights and ours in timings and beside in timings:
                what = f"{text(size)}, {at_once} in flight" + (f" (asked for: {factor:g})" if factor else "")
                made.append(Row.rate(what, ours, timings[ours], beside, timings[beside], size))
    return made


def text(size: int) -> str:
    """A size as people write it."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def octets(words: str) -> list[int]:
    """`64K,2M` as numbers."""
    units = {"K": KIB, "M": MIB}
    return [int(word[:-1]) * units[word[-1]] for word in words.split(",")]


def run(arguments: Sequence[str] = ()) -> list[Row]:
    """Rows of the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=octets, default=SIZES)
    parser.add_argument("--at-once", type=lambda words: [int(word) for word in words.split(",")], default=AT_ONCE)
    parser.add_argument("--mooncake", type=Path, default=os.environ.get("KVSP_BENCH_MOONCAKE"))
    parser.add_argument("--only", default="")
    return rows(uvloop.run(bench(parser.parse_args(arguments))))


def main() -> None:
    """Print the rows."""
    for row in run(sys.argv[1:]):
        print(" | ".join(cells(row)))


if __name__ == "__main__":
    main()
