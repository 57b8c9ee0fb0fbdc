"""Hashing in worker threads: hashlib lets go of the GIL, so it overlaps arrival and other requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Final

from kvsp.protocol import registry
from kvsp.protocol.digests import ALGORITHMS, ContainerDigester
from kvsp.protocol.errors import KvspError, bad_request
from services.holder.blocks import Digested
from services.holder.transfers import Pin

STEP_OCTETS: Final = 256 << 10  # less is not worth a thread switch
STEP_OCTETS_MAX: Final = 8 << 20  # more would keep an aborted upload's thread busy
RANGES_MAX: Final = 65_536


class _Pass:
    """Feeds the octets of an extent to `feed`, in order, on one thread at a time.

    A thread that has begun goes on with what arrives meanwhile: the event loop has no part in each step.
    """

    def __init__(self, extent: memoryview, executor: Executor, feed: Callable[[memoryview], None]) -> None:
        self._extent = extent
        self._executor = executor
        self._feed = feed
        self._fed = 0
        self._until = 0
        self._lock = threading.Lock()
        self._running = False  # also after an error: what it hashes is of no use then
        self._job: Future[None] | None = None

    def reach(self, until: int) -> None:
        """Octets [0, until) are in place, and to be fed."""
        with self._lock:
            self._until = until
            if not self._running and self._fed < until:
                self._running = True
                self._job = self._executor.submit(self._step)

    def stop(self) -> None:
        """No further step."""
        with self._lock:
            self._until = self._fed

    async def finish(self) -> None:
        """Wait until all is fed. Raises what `feed` raised."""
        done = None
        while (job := self._job) is not done:
            assert job is not None  # noqa: S101  (for the type checker)
            await asyncio.wrap_future(job)
            done = job

    def _step(self) -> None:
        end = min(self._until, self._fed + STEP_OCTETS_MAX)
        self._feed(self._extent[self._fed : end])
        with self._lock:
            self._fed = end
            # In turns with those of other uploads.
            self._running = end < self._until
            if self._running:
                self._job = self._executor.submit(self._step)


class Ingest:
    """Reads a container through once, behind its writer. `extent` is the memory it is written to.

    `shared`: the writer puts octets there itself and is believed when it says how many. Nobody else
    is: room not written to still holds octets of an evicted block, perhaps of another scope. Two
    threads read it: one for the framing and the layer digests, one for the SHA-256 of everything.
    """

    def __init__(self, extent: memoryview, executor: Executor, *, shared: bool) -> None:
        self.shared = shared
        self.arrived = 0
        self._extent = extent
        self._executor = executor
        self._digester = ContainerDigester()
        self._whole = hashlib.sha256()
        self._passes = [_Pass(extent, executor, feed) for feed in (self._digester.feed, self._whole.update)]
        self._asked = 0
        self._too_many = False
        self._stopped = False
        self._finishing: asyncio.Future[list[None]] | None = None

    def advance(self, arrived: int) -> None:
        """Octets [0, arrived) are in place. Raises KvspError (400) when there is no room for as many."""
        if arrived > len(self._extent):
            self._too_many = True
            raise _too_many()
        self.arrived = max(self.arrived, arrived)
        if self.arrived - self._asked >= STEP_OCTETS:
            self._reach()

    async def finish(self) -> Digested:
        """Nothing more will arrive. Raises KvspError: 400 when it is no whole container, 404 once stopped."""
        self._reach()
        self._finishing = asyncio.gather(*(each.finish() for each in self._passes))
        await asyncio.wait([self._finishing])
        if self._stopped:
            raise KvspError(registry.NOT_FOUND, "the transfer has been given up")
        if self._too_many:
            raise _too_many()
        self._finishing.result()
        self._digester.finish()
        header = self._digester.header
        if header is None:
            raise bad_request("container truncated")
        return Digested(header, tuple(self._digester.layer_digests), self._whole.digest())

    async def check(self, declared: Iterable[tuple[str, bytes]], sha256: bytes) -> None:
        """Compare declared digests; others than SHA-256 are computed only here.

        Raises KvspError (kvsp-digest-mismatch) (R-160, U-27).
        """
        for algorithm, value in declared:
            if algorithm not in ALGORITHMS:
                continue
            computed = sha256
            if algorithm != "sha-256":
                octets, loop = self._extent[: self._asked], asyncio.get_running_loop()
                computed = await loop.run_in_executor(self._executor, _digest, octets, algorithm)
            if not hmac.compare_digest(computed, value):
                raise KvspError(registry.DIGEST_MISMATCH, f"{algorithm} differs from that of the octets received")

    def stop(self) -> None:
        """Whatever is being hashed is of no interest any more."""
        self._stopped = True
        if self._finishing is not None:
            self._finishing.cancel()
        for each in self._passes:
            each.stop()

    def _reach(self) -> None:
        if not self._too_many:
            self._asked = self.arrived
            for each in self._passes:
                each.reach(self.arrived)


def _too_many() -> KvspError:
    return bad_request("more octets than announced")


class RangeDigests:
    """Representation digests of what is served. That of a whole block is known since it was stored; those
    of layer ranges cannot be composed from layer digests and are memoised (U-28)."""

    def __init__(self, arena: memoryview, executor: Executor) -> None:
        self._arena = arena
        self._executor = executor
        # Named by content, so nothing need be forgotten when a block goes.
        self._known: OrderedDict[tuple[bytes, int, int], bytes] = OrderedDict()

    async def sha256(self, pin: Pin, encoded_header: bytes) -> bytes | None:
        """SHA-256 of header and payload; None: the octets no longer match their layer digests (U-27)."""
        if pin.header.layer_count == pin.block.digested.header.layer_count:
            return pin.block.digested.sha256
        key = (pin.block.digested.sha256, *pin.header.layers)
        known = self._known.get(key)
        if known is None:
            known = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._computed, pin, encoded_header
            )
            if known is None:
                return None
            self._known[key] = known
            if len(self._known) > RANGES_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known

    def _computed(self, pin: Pin, encoded_header: bytes) -> bytes | None:
        digester = ContainerDigester(full=True)
        digester.feed(encoded_header)
        digester.feed(self._arena[pin.offset : pin.offset + pin.header.payload_octets])
        digester.finish()
        first, last = pin.header.layers
        expected = pin.block.digested.layer_digests[first : last + 1]
        return digester.sha256() if tuple(digester.layer_digests) == expected else None


def _digest(octets: memoryview, algorithm: str) -> bytes:
    return hashlib.new(ALGORITHMS[algorithm][0], octets).digest()
