"""Block GET through Envoy from outside, four in flight, beside nginx with the same file and Redis over TLS.

    python -m benchmarks bulk_https

The gateway reads the holder's shared memory. Each flight is a thread with a client of its own, in one process;
nginx is asked by the same clients as we are. The targets: 0.7 of nginx at 2 MiB, 0.9 at 32 MiB, and ahead of Redis
at both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks import peers
from benchmarks.blocks import MIB, _redis
from benchmarks.bulk_peers import in_threads
from benchmarks.measure import Row, interleaved
from benchmarks.stack import COMPAT, Bench, bench_stack, make_container, make_key

AT_ONCE = 4
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
        ):
            for size, turns in SIZES.items():
                rows += _size(bench, files, nginx, port, size, *turns)
    return rows


def _size(bench: Bench, files: Path, nginx: str, port: int, size: int, rounds: int, blocks: int) -> list[Row]:
    octets, key = make_container(size), make_key("four", size)
    path = files / "blocks" / COMPAT / bench.scope_id / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(octets)
    with ExitStack() as stack:
        flights = [_flight(bench, stack, nginx, port, octets, key) for _ in range(AT_ONCE)]

        def turn(contender: str) -> Callable[[], object]:
            return lambda: in_threads(AT_ONCE, blocks, lambda i: flights[i][contender])

        timings = interleaved({contender: turn(contender) for contender in flights[0]}, rounds)
    label = f"GET {size // MIB} MiB, {AT_ONCE} in flight"
    moved = size * blocks
    return [
        Row.rate(label, f"through Envoy, {version}", timings[f"kvsp {version}"], peer, timings[theirs], moved)
        for version in ("h1", "h2")
        for peer, theirs in ((f"nginx mTLS, {version}", f"nginx {version}"), ("Redis TLS GET", "redis"))
    ]


def _flight(bench: Bench, stack: ExitStack, nginx: str, port: int, octets: bytes, key: str) -> dict[str, Fetch]:
    """One caller's connections, each warmed up."""
    buffer = bytearray(len(octets))
    made: dict[str, Fetch] = {}
    for version in ("h1", "h2"):
        client = stack.enter_context(bench.client(frozenset({nginx}), verify=False, http2_blocks=version == "h2"))
        client.put(bench.holder, COMPAT, bench.scope_id, key, octets)
        for name, holder in (("kvsp", bench.holder), ("nginx", nginx)):
            made[f"{name} {version}"] = lambda client=client, holder=holder: client.get_from(  # type: ignore[misc]
                holder, COMPAT, bench.scope_id, key, into=buffer
            )
    redis = stack.enter_context(_redis(bench, port))
    redis.set(key, octets)
    made["redis"] = lambda: redis.get(key)
    for fetch in made.values():
        fetch()
    return made
