"""Keeps this instance's own holder told of what the engine keeps in its own memory (R-044, U-49)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import structlog

from kvsp.bulk.source import Piece
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import HEX16_CHARS
from kvsp.rpc.convert import block_name
from services.instance.filling import device_name
from services.instance.peers import InternalHolder

if TYPE_CHECKING:
    from services.instance.device import DeviceTier

RETRY_S: Final = 1.0

log = structlog.get_logger()

Change = tuple[Sequence[str], tuple[int, int] | None]
"""Blocks by their name in the device tier, none: every block; and their layers there, None: none."""


class TierNews:
    """Changes of the device tier, passed on in their order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changes: asyncio.Queue[Change] = asyncio.Queue()

    def changed(self, names: Sequence[str], layers: tuple[int, int] | None) -> None:
        """From any thread: these blocks have these layers in the device tier now."""
        self._loop.call_soon_threadsafe(self._changes.put_nowait, (names, layers))

    async def run(self, own: InternalHolder, compat_id: str) -> None:
        """Pass on, for ever. At start there is nothing in the tier, whatever an earlier life has said."""
        cleared = False
        while True:
            names, layers = (await self._changes.get()) if cleared else ((), None)
            if await _send(own, compat_id, names, layers):
                cleared = True
            elif not cleared:
                await asyncio.sleep(RETRY_S)


async def clear(own: InternalHolder) -> None:
    """Tell that no block is in the tier."""
    await _send(own, "", (), None)


async def _send(own: InternalHolder, compat_id: str, names: Sequence[str], layers: tuple[int, int] | None) -> bool:
    blocks = [block_name(compat_id, name[:HEX16_CHARS], name[HEX16_CHARS:]) for name in names]
    try:
        await own.set_tier(blocks, layers)
    except KvspError as error:
        log.warning("device tier not reported", status=error.status)
        return False
    return True


async def keep(device: DeviceTier | None, scope_id: str, key: bytes, pieces: Sequence[Piece]) -> None:
    """Keep a block that the own holder has: what is stored last is the most likely to be used next."""
    if device is not None:
        octets = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        await asyncio.to_thread(device.put, device_name(scope_id, key), octets)
