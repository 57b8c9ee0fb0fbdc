"""Lookup of 1,024 keys over HTTPS in an index of 200,000 replicas, beside FastAPI returning the same octets.

Both stand behind an Envoy of the same template and are asked by the same client over kept connections. What the
index process grew by is set against its layer digests.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.fill import fill_index
from benchmarks.measure import Row, interleaved
from benchmarks.peers import free_port
from benchmarks.stack import COMPAT, LAYERS, Bench, bench_stack, make_key
from deploy.local import envoy, policy
from deploy.local.envoy import Tuning
from deploy.local.layout import Layout
from kvsp.client import Options
from kvsp.client.transport import Deadline, Transport
from kvsp.protocol import jsonio
from kvsp.protocol.records import LookupRequest

REPLICAS = 200_000
KEYS = 1024
ROUNDS = 60
DIGEST_OCTETS = LAYERS * (2 * 32 + 3)  # hexadecimal, quotes and comma


def run() -> list[Row]:
    """Rows of the table."""
    with bench_stack() as bench, tempfile.TemporaryDirectory(prefix="kvsp-bench-") as folder:
        process = psutil.Process(bench.pid("index"))
        before = process.memory_info().rss
        socket, holder = bench.layout.socket("index"), bench.holder
        taken = asyncio.run(fill_index(socket, policy.identity_uri("h1"), holder, bench.scope_id, REPLICAS))
        grown = (process.memory_info().rss - before) / taken
        beside = f"{grown:,.0f} octets each, {grown - DIGEST_OCTETS:,.0f} without layer digests"
        print(f"index: {taken:,} replicas, {beside}")
        return [_compare(bench, Path(folder))]


def _compare(bench: Bench, folder: Path) -> Row:
    transport = Transport(bench.credentials, Options())
    chains = [
        jsonio.encode(LookupRequest(bench.scope_id, COMPAT, [make_key("chain", first + i) for i in range(KEYS)]))
        for first in range(0, REPLICAS - KEYS, KEYS)
    ]
    turn = iter(range(1 << 30))

    def ask(base: str, body: bytes) -> bytes:
        return bytes(transport.json("POST", base + "lookup", Deadline(30), body).body)

    index = str(bench.endpoints.index)
    body = ask(index, chains[0])
    (folder / "body").write_bytes(body)
    with plain_fastapi(bench.layout, folder) as plain:
        timings = interleaved(
            {
                "kvsp": lambda: ask(index, chains[next(turn) % len(chains)]),
                "fastapi": lambda: ask(plain, chains[0]),
            },
            ROUNDS,
        )
    print(f"reply: {len(body):,} octets")
    transport.close()
    return Row.of(
        f"lookup of {KEYS} keys, HTTPS", "kvsp", timings["kvsp"], "FastAPI, same octets from memory",
        timings["fastapi"], 1, "lookups/s",
    )  # fmt: skip


@contextmanager
def plain_fastapi(stack: Layout, folder: Path) -> Iterator[str]:
    """benchmarks/plain_app.py behind an Envoy of its own; yields its base URI."""
    layout = Layout(folder / ".kvsp", free_port(), free_port())
    layout.make_directories()
    for name in ("ca.pem", "envoy.pem", "envoy-key.pem"):
        (layout.pki / name).write_bytes((stack.pki / name).read_bytes())
    layout.envoy.write_text(envoy.render(layout, {"is": "/is/"}, Tuning()))
    commands = [
        [sys.executable, "-m", "uvicorn", "benchmarks.plain_app:app", "--uds", str(layout.socket("gateway")),
         "--log-level", "warning", "--no-access-log"],
        [envoy.find_binary(), "-c", str(layout.envoy), "--concurrency", "2", "--disable-hot-restart",
         "--log-level", "error", "--base-id", "77"],
    ]  # fmt: skip
    environment = {**os.environ, "KVSP_BENCH_BODY": str(folder / "body")}
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        time.sleep(3)  # a benchmark, not a test: both are up by then
        yield f"https://localhost:{layout.port}/is/"
    finally:
        for process in processes:
            process.terminate()
            process.wait(10)
