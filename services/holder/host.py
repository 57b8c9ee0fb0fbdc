"""The shell around the state: clock, arena, worker threads, the index. One per process, one event loop."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

import grpc

from kvsp.protocol import access, limits, registry
from kvsp.protocol.errors import KvspError, bad_request, unavailable
from kvsp.protocol.policy import Identity, Policy
from kvsp.protocol.routes import Route
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import load_descriptors
from services.holder import metrics
from services.holder.arena import Arena
from services.holder.blocks import Block, Kept, Name
from services.holder.config import HolderConfig, check_identity
from services.holder.hashing import Ingest, RangeDigests
from services.holder.journal import Journal
from services.holder.leases import Lease
from services.holder.offers import Offers
from services.holder.publisher import Publisher
from services.holder.state import HolderState, Publish, Settled, Withdraw
from services.holder.transfers import Pin, Reservation

TICK_S: Final = 0.25
WITHDRAW_S: Final = 2.0
GOODBYE_S: Final = 2.0
DRAIN_S: Final = 5.0


class Host:
    """What the RPCs do, after authorization. Raises KvspError as the state does."""

    def __init__(self, config: HolderConfig, policy: Policy, index: grpc.aio.Channel) -> None:
        self.config = config
        self.policy = policy
        self._identity = check_identity(config, policy)
        self.state = HolderState(
            config.arena_octets,
            publish_ttl_ms=config.publish_ttl_ms,
            descriptors=load_descriptors(config.descriptors),
            require_known_compat=config.require_known_compat,
        )
        self._journal = Journal(Path(config.state_dir) if config.state_dir else None)
        self.arena = Arena.create(
            Path(config.arena_dir), config.base_uri, config.arena_octets, config.bulk.get("shm")
        )
        self._executor = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "hash")
        self._ranges = RangeDigests(self.arena.view, self._executor)
        self._ingests: dict[Reservation, Ingest] = {}
        self._outcomes: dict[Name, asyncio.Event] = {}
        self.offers = Offers(config.bulk, self.arena.view)
        self.draining = asyncio.Event()
        self._purges: dict[Block, asyncio.Task[None]] = {}
        self._numbers = count(1)
        self._streams: set[int] = set()
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self.publisher = Publisher(
            index, config.principal, config.base_uri, config.publish_ttl_ms, self._journal,
            held=self.state.store.all, listed=self.state.store.listed,
            published=self.state.published, refused=lambda block: self.state.refused(block, now_ms()),
        )  # fmt: skip
        metrics.ARENA_OCTETS.set(config.arena_octets)

    # --- lifetime ---

    async def run_timers(self) -> None:
        """Everything that depends on time alone."""
        while True:
            await asyncio.sleep(TICK_S)
            for reservation in self.state.tick(now_ms()):
                self._stop(reservation)
            self.carry_out()
            metrics.ARENA_USED_OCTETS.set(self.state.store.used_octets)
            metrics.BLOCKS.set(len(self.state.store))
            metrics.LEASES.set(len(self.state.leases))

    async def drain(self) -> None:
        """Prepare to stop: withdraw everything while it can still be read (R-086), then end the control streams.

        Waits for the transfers that are open, but for nobody longer than a bound.
        """
        self.state.drain()
        self.carry_out()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self.publisher.flushed()
        self.draining.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._no_streams.wait()

    @contextmanager
    def control_stream(self) -> Iterator[int]:
        """Around a control stream: its number. Everything that its peer had open is dropped at the end."""
        stream = next(self._numbers)
        self._streams.add(stream)
        self._no_streams.clear()
        try:
            yield stream
        finally:
            for transfer in self.state.of_stream(stream):
                self.offers.revoke(transfer)
            for reservation in self.state.end_stream(stream):
                self._stop(reservation)
            self.carry_out()
            self._streams.discard(stream)
            if not self._streams:
                self._no_streams.set()

    def close(self) -> None:
        """Give everything back that outlives the process."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._journal.close()
        self.arena.close()

    def carry_out(self) -> None:
        """Do what the state asks for, in its order."""
        for instruction in self.state.instructions():
            match instruction:
                case Publish(block):
                    self.publisher.publish(block)
                case Withdraw(block):
                    self.publisher.withdraw(block)
                case Settled(name):
                    outcome = self._outcomes.pop(name, None)
                    if outcome is not None:
                        outcome.set()

    def authorize(self, identity: Identity, route: Route, scope_id: bytes) -> None:
        """May the caller use the scope, and may this holder serve it at all (R-158, R-211)?"""
        access.authorize(self.policy, identity, route, scope_id=scope_id.hex())
        self.policy.require_scope(self._identity, scope_id.hex())

    def scheme(self, offered: Iterable[str], *, same_host: bool) -> str:
        """The first of the peer's schemes that this holder has. Raises KvspError (503)."""
        for scheme in offered:
            if scheme in self.offers or (scheme in self.config.schemes and (same_host or scheme != "shm")):
                return scheme
        raise KvspError(registry.UNAVAILABLE, "no transport in common")

    # --- reading ---

    async def open(
        self,
        stream: int,
        identity: Identity,
        name: Name,
        layers: tuple[int, int] | None,
        codec: int | None,
    ) -> tuple[Pin, bytes, bytes]:
        """A pin, the encoded header of what it covers, and the SHA-256 of header and payload."""
        self._check_open()
        if (block := self.state.store.get(name)) in self._purges:
            await self._purge(block)  # who finds it gone here finds it nowhere
        pin = self.state.open(stream, identity, name, now_ms(), layers=layers, codec=codec)
        try:
            header = pin.header.encode()
            sha256 = await self._ranges.sha256(pin, header)
        except BaseException:
            self.close_pin(pin)
            raise
        if sha256 is None:
            # At rest, corruption is a miss: withdraw, drop, 404, so that the client falls through (U-27).
            metrics.DIGEST_FAILURES.labels("at_rest").inc()
            self.close_pin(pin)
            await self._purge(pin.block)
            raise KvspError(registry.NOT_FOUND, "no such block")
        return pin, header, sha256

    def max_age_s(self, block: Block) -> int:
        """How long a cache may keep the block."""
        return self.state.max_age_s(block, now_ms())

    def close_pin(self, pin: Pin) -> None:
        """Drop a pin."""
        self.close_transfer(pin.stream, pin.id)

    def close_transfer(self, stream: int, transfer: int) -> None:
        """Drop a pin of a stream, by number."""
        self._revoke(stream, transfer)
        self.state.close(stream, transfer)
        self.carry_out()

    def read(self, pin: Pin, at: int) -> bytes:
        """A chunk of the payload from `at` on. Raises KvspError (kvsp-not-found) when the pin has lapsed."""
        self.state.pin(pin.id, pin.owner)
        end = min(at + limits.GRPC_CHUNK_OCTETS, pin.header.payload_octets)
        return bytes(self.arena.view[pin.offset + at : pin.offset + end])

    # --- writing ---

    async def reserve(
        self, stream: int, identity: Identity, name: Name, length: int, *, shared: bool
    ) -> Reservation:
        """Room to write. Waits while another writes the same block, at most until that one's deadline."""
        reservation = self._try_reserve(stream, identity, name, length, shared=shared)
        if reservation is None:
            until_ms = self.state.writer_until_ms(name) or now_ms()
            try:
                # Lapses are seen at the next tick.
                async with asyncio.timeout((until_ms - now_ms()) / 1000 + 2 * TICK_S):
                    while reservation is None:
                        await self._outcomes.setdefault(name, asyncio.Event()).wait()
                        reservation = self._try_reserve(stream, identity, name, length, shared=shared)
            except TimeoutError:
                raise unavailable("others are writing this block") from None
        extent = self.arena.view[reservation.offset : reservation.offset + length]
        self._ingests[reservation] = Ingest(extent, self._executor, shared=shared)
        return reservation

    def _try_reserve(
        self, stream: int, identity: Identity, name: Name, length: int, *, shared: bool
    ) -> Reservation | None:
        self._check_open()
        try:
            return self.state.reserve(stream, identity, name, length, now_ms(), shared=shared)
        except KvspError as error:
            if error.problem is registry.UNAVAILABLE:
                metrics.NO_ROOM.inc()
            raise
        finally:
            self._count_evictions()
            self.carry_out()

    def _check_open(self) -> None:
        if self.draining.is_set():
            raise unavailable("the holder is stopping")

    def write(self, reservation: Reservation, octets: bytes) -> None:
        """Append octets. Raises KvspError (400) when there is no room for as many."""
        self.state.reservation(reservation.id, reservation.owner)
        ingest = self._ingests[reservation]
        end = ingest.arrived + len(octets)
        if end > reservation.length or ingest.shared:
            raise bad_request("more octets than announced")
        start = reservation.offset
        self.arena.view[start + ingest.arrived : start + end] = octets
        ingest.advance(end)

    def wrote(self, reservation: Reservation, octets: int) -> None:
        """A writer that shares memory has put octets [0, octets) in place itself."""
        ingest = self._ingests[reservation]
        if ingest.shared:
            ingest.advance(octets)

    def arrived(self, reservation: Reservation, octets: int) -> None:
        """A transport of its own has put octets [0, octets) in place."""
        ingest = self._ingests.get(reservation)
        if ingest is not None:
            ingest.advance(octets)

    async def commit(self, reservation: Reservation, declared: list[tuple[str, bytes]]) -> Block:
        """Check the container and make it visible. On any failure nothing is stored and the room is free."""
        ingest = self._ingests[reservation]
        try:
            if self.config.require_put_digest and not declared:
                raise bad_request("this holder takes no block without Repr-Digest")
            self.offers.revoke(reservation.id)
            if ingest.shared:
                ingest.advance(reservation.length)
            digested = await ingest.finish()
            self.state.check(reservation, digested)
            await ingest.check(declared, digested.sha256)
            block = self.state.commit(reservation, digested)
        except BaseException as error:
            if isinstance(error, KvspError) and error.problem is registry.DIGEST_MISMATCH:
                metrics.DIGEST_FAILURES.labels("upload").inc()
            self.abort(reservation.stream, reservation.id)
            raise
        finally:
            self.carry_out()
        del self._ingests[reservation]
        return block

    def abort(self, stream: int, transfer: int) -> None:
        """Give room back."""
        self._revoke(stream, transfer)
        reservation = self.state.abort(stream, transfer)
        if reservation is not None:
            self._stop(reservation)
        self.carry_out()

    def _revoke(self, stream: int, transfer: int) -> None:
        if transfer in self.state.of_stream(stream):
            self.offers.revoke(transfer)

    def _stop(self, reservation: Reservation) -> None:
        ingest = self._ingests.pop(reservation, None)
        if ingest is not None:
            ingest.stop()

    def _count_evictions(self) -> None:
        metrics.EVICTIONS.inc(self.state.evictions)
        self.state.evictions = 0

    # --- leases, tiers, purging ---

    def lease(
        self, identity: Identity, block_keys: list[bytes], ttl_ms: int, scope_id: bytes, compat_id: bytes
    ) -> Lease:
        """Lease blocks under a fresh id."""
        with _counted():
            return self.state.lease(
                identity, str(uuid.uuid4()), block_keys, ttl_ms, now_ms(), scope_id=scope_id, compat_id=compat_id
            )

    def renew(self, identity: Identity, lease_id: str, ttl_ms: int) -> Lease:
        """Count the TTL of a lease anew."""
        with _counted():
            return self.state.leases.renew(lease_id, identity, ttl_ms, now_ms())

    def set_tier(self, kept: Kept | None, names: list[Name]) -> None:
        """The engine beside this holder keeps these layers, too, of the blocks named, or of all."""
        self.state.set_tier(kept, names)
        self.carry_out()

    async def purge(self, name: Name) -> None:
        """Withdraw a block and then drop it, leased or not. Raises KvspError (kvsp-not-found)."""
        block = self.state.store.get(name)
        if block is None:
            raise KvspError(registry.NOT_FOUND, "no such block")
        await self._purge(block)

    async def _purge(self, block: Block) -> None:
        """All who want the block gone or find it going wait for one purge, which goes on when they do not."""
        task = self._purges.get(block)
        if task is None:
            task = self._purges[block] = asyncio.create_task(self._withdraw_and_drop(block))
        await asyncio.shield(task)

    async def _withdraw_and_drop(self, block: Block) -> None:
        # "A holder that must evict leased data ... MUST first withdraw the affected replica records."
        self.state.withdraw(block)
        self.carry_out()
        with suppress(TimeoutError):  # a silent index is not waited for long
            async with asyncio.timeout(WITHDRAW_S):
                await self.publisher.settled(block.name.block_key)
        self.state.drop(block)
        self.carry_out()
        del self._purges[block]


@contextmanager
def _counted() -> Iterator[None]:
    try:
        yield
    except KvspError as error:
        metrics.LEASE_REJECTIONS.labels(str(error.status)).inc()
        raise
