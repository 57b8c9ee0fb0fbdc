"""Loading of blocks, among real holders and a real index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvsp.bulk import shm
from kvsp.bulk.source import Piece
from kvsp.connectors.prefix import PrefixCache
from kvsp.rpc.config import Peer
from tests.services.instance_rig import (
    FOREIGN,
    SCOPE,
    URIS,
    key,
    loader,
    sections,
    until,
    world,
)  # fmt: skip


def holds(cache: PrefixCache | None, *blocks: int) -> None:
    """The cache has exactly these blocks, whole."""
    assert cache is not None
    assert cache.arrival.blocks == len(blocks)
    for at, i in enumerate(blocks):
        for layer, pair in enumerate(sections(i)):
            assert tuple(map(bytes, cache.rows(layer, at))) == pair
    cache.rewind()
    cache.arrival.wait(4, cache.arrival.blocks)


class Outcomes(dict[int, bool]):
    def __call__(self, directive: str, block_key: bytes, loaded: bool) -> None:
        self[int.from_bytes(block_key)] = loaded


@pytest.mark.spec("R-128", "R-155", "R-180")
async def test_own_and_remote_blocks_make_a_prefix(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1", "h2") as made, loader(made, "h1", "h2") as load:
        await made.put("ii1", 0, 1)
        await made.put("h1", 2)
        await made.put("h2", 3)
        holds(await load.fill(0, 1, 2, 3, 4), 0, 1, 2, 3)
        # what came from others is held, and so published, here
        await until(lambda: made.listed("ii1", 2) and made.listed("ii1", 3))
        await until(lambda: sorted(load.kept) == [2, 3])
        await until(lambda: len(load.loads) == 0)
        asked = made.places["h1"].asked
        await until(lambda: asked == ["lease 2", "open 2", "release"])
        asked.clear()
        holds(await load.fill(0, 1, 2, 3), 0, 1, 2, 3)
        assert asked == []


@pytest.mark.spec("R-088")
async def test_nothing_known_is_nothing_loaded(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1") as load:
        assert await load.fill(0, 1) is None
        await made.put("h1", 1)
        assert await load.fill(0, 1) is None  # the prefix ends before block 0


@pytest.mark.spec("R-161", "R-162", "D11", "U-47")
@pytest.mark.parametrize("granted", [True, False])
async def test_a_lying_source_is_passed_over_and_reported(tmp_path: Path, granted: bool) -> None:
    grant = [URIS["h1"]] if granted else []
    async with (
        world(tmp_path, "ii1", "h1", "h2", withdraw=grant) as made,
        loader(made, "h1", "h2") as load,
    ):
        await made.put("h1", 1)
        await made.put("h2", 1)
        made.places["h1"].flip(1, made.compat_id, layer=2)
        holds(await load.fill(1), 1)
        assert "open 1" in made.places["h1"].asked  # of equal sources the first by name
        await until(lambda: made.listed("ii1", 1))
        if granted:
            await until(lambda: not made.listed("h1", 1))
        else:
            assert made.listed("h1", 1)
        assert made.listed("h2", 1)


@pytest.mark.spec("R-161", "U-54")
async def test_octets_changed_on_their_way_come_by_another_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is not to blame, and stays listed."""

    async def changed(reader: shm._Reader) -> AsyncIterator[Piece]:
        for view in reader.views():
            octets = bytearray(view)
            octets[len(octets) // 2] ^= 1
            yield octets

    async with world(tmp_path, "ii1", "h1", withdraw=[URIS["h1"]]) as made, loader(made, "h1") as load:
        await made.put("h1", 1)
        monkeypatch.setattr(shm._Reader, "pieces", changed)
        holds(await load.fill(1), 1)
        assert made.places["h1"].asked.count("open 1") > 1
        await until(lambda: made.listed("ii1", 1))
        assert made.listed("h1", 1)


@pytest.mark.spec("R-161", "R-155")
async def test_wrong_octets_everywhere_end_the_prefix(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1") as load:
        await made.put("h1", 0, 1, 2)
        made.places["h1"].flip(1, made.compat_id, layer=3)
        holds(await load.fill(0, 1, 2), 0)
        assert made.places["ii1"].stored(1, made.compat_id) is None


@pytest.mark.spec("R-155", "U-27")
async def test_rot_in_the_own_holder_ends_the_prefix_and_is_dropped(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1") as load:
        await made.put("ii1", 0, 1)
        made.places["ii1"].flip(1, made.compat_id, layer=0)
        holds(await load.fill(0, 1), 0)
        assert made.places["ii1"].stored(1, made.compat_id) is None
        assert not made.listed("ii1", 1)


@pytest.mark.spec("R-088", "R-155")
async def test_without_the_index_the_own_holder_serves(tmp_path: Path) -> None:
    nowhere = Peer(f"unix:{tmp_path}/none.sock")
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1", index=nowhere) as load:
        await made.put("ii1", 0, 1, 2)
        await made.put("h1", 3)
        made.places["ii1"].flip(2, made.compat_id, layer=3)
        holds(await load.fill(0, 1, 2, 3), 0, 1)


@pytest.mark.spec("R-088", "R-128")
async def test_a_source_that_has_gone_is_passed_over(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1", "h2") as made, loader(made, "h1", "h2") as load:
        await made.put("h1", 0, 1)
        await made.put("h2", 1)
        host = made.places["h1"].host
        for i in (0, 1):  # the records stay, as after a crash
            found = made.places["h1"].stored(i, made.compat_id)
            assert found is not None
            host.state.drop(found)
        assert made.listed("h1", 0)
        cache = await load.fill(0, 1)
        assert cache is not None
        assert cache.arrival.blocks == 0
        holds_one = Outcomes()
        await load.prefetch([(1, ["h1", "h2"])], holds_one)
        assert holds_one == {1: True}


@pytest.mark.spec("R-211", "D10")
async def test_a_holder_that_is_not_trusted_for_the_scope_is_no_source(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h3") as made, loader(made, "h3") as load:
        await made.put("h3", 0, scope=FOREIGN)
        assert list(load.holders.sources(FOREIGN)) == [URIS["h3"]]
        assert await load.fill(0) is None
        assert made.places["h3"].asked == []


# --- directives -----------------------------------------------------------------------


@pytest.mark.spec("R-128", "U-20")
async def test_a_directive_leases_fetches_and_publishes(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1", "h2") as made, loader(made, "h1", "h2") as load:
        await made.put("ii1", 0)
        await made.put("h1", 1, 3)
        await made.put("h2", 3, 4)
        got = Outcomes()
        await load.prefetch([(0, ["h1"]), (1, ["h1"]), (2, ["h1"]), (3, ["h2", "h1"]), (4, ["h1"])], got)
        # 2 is nowhere, 4 only where the directive did not send us
        assert got == {0: True, 1: True, 2: False, 3: True, 4: False}
        await until(lambda: made.places["h1"].asked == ["lease 1", "open 1", "release"])
        await until(lambda: made.places["h2"].asked == ["lease 3", "open 3", "release"])
        await until(lambda: made.listed("ii1", 1) and made.listed("ii1", 3))


@pytest.mark.spec("U-20", "R-142")
async def test_a_refused_lease_sends_to_the_next_source(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1", "h2") as made, loader(made, "h1", "h2") as load:
        await made.put("h1", 0, 1, 2)
        await made.put("h2", 1)
        host = made.places["h1"].host
        for i in (1, 2):
            found = made.places["h1"].stored(i, made.compat_id)
            assert found is not None
            host.state.drop(found)
        got = Outcomes()
        await load.prefetch([(i, ["h1", "h2"]) for i in range(3)], got)
        assert got == {0: True, 1: True, 2: False}
        assert made.places["h1"].asked[:2] == ["lease 0,1,2", "lease 0"]


@pytest.mark.spec("R-130", "R-127")
async def test_a_stopped_directive_asks_for_nothing_more(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1") as load:
        await made.put("h1", *range(6))
        slow = made.places["h1"]
        slow.gate.clear()
        got = Outcomes()
        running = load.prefetch([(i, ["h1"]) for i in range(6)], got)
        await until(lambda: sum(each.startswith("open") for each in slow.asked) == 2)  # as many as are parallel
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: len(load.loads) == 0)
        slow.gate.set()
        await until(lambda: slow.asked[-1] == "release")
        assert sum(each.startswith("open") for each in slow.asked) == 2
        assert got == {}
        assert not slow.host.state.leases


@pytest.mark.spec("R-127")
async def test_a_session_joins_what_a_directive_is_loading(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1") as load:
        await made.put("h1", 0, 1, 2)
        slow = made.places["h1"]
        slow.gate.clear()
        got = Outcomes()
        running = load.prefetch([(i, ["h1"]) for i in range(3)], got)
        await until(lambda: "open 0" in slow.asked)
        filling = asyncio.create_task(load.fill(0, 1, 2))
        await until(lambda: all(each.urgent for each in list(load.loads._all.values())))
        slow.gate.set()
        holds(await filling, 0, 1, 2)
        await running
        assert got == {0: True, 1: True, 2: True}
        assert sorted(each for each in slow.asked if each.startswith("open")) == ["open 0", "open 1", "open 2"]


@pytest.mark.spec("R-127")
async def test_a_session_is_not_held_up_by_a_source_that_stalls_for_a_directive(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1", "h2") as made, loader(made, "h1", "h2") as load:
        await made.put("h1", 0, 1, 2, 3)
        await made.put("h2", 7)
        made.places["h1"].gate.clear()
        running = load.prefetch([(i, ["h1"]) for i in range(4)], Outcomes())
        await until(lambda: "open 0" in made.places["h1"].asked)
        holds(await load.fill(7), 7)
        running.cancel()
        made.places["h1"].gate.set()


async def test_a_source_that_stalls_loses_its_turn(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1", "h2") as made, loader(made, "h1", "h2", fetch_timeout_ms=50) as load:
        await made.put("h1", 0)
        await made.put("h2", 0)
        made.places["h1"].gate.clear()
        got = Outcomes()
        await load.prefetch([(0, ["h1", "h2"])], got)
        assert got == {0: True}
        made.places["h1"].gate.set()


async def test_sessions_that_want_the_same_block_fetch_it_once(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1") as load:
        await made.put("h1", 0, 1)
        made.places["h1"].gate.clear()
        both = [asyncio.create_task(load.fill(0, 1)) for _ in range(2)]
        await until(lambda: [len(each.watchers) for each in load.loads._all.values()] == [2, 2])
        made.places["h1"].gate.set()
        for cache in await asyncio.gather(*both):
            holds(cache, 0, 1)
        assert sum(each.startswith("open") for each in made.places["h1"].asked) == 2


async def test_a_cancelled_session_lets_go_of_everything(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made, loader(made, "h1") as load:
        await made.put("ii1", 0)
        await made.put("h1", 1)
        made.places["h1"].gate.clear()
        filling = asyncio.create_task(load.fill(0, 1))
        await until(lambda: "open 1" in made.places["h1"].asked)
        filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
        made.places["h1"].gate.set()
        await until(lambda: len(load.loads) == 0 and not made.places["h1"].host.state.leases)
        found = made.places["ii1"].stored(0, made.compat_id)
        await until(lambda: found is not None and found.pins == 0)


@pytest.mark.spec("R-128")
async def test_leases_are_released_before_the_connection_ends(tmp_path: Path) -> None:
    async with world(tmp_path, "ii1", "h1") as made:
        await made.put("h1", 1)
        source = made.places["h1"]
        async with loader(made, "h1") as load:
            holder = load.holders.others[URIS["h1"]]
            async with holder.leased(SCOPE, made.compat_id, [key(1)], 60_000):
                assert source.host.state.leases
        assert source.asked == ["lease 1", "release"]
        assert not source.host.state.leases
