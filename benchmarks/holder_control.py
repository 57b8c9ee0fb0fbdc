"""What the way to a holder costs, without HTTP: control calls, and PUT and GET of blocks by source.

    python -m benchmarks.holder_control [--seconds 2]

One holder process, one client process. Compare within one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import uvloop

from kvsp.bulk.holder import HolderClient
from kvsp.protocol import container
from kvsp.rpc.channel import open_channel
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, common_pb2_grpc

SCOPE = "aa" * 16
CLIENT = "spiffe://b/client"
BASE_URI = "https://h1.example/kvsp/"
PIECE = 256 << 10
POLICY = f"""
[identities."spiffe://b/h1"]
roles = ["holder"]
base_uris = ["{BASE_URI}"]
scopes = ["{SCOPE}"]
[identities."{CLIENT}"]
roles = ["client"]
scopes = ["{SCOPE}"]
"""
CONFIG = """
listen = "unix:{folder}/h1.sock"
policy = "{folder}/policy.toml"
principal = "spiffe://b/h1"
base_uri = "{base_uri}"
arena_octets = 536870912
index = {{address = "unix:{folder}/none.sock"}}
log_level = "error"
"""


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[str]:
    (folder / "policy.toml").write_text(POLICY)
    (folder / "holder.toml").write_text(CONFIG.format(folder=folder, base_uri=BASE_URI))
    code = "import pathlib, sys; from services.holder.server import run; run(pathlib.Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder / "holder.toml")])
    try:
        while not (folder / "h1.sock").exists():
            time.sleep(0.02)
        yield f"unix:{folder}/h1.sock"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def name(i: int) -> common_pb2.BlockName:
    key = hashlib.sha256(b"%d" % i).digest()
    return common_pb2.BlockName(compat_id=b"\x11" * 32, scope_id=bytes.fromhex(SCOPE), block_key=key)


async def rate(seconds: float, call: Callable[[int], Awaitable[None]]) -> float:
    """Calls a second."""
    for i in range(3):
        await call(-1 - i)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        await call(done)
        done += 1
    return done / (time.perf_counter() - started)


async def pieces(block: bytes) -> AsyncIterator[memoryview]:
    view = memoryview(block)
    for at in range(0, len(view), PIECE):
        yield view[at : at + PIECE]
        await asyncio.sleep(0)  # as octets arrive from a socket


async def control(address: str, seconds: float) -> None:
    async with open_channel(address) as channel:
        client, authority = HolderClient(channel), common_pb2_grpc.AuthorityStub(channel)
        await put(client, 1, container.build(0, 16, [(b"k" * 64, b"v" * 64)]))
        request = common_pb2.AuthorizeRequest(method="POST", path="leases")

        async def unary(_: int) -> None:
            await authority.Authorize(request, metadata=speak_for(CLIENT), timeout=5)

        async def kept(_: int) -> None:
            (await client.open(CLIENT, name(1))).close()

        for label, call in (("unary call", unary), ("open + close, kept stream", kept)):
            print(f"{label:28} {1e6 / await rate(seconds, call):8.0f} us")
        await client.close()


async def put(client: HolderClient, i: int, block: bytes) -> None:
    reserved = await client.reserve(CLIENT, name(i), len(block))
    assert reserved is not None
    async for piece in pieces(block):
        await reserved.write(piece)
    await reserved.commit()


async def transfers(address: str, scheme: str, mebioctets: int, seconds: float) -> None:
    section = (mebioctets << 20) // 64
    block = container.build(0, 16, [(os.urandom(section), os.urandom(section)) for _ in range(32)])
    serial = iter(range(int(time.time() * 1e6) * 1000, 1 << 62))
    async with open_channel(address) as channel:
        client = HolderClient(channel, (scheme,))
        fixed = next(serial)
        await put(client, fixed, block)

        async def get(_: int) -> None:
            opened = await client.open(CLIENT, name(fixed))
            async for piece in opened.pieces():
                bytes(piece)
            opened.close()

        writes = await rate(seconds, lambda _: put(client, next(serial), block))
        await put(client, fixed := next(serial), block)
        reads = await rate(seconds, get)
        await client.close()
    gigaoctets = len(block) / 1e9
    print(
        f"{scheme:5} {mebioctets:3} MiB   PUT {writes * gigaoctets:5.2f} GB/s   GET {reads * gigaoctets:5.2f} GB/s"
    )


async def bench(address: str, seconds: float) -> None:
    async with open_channel(address) as channel:
        await channel.channel_ready()
    await control(address, seconds)
    for scheme in ("shm", "grpc"):
        for mebioctets in (2, 32):
            await transfers(address, scheme, mebioctets, seconds)
    octets = os.urandom(32 << 20)
    started = time.perf_counter()
    hashlib.sha256(octets)
    print(f"SHA-256, one pass            {len(octets) / 1e9 / (time.perf_counter() - started):8.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, holder(Path(folder)) as address:
        uvloop.run(bench(address, arguments.seconds))


if __name__ == "__main__":
    main()
