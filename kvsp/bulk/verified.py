"""Octets are given out once the digest of their layer matched, whichever transport brought them (R-042, U-54)."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, NamedTuple

from kvsp.bulk.source import Piece
from kvsp.protocol import digests, registry
from kvsp.protocol.errors import KvspError, unavailable

JOB_OCTETS: Final = 1 << 20
"""Hashed at a time, in whole layers: two threads then reach 0.8 of what both cores hash, with 512 KiB 0.7."""
INLINE_OCTETS: Final = 128 << 10
"""Fewer are hashed in place."""
THREADS: Final = max(2, min(4, os.cpu_count() or 1))
"""More than there are cores get in each other's way."""

Layer = tuple[bytes, list[Piece]]
"""What the digest has to be, and the octets."""


class _Job(NamedTuple):
    """Layers to hash, and their octets in as few pieces as they came in."""

    layers: list[Layer]
    pieces: list[Piece]


async def verified(pieces: AsyncIterator[Piece], layers: Sequence[tuple[int, bytes]]) -> AsyncIterator[Piece]:
    """The same octets, of layers of these lengths and digests. Raises KvspError: 422 (one does not match), 503."""
    hashing: deque[tuple[asyncio.Future[bool], _Job]] = deque()
    try:
        async for job in _jobs(pieces, layers):
            hashing.append((_hashed(job), job))
            # While one is awaited others hash, and the transport goes on.
            while len(hashing) >= THREADS or (hashing and hashing[0][0].done()):
                for piece in await _checked(*hashing.popleft()):
                    yield piece
        while hashing:
            for piece in await _checked(*hashing.popleft()):
                yield piece
    finally:
        # Threads cannot be stopped, and look at memory that may be another's afterwards.
        await asyncio.gather(*(matches for matches, _ in hashing), return_exceptions=True)


async def _checked(matches: asyncio.Future[bool], job: _Job) -> list[Piece]:
    if not await matches:
        raise KvspError(registry.DIGEST_MISMATCH, "a layer is not what its digest says")
    return job.pieces


def _hashed(job: _Job) -> asyncio.Future[bool]:
    """Under way when this returns: a task would begin when the loop has its turn, late if octets come fast."""
    loop = asyncio.get_running_loop()
    if sum(map(len, job.pieces)) >= INLINE_OCTETS:
        return loop.run_in_executor(_threads(), _match, job.layers)
    done: asyncio.Future[bool] = loop.create_future()
    done.set_result(_match(job.layers))
    return done


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "kvsp-hash")


def _match(layers: list[Layer]) -> bool:
    return all(digests.layer_digest(*octets) == digest for digest, octets in layers)


async def _jobs(pieces: AsyncIterator[Piece], layers: Sequence[tuple[int, bytes]]) -> AsyncIterator[_Job]:
    """Whole layers, together at least JOB_OCTETS but for the last."""
    # The newest piece, how much of it is in layers, and how much of that in earlier jobs.
    piece, at, given = memoryview(b""), 0, 0
    job, gathered = _Job([], []), 0
    for length, digest in layers:
        octets: list[Piece] = []
        missing = length
        while missing:
            if at == len(piece):
                if given < at:
                    job.pieces.append(piece[given:])
                piece, at, given = memoryview(await _next(pieces)), 0, 0
            part = piece[at : at + missing]
            at += len(part)
            missing -= len(part)
            octets.append(part)
        job.layers.append((digest, octets))
        gathered += length
        if gathered >= JOB_OCTETS:
            job.pieces.append(piece[given:at])
            yield job
            job, gathered, given = _Job([], []), 0, at
    if at < len(piece) or [piece async for piece in pieces]:
        raise unavailable("the block is longer than agreed")
    if job.layers:
        job.pieces.append(piece[given:at])
        yield job


async def _next(pieces: AsyncIterator[Piece]) -> Piece:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        raise unavailable("the block is shorter than agreed") from None
