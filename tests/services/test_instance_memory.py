"""KV memory of sessions: nothing has a cache that memory is not kept for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol.errors import KvspError
from services.instance.memory import Memory
from services.instance.scheduler import Scheduler
from services.instance.torch_engine import TorchEngine
from tests.connectors.driver import descriptor_of, small_llama
from tests.services.instance_engine import B, bench, engine, tokens_of, work
from tests.services.instance_rig import instance, until, world
from tests.services.instance_states import session_id
from tests.services.test_instance_server_engine import PROMPT, generated, listed, sampler

MODEL = small_llama()


def kv_octets(positions: int) -> int:
    return positions * descriptor_of(MODEL, B).payload_octets // B


@given(st.lists(st.tuples(st.sampled_from(["ask", "free"]), st.integers(0, 9), st.integers(0, 60)), max_size=60))
def test_memory_is_bounded_and_given_in_order(steps: list[tuple[str, int, int]]) -> None:
    memory = Memory(100)
    line: list[tuple[str, int]] = []
    kept: dict[tuple[str, int], int] = {}
    for action, number, positions in steps:
        key = (str(number), 1)
        if action == "free":
            if key in line:
                line.remove(key)
            kept.pop(key, None)
            memory.free(key)
        elif key not in memory:
            line.append(key)

            def granted(key: tuple[str, int] = key, positions: int = positions) -> None:
                assert line.pop(0) == key
                kept[key] = positions

            memory.ask(key, positions, granted)
        else:
            with pytest.raises(ValueError, match="already"):
                memory.ask(key, positions, lambda: None)
        assert memory.taken == sum(kept.values()) <= 100
        assert memory.waiting == line
        assert all(memory.has(each) == (each in kept) for each in [*kept, *line])
    for key in [*kept, *line]:  # the end of each makes room for the next
        assert memory.has(key)
        memory.free(key)
    assert (memory.taken, line) == (0, [])


async def test_room_is_waited_for_and_given_back() -> None:
    one = engine()
    with bench(one, kv_octets=kv_octets(100)) as made:
        scheduler: Scheduler[Any] = made.scheduler
        with pytest.raises(KvspError):
            await scheduler.room("long", 1, 100, 1)
        await scheduler.room("a", 1, 30, 50)
        waiting = [asyncio.create_task(scheduler.room(name, 1, 30, 50)) for name in "bcd"]
        await asyncio.sleep(0)
        assert scheduler.stats().queued == 3
        assert scheduler.stats().kv_utilization == pytest.approx(0.8)
        for at, name in enumerate("bc"):  # nobody wants them any more
            scheduler.cancel(name, 1)
            waiting[at].cancel()
        assert scheduler.stats().queued == 1
        [outcome] = await made.run(work(tokens_of(1, 30), 50))
        assert len(outcome.tokens) == 50
        await waiting[2]  # the end of a made room for d
        scheduler.cancel("d", 1)
        assert scheduler.stats().kv_utilization == 0.0


async def test_a_session_that_was_cancelled_can_be_had_again_at_once() -> None:
    one = engine()
    with bench(one, kv_octets=kv_octets(100)) as made:
        await made.scheduler.room("a", 1, 30, 50)
        made.scheduler.submit(work(tokens_of(1, 30), 50))
        await made.until(lambda: made.sampled("a") > 3)
        made.scheduler.cancel("a", 1)
        before = made.sampled("a")
        await made.scheduler.room("a", 1, 30, 10)
        [outcome] = await made.run(work(tokens_of(2, 30), 10))
        assert len(outcome.tokens) == before + 10
        assert made.scheduler.stats().kv_utilization == 0.0


async def test_a_session_with_room_goes_before_one_that_waits_for_it() -> None:
    with bench(engine(), kv_octets=kv_octets(100)) as made:
        await made.scheduler.room("late", 1, 30, 20)
        made.scheduler.submit(work(tokens_of(1, 40), 40, session="big"))
        [late, big] = await made.run(work(tokens_of(2, 30), 20, session="late")), made.outcomes
        await made.until(lambda: made.ended("big"))
        assert len(late[0].tokens) == 20
        assert len(big["big"].tokens) == 40


@pytest.mark.spec("D13")
async def test_nothing_is_loaded_for_sessions_without_memory(tmp_path: Path) -> None:
    prefixes: list[PrefixCache] = []

    class Noted(TorchEngine):
        def prefix(self, blocks: int, room: int) -> PrefixCache:
            made = super().prefix(blocks, room)
            if blocks:
                prefixes.append(made)
            return made

    def make(_: Any) -> TorchEngine:
        return Noted(MODEL, descriptor_of(MODEL, B), chunk_tokens=3 * B)

    def schedule(one: Any) -> Any:
        return lambda tell: Scheduler(one, tell, kv_octets=kv_octets(300))

    async with (
        world(tmp_path, "ii1", "h1", descriptor=descriptor_of(MODEL, B)) as made,
        instance(made, "h1", make_engine=make, schedule=schedule) as ii,
    ):
        await generated(ii, session_id(1))
        await listed(made, "ii1", PROMPT)
        long = [ii.generate(session_id(i), prompt=PROMPT, sampler=sampler(max_tokens=200)) for i in (2, 3, 4)]
        await until(lambda: any(len(each.tokens) > 50 for each in long))
        assert len(prefixes) == 1
        assert all(block.pins == 0 for block in made.places["ii1"].host.state.store.all())
        for each in long:
            await each.reading
            assert (each.reused.cached_tokens, len(each.tokens)) == (40, 200)
        assert len(prefixes) == 3
