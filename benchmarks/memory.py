"""The gateway's memory while 64 MiB blocks are read and written 8 at a time: it must not follow the block size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil

from benchmarks.measure import Row
from benchmarks.stack import COMPAT, bench_stack, make_container, make_key

MIB = 1 << 20
BLOCK_OCTETS = 64 * MIB
PARALLEL = 8


def run() -> list[Row]:
    """No ratio: prints what the gateway grew by."""
    with bench_stack(arena_octets=2 << 30) as bench, bench.client() as client:
        process = psutil.Process(bench.pid("gateway"))
        small, large = make_container(MIB), make_container(BLOCK_OCTETS)

        def exchange(octets: bytes, number: int) -> None:
            key = make_key("memory", len(octets), number)
            client.put(bench.holder, COMPAT, bench.scope_id, key, octets)
            client.get_from(bench.holder, COMPAT, bench.scope_id, key)

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(exchange, [small] * PARALLEL, range(PARALLEL)))
            before = _private(process)
            list(pool.map(exchange, [large] * PARALLEL, range(PARALLEL)))
            after = _private(process)
        sizes = f"{before / MIB:.0f} MiB after 1 MiB blocks, {after / MIB:.0f} MiB after 64 MiB blocks"
        print(f"gateway: {sizes}, {PARALLEL} at a time")
    return []


def _private(process: psutil.Process) -> int:
    """Octets that are the process's own; pages of the holder's arena mapped read-only are not."""
    return int(process.memory_full_info().uss)
