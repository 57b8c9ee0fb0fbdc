"""Sessions and their groups under crashes, restarts, loss, repeats and delays, and a model that only remembers.

The controller is its real state over rows at rest; it may crash before the rows of an event are written, and after
any of the instructions that follow them. The model knows which versions were committed, and where tokens lie.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest

from kvsp.protocol import reshard
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ShardMap
from kvsp.protocol.reshard import GroupContext
from services.instance.shards import Fetch
from services.placement.groups import LIFETIME_MS, MapRow
from services.placement.instructions import Form, Instruction, Reshard, SendLeave, SendResume, SessionRow, Survey
from tests.services import placement_groups
from tests.services.placement_groups import INSTANCES, Grouped
from tests.services.placement_records import BLOCK_TOKENS, checkpoint, keys, session_id
from tests.sim.members import Member, tokens

GROUPS = replace(placement_groups.GROUPS, deadline_ms=2 * LIFETIME_MS)  # a plan may come later than its abort
FAULT = 0.004  # at each point of a controller's life, and of an instance's
LOSS = 0.05  # of each message
LEAVES = 0.01  # of who is to leave being told so at any moment, and else at the worst


def need(condition: bool, *words: object) -> None:
    assert condition, " ".join(map(str, words))


@dataclass
class Forming:
    """What the controller's shell waits for."""

    context: GroupContext
    waiting: set[str]
    ok: bool = True


class World:
    """Messages wait in a bag; a seed decides what happens next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults = True
        self.pc = Grouped(2, GROUPS)
        self.members = {uri: Member(uri, BLOCK_TOKENS, need) for uri in INSTANCES}
        self.epochs = dict.fromkeys(INSTANCES, 10)
        self.seen = dict(self.epochs)  # by the controller
        self.life = 0
        self.sessions = [1, 2]
        self.newest = 2
        self.bag: list[Callable[[], None]] = []
        self.leaves: list[tuple[int, str, str]] = []  # sent when, to whom, of which map: of no version
        self.forming: dict[str, Forming] = {}
        self.committed: dict[str, int] = {}  # the highest version that anybody was told to be
        self.counts: dict[str, int] = {}

    def chance(self, probability: float) -> bool:
        return self.faults and self.random.random() < probability

    # --- the controller ---

    def event(self, rule: Callable[[], object]) -> None:
        try:
            rule()
        except KvspError:
            self.count("refused")
        if self.chance(FAULT):
            self.crash()  # nothing of it is on disk
            return
        self.pc.drain()
        self.act()

    def act(self) -> None:
        todo, self.pc.done = self.pc.done, []
        for each in todo:
            if self.chance(FAULT):
                self.crash()
                return
            self.do(each)

    def crash(self) -> None:
        self.count("crashes")
        self.life += 1
        self.forming.clear()
        self.pc.restart()
        self.act()
        for uri in INSTANCES:
            self.report(uri)

    def report(self, uri: str) -> None:
        self.seen[uri] = self.epochs[uri]
        self.event(lambda: self.pc.report(uri, self.epochs[uri]))

    def do(self, instruction: Instruction) -> None:
        match instruction:
            case Form(context):
                name = context.map.map
                self.forming[name] = Forming(context, set(reshard.held(context.map)))
                for uri in sorted(self.forming[name].waiting):
                    answered = partial(self.joined, uri, name)
                    self.send(uri, lambda member: member.join(context), answered)
            case Reshard():
                self.reshard(instruction)
            case SendLeave(uri, name):
                self.leave(uri, name)
            case Survey():
                self.event(
                    lambda: self.pc.state.surveyed(instruction.session, instruction.epoch, (), self.pc.now_ms)
                )
            case SendResume():
                request = instruction.request
                self.event(
                    lambda: self.pc.state.resumed(request.checkpoint.session, request.epoch, self.pc.now_ms)
                )

    def joined(self, uri: str, name: str, ok: bool | None) -> None:
        forming = self.forming.get(name)
        if forming is None or uri not in forming.waiting:
            return
        forming.waiting.discard(uri)
        forming.ok &= bool(ok)
        if forming.waiting:
            return
        del self.forming[name]
        self.count("formed" if forming.ok else "not formed")
        if not forming.ok:
            for each in reshard.held(forming.context.map):
                self.leave(each, name)
        shard_map = forming.context.map
        self.event(lambda: self.pc.state.groups.formed(shard_map, self.pc.now_ms, ok=forming.ok))

    def reshard(self, send: Reshard) -> None:
        name, request = send.request.map, send.request
        committed = self.committed.get(name, 1)
        if isinstance(request.commit, int):
            self.committed[name] = max(committed, request.commit)
            row = self.pc.disk.get(("map", name))
            assert not isinstance(row, MapRow) or row.map.version >= request.commit  # on disk before it is told
        elif isinstance(request.abort, int):
            assert request.abort > committed, "an abort follows a commit"

        def answer(ok: bool | None) -> None:
            if send.context is not None and ok:
                self.left(send.instance)  # it has just prepared the next version
            if send.context is not None or ok is not None:  # a decision without an answer is told again
                said = bool(ok)
                self.event(
                    lambda: self.pc.state.groups.answered(name, send.step, send.instance, self.pc.now_ms, ok=said)
                )

        def joined(ok: bool | None) -> None:
            if not ok:
                answer(ok=False)
            elif self.pc.state.groups.is_waited_for(name, send.step):
                self.send(send.instance, lambda member: member.plan(request), answer, GROUPS.deadline_ms + 1_000)

        context = send.context
        if context is None:
            self.send(send.instance, lambda member: member.decide(request), answer)
        else:
            self.send(send.instance, lambda member: member.join(context), joined)

    # --- the network and the members ---

    def send(
        self,
        uri: str,
        call: Callable[[Member], Fetch | None],
        answered: Callable[[bool | None], None],
        lifetime_ms: int = LIFETIME_MS,
    ) -> None:
        """A call that may get lost, or arrive twice, but not after it is given up; its answer may get lost too."""
        life, sent_ms = self.life, self.pc.now_ms

        def arrive() -> None:
            if self.chance(LOSS) or self.pc.now_ms - sent_ms > lifetime_ms:
                back(None)
                return
            if self.chance(LOSS):
                self.bag.append(arrive)
            member = self.members[uri]
            try:
                wanted = call(member)
            except KvspError:
                self.bag.append(lambda: back(False))
            else:
                self.bag.append(lambda: back(wanted is None or self.fetch(member, wanted)))

        def back(ok: bool | None) -> None:
            if life == self.life:
                answered(None if self.chance(LOSS) else ok)

        self.bag.append(arrive)

    def fetch(self, member: Member, wanted: Fetch) -> bool | None:
        """None: it has begun anew and answers nothing."""
        if self.members[member.uri] is not member:
            return None
        return not self.chance(LOSS) and member.fetched(
            wanted, lambda uri, token: self.members[uri].holds(wanted.map, [(token, token + 1)])
        )

    def leave(self, uri: str, name: str) -> None:
        if not self.chance(LOSS):  # who is not told drops it when nobody uses it
            self.leaves.append((self.pc.now_ms, uri, name))
        if self.chance(0.5):
            self.bag.append(lambda: self.resize(name, 3))  # an operator wants it back at once

    def left(self, *instances: str) -> None:
        """One of these is told to leave now, if that may still be on its way."""
        self.leaves = [each for each in self.leaves if self.pc.now_ms - each[0] < LIFETIME_MS]
        waiting = [each for each in self.leaves if each[1] in instances]
        if waiting:
            told = self.random.choice(waiting)
            self.leaves.remove(told)
            self.members[told[1]].leave(told[2])
            if not self.chance(LOSS):
                life = self.life
                self.bag.append(lambda: self.pc.state.groups.left(told[2], told[1]) if life == self.life else None)

    def restart(self, uri: str) -> None:
        self.count("restarts")
        self.epochs[uri] += 1
        self.members[uri] = Member(uri, BLOCK_TOKENS, need)
        self.bag.append(lambda: self.report(uri))

    # --- what happens next ---

    def row(self, session: int) -> SessionRow | None:
        row = self.pc.disk.get(("session", session_id(session)))
        return row if isinstance(row, SessionRow) and row.checkpoint is not None else None

    def map(self, name: str) -> ShardMap | None:
        return next((each for each in self.pc.state.groups if each.map == name), None)

    def step(self) -> None:
        if self.chance(FAULT):
            self.crash()
        if self.chance(FAULT):
            self.restart(self.random.choice(INSTANCES))
        if self.random.random() < LEAVES:
            self.left(*INSTANCES)
        elif self.random.random() < (0.05 if self.bag else 0.5):
            self.spontaneous()
        elif self.bag and self.random.random() < 0.95:
            self.bag.pop(self.random.randrange(len(self.bag)))()
        else:
            self.pc.now_ms += self.random.choice((1, 100, 400, 2_000))
            self.event(lambda: self.pc.state.tick(self.pc.now_ms))
            uri = self.random.choice(INSTANCES)
            if self.seen[uri] == self.epochs[uri]:
                self.report(uri)
        self.check()

    def spontaneous(self) -> None:
        slot = self.random.randrange(len(self.sessions))
        session = self.sessions[slot]
        name, row = session_id(session), self.row(session)
        what = self.random.choice(("output",) * 8 + ("resize",) * 4 + ("end", "lost"))
        if row is None or row.checkpoint is None:
            if self.faults and ("session", name) not in self.pc.disk:
                self.pc.policy.wanted = self.random.randint(2, 3)
                self.event(lambda: self.pc.ask(session))
        elif self.faults and self.map(name) is None and name not in self.forming:
            self.event(lambda: self.pc.end(session))  # it has no group any more: another one comes
            self.newest += 1
            self.sessions[slot] = self.newest
        elif what == "output" and row.bound and name not in self.forming:
            self.pc.policy.wanted = self.random.randint(1, 3)
            offset = row.checkpoint.output_offset + self.random.choice((1, 20))
            made = checkpoint(session, row.epoch, offset, prompt_blocks=keys(8))
            self.event(lambda: self.pc.state.checkpoint([row.instance], made, self.pc.now_ms))
        elif what == "resize":
            self.resize(name, self.random.randint(1, 3))
        elif what == "end" and self.chance(0.1):
            self.event(lambda: self.pc.end(session))
        elif what == "lost" and self.chance(0.1):
            uri = self.random.choice(INSTANCES)
            self.event(lambda: self.pc.state.groups.lost([uri], name, self.pc.now_ms))

    def resize(self, name: str, members: int) -> None:
        self.event(lambda: self.pc.state.groups.resize(name, members, self.pc.now_ms))

    # --- invariants ---

    def check(self) -> None:
        for shard_map in self.pc.state.groups:
            name = shard_map.map
            assert shard_map.version >= self.committed.get(name, 1), "a commit is lost"
            held = reshard.held(shard_map)
            row = self.pc.disk["session", name]
            assert isinstance(row, SessionRow)
            assert row.bound
            assert shard_map.shards[-1].instance == row.instance
            for uri, ranges in held.items():
                if self.seen[uri] != self.epochs[uri]:
                    continue  # the controller does not know yet what it has lost
                member = self.members[uri]
                ours = reshard.common(member.rules.held(name), ranges) if self.grows(shard_map, uri) else ranges
                assert member.holds(name, ours), "a token of the authoritative version is lost"
                assert member.rules.version(name) <= shard_map.version

    def grows(self, shard_map: ShardMap, uri: str) -> bool:
        """The home has its tail, which only a plan asks for."""
        return shard_map.shards[-1].instance == uri

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def settle(self) -> None:
        self.faults = False
        while self.leaves:
            self.left(*INSTANCES)
        for uri in INSTANCES:
            self.report(uri)
        for _ in range(5_000):
            if not self.bag and self.pc.state.groups.next_deadline() is None:
                break
            if self.bag:
                self.bag.pop(self.random.randrange(len(self.bag)))()
            else:
                self.pc.now_ms += 100
                self.event(lambda: self.pc.state.tick(self.pc.now_ms))
            self.check()
        assert self.pc.state.groups.next_deadline() is None, "a step hangs"
        assert not self.bag
        maps = {each.map: each for each in self.pc.state.groups}
        assert {("map", name) for name in maps} == {key for key in self.pc.disk if key[0] == "map"}
        for uri, member in self.members.items():
            for name in member.memory.keys() & maps.keys():
                held = reshard.held(maps[name]).get(uri, [])
                if held:
                    assert member.rules.version(name) == maps[name].version
                    if self.grows(maps[name], uri):
                        held = member.rules.held(name)
                        assert held[0][0] == maps[name].shards[-1].tokens[0]
                    # A plan that came after its abort, of a controller that is gone, is aborted by the next step.
                    if member.rules.under_way(name) is None:
                        assert member.memory[name].keys() == set(tokens(held))


def run(seed: int) -> World:
    world = World(seed)
    for _ in range(400):
        world.step()
    world.settle()
    return world


@pytest.mark.spec("R-193", "R-194", "R-196", "U-38", "D12")
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_whatever_happens_there_is_one_whole_version_or_none(first: int) -> None:
    totals: dict[str, int] = {}
    for seed in range(first, first + 20):
        world = run(seed)
        for what, count in world.counts.items():
            totals[what] = totals.get(what, 0) + count
        totals["committed"] = totals.get("committed", 0) + sum(each - 1 for each in world.committed.values())
    for what in ("formed", "not formed", "crashes", "restarts", "committed"):
        assert totals.get(what, 0) > 0
