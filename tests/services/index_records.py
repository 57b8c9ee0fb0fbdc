"""Replica and status records for the index tests."""

from __future__ import annotations

import hashlib
from typing import Any

from msgspec import structs

from kvsp.protocol import digests
from kvsp.protocol.records import InstanceStatus, Link, ReplicaRecord, Residency

H1, H2 = "https://h1.example/kvsp/", "https://h2.example/kvsp/"
SCOPE, OTHER_SCOPE, NO_SCOPE = "aa" * 16, "bb" * 16, "cc" * 16
COMPAT, OTHER_COMPAT = "11" * 32, "22" * 32
LAYERS = 4


def key(i: int) -> bytes:
    """A block key."""
    return hashlib.sha256(b"key %d" % i).digest()


def record(i: int, holder: str = H1, layers: int = LAYERS, seed: int = 0, **changes: Any) -> ReplicaRecord:
    """A valid record of block i; `seed` varies its octets."""
    each = [hashlib.sha256(b"%d %d %d" % (i, layer, seed)).digest() for layer in range(layers)]
    members: dict[str, Any] = {
        "block_key": key(i).hex(),
        "compat_id": COMPAT,
        "scope_id": SCOPE,
        "holder": holder,
        "codec": 1,
        "size": 2097152,
        "digest": digests.format_digest(digests.replica_digest(each)),
        "residency": [Residency("host", (0, layers - 1))],
        "layer_digests": [digest.hex() for digest in each],
        "ttl_ms": 600_000,
    }
    return ReplicaRecord(**(members | changes))


def status(instance: str, links: dict[str, tuple[float, float]], **changes: Any) -> InstanceStatus:
    """A valid status; `links` are holder -> (Mbit/s, rtt in us)."""
    made = InstanceStatus(
        instance=instance,
        epoch=12,
        state="active",
        running=18,
        queued=3,
        batch_size=32,
        kv_utilization=0.71,
        prefill_tokens_per_s=42000,
        decode_tokens_per_s=3100,
        ttl_ms=3000,
        links=[Link(holder, rate, rtt) for holder, (rate, rtt) in links.items()],
    )
    return structs.replace(made, **changes)
