"""Hashing in worker threads: hashlib lets go of the GIL, so it overlaps arrival and other requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from kvsp.protocol import registry
from kvsp.protocol.digests import ALGORITHMS, ContainerDigester
from kvsp.protocol.errors import KvspError, bad_request
from services.holder.blocks import Digested
from services.holder.transfers import Pin

T = TypeVar("T")

STEP_OCTETS: Final = 256 << 10  # less is not worth a thread switch
STEP_OCTETS_MAX: Final = 8 << 20  # more would keep an aborted upload's thread busy
RANGES_MAX: Final = 65_536


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
        self._fed = 0
        self._complete = False
        self._error: Exception | None = None
        self._pump: asyncio.Task[None] | None = None

    def advance(self, arrived: int) -> None:
        """Octets [0, arrived) are in place. Raises KvspError (400) when there is no room for as many."""
        if arrived > len(self._extent):
            self._error = bad_request("more octets than announced")
            raise self._error
        self.arrived = max(self.arrived, arrived)
        if self._waiting() >= STEP_OCTETS:
            self._start()

    async def finish(self) -> Digested:
        """Nothing more will arrive. Raises KvspError: 400 when it is no whole container, 404 once stopped."""
        self._complete = True
        self._start()
        if self._pump is not None:
            await asyncio.wait([self._pump])
            if self._pump.cancelled():
                raise KvspError(registry.NOT_FOUND, "the transfer has been given up")
        if self._error is not None:
            raise self._error
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
                computed = await self._in_thread(_digest, self._extent[: self._fed], algorithm)
            if not hmac.compare_digest(computed, value):
                raise KvspError(registry.DIGEST_MISMATCH, f"{algorithm} differs from that of the octets received")

    def stop(self) -> None:
        """Whatever is being hashed is of no interest any more."""
        if self._pump is not None:
            self._pump.cancel()

    def _waiting(self) -> int:
        return self.arrived - self._fed

    def _start(self) -> None:
        if self._error is None and self._waiting() and (self._pump is None or self._pump.done()):
            self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting() >= (1 if self._complete else STEP_OCTETS):
                step = min(self._waiting(), STEP_OCTETS_MAX)
                piece = self._extent[self._fed : self._fed + step]
                await asyncio.gather(
                    self._in_thread(self._digester.feed, piece), self._in_thread(self._whole.update, piece)
                )
                self._fed += step
        except Exception as error:  # kept for `finish`, whose caller is the one to tell
            self._error = error

    def _in_thread(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, call, *args)


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
