"""Group commit, and what is left after a crash at any point."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ResumeRequest
from services.placement.instructions import InstanceRow, Persist, Row, SendResume, SessionRow, Survey
from services.placement.journal import Journal
from services.placement.settings import Settings
from services.placement.state import PlacementState
from services.placement.store import SqliteStore, StoreError
from tests.services.placement_crashes import Mortal, is_crashed
from tests.services.placement_records import OWNER, PROMPT_TOKENS, A, B, checkpoint, session_id, status


class SlowStore:
    """Commits when it is let."""

    def __init__(self) -> None:
        self.commits: list[list[Row]] = []
        self.gate = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.broken = False

    def load(self) -> list[Row]:
        return []

    def commit(self, rows: Sequence[Row]) -> None:
        asyncio.run_coroutine_threadsafe(self.gate.wait(), self.loop).result()
        if self.broken:
            raise StoreError("no space left")
        self.commits.append(list(rows))

    def close(self) -> None:
        pass


@asynccontextmanager
async def slow() -> AsyncIterator[tuple[Journal, SlowStore, asyncio.Task[None]]]:
    store = SlowStore()
    journal = Journal(store)
    running = asyncio.create_task(journal.run())
    yield journal, store, running
    store.gate.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.to_thread(journal.close)


def row(n: int, epoch: int = 1) -> InstanceRow:
    return InstanceRow(f"https://i{n}.example/", epoch, 1)


@pytest.mark.spec("R-172", "D13")
async def test_events_of_the_same_moment_share_a_transaction_and_wait_for_it() -> None:
    done: list[str] = []
    async with slow() as (journal, store, _):
        first = journal.enter([row(1)], [lambda: done.append("first")])
        await asyncio.sleep(0)  # its write begins
        others = [journal.enter([row(n)], [lambda n=n: done.append(f"{n}")]) for n in range(2, 100)]  # type: ignore[misc]
        again = journal.enter([row(50, 2)], [])
        nothing = journal.enter([], [lambda: done.append("last")])
        assert first is not None
        assert nothing is not None
        assert len({*others, again, nothing}) == 1
        assert done == []
        store.gate.set()
        await nothing
        assert [len(rows) for rows in store.commits] == [1, 98]
        assert row(50, 2) in store.commits[1]
        assert done == ["first", *map(str, range(2, 100)), "last"]


async def test_what_writes_nothing_happens_at_once_when_all_is_written() -> None:
    done: list[int] = []
    async with slow() as (journal, store, _):
        assert journal.enter([], [lambda: done.append(1)]) is None
        assert done == [1]
        written = journal.enter([row(1)], [])
        await asyncio.sleep(0)
        waiting = journal.enter([], [lambda: done.append(2)])  # it may rest on what is being written
        assert waiting is written
        assert done == [1]
        store.gate.set()
        assert waiting is not None
        await waiting
        assert done == [1, 2]


@pytest.mark.spec("R-172", "R-103")
async def test_a_failed_write_acknowledges_nothing_from_then_on() -> None:
    done: list[int] = []
    async with slow() as (journal, store, running):
        store.broken = True
        first = journal.enter([row(1)], [lambda: done.append(1)])
        await asyncio.sleep(0)
        second = journal.enter([row(2)], [lambda: done.append(2)])
        store.gate.set()
        for waiting in (first, second):
            assert waiting is not None
            with pytest.raises(KvspError) as error:
                await waiting
            assert error.value.problem == registry.UNAVAILABLE
        with pytest.raises(StoreError):
            await running
        with pytest.raises(KvspError):
            journal.enter([], [])
        assert done == []


# --- kill -9 --------------------------------------------------------------------------

_WRITER = """
import asyncio, sys
from pathlib import Path
from services.placement.journal import Journal
from services.placement.state import PlacementState
from services.placement.settings import Settings
from services.placement.instructions import Persist
from services.placement.quota import Rate
from services.placement.store import SqliteStore
from tests.services.placement_records import A, checkpoint, status

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    settings = Settings(session_rate=Rate(1e9), instance_rate=Rate(1e9), octet_rate=Rate(1e12))
    state = PlacementState(settings, new_id=str, rows=store.load(), now_ms=0)
    journal = Journal(store)
    running = asyncio.create_task(journal.run())
    first = int(sys.argv[2])

    async def event(rule):
        reply = rule()
        todo = state.instructions()
        rows = todo[0].rows if todo and isinstance(todo[0], Persist) else ()
        written = journal.enter(rows, [])
        if written is not None:
            await asyncio.shield(written)
        return reply

    async def session(n):
        for offset in range(first, first + 100000):
            _, reply = await event(lambda: state.checkpoint([A], checkpoint(n, 1, offset), 0))
            print("session", n, reply.epoch, reply.output_offset, flush=True)

    async def instance():
        for epoch in range(first + 10, first + 100000):
            await event(lambda: state.status(status("https://other.example/", epoch), 0))
            print("instance", epoch, flush=True)
            await asyncio.sleep(0)

    await event(lambda: state.status(status(A, 10), 0))
    await asyncio.gather(instance(), *map(session, range(8)))

asyncio.run(main())
"""


@pytest.mark.spec("R-103", "R-172", "R-175", "D12")
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))}
    acknowledged: dict[str, int] = {}
    first = 1
    for seed in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(first)],
            stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        assert writer.stdout is not None
        for _ in range(random.Random(seed).randint(20, 200)):
            _take(acknowledged, writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        for line in writer.stdout:
            _take(acknowledged, line)
        writer.wait()
        writer.stdout.close()
        store = SqliteStore(path)
        kept = {
            each.session if isinstance(each, SessionRow) else each.instance: each
            for each in store.load()
            if isinstance(each, SessionRow | InstanceRow)
        }
        store.close()
        for n in range(8):
            session = kept.get(session_id(n))
            if f"session {n}" in acknowledged:
                assert isinstance(session, SessionRow)
                assert session.checkpoint is not None
                assert session.checkpoint.output_offset >= acknowledged[f"session {n}"]
        assert kept["https://other.example/"].epoch >= acknowledged["instance"]
        first = max(acknowledged.values()) + 1


def _take(acknowledged: dict[str, int], line: str) -> None:
    words = line.split()
    if not line.endswith("\n"):
        return  # cut by the kill
    if words[0] == "session":
        acknowledged[f"session {words[1]}"] = int(words[3])
    else:
        acknowledged["instance"] = int(words[1])


# --- a crash at every boundary --------------------------------------------------------


class World(Mortal):
    """What the world knows of a controller: acknowledgements, offers, bindings. It outlives every crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.epoch = 0
        self.acknowledged: dict[str, int] = {}
        self.instances: dict[str, tuple[int, str]] = {}
        self.offers: dict[int, tuple[str, ResumeRequest]] = {}
        self.open()

    def open(self) -> None:
        self.store = SqliteStore(self.path)
        self.state = PlacementState(Settings(), new_id=str, rows=self.store.load(), now_ms=0)
        self.settle()

    def restart(self) -> None:
        """After a crash: everything acknowledged is there, and every instance reports again."""
        self.store.close()
        self.open()
        for instance, epoch in self.acknowledged.items():
            with pytest.raises(KvspError):
                self.state.status(status(instance, epoch - 1), 0)
        for instance, (epoch, state) in list(self.instances.items()):
            self.report(instance, epoch, state)

    def settle(self) -> None:
        """Carry out what is to be done; a crash may come before and after each step."""
        todo = self.state.instructions()
        while todo:
            each = todo.pop(0)
            self.boundary()
            if isinstance(each, Persist):
                self.store.commit(each.rows)
            elif isinstance(each, SendResume):
                self.offered(each)
                self.boundary()  # the instance has accepted; the answer is lost
                self.state.resumed(each.request.checkpoint.session, each.request.epoch, 0)
                todo += self.state.instructions()
            elif isinstance(each, Survey):
                self.state.surveyed(each.session, each.epoch, [], 0)
                todo += self.state.instructions()
        self.boundary()

    def offered(self, send: SendResume) -> None:
        request = send.request
        # One epoch is offered to one instance, again only with the same checkpoint, and never an old one.
        known = self.offers.setdefault(request.epoch, (send.instance, request))
        assert known == (send.instance, request)
        assert request.epoch >= self.epoch
        assert request.checkpoint.output_offset >= self.offset
        self.epoch = request.epoch

    # --- steps, each of which may be repeated by who has had no answer ---

    def report(self, instance: str, epoch: int, state: str = "active") -> None:
        self.instances[instance] = (epoch, state)
        self.state.status(status(instance, epoch, state=state), 0)
        self.settle()
        self.acknowledged[instance] = epoch

    def assign(self) -> None:
        try:
            self.state.assign(OWNER, checkpoint(1, 0), PROMPT_TOKENS, [], 0)
        except KvspError:  # the answer was lost: the session is there
            assert self.state.sessions == 1
        self.settle()
        self.epoch = max(1, self.epoch)

    def checkpoint(self, offset: int) -> None:
        """By whoever has the session, as those who follow it are told."""
        binding = self.state.binding(OWNER, session_id(1))
        assert binding is not None
        assert binding.epoch >= self.epoch
        _, reply = self.state.checkpoint([binding.instance], checkpoint(1, binding.epoch, offset), 0)
        self.settle()
        self.offset = reply.output_offset
        self.epoch = binding.epoch


LIFE: Sequence[Callable[[World], None]] = (
    lambda world: world.report(A, 10),
    lambda world: world.assign(),
    lambda world: world.report(B, 20),
    lambda world: world.checkpoint(16),
    lambda world: world.report(A, 11),  # it restarts: the session moves
    lambda world: world.checkpoint(32),
    lambda world: world.report(A, 11, "failed"),
    lambda world: world.report(B, 21),
    lambda world: world.checkpoint(48),
)


def _is_survived(path: Path, steps: int) -> bool:
    world = World(path)
    crashed = is_crashed(world, LIFE, steps)
    assert world.offset == 48
    assert world.epoch >= 3
    world.store.close()
    return crashed


@pytest.mark.spec("R-103", "R-172", "R-179", "R-181", "U-35")
def test_a_crash_between_any_two_steps_loses_nothing(tmp_path: Path) -> None:
    steps = 0
    while _is_survived(tmp_path / f"{steps}.sqlite", steps):
        steps += 1
    assert steps > 30
