"""Where blocks are and who knows: holders and the index, on their real states."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvsp.protocol import digests, jsonio
from kvsp.protocol.container import Header
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ZERO, ScopeKey, block_keys, scope_id
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Identity, Quotas
from kvsp.protocol.records import InstanceStatus, LookupReply, ReplicaRecord, Residency
from services.holder.blocks import Digested, Name
from services.holder.state import HolderState, Publish, Withdraw
from services.index.state import IndexState
from tests.sim.kernel import Kernel, Node
from tests.sim.network import Network, UnreachableError

SCOPE_KEY: Final = ScopeKey(bytes(range(32)))
SCOPE: Final = scope_id(SCOPE_KEY)
COMPAT: Final = hashlib.sha256(b"compat").digest()
BLOCK_TOKENS: Final = 4
REPLICA_TTL_MS: Final = 15_000
_HEADER: Final = Header(codec=1, first_layer=0, token_count=BLOCK_TOKENS, sections=((16, 16),))
TICK_MS: Final = 500
ARENA_OCTETS: Final = 4096 * 512


def identity(uri: str) -> Identity:
    return Identity(
        uri, frozenset({"instance"}), (uri,), frozenset({SCOPE.hex()}), frozenset(), frozenset(), Quotas(),
        frozenset({party_id(uri)}),
    )  # fmt: skip


def keys_of(tokens: Sequence[int], parent: bytes = ZERO) -> list[bytes]:
    """Keys of the complete blocks."""
    return block_keys(SCOPE_KEY, COMPAT, tokens, BLOCK_TOKENS, parent)


def name_of(key: bytes) -> Name:
    return Name(COMPAT, SCOPE, key)


def digested_of(key: bytes) -> Digested:
    """What the block of a key holds is a function of the key."""
    layer = hashlib.sha256(key).digest()
    return Digested(_HEADER, (layer,), hashlib.sha256(layer).digest())


@lru_cache(4096)
def record_of(key: bytes, holder: str) -> ReplicaRecord:
    layers = digested_of(key).layer_digests
    return ReplicaRecord(
        block_key=key.hex(), compat_id=COMPAT.hex(), scope_id=SCOPE.hex(), holder=holder, codec=1, size=32,
        digest=digests.format_digest(digests.replica_digest(layers)), residency=[Residency("host", (0, 0))],
        layer_digests=[each.hex() for each in layers], ttl_ms=REPLICA_TTL_MS,
    )  # fmt: skip


class IndexNode(Node):
    """The index: all in memory, gone with a crash."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self.state = self._fresh()

    @staticmethod
    def _fresh() -> IndexState:
        return IndexState(replica_ttl_ms_max=60_000, block_tokens={COMPAT: BLOCK_TOKENS})

    def boot(self) -> None:
        self.state = self._fresh()

    async def publish(self, record: ReplicaRecord) -> int:
        return self.state.publish(record, 100_000, self.now_ms)[1]

    async def withdraw(self, holder: str, key: bytes) -> None:
        self.state.withdraw(party_id(holder), key, self.now_ms)

    async def feed(self, status: InstanceStatus) -> None:
        self.state.observe(status, self.now_ms)

    async def lookup(self, keys: Sequence[bytes]) -> LookupReply:
        found = self.state.lookup(SCOPE, COMPAT, keys, self.now_ms)
        return jsonio.decode(b"".join(found.pieces) + b"}", LookupReply)


class HolderNode(Node):
    """A holder process. Its arena is gone with a crash; its records in the index then point at nothing (U-51)."""

    def __init__(self, kernel: Kernel, network: Network, name: str, base_uri: str, index: IndexNode) -> None:
        super().__init__(kernel, name)
        self.network = network
        self.base_uri = base_uri
        self.index = index
        self.self_identity = identity(base_uri)
        self.state = self._fresh()
        self._leases = 0

    def _fresh(self) -> HolderState:
        return HolderState(ARENA_OCTETS, publish_ttl_ms=REPLICA_TTL_MS)

    def boot(self) -> None:
        self.state = self._fresh()
        self._tick()

    def _tick(self) -> None:
        self.state.tick(self.now_ms)
        self._act()
        self.after(TICK_MS, self._tick)

    def leases(self) -> int:
        """Leases that are valid now."""
        if self.up:
            self.state.expire_leases(self.now_ms)
        return len(self.state.leases) if self.up else 0

    def left_over(self) -> list[str]:
        return [f"{self.name}: {self.leases()} leases"] if self.leases() else []

    # --- calls ---

    async def put(self, who: Identity, key: bytes) -> None:
        """Store a block. Raises KvspError: 412, 429, 503."""
        reservation = self.state.reserve(1, who, name_of(key), _HEADER.total_octets, self.now_ms)
        assert reservation is not None  # stored in one step, so nobody is ever writing
        self.state.commit(reservation, digested_of(key))
        self._act()

    async def get(self, who: Identity, key: bytes) -> bytes:
        """The SHA-256 of the container. Raises KvspError (kvsp-not-found)."""
        pin = self.state.open(1, who, name_of(key), self.now_ms)
        self.state.close(1, pin.id)
        return pin.block.digested.sha256

    async def lease(self, who: Identity, keys: Sequence[bytes], ttl_ms: int) -> str:
        """Raises KvspError: kvsp-not-found, kvsp-lease-quota."""
        self._leases += 1
        lease_id = f"{self.name}-{self.life}-{self._leases}"
        self.state.lease(who, lease_id, keys, ttl_ms, self.now_ms)
        self.kernel.count("leases")
        return lease_id

    async def renew(self, who: Identity, lease_id: str, ttl_ms: int) -> None:
        self.state.leases.renew(lease_id, who, ttl_ms, self.now_ms)

    async def release(self, who: Identity, lease_id: str) -> None:
        self.state.release_lease(who, lease_id, self.now_ms)

    def holds(self, key: bytes) -> bool:
        return self.up and name_of(key) in self.state.store

    # --- publication ---

    def _act(self) -> None:
        for instruction in self.state.instructions():
            if isinstance(instruction, Publish):
                self.spawn(self._publish(instruction))
            elif isinstance(instruction, Withdraw):
                self.spawn(self._withdraw(instruction))

    async def _publish(self, instruction: Publish) -> None:
        block, sent_ms = instruction.block, self.now_ms
        record = record_of(block.name.block_key, self.base_uri)
        try:
            granted = await self.network.call(self, self.index, lambda: self.index.publish(record))
        except (KvspError, UnreachableError):
            self.state.refused(block, self.now_ms)
        else:
            self.state.published(block, granted, sent_ms)

    async def _withdraw(self, instruction: Withdraw) -> None:
        key = instruction.block.name.block_key
        try:
            await self.network.call(self, self.index, lambda: self.index.withdraw(self.base_uri, key))
        except (KvspError, UnreachableError):
            return  # the record runs out
