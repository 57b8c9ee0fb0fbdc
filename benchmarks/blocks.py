"""Block GET and PUT over mTLS through Envoy, beside nginx serving the same file and Redis over TLS.

One client process, kept connections; nginx is asked by the same client as we are.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import redis as redis_client

from benchmarks import peers
from benchmarks.measure import Row, Timing, interleaved
from benchmarks.stack import COMPAT, Bench, behind_envoy, bench_stack, make_container, make_key
from kvsp.client import Client
from kvsp.protocol.records import ReplicaRecord

MIB = 1 << 20
SIZES = {2 * MIB: (30, 8), 32 * MIB: (12, 2)}  # octets -> rounds, calls in a turn


def run() -> list[Row]:
    """Rows of the table."""
    rows: list[Row] = []
    with bench_stack() as bench, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        files = work / "files"
        files.mkdir()
        with (
            peers.nginx(work / "nginx", files, bench.server_tls) as nginx,
            peers.redis(work / "redis", bench.server_tls) as port,
            behind_envoy(bench.layout, work / "sink", "sink", _sink()) as sink,
            behind_envoy(bench.layout, work / "hashing", "hashing", _sink("hash")) as hashing,
        ):
            for size, turns in SIZES.items():
                # Sinks are the bound of what we miss, at 2 MiB; their buffers are not made for more.
                sinks = {"sink": sink, "hashing sink": hashing} if size == 2 * MIB else {}
                rows += _size(bench, files, nginx, sinks, _redis(bench, port), size, *turns)
    return rows


def _sink(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda socket: [sys.executable, "-m", "benchmarks.sink", str(socket), *arguments]


def _redis(bench: Bench, port: int) -> redis_client.Redis:
    return redis_client.Redis(
        host="localhost",
        port=port,
        ssl=True,
        ssl_ca_certs=str(bench.credentials.ca),
        ssl_certfile=str(bench.credentials.cert),
        ssl_keyfile=str(bench.credentials.key),
    )


def _size(
    bench: Bench,
    files: Path,
    nginx: str,
    sinks: Mapping[str, str],
    redis: redis_client.Redis,
    size: int,
    rounds: int,
    calls: int,
) -> list[Row]:
    label = f"{size // MIB} MiB"
    octets = make_container(size)
    key = make_key("get", size)
    path = files / "blocks" / COMPAT / bench.scope_id / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(octets)
    redis.set(key, octets)
    buffer = bytearray(size)
    with (
        bench.client(frozenset({nginx}), verify=False, http2_blocks=True) as h2,
        bench.client(frozenset({nginx, *sinks.values()}), verify=False) as h1,
        bench.client() as verifying,
    ):
        verifying.put(bench.holder, COMPAT, bench.scope_id, key, octets)
        records = _published(verifying, bench.scope_id, key)

        def get_from(client: Client, holder: str) -> Callable[[], object]:
            return lambda: client.get_from(holder, COMPAT, bench.scope_id, key, into=buffer)

        gets = interleaved(
            {
                "kvsp h2": get_from(h2, bench.holder),
                "kvsp h1": get_from(h1, bench.holder),
                "kvsp verified": lambda: verifying.get(records, into=buffer),
                "nginx h2": get_from(h2, nginx),
                "nginx h1": get_from(h1, nginx),
                "redis": lambda: redis.get(key),
            },
            rounds,
            calls,
        )
        numbers = itertools.count()
        sha256 = hashlib.sha256(octets).digest()

        def put(client: Client, known: bytes | None, holder: str = bench.holder) -> Callable[[], object]:
            return lambda: client.put(
                holder, COMPAT, bench.scope_id, make_key("put", size, next(numbers)), octets, sha256=known
            )

        puts = interleaved(
            {
                "kvsp h2": put(h2, None),
                "kvsp h1": put(h1, None),
                "kvsp known": put(h1, sha256),
                **{each: put(h1, sha256, holder) for each, holder in sinks.items()},
                "redis": lambda: redis.set("put", octets),
            },
            rounds,
            calls,
        )

    def row(what: str, ours: str, our: Timing, peer: str, their: Timing) -> Row:
        return Row.rate(f"{what} {label}", ours, our, peer, their, size)

    return [
        row("GET", "unverified, h2", gets["kvsp h2"], "nginx mTLS, h2", gets["nginx h2"]),
        row("GET", "unverified, HTTP/1.1", gets["kvsp h1"], "nginx mTLS, HTTP/1.1", gets["nginx h1"]),
        row("GET", "unverified, h2", gets["kvsp h2"], "Redis TLS GET", gets["redis"]),
        row("GET", "unverified, HTTP/1.1", gets["kvsp h1"], "Redis TLS GET", gets["redis"]),
        row(
            "GET",
            "verified, HTTP/1.1",
            gets["kvsp verified"],
            "nginx mTLS, HTTP/1.1, unverified",
            gets["nginx h1"],
        ),
        row("GET", "verified, HTTP/1.1", gets["kvsp verified"], "Redis TLS GET, unverified", gets["redis"]),
        row("PUT", "digests checked, h2", puts["kvsp h2"], "Redis TLS SET", puts["redis"]),
        row("PUT", "digests checked, HTTP/1.1", puts["kvsp h1"], "Redis TLS SET", puts["redis"]),
        row("PUT", "digests checked, SHA-256 known, HTTP/1.1", puts["kvsp known"], "Redis TLS SET", puts["redis"]),
        # What the machine allows: the same client and Envoy, and behind them what keeps nothing.
        *(
            row("PUT", f"{each} behind Envoy, SHA-256 known", puts[each], "Redis TLS SET", puts["redis"])
            for each in sinks
        ),
    ]


def _published(client: Client, scope_id: str, key: str) -> Sequence[ReplicaRecord]:
    """The records of a block, once the holder has told the index."""
    while not (found := client.lookup(scope_id, COMPAT, [key]).replicas):
        time.sleep(0.01)
    return found[0]
