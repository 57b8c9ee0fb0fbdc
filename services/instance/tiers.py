"""Keeps this instance's own holder told of what the engine keeps in its own memory (R-044, U-49)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
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

NAMES_MAX: Final = 1024
"""Blocks named in one message, about 80 octets each."""

log = structlog.get_logger()

Layers = tuple[int, int] | None
"""Layers (inclusive) in the device tier; None: none."""


class TierNews:
    """Changes of the device tier. What the holder has not heard is told again, until it has."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._untold: dict[str, Layers] = {}
        """Blocks by their name in the device tier."""
        self._some = asyncio.Event()
        self._telling = asyncio.Lock()
        self._ended = False

    def changed(self, names: Sequence[str], layers: Layers) -> None:
        """From any thread: these blocks have these layers in the device tier now."""
        self._loop.call_soon_threadsafe(self._note, names, layers)

    async def run(self, own: InternalHolder, compat_id: str) -> None:
        """Pass on, until the end. At start there is nothing in the tier, whatever an earlier life has said."""
        is_cleared = False
        while True:
            names, layers = (await self._next()) if is_cleared else ([], None)
            async with self._telling:
                if self._ended:
                    return
                is_told = await _send(own, compat_id, names, layers)
            if is_told:
                is_cleared = True
                self._told(names, layers)
            else:
                await asyncio.sleep(RETRY_S)

    async def end(self, own: InternalHolder) -> None:
        """At stop no block is in the tier (U-49), and nothing is passed on after that was said."""
        self._ended = True
        async with self._telling:
            await _send(own, "", (), None)

    def _note(self, names: Sequence[str], layers: Layers) -> None:
        self._untold.update(dict.fromkeys(names, layers))
        self._some.set()

    async def _next(self) -> tuple[list[str], Layers]:
        """Some blocks with the same layers."""
        while not self._untold:
            self._some.clear()
            await self._some.wait()
        layers = next(iter(self._untold.values()))
        alike = (name for name, each in self._untold.items() if each == layers)
        return list(islice(alike, NAMES_MAX)), layers

    def _told(self, names: Sequence[str], layers: Layers) -> None:
        for name in names:
            if self._untold[name] == layers:  # otherwise it has changed since
                del self._untold[name]


async def _send(own: InternalHolder, compat_id: str, names: Sequence[str], layers: Layers) -> bool:
    """Tell of these blocks; none: of every block."""
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
