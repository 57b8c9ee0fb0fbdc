"""What an instance tells its own holder of its device tier: a real holder, whose answers the test withholds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from services.instance import tiers
from services.instance.filling import device_name
from services.instance.peers import InternalHolder
from services.instance.tiers import TierNews
from tests.services.instance_rig import SCOPE, World, key, loader, until, world

BLOCKS = range(4)


@dataclass
class Rig:
    """The holder beside an instance, what it was told, and the news of the instance's tier."""

    world: World
    own: InternalHolder
    news: TierNews
    told: list[tuple[int, Any]] = field(default_factory=list)
    """How many blocks at a time, and what is kept of them."""
    refuses: bool = False

    def __post_init__(self) -> None:
        host = self.world.places["ii1"].host
        real = host.set_tier

        def noted(kept: Any, names: list[Any]) -> None:
            self.told.append((len(names), kept))
            if self.refuses:
                raise KvspError(registry.UNAVAILABLE)
            real(kept, names)

        host.set_tier = noted  # type: ignore[method-assign]

    def changed(self, *blocks: int, layers: tuple[int, int] | None) -> None:
        self.news.changed([device_name(SCOPE, key(i)) for i in blocks], layers)

    def has(self, *blocks: int) -> bool:
        """Does the holder say of exactly these blocks that they are in the device tier?"""
        stored = {i: self.world.places["ii1"].stored(i, self.world.compat_id) for i in BLOCKS}
        return {i for i, each in stored.items() if each and each.residency[0][0] == "device"} == set(blocks)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(tiers, "RETRY_S", 0.001)
    async with world(tmp_path, "ii1") as made, loader(made) as load:
        await made.put("ii1", *BLOCKS)
        one = Rig(made, load.holders.own, TierNews())
        running = asyncio.create_task(one.news.run(one.own, made.compat_id))
        await until(lambda: one.told == [(0, None)])
        yield one
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.spec("R-044")
async def test_what_the_holder_did_not_take_is_told_again(rig: Rig) -> None:
    rig.refuses = True
    rig.changed(0, 1, 2, layers=(0, 1))
    await until(lambda: len(rig.told) > 3)
    rig.changed(1, layers=None)  # meanwhile it has left the tier
    rig.changed(3, layers=(0, 1))
    await until(lambda: len(rig.told) > 6)
    assert rig.has()
    rig.refuses = False
    await until(lambda: rig.has(0, 2, 3) and not rig.news._untold)
    told = len(rig.told)
    rig.changed(0, layers=None)
    await until(lambda: rig.has(2, 3))
    assert rig.told[told:] == [(1, None)]  # what it has heard is not repeated


@pytest.mark.spec("U-49")
async def test_after_the_end_nothing_is_in_the_tier(rig: Rig) -> None:
    rig.changed(0, 1, layers=(0, 1))
    await until(lambda: rig.has(0, 1))
    rig.refuses = True
    rig.changed(2, layers=(0, 1))
    told = len(rig.told)
    await until(lambda: len(rig.told) > told)
    rig.refuses = False
    rig.changed(3, layers=(0, 1))  # on its way while the instance stops
    await rig.news.end(rig.own)
    rig.changed(3, layers=(0, 1))
    for _ in range(100):  # as long as it takes to tell, if it were told
        await rig.own.holds(rig_name(rig, 3))
    assert rig.told[-1] == (0, None)
    assert rig.has()


async def test_one_message_names_only_so_many_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "NAMES_MAX", 2)
    told = len(rig.told)
    rig.changed(*BLOCKS, layers=(0, 1))
    await until(lambda: rig.has(*BLOCKS))
    assert [names for names, _ in rig.told[told:]] == [2, 2]


def rig_name(rig: Rig, block: int) -> Any:
    from kvsp.rpc.convert import block_name

    return block_name(rig.world.compat_id, SCOPE, key(block).hex())
