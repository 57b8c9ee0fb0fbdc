"""Transfers opened and given up at any point, by every source: in the end nothing is held any more.

KVSP_BULK_CYCLES says how many there are (10,000 take minutes).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvsp.bulk.holder import HolderClient
from kvsp.protocol.errors import KvspError
from services.holder.local import local_peers
from tests.contract.test_block_source import SOURCES, UCX
from tests.services.holder_harness import CLIENT, Rig, block, name, rig, until

CYCLES = int(os.environ.get("KVSP_BULK_CYCLES", "400"))
WARM = 200
GROWTH_OCTETS_MAX = 48 << 20
MADE = block(1, 6, 400_000)


async def read(client: HolderClient, pieces: int) -> None:
    opened = await client.open(CLIENT, name(1))
    try:
        async for _ in opened.pieces():
            pieces -= 1
            if pieces < 0:
                break
    finally:
        opened.close()


async def write(client: HolderClient, octets: int) -> None:
    reserved = await client.reserve(CLIENT, name(2), len(MADE))
    assert reserved is not None
    try:
        await reserved.write(MADE[:octets])
    finally:
        reserved.abort()


async def cycle(client: HolderClient, chance: random.Random) -> None:
    """One that ends by itself, or is cancelled after a few turns of the loop, or later."""
    work = (
        read(client, chance.randrange(-1, 6))
        if chance.random() < 0.7
        else write(client, chance.randrange(len(MADE)))
    )
    task = asyncio.ensure_future(work)
    if chance.random() < 0.6:
        for _ in range(chance.choice([0, 1, 2, 3, 5, 8, 20, 50])):
            await asyncio.sleep(0)
        task.cancel()
    with suppress(asyncio.CancelledError, KvspError):
        await task


async def settled(holder: Rig, client: HolderClient, used: int) -> tuple[int, int]:
    """Descriptors and memory of this process once all is given back."""
    await read(client, 100)
    state = holder.host.state
    await until(lambda: holder.pins(1) == 0 and state.store.used_octets == used and not state._transfers._open)
    assert not holder.host.offers._tickets
    assert not holder.host._ingests
    [stream] = client._streams.values()
    assert stream.idle
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    kept = sum(owner._buffers.idle_octets for owner in buffered(holder, client))
    return psutil.Process().num_fds(), psutil.Process().memory_info().rss - kept


def buffered(holder: Rig, client: HolderClient) -> list[Any]:
    """Who keeps buffers for the next transfer, as many as it may."""
    both = [*holder.host.offers._servers.values(), *client._chooser._sources.values()]
    return [owner for owner in both if hasattr(owner, "_buffers")]


@pytest.mark.parametrize("scheme", SOURCES)
async def test_nothing_is_left_behind(tmp_path: Path, scheme: str) -> None:
    chance = random.Random(scheme)
    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(rig(tmp_path, with_index=False, arena_octets=32 << 20, bulk=UCX))
        await stack.enter_async_context(local_peers(holder.host, tmp_path / "c"))
        client = HolderClient(holder.channel, (scheme,), local=tmp_path / "c")
        stack.push_async_callback(client.close)
        await holder.put(1, MADE)
        used = holder.host.state.store.used_octets
        for _ in range(WARM):  # until kept connections and buffers are as many as they get
            await cycle(client, chance)
        descriptors, memory = await settled(holder, client, used)
        for _ in range(CYCLES):
            await cycle(client, chance)
        after_descriptors, after_memory = await settled(holder, client, used)
        assert after_descriptors <= descriptors
        assert after_memory - memory < GROWTH_OCTETS_MAX
