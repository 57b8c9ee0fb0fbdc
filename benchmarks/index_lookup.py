"""How fast the index answers, in process: `python -m benchmarks.index_lookup`.

A table of 200,000 replicas with 32 layer digests each; lookups of 1,024 keys, all matched, each from another
place of the table. Every step is set against the least work that could do the same in Python: one dict `get`
a key, and one `join` of octets that are ready.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import time
from collections.abc import Callable

from benchmarks.measure import interleaved
from kvsp.protocol import digests
from kvsp.protocol.records import InstanceStatus, Link, ReplicaRecord, Residency
from kvsp.rpc.convert import split_keys
from services.index.state import IndexState

HOLDER, TARGET = "https://h1.example/kvsp/", "https://ii7.example/kvsp/"
SCOPE, COMPAT = bytes(16), bytes(32)
LAYERS = 32


def key(i: int) -> bytes:
    return hashlib.sha256(i.to_bytes(8, "big")).digest()


def fill(state: IndexState, replicas: int) -> float:
    """Publish that many records; returns seconds per record."""
    each = [hashlib.sha256(bytes([layer])).digest() for layer in range(LAYERS)]
    digest, layer_digests = digests.format_digest(digests.replica_digest(each)), [d.hex() for d in each]
    spent = 0.0
    for i in range(replicas):
        if i % 20_000 == 0:
            print(f"\rpublishing {i:,} of {replicas:,}", end="", file=sys.stderr, flush=True)
        record = ReplicaRecord(
            block_key=key(i).hex(), compat_id=COMPAT.hex(), scope_id=SCOPE.hex(), holder=HOLDER, codec=1,
            size=2097152, digest=digest, residency=[Residency("host", (0, LAYERS - 1))],
            layer_digests=layer_digests, ttl_ms=600_000,
        )  # fmt: skip
        started = time.perf_counter()
        state.publish(record, replicas, 0)
        spent += time.perf_counter() - started
    print("\r", end="", file=sys.stderr)
    return spent / replicas


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=200_000)
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()

    state = IndexState(block_tokens={COMPAT: 16})
    publish_s = fill(state, options.replicas)
    state.observe(
        InstanceStatus(TARGET, 1, "active", 0, 0, 1, 0.0, 42000, 3100, 60_000, [Link(HOLDER, 200_000, 12)]), 0
    )
    starts = range(0, options.replicas - options.keys, options.keys)
    chains = [b"".join(map(key, range(start, start + options.keys))) for start in starts]
    table = {key(i): i for i in range(options.replicas)}
    ready = state.lookup(SCOPE, COMPAT, split_keys(chains[0]), 1).pieces

    def each(step: Callable[[list[bytes]], object]) -> Callable[[], object]:
        turns = itertools.cycle(chains)
        return lambda: step(split_keys(next(turns)))

    contenders = {
        "floor: dict get": each(lambda keys: list(map(table.get, keys))),
        "longest prefix": each(lambda keys: state.table.longest_prefix(SCOPE, COMPAT, keys, 1)),
        "floor: join": lambda: b"".join(ready),
        "prefix and JSON text": each(lambda keys: b"".join(state.lookup(SCOPE, COMPAT, keys, 1).pieces)),
        "and one target": each(
            lambda keys: state.estimate(state.lookup(SCOPE, COMPAT, keys, 1, survey=True), TARGET, 1)
        ),
    }
    octets = sum(map(len, ready))
    print(f"{options.replicas:,} replicas, {options.keys:,} keys a lookup, {octets:,} octets a reply")
    print(f"publish: {publish_s * 1e6:.1f} us a record")
    for name, timing in interleaved(contenders, options.rounds).items():
        rate = options.keys / timing.seconds / 1e6
        print(f"{name:22} {timing.seconds * 1e6:8.0f} us  {rate:6.2f} M keys/s  (spread {timing.spread:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
