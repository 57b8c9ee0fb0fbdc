"""Lookup of 1,024 keys over HTTPS in an index of 200,000 replicas, beside FastAPI returning the same octets.

Both stand behind an Envoy of the same template and are asked by the same client over kept connections. What the
index process grew by is set against its layer digests.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.fill import fill_index
from benchmarks.measure import Row, interleaved
from benchmarks.stack import COMPAT, LAYERS, Bench, behind_envoy, bench_stack, make_key
from deploy.local import policy
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

    def command(socket: Path) -> list[str]:
        uvicorn = ["uvicorn", "benchmarks.plain_app:app", "--uds", str(socket), "--log-level", "warning"]
        return [sys.executable, "-m", *uvicorn, "--no-access-log"]

    with behind_envoy(stack, folder, "is", command, {"KVSP_BENCH_BODY": str(folder / "body")}) as base_uri:
        yield base_uri
