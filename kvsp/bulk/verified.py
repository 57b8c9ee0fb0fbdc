"""Octets are given out once the digest of their layer matched, whichever transport brought them (R-042, U-54)."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final

from kvsp.bulk.source import Piece
from kvsp.protocol import digests, registry
from kvsp.protocol.errors import KvspError, unavailable

JOB_OCTETS: Final = 1 << 20
"""Hashed at a time, in whole layers: two threads then reach 0.8 of what both cores hash, with 512 KiB 0.7."""
INLINE_OCTETS: Final = 128 << 10
"""So few are hashed at once."""
JOBS_MAX: Final = max(2, min(4, os.cpu_count() or 1))
"""While one is awaited others hash, and the transport goes on. More than cores get in each other's way."""

Layer = tuple[bytes, list[Piece]]
"""What the digest has to be, and the octets."""


async def verified(pieces: AsyncIterator[Piece], layers: Sequence[tuple[int, bytes]]) -> AsyncIterator[Piece]:
    """The same octets, of layers of these lengths and digests. Raises KvspError: 422 (one does not match), 503."""
    hashing: deque[tuple[asyncio.Future[bool], list[Layer]]] = deque()
    try:
        async for job in _jobs(pieces, layers):
            hashing.append((_hashed(job), job))
            while len(hashing) >= JOBS_MAX or (hashing and hashing[0][0].done()):
                for piece in await _checked(*hashing.popleft()):
                    yield piece
        while hashing:
            for piece in await _checked(*hashing.popleft()):
                yield piece
    finally:
        # Threads cannot be stopped, and look at memory that may be another's afterwards.
        await asyncio.gather(*(matches for matches, _ in hashing), return_exceptions=True)


async def _checked(matches: asyncio.Future[bool], job: list[Layer]) -> list[Piece]:
    if not await matches:
        raise KvspError(registry.DIGEST_MISMATCH, "a layer is not what its digest says")
    return [piece for _, octets in job for piece in octets]


def _hashed(job: list[Layer]) -> asyncio.Future[bool]:
    """Under way when this returns: a task would begin when the loop has its turn, late if octets come fast."""
    loop = asyncio.get_running_loop()
    if sum(len(piece) for _, octets in job for piece in octets) >= INLINE_OCTETS:
        return loop.run_in_executor(None, _match, job)
    done: asyncio.Future[bool] = loop.create_future()
    done.set_result(_match(job))
    return done


def _match(job: list[Layer]) -> bool:
    return all(digests.layer_digest(*octets) == digest for digest, octets in job)


async def _jobs(pieces: AsyncIterator[Piece], layers: Sequence[tuple[int, bytes]]) -> AsyncIterator[list[Layer]]:
    """Whole layers, together at least JOB_OCTETS but for the last."""
    rest = memoryview(b"")
    job: list[Layer] = []
    gathered = 0
    for length, digest in layers:
        octets: list[Piece] = []
        missing = length
        while missing:
            if not rest:
                rest = memoryview(await _next(pieces))
            part, rest = rest[:missing], rest[missing:]
            missing -= len(part)
            octets.append(part)
        job.append((digest, octets))
        gathered += length
        if gathered >= JOB_OCTETS:
            yield job
            job, gathered = [], 0
    if rest or [piece async for piece in pieces]:
        raise unavailable("the block is longer than agreed")
    if job:
        yield job


async def _next(pieces: AsyncIterator[Piece]) -> Piece:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        raise unavailable("the block is shorter than agreed") from None
