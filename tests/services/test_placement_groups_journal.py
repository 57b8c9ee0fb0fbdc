"""Shard maps on disk: what a kill, and a crash between any two steps, leave of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import Shard, ShardMap
from services.placement.groups import LIFETIME_MS, ForgetMap, MapRow
from services.placement.instructions import Form, Persist, Reshard, Row
from services.placement.settings import Settings
from services.placement.state import PlacementState
from services.placement.store import SqliteStore
from tests.services.placement_crashes import Mortal, is_crashed
from tests.services.placement_groups import GROUPS, INSTANCES, PROMPT, Wanted, kind_of
from tests.services.placement_records import OWNER, A, B, checkpoint, keys, session_id, status

S = session_id(1)


def shard_map(version: int, *instances: str) -> ShardMap:
    return ShardMap(S, version, [Shard((16 * n, 16 * (n + 1)), uri) for n, uri in enumerate(instances)])


def reopened(path: Path, rows: Sequence[Row]) -> list[Row]:
    store = SqliteStore(path)
    store.commit(rows)
    store.close()
    store = SqliteStore(path)
    try:
        return store.load()
    finally:
        store.close()


@pytest.mark.spec("R-193")
def test_a_map_comes_back_as_it_was_written_and_its_version_never_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    rows: list[Row] = [
        MapRow(shard_map(1, A)),
        MapRow(shard_map(1, A), shard_map(2, B, A), "", (A, B), fixed=True),
        MapRow(shard_map(2, B, A), shard_map(2, B, A), "commit", (A, B), fixed=True),
    ]
    for row in rows:
        assert reopened(path, [row]) == [row]
    assert reopened(path, [rows[0]]) == [rows[2]]
    assert reopened(path, [ForgetMap(S)]) == []
    assert reopened(path, [rows[0], ForgetMap(session_id(2))]) == [rows[0]]


# --- kill -9 --------------------------------------------------------------------------

_WRITER = """
import asyncio, sys
from pathlib import Path
from services.placement.groups import MapRow
from services.placement.journal import Journal
from services.placement.store import SqliteStore
from tests.services.placement_records import A, B
from tests.services.test_placement_groups_journal import shard_map

async def main():
    journal = Journal(SqliteStore(Path(sys.argv[1])))
    asyncio.create_task(journal.run())
    for version in range(int(sys.argv[2]), 10**9):
        new = shard_map(version + 1, B, A)
        await journal.enter([MapRow(shard_map(version, A, B), new, "", (A, B))], [])
        await journal.enter([MapRow(new, new, "commit", (A, B))], [])
        print("committed", version + 1, flush=True)

asyncio.run(main())
"""


@pytest.mark.spec("R-193", "D12")
def test_kill_9_loses_no_commit_that_was_told(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))}
    told = 1
    for seed in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(told)],
            stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(random.Random(seed).randint(5, 60))]
        os.kill(writer.pid, signal.SIGKILL)
        lines += [line for line in writer.stdout if line.endswith("\n")]
        writer.wait()
        writer.stdout.close()
        before, told = told, int(lines[-1].split()[1])
        assert told > before
        store = SqliteStore(path)
        (row,) = store.load()
        store.close()
        assert isinstance(row, MapRow)
        assert row.map.version >= told
        assert row.next is not None
        assert (row.decision == "commit") == (row.next == row.map)
        told = row.map.version


# --- a crash at every boundary --------------------------------------------------------


class World(Mortal):
    """What the world knows of one session's map; it outlives every crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_ms = 0
        self.offset = 0
        self.committed = 1
        self.policy = Wanted(2)
        self.formed = False
        self.open()

    def open(self) -> None:
        self.store = SqliteStore(self.path)
        self.state = PlacementState(
            Settings(groups=GROUPS), new_id=str, rows=self.store.load(), widths=self.policy, now_ms=self.now_ms
        )
        self.settle()

    def restart(self) -> None:
        self.store.close()
        self.now_ms += LIFETIME_MS
        self.open()
        self.report()
        self.now_ms += LIFETIME_MS

    def settle(self) -> None:
        """Carry out what is to be done; a crash may come before and after each step, answers included."""
        todo = self.state.instructions()
        while todo:
            each = todo.pop(0)
            self.boundary()
            match each:
                case Persist():
                    self.store.commit(each.rows)
                case Form():
                    self.boundary()
                    self.state.groups.formed(each.context.map, self.now_ms, ok=True)
                case Reshard():
                    self.told(each)
                    self.boundary()  # the member has done it; the answer is lost
                    self.state.groups.answered(S, each.step, each.instance, self.now_ms, ok=True)
            more = self.state.instructions()
            todo = [*more[:1], *todo, *more[1:]] if more and isinstance(more[0], Persist) else todo + more
        self.boundary()
        self.formed = self.formed or len(self.state.groups) > 0

    def told(self, send: Reshard) -> None:
        request = send.request
        if kind_of(request) == "commit":
            assert isinstance(request.commit, int)
            assert request.commit >= self.committed
            self.committed = request.commit
        else:
            version = request.abort if kind_of(request) == "abort" else request.new
            assert isinstance(version, int)
            assert version > self.committed, "after its commit"

    # --- steps, each of which may be repeated by who has had no answer ---

    def report(self) -> None:
        for uri in INSTANCES:
            self.state.status(status(uri, 10, ttl_ms=60_000), self.now_ms)
            self.settle()

    def assign(self) -> None:
        try:
            self.state.assign(OWNER, checkpoint(1, 0, prompt_blocks=keys(8)), PROMPT, [], self.now_ms)
        except KvspError:  # the answer was lost: the session is there
            assert self.state.sessions == 1
        self.settle()

    def output(self, offset: int) -> None:
        self.state.checkpoint([A], checkpoint(1, 1, offset, prompt_blocks=keys(8)), self.now_ms)
        self.settle()
        self.offset = offset

    def resize(self, members: int) -> None:
        if not self.formed:
            return  # the crash came before all had joined: it is an ordinary session
        self.now_ms += self.state.groups.pause_ms(S, self.now_ms)
        wanted = self.state.groups.resize(S, members, self.now_ms)
        self.settle()
        assert self.state.groups.is_settled(self.map)
        assert len(self.map.shards) == members
        assert self.map.version >= wanted.version

    @property
    def map(self) -> ShardMap:
        (found,) = self.state.groups
        return found


LIFE: Sequence[Callable[[World], None]] = (
    lambda world: world.report(),
    lambda world: world.assign(),
    lambda world: world.output(1),
    lambda world: world.resize(3),
    lambda world: world.output(40),
    lambda world: world.resize(1),
    lambda world: world.resize(2),
)


def _is_survived(path: Path, steps: int) -> bool:
    world = World(path)
    crashed = is_crashed(world, LIFE, steps)
    assert world.offset == 40
    if world.formed:
        assert world.map.version == world.committed
        assert world.committed >= 4
        assert len(world.map.shards) == 2
    world.store.close()
    return crashed


@pytest.mark.spec("R-193", "R-194", "U-38")
def test_a_crash_between_any_two_steps_leaves_one_authoritative_version(tmp_path: Path) -> None:
    steps = 0
    while _is_survived(tmp_path / f"{steps}.sqlite", steps):
        steps += 1
    assert steps > 60
