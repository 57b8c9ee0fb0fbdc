"""The shell around the state: clock, arena, worker threads, the index. One per process, one event loop."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc

from kvsp.protocol import access, limits, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.policy import Identity, Policy
from kvsp.protocol.routes import Route
from services.holder import metrics
from services.holder.arena import Arena
from services.holder.blocks import Block, Name
from services.holder.config import HolderConfig, check_identity, load_descriptors
from services.holder.hashing import Ingest, RangeDigests
from services.holder.journal import Journal
from services.holder.leases import Lease
from services.holder.publisher import Publisher, now_ms
from services.holder.state import Free, HolderState, Publish, Settled, Withdraw
from services.holder.transfers import Pin, Reservation

TICK_S: Final = 0.25
WITHDRAW_S: Final = 2.0


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
        self.arena = Arena.create(Path(config.arena_dir), config.base_uri, config.arena_octets)
        self._executor = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "hash")
        self._ranges = RangeDigests(self.arena.view, self._executor)
        self._ingests: dict[Reservation, Ingest] = {}
        self._outcomes: dict[Name, asyncio.Event] = {}
        self.publisher = Publisher(
            index, config.principal, config.base_uri, config.publish_ttl_ms, self._journal,
            held=self.state.store.all, holds_key=lambda key: bool(self.state.store.of_key(key)),
            published=self.state.published, refused=lambda block: self.state.refused(block, now_ms()),
        )  # fmt: skip
        metrics.ARENA_OCTETS.set(config.arena_octets)

    # --- lifetime ---

    async def run_timers(self) -> None:
        """Everything that depends on time alone."""
        while True:
            await asyncio.sleep(TICK_S)
            self.state.tick(now_ms())
            self.carry_out()
            metrics.ARENA_USED_OCTETS.set(self.state.store.used_octets)
            metrics.BLOCKS.set(len(self.state.store))
            metrics.LEASES.set(len(self.state.leases))

    async def withdraw_all(self, within_s: float) -> None:
        """A holder that stops loses its blocks: tell the index while there is time."""
        for block in list(self.state.store.all()):
            self.state.drop(block)
        self.carry_out()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.publisher.flushed()

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
                case Free():
                    pass  # the arena is memory that the state has already given to others

    def authorize(self, identity: Identity, route: Route, scope_id: bytes) -> None:
        """May the caller use the scope, and may this holder serve it at all (R-158, R-211)?"""
        access.authorize(self.policy, identity, route, scope_id=scope_id.hex())
        self.policy.require_scope(self._identity, scope_id.hex())

    def scheme(self, offered: Iterable[str], *, same_host: bool) -> str:
        """The first of the peer's schemes that this holder has. Raises KvspError (503)."""
        for scheme in offered:
            if scheme in self.config.schemes and (same_host or scheme != "shm"):
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
        pin = self.state.open(stream, identity.uri, name, now_ms(), layers=layers, codec=codec)
        try:
            header = pin.header.encode()
            sha256 = await self._ranges.sha256(pin, header)
        except BaseException:
            self.close_pin(pin)
            raise
        if sha256 is None:
            # At rest, corruption is a miss: withdraw, drop, 404, so that the client falls through (U-27).
            metrics.DIGEST_FAILURES.labels("at_rest").inc()
            self.state.drop(pin.block)
            self.close_pin(pin)
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
        while True:
            try:
                reservation = self.state.reserve(stream, identity.uri, name, length, now_ms())
            except KvspError as error:
                if error.problem is registry.UNAVAILABLE:
                    metrics.NO_ROOM.inc()
                raise
            finally:
                self._count_evictions()
                self.carry_out()
            if reservation is not None:
                break
            await self._outcomes.setdefault(name, asyncio.Event()).wait()
        extent = self.arena.view[reservation.offset : reservation.offset + length]
        self._ingests[reservation] = Ingest(extent, self._executor, shared=shared)
        return reservation

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

    async def commit(self, reservation: Reservation, declared: list[tuple[str, bytes]]) -> Block:
        """Check the container and make it visible. On any failure nothing is stored and the room is free."""
        ingest = self._ingests[reservation]
        try:
            if self.config.require_put_digest and not declared:
                raise bad_request("this holder takes no block without Repr-Digest")
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
        reservation = self.state.abort(stream, transfer)
        if reservation is not None:
            self._stop(reservation)
        self.carry_out()

    def end_stream(self, stream: int) -> None:
        """The peer is gone: everything that it had open is dropped."""
        for reservation in self.state.end_stream(stream):
            self._stop(reservation)
        self.carry_out()

    def _stop(self, reservation: Reservation) -> None:
        ingest = self._ingests.pop(reservation, None)
        if ingest is not None:
            ingest.stop()

    def _count_evictions(self) -> None:
        metrics.EVICTIONS.inc(self.state.evictions)
        self.state.evictions = 0

    # --- leases, purging ---

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

    async def purge(self, name: Name) -> None:
        """Withdraw a block and then drop it, leased or not. A silent index is not waited for long."""
        block = self.state.store.get(name)
        if block is not None:
            # "A holder that must evict leased data ... MUST first withdraw the affected replica records."
            self.publisher.withdraw(block)
            with suppress(TimeoutError):
                async with asyncio.timeout(WITHDRAW_S):
                    await self.publisher.settled(name.block_key)
        self.state.purge(name)
        self.carry_out()


@contextmanager
def _counted() -> Iterator[None]:
    try:
        yield
    except KvspError as error:
        metrics.LEASE_REJECTIONS.labels(str(error.status)).inc()
        raise
