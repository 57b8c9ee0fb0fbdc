"""Fills a running index over its Publish stream, as a holder does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.stack import COMPAT, LAYERS, make_key
from kvsp.protocol import digests
from kvsp.rpc.channel import open_channel
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, index_pb2, index_pb2_grpc

TTL_MS = 3_600_000


async def fill_index(socket: Path, principal: str, holder: str, scope_id: str, replicas: int) -> int:
    """Publish that many records with LAYERS layer digests each; how many the index took."""
    each = [bytes.fromhex(make_key("layer", layer)) for layer in range(LAYERS)]
    record = common_pb2.ReplicaRecord(
        name=common_pb2.BlockName(compat_id=bytes.fromhex(COMPAT), scope_id=bytes.fromhex(scope_id)),
        holder=holder,
        codec=1,
        size=2 << 20,
        digest=digests.replica_digest(each),
        residency=[common_pb2.Residency(tier="host", layers=common_pb2.LayerRange(first=0, last=LAYERS - 1))],
        layer_digests=b"".join(each),
        ttl_ms=TTL_MS,
    )

    async def items() -> AsyncIterator[index_pb2.PublishRequest]:
        for number in range(replicas):
            record.name.block_key = bytes.fromhex(make_key("chain", number))
            yield index_pb2.PublishRequest(seq=number, put=record)

    taken = 0
    async with open_channel(f"unix:{socket}") as channel:
        stream = index_pb2_grpc.IndexStub(channel).Publish(items(), metadata=speak_for(principal))
        async for reply in stream:
            taken += reply.HasField("put")
    return taken
