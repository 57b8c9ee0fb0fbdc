"""Leases and their quotas (R-140 ... R-142, U-14 ... U-17, D13). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity, Quotas
from services.holder.blocks import Account, Block
from services.holder.timers import Timers


@dataclass(eq=False, slots=True)
class Lease:
    """A lease of one identity; `blocks` shrinks only when a block is purged."""

    id: str
    owner: str
    blocks: list[Block]
    expires_ms: int


class _Account(Account):
    """What one identity has leased."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: set[Lease] = set()


class Leases:
    """Accounts are by identity, not by connection. Keeps `Block.leases`; what lapses is returned to the caller.

    Whatever its quota, no identity leases more than `octets_max`.
    """

    def __init__(self, octets_max: int) -> None:
        self._octets_max = octets_max
        self._leases: dict[str, Lease] = {}
        self._accounts: dict[str, _Account] = {}
        self._expiry: Timers[Lease] = Timers()

    def __len__(self) -> int:
        return len(self._leases)

    def create(
        self, lease_id: str, identity: Identity, blocks: Iterable[Block], ttl_ms: int, now_ms: int
    ) -> Lease:
        """Lease all of `blocks`. Raises KvspError (kvsp-lease-quota)."""
        wanted = list(dict.fromkeys(blocks))
        account = self._accounts.get(identity.uri, _Account())
        _check_ttl(identity.quotas, ttl_ms)
        if len(account.leases) >= identity.quotas.leases:
            raise KvspError(registry.LEASE_QUOTA, "too many leases")
        if account.octets + account.more(wanted) > min(identity.quotas.leased_octets, self._octets_max):
            retry = min((lease.expires_ms for lease in account.leases), default=None)
            retry_after_s = None if retry is None else max(1, -(-(retry - now_ms) // 1000))
            raise KvspError(registry.LEASE_QUOTA, "too many leased octets", retry_after_s=retry_after_s)
        lease = Lease(lease_id, identity.uri, wanted, now_ms + ttl_ms)
        self._accounts[identity.uri] = account
        self._leases[lease_id] = lease
        self._expiry.set(lease, lease.expires_ms)
        account.leases.add(lease)
        for block in wanted:
            account.add(block)
            block.leases += 1
        return lease

    def renew(self, lease_id: str, identity: Identity, ttl_ms: int, now_ms: int) -> Lease:
        """Count the TTL anew, from now. Raises KvspError (kvsp-not-found, kvsp-lease-quota)."""
        lease = self._owned(lease_id, identity, now_ms)
        _check_ttl(identity.quotas, ttl_ms)
        lease.expires_ms = now_ms + ttl_ms
        self._expiry.set(lease, lease.expires_ms)
        return lease

    def release(self, lease_id: str, identity: Identity, now_ms: int) -> list[Block]:
        """End a lease; blocks that no lease covers any more. Raises KvspError (kvsp-not-found)."""
        lease = self._owned(lease_id, identity, now_ms)
        self._expiry.cancel(lease)
        return self._end(lease)

    def expire(self, now_ms: int) -> list[Block]:
        """End what has run out; blocks that no lease covers any more (R-141)."""
        return [block for lease in self._expiry.due(now_ms) for block in self._end(lease)]

    def forget(self, block: Block) -> None:
        """The block is gone: take it out of every lease."""
        for lease in self._leases.values():
            if block in lease.blocks:
                lease.blocks.remove(block)
                self._accounts[lease.owner].remove(block)
                block.leases -= 1

    def next_ms(self) -> int | None:
        """When the first lease runs out."""
        return self._expiry.next_ms()

    def octets(self, owner: str) -> int:
        """Octets of the arena that an identity has leased."""
        account = self._accounts.get(owner)
        return 0 if account is None else account.octets

    def _owned(self, lease_id: str, identity: Identity, now_ms: int) -> Lease:
        lease = self._leases.get(lease_id)
        # Unknown, run out and another's are one answer: no oracle (U-17).
        if lease is None or lease.owner != identity.uri or lease.expires_ms <= now_ms:
            raise KvspError(registry.NOT_FOUND, "no such lease")
        return lease

    def _end(self, lease: Lease) -> list[Block]:
        del self._leases[lease.id]
        account = self._accounts[lease.owner]
        account.leases.remove(lease)
        for block in lease.blocks:
            account.remove(block)
            block.leases -= 1
        if not account.leases:
            del self._accounts[lease.owner]
        return [block for block in lease.blocks if not block.leases]


def _check_ttl(quotas: Quotas, ttl_ms: int) -> None:
    # Above the limit is refused, not clamped: "MUST enforce ... quotas on ... lease TTL" (R-142, U-17).
    if ttl_ms > quotas.lease_ttl_ms:
        raise KvspError(registry.LEASE_QUOTA, "lease ttl above the limit")
