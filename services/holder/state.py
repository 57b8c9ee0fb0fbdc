"""The rules of a holder: residency, pins, reservations, leases, eviction, publication. Pure.

Events come in as calls with the caller's `now_ms`; replies are returned, refusals are KvspError, and
what the shell has to do is handed out by `instructions()` in the order in which it must happen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvsp.protocol import container, limits, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.policy import Identity
from services.holder.blocks import Block, Digested, EvictionPolicy, Kept, Lru, Name
from services.holder.leases import Lease, Leases
from services.holder.store import Store
from services.holder.timers import Timers
from services.holder.transfers import Pin, Reservation, Transfers

REFRESH_DIVISOR: Final = 3  # "refresh at TTL/3"


@dataclass(frozen=True, slots=True)
class Publish:
    """Put the block's record into the index, or refresh it; answer with `published` or `refused`."""

    block: Block


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take the block's record out of the index."""

    block: Block


@dataclass(frozen=True, slots=True)
class Settled:
    """Nobody writes this block any more: who waits for the outcome may ask again."""

    name: Name


Instruction = Publish | Withdraw | Settled


class HolderState:
    """Blocks of one holder in one arena of `arena_octets`.

    `descriptors` by compat_id say what a block must look like (U-25); with `require_known_compat` a
    block of any other is refused. `publish_ttl_ms` is the TTL asked for and the retention named
    before the first grant.
    """

    def __init__(
        self,
        arena_octets: int,
        *,
        publish_ttl_ms: int,
        descriptors: Mapping[bytes, Descriptor] | None = None,
        require_known_compat: bool = False,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        # Leased blocks take room from everybody else: no client gets more than half.
        self.leases = Leases(arena_octets // 2)
        self.store = Store(arena_octets, eviction or Lru())
        self.draining = False
        self.evictions = 0
        self._publish_ttl_ms = publish_ttl_ms
        self._descriptors = descriptors or {}
        self._require_known_compat = require_known_compat
        self._transfers = Transfers()
        self._writing: dict[Name, Reservation] = {}
        self._refresh: Timers[Block] = Timers()
        self._instructions: list[Instruction] = []

    def instructions(self) -> list[Instruction]:
        """What is to be done since the last call."""
        taken, self._instructions = self._instructions, []
        return taken

    def max_age_s(self, block: Block, now_ms: int) -> int:
        """How long a cache may keep the block (R-154, U-31): what is left of the last granted publication."""
        until_ms = block.published_until_ms
        left_ms = self._publish_ttl_ms if until_ms is None else until_ms - now_ms
        return max(0, left_ms) // 1000

    # --- reading ---

    def open(
        self,
        stream: int,
        identity: Identity,
        name: Name,
        now_ms: int,
        *,
        layers: tuple[int, int] | None = None,
        codec: int | None = None,
    ) -> Pin:
        """Pin a block, or layers first..last of it, for as long as its octets may take (limits.transfer_ms).

        Raises KvspError: kvsp-not-found (block, codec), kvsp-layers-unavailable, 429.
        """
        block = self.store.get(name)
        if block is None:
            raise KvspError(registry.NOT_FOUND, "no such block")
        header = block.digested.header
        if codec is not None and codec != header.codec:
            # Not 200 with another codec: 404 makes every client fall back at once (U-22).
            raise KvspError(registry.NOT_FOUND, "not available in this codec")
        offset = block.offset + header.header_octets
        if layers is not None:
            offset += header.layer_span(layers[0])[0]
            header = header.select(*layers)
        self._transfers.check_pin(identity, block)
        deadline_ms = now_ms + limits.transfer_ms(header.total_octets)
        pin = Pin(self._transfers.next_id(), stream, identity.uri, block, header, offset, deadline_ms)
        self._transfers.add(pin)
        block.pins += 1
        self.store.hold(block)
        return pin

    def pin(self, transfer: int, owner: str) -> Pin:
        """An open pin of this identity. Raises KvspError (kvsp-not-found)."""
        found = self._transfers.get(transfer)
        if not isinstance(found, Pin) or found.owner != owner:
            raise KvspError(registry.NOT_FOUND, "no such transfer")
        return found

    def close(self, stream: int, transfer: int) -> None:
        """Drop a pin of this stream; unknown is fine, it may have lapsed."""
        found = self._transfers.get(transfer)
        if isinstance(found, Pin) and found.stream == stream:
            self._unpin(found)

    # --- writing ---

    def reserve(
        self, stream: int, identity: Identity, name: Name, length: int, now_ms: int, *, shared: bool = False
    ) -> Reservation | None:
        """Room for a container of `length` octets, for as long as they may take (limits.transfer_ms).

        `shared`: the writer will put them there itself. None: another writes this block; ask again when
        it has Settled. Answering 412 before that outcome would tell the second writer of a block that may
        never come to be. Raises KvspError: 412, 413, kvsp-incompatible, 429, 503.
        """
        self.check_reserve(name, length)
        if name in self._writing:
            return None
        self._transfers.check_reservation(identity, length)  # before anything is evicted on a mere promise (D4)
        offset = self._make_room(length, now_ms)
        deadline_ms = now_ms + limits.transfer_ms(length)
        reservation = Reservation(
            self._transfers.next_id(), stream, identity.uri, name, offset, length, deadline_ms, shared
        )
        self._writing[name] = reservation
        self._transfers.add(reservation)
        return reservation

    def writer_until_ms(self, name: Name) -> int | None:
        """When who writes this block has finished or given up at the latest; None: nobody does."""
        reservation = self._writing.get(name)
        return None if reservation is None else reservation.deadline_ms

    def check_reserve(self, name: Name, length: int) -> None:
        """All that can refuse a container of `length` octets (0: unknown yet) but want of room.

        Raises KvspError: 412, 413, kvsp-incompatible.
        """
        if length > min(limits.BLOCK_OCTETS_MAX, self.store.capacity):
            raise KvspError(registry.CONTENT_TOO_LARGE, "container too long for this holder")
        # "an existing block is never overwritten", whatever the octets (R-157, U-21).
        if name in self.store:
            raise KvspError(registry.PRECONDITION_FAILED, "the block exists")
        if self._require_known_compat and name.compat_id not in self._descriptors:
            raise KvspError(registry.INCOMPATIBLE, "no descriptor of this compatibility id is configured")

    def reservation(self, transfer: int, owner: str) -> Reservation:
        """A reservation of this identity that can still become a block. Raises KvspError (kvsp-not-found)."""
        found = self._transfers.get(transfer)
        if not isinstance(found, Reservation) or found.owner != owner or found.lapsed:
            raise KvspError(registry.NOT_FOUND, "no such transfer")
        return found

    def check(self, reservation: Reservation, digested: Digested) -> None:
        """May this container become the block?

        Raises KvspError: 400, kvsp-not-found when the reservation has ended meanwhile, kvsp-incompatible.
        """
        if self._transfers.get(reservation.id) is not reservation or reservation.lapsed:
            raise KvspError(registry.NOT_FOUND, "no such transfer")
        header = digested.header
        if header.total_octets != reservation.length:
            raise bad_request("the container is shorter than announced")
        descriptor = self._descriptors.get(reservation.name.compat_id)
        if descriptor is not None:
            container.check_geometry(header, descriptor)
        elif header.first_layer != 0:
            # A holder given a part could never publish or complete the block (U-25).
            raise KvspError(registry.INCOMPATIBLE, "container does not begin with layer 0")

    def commit(self, reservation: Reservation, digested: Digested) -> Block:
        """The container is complete: make it a block. Raises KvspError as `check`, which changes nothing."""
        self.check(reservation, digested)
        self._transfers.remove(reservation)
        self._settle(reservation)
        name = reservation.name
        block = Block(name, reservation.offset, digested)
        self.store.add(block)
        if self.draining:
            block.withdrawn = True
        elif self.store.listed(name.block_key) is block:
            # The index has one record for holder and key: that of the block that came first (U-13, U-15).
            self._instructions.append(Publish(block))
        return block

    def abort(self, stream: int, transfer: int) -> Reservation | None:
        """Give a reservation of this stream back; nothing is stored. None: there was none, which is fine."""
        found = self._transfers.get(transfer)
        if not isinstance(found, Reservation) or found.stream != stream:
            return None
        self._transfers.remove(found)
        self._settle(found)
        self.store.free(found.offset)
        return found

    def end_stream(self, stream: int) -> list[Reservation]:
        """The peer is gone: drop every pin and reservation it had. The reservations are returned."""
        aborted: list[Reservation] = []
        for transfer in self._transfers.of_stream(stream):
            self.close(stream, transfer)
            reservation = self.abort(stream, transfer)
            if reservation is not None:
                aborted.append(reservation)
        return aborted

    def of_stream(self, stream: int) -> list[int]:
        """Numbers of what the stream has open."""
        return self._transfers.of_stream(stream)

    def is_busy(self, stream: int) -> bool:
        """Has the stream anything open?"""
        return bool(self._transfers.of_stream(stream))

    # --- leases ---

    def lease(
        self,
        identity: Identity,
        lease_id: str,
        block_keys: Iterable[bytes],
        ttl_ms: int,
        now_ms: int,
        *,
        scope_id: bytes = b"",
        compat_id: bytes = b"",
    ) -> Lease:
        """Lease every block of these keys that the identity may read, all or nothing (U-15, U-16).

        Raises KvspError: kvsp-not-found with the missing keys, kvsp-lease-quota.
        """
        self.expire_leases(now_ms)
        blocks: list[Block] = []
        missing: list[str] = []
        for key in dict.fromkeys(block_keys):
            found = [
                block
                for block in self.store.of_key(key)
                if block.name.scope_id.hex() in identity.scopes
                and scope_id in (b"", block.name.scope_id)
                and compat_id in (b"", block.name.compat_id)
            ]
            blocks += found
            if not found:
                missing.append(key.hex())
        if missing:
            raise KvspError(registry.NOT_FOUND, "blocks not held", {"block_keys": missing})
        lease = self.leases.create(lease_id, identity, blocks, ttl_ms, now_ms)
        for block in lease.blocks:
            self.store.hold(block)
        return lease

    def release_lease(self, identity: Identity, lease_id: str, now_ms: int) -> None:
        """End a lease. Raises KvspError (kvsp-not-found)."""
        self._let_go(self.leases.release(lease_id, identity, now_ms))

    def expire_leases(self, now_ms: int) -> None:
        """Leases lapse at their expiry (R-141)."""
        self._let_go(self.leases.expire(now_ms))

    # --- time, publication, removal ---

    def tick(self, now_ms: int) -> list[Reservation]:
        """Let lapse what has run out, and refresh records that are due. Returns reservations that have ended."""
        self.expire_leases(now_ms)
        ended = [ended for transfer in self._transfers.due(now_ms) if (ended := self._lapse(transfer))]
        self._instructions += [Publish(block) for block in self._refresh.due(now_ms)]
        return ended

    def published(self, block: Block, granted_ms: int, sent_ms: int) -> None:
        """The index lists the block for `granted_ms`, counted from no earlier than `sent_ms`."""
        if not block.withdrawn:
            block.published_until_ms = sent_ms + granted_ms
            self._refresh.set(block, sent_ms + max(1, granted_ms // REFRESH_DIVISOR))

    def refused(self, block: Block, now_ms: int) -> None:
        """The index refused the record: try again when a refresh would be due."""
        if not block.withdrawn:
            self._refresh.set(block, now_ms + self._publish_ttl_ms // REFRESH_DIVISOR)

    def withdraw(self, block: Block) -> None:
        """Out of the index; it is still found here until it is dropped."""
        if not block.withdrawn:
            was_listed = self.store.listed(block.name.block_key) is block
            block.withdrawn = True
            self._refresh.cancel(block)
            if was_listed:
                self._instructions.append(Withdraw(block))

    def set_tier(self, kept: Kept | None, names: Collection[Name] = ()) -> None:
        """What the engine beside this holder keeps of these blocks, of all when none is named (R-044)."""
        named = [block for name in names if (block := self.store.get(name))] if names else self.store.all()
        for block in named:
            if block.keep(kept) and self.store.listed(block.name.block_key) is block:
                self._instructions.append(Publish(block))

    def drain(self) -> None:
        """Withdraw everything, and list nothing any more; what is held can still be read."""
        self.draining = True
        for block in self.store.all():
            self.withdraw(block)

    def drop(self, block: Block) -> None:
        """Withdraw a block and let it go, leased or not: purged by an operator (D11) or corrupt (U-27, R-143)."""
        if block.gone:
            return
        if block.leases:
            self.leases.forget(block)
            self.store.let_go(block)
        self._remove(block)

    def _remove(self, block: Block) -> None:
        """Out of the index first, then out of here; the extent goes with the last reader (R-086, R-143)."""
        self.withdraw(block)
        self.store.remove(block)

    def _make_room(self, length: int, now_ms: int) -> int:
        """An extent, evicting what may go. Raises KvspError (503)."""
        self.expire_leases(now_ms)
        while (offset := self.store.allocate(length)) is None:
            victims = self.store.victims(length)
            if victims is None:
                raise KvspError(registry.UNAVAILABLE, "no room", retry_after_s=self._retry_after_s(now_ms))
            for victim in victims:
                self._remove(victim)
            self.evictions += len(victims)
        return offset

    def _retry_after_s(self, now_ms: int) -> int:
        """Seconds until the first lease or transfer ends at the latest."""
        ends = [at for at in (self.leases.next_ms(), self._transfers.next_ms()) if at is not None]
        return max(1, -(-(min(ends, default=now_ms) - now_ms) // 1000))

    def _let_go(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.store.let_go(block)

    # --- ends of transfers ---

    def _unpin(self, pin: Pin) -> None:
        self._transfers.remove(pin)
        pin.block.pins -= 1
        self._let_go([pin.block])

    def _settle(self, reservation: Reservation) -> None:
        if not reservation.lapsed:
            del self._writing[reservation.name]
            self._instructions.append(Settled(reservation.name))

    def _lapse(self, transfer: Pin | Reservation) -> Reservation | None:
        if isinstance(transfer, Pin):
            self._unpin(transfer)
            return None
        if not transfer.shared:  # octets come through us, and no more are taken
            return self.abort(transfer.stream, transfer.id)
        self._settle(transfer)
        transfer.lapsed = True
        return None
