"""Where blocks are: lookups at the index, of which only what this instance may and can use is passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

import grpc
import structlog

from kvsp.client.wire import decode_lookup
from kvsp.protocol import limits, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import LookupRequest, ReplicaRecord
from kvsp.rpc.channel import DEFAULT_TIMEOUT_S
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.rpc.lookup import LookupClient
from kvsp.v1 import index_pb2, index_pb2_grpc

LOOKUPS_MAX: Final = 16
"""For one list of keys, whose gaps each cost a lookup."""

LOOKUP_S: Final = 0.5
"""An index that takes longer is as good as away."""

log = structlog.get_logger()

Replicas = list[list[ReplicaRecord]]


class Directory:
    """Usable replicas by block: at `holders(scope_id)`, whole, in codec raw, verifiable by layer."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        client: LookupClient,
        principal: str,
        *,
        compat_id: str,
        descriptor: Descriptor,
        holders: Callable[[str], Collection[str]],
    ) -> None:
        self._stub = index_pb2_grpc.IndexStub(channel)
        self._client = client
        self._principal = principal
        self._compat_id = compat_id
        self._descriptor = descriptor
        self._holders = holders

    async def prefix(self, scope_id: str, keys: Sequence[bytes]) -> Replicas:
        """The replicas of the leading keys that have any."""
        return await self._find(scope_id, keys, lookups=1)

    async def each(self, scope_id: str, keys: Sequence[bytes]) -> Replicas:
        """The replicas of every key, none for some."""
        found = await self._find(scope_id, keys, lookups=LOOKUPS_MAX)
        return found + [[] for _ in keys[len(found) :]]

    async def _find(self, scope_id: str, keys: Sequence[bytes], lookups: int) -> Replicas:
        """The index is advisory (R-088): what it does not tell, or not soon, is computed."""
        found: Replicas = []
        try:
            async with asyncio.timeout(LOOKUP_S):
                while lookups and (rest := keys[len(found) :][: limits.LOOKUP_KEYS_MAX]):
                    lookups -= 1
                    found += await self._lookup(scope_id, rest)
                    if lookups and len(found) < len(keys):
                        found.append([])  # "MUST stop at the first key without a replica"
        except (KvspError, TimeoutError) as error:
            log.warning("lookup failed", kind=type(error).__name__)
        return found

    async def withdraw(self, holder: str, block_key: str) -> None:
        """Report a replica that does not match its digest, if the index lets us (R-162, U-47)."""
        request = index_pb2.DeleteReplicaRequest(holder_id=party_id(holder), block_key=bytes.fromhex(block_key))
        try:
            async with translated():
                await self._stub.DeleteReplica(
                    request, metadata=speak_for(self._principal), timeout=DEFAULT_TIMEOUT_S
                )
        except KvspError as error:
            log.info("replica not withdrawn", holder=holder, status=error.status)

    async def _lookup(self, scope_id: str, keys: Sequence[bytes]) -> Replicas:
        request = index_pb2.LookupRequest(
            scope_id=bytes.fromhex(scope_id), compat_id=bytes.fromhex(self._compat_id), block_keys=b"".join(keys)
        )
        text = bytearray()
        async with self._client.lookup(self._principal, request) as answer:
            async for piece in answer.pieces:
                text += piece
        asked = LookupRequest(scope_id, self._compat_id, [key.hex() for key in keys])
        # Thousands of records take tens of milliseconds: not on the event loop.
        reply = await asyncio.to_thread(decode_lookup, text, asked)
        trusted = self._holders(scope_id)
        return [
            [record for record in row if record.holder in trusted and self._fits(record)] for row in reply.replicas
        ]

    def _fits(self, record: ReplicaRecord) -> bool:
        """Can it be fetched as a whole, and verified by layer?"""
        resident = sum(entry.layer_count for entry in record.residency)
        return (
            record.codec == registry.RAW.value
            and record.layer_count == resident == self._descriptor.layers
            and bool(record.layer_digests)
            and record.size == 2 * self._descriptor.layers * self._descriptor.section_octets
        )
