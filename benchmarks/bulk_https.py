"""Block GET through Envoy from outside, four in flight, beside nginx with the same file and Redis over TLS.

    python -m benchmarks bulk_https

The gateway reads the holder's shared memory. Each flight is a thread with a client of its own, in one process;
nginx is asked by the same clients as we are. The targets: 0.7 of nginx at 2 MiB, 0.9 at 32 MiB, and ahead of Redis
at both. `Envoy alone` is what is left when nothing but nginx with the file stands behind Envoy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import peers
from benchmarks.blocks import MIB, _redis
from benchmarks.bulk_peers import in_threads
from benchmarks.measure import Row, interleaved
from benchmarks.stack import COMPAT, Bench, behind_envoy, bench_stack, make_container, make_key

AT_ONCE = 4
OURS, NGINX, REDIS = "through Envoy,", "nginx mTLS,", "Redis TLS GET"
ALONE, BARE = "Envoy alone,", "bare"
SIZES = {2 * MIB: (20, 64), 32 * MIB: (10, 16)}  # octets -> rounds, blocks in a turn

Fetch = Callable[[], object]


def run() -> list[Row]:
    """Rows of the table."""
    rows: list[Row] = []
    with bench_stack() as bench, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        files = work / "files"
        with (
            peers.nginx(work / "nginx", files, bench.server_tls) as nginx,
            peers.redis(work / "redis", bench.server_tls) as port,
            behind_envoy(bench.layout, work / "bare", BARE, partial(peers.plain_nginx, work, files)) as bare,
        ):
            holders = {NGINX: nginx, ALONE: bare}
            for size, turns in SIZES.items():
                rows += _size(bench, files, holders, port, size, *turns)
    return rows


def _size(
    bench: Bench, files: Path, holders: Mapping[str, str], port: int, size: int, rounds: int, blocks: int
) -> list[Row]:
    octets, key = make_container(size), make_key("four", size)
    for root in (files, files / BARE):
        path = root / "blocks" / COMPAT / bench.scope_id / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(octets)
    with ExitStack() as stack:
        flights = [_flight(bench, stack, holders, port, octets, key) for _ in range(AT_ONCE)]

        def turn(contender: str) -> Callable[[], object]:
            return lambda: in_threads(AT_ONCE, blocks, lambda i: flights[i][contender])

        timings = interleaved({contender: turn(contender) for contender in flights[0]}, rounds)
    label = f"GET {size // MIB} MiB, {AT_ONCE} in flight"
    moved = size * blocks
    pairs = [
        (f"{ours} {version}", theirs if theirs == REDIS else f"{theirs} {version}")
        for version in ("h1", "h2")
        for ours, theirs in ((OURS, NGINX), (OURS, REDIS), (ALONE, REDIS))
    ]
    return [Row.rate(label, ours, timings[ours], theirs, timings[theirs], moved) for ours, theirs in pairs]


def _flight(
    bench: Bench, stack: ExitStack, holders: Mapping[str, str], port: int, octets: bytes, key: str
) -> dict[str, Fetch]:
    """One caller's connections, each warmed up."""
    buffer = bytearray(len(octets))
    made: dict[str, Fetch] = {}
    for version in ("h1", "h2"):
        extra = frozenset(holders.values())
        client = stack.enter_context(bench.client(extra, verify=False, http2_blocks=version == "h2"))
        client.put(bench.holder, COMPAT, bench.scope_id, key, octets)
        for name, holder in {OURS: bench.holder, **holders}.items():
            made[f"{name} {version}"] = partial(client.get_from, holder, COMPAT, bench.scope_id, key, into=buffer)
    redis = stack.enter_context(_redis(bench, port))
    redis.set(key, octets)
    made[REDIS] = partial(redis.get, key)
    for fetch in made.values():
        fetch()
    return made
