"""Both sides of resharding together: the rules of controller and members, over a lossy network."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import dataclass, field

import pytest

from kvsp.protocol import reshard
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReshardFetch, ReshardRequest, Shard, ShardMap
from services.instance import shards
from services.instance.shards import LEFT_MAX, Shards
from services.placement import groups
from services.placement.groups import Groups, MapRow

BLOCK = 4
BLOCKS = 12
INSTANCES = [f"https://ii{n}.example/kvsp/" for n in range(4)]


@dataclass
class Member:
    """An instance: its rules, and the tokens that lie in its memory, each with the "address" it was put at."""

    rules: Shards = field(default_factory=lambda: Shards(BLOCK))
    memory: dict[int, int] = field(default_factory=dict)
    moved: int = 0
    fetching: list[shards.Fetch] = field(default_factory=list)


class World:
    """Messages wait in a bag; a seed decides what happens next."""

    def __init__(self, seed: int, *, faults: bool) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.now = 0
        self.members = {uri: Member() for uri in INSTANCES}
        self.disk: dict[str, MapRow] = {}
        self.groups = Groups()
        self.bag: list[tuple[str, tuple[object, ...]]] = []
        self.addresses = 0
        self.settled: list[bool] = []
        self.broken = False
        self.life = 0  # of the controller
        self.decisions: dict[tuple[int, int], str] = {}
        start = self.random_map(1)
        for uri, ranges in reshard.held(start).items():
            self.members[uri].rules.adopt("m", 1, ranges)
            for token in tokens(ranges):
                self.put(self.members[uri], token)
        self.groups.adopt(start)
        self.carry_out()

    def random_map(self, version: int) -> ShardMap:
        cuts = sorted(self.random.sample(range(1, BLOCKS), self.random.randint(0, 4)))
        edges = [0, *cuts, BLOCKS]
        made = [Shard((a * BLOCK, b * BLOCK), self.random.choice(INSTANCES)) for a, b in itertools.pairwise(edges)]
        return ShardMap("m", version, made)

    def put(self, member: Member, token: int) -> None:
        self.addresses += 1
        member.memory[token] = self.addresses

    # --- the controller's shell ---

    def carry_out(self) -> None:
        for instruction in self.groups.instructions():
            match instruction:
                case groups.PersistMap(MapRow() as row):
                    self.disk[row.map.map] = row
                case groups.PersistMap(groups.ForgetMap(name)):
                    self.disk.pop(name, None)
                case groups.SendReshard(instance, step, request):
                    self.bag.append(("request", (instance, step, request, self.life, self.now)))
                case groups.Settled(_, committed):
                    self.settled.append(committed)
                case groups.Broken():
                    self.broken = True

    def crash_controller(self) -> None:
        self.life += 1
        self.groups.instructions()
        self.groups = Groups(self.disk.values(), self.now)
        self.bag = [each for each in self.bag if each[0] != "answer"]  # its connections are gone
        self.carry_out()

    # --- a member's shell ---

    def deliver(self, uri: str, step: int, request: ReshardRequest, life: int, sent: int) -> None:
        if self.now - sent > groups.LIFETIME_MS:
            return  # given up by then
        member = self.members[uri]
        ok: bool | None = True
        try:
            if request.commit is not groups_unset:
                member.rules.commit("m", request.commit)
            elif request.abort is not groups_unset:
                member.rules.abort("m", request.abort)
            else:
                ok = member.rules.plan(request) or None
        except KvspError:
            ok = False
        self.carry_out_member(uri, step)
        if ok is not None and life == self.life:
            self.bag.append(("answer", (step, uri, ok)))

    def carry_out_member(self, uri: str, step: int) -> None:
        member = self.members[uri]
        for instruction in member.rules.instructions():
            match instruction:
                case shards.Fetch():
                    member.fetching.append(instruction)
                    self.bag.append(("fetch", (uri, step, instruction)))
                case shards.StopFetch(_, version):
                    member.fetching = [each for each in member.fetching if each.version != version]
                case shards.Drop(_, ranges):
                    for token in tokens(ranges):
                        member.memory.pop(token, None)

    def fetch(self, uri: str, step: int, wanted: shards.Fetch) -> None:
        member = self.members[uri]
        if wanted not in member.fetching:
            return
        member.fetching.remove(wanted)
        for entry in wanted.ranges:
            for token in range(*entry.tokens):
                if token not in self.members[entry.source].memory:
                    self.bag.append(("answer", (step, uri, False)))
                    return
                self.put(member, token)
                member.moved += 1
        if member.rules.loaded("m", wanted.version):
            self.bag.append(("answer", (step, uri, True)))

    def restart(self, uri: str) -> None:
        self.members[uri] = Member()
        self.bag = [each for each in self.bag if not (each[0] in ("fetch", "answer") and uri in each[1])]
        self.groups.restarted(uri, self.now)
        self.carry_out()

    # --- what happens next ---

    def step(self) -> None:
        if self.faults and self.random.random() < 0.03:
            self.crash_controller()
        if self.faults and self.random.random() < 0.01 and not self.broken:
            self.restart(self.random.choice(INSTANCES))
        if not self.bag or self.random.random() < 0.05:
            self.now += self.random.choice((1, 100, 600))
            self.groups.tick(self.now)
            self.carry_out()
            return
        kind, message = self.bag.pop(self.random.randrange(len(self.bag)))
        if self.faults and kind == "answer" and self.random.random() < 0.1:
            return  # lost
        if kind == "request":
            if self.faults and self.random.random() < 0.1:
                return
            if self.faults and self.random.random() < 0.1:
                self.bag.append((kind, message))
            self.deliver(*message)  # type: ignore[arg-type]
        elif kind == "fetch":
            self.fetch(*message)  # type: ignore[arg-type]
        else:
            number, uri, ok = message
            self.groups.answered("m", number, uri, ok=ok, now_ms=self.now)  # type: ignore[arg-type]
            self.carry_out()

    def check(self) -> None:
        """Until something was lost: every token of the authoritative version is where the map says."""
        if self.broken:
            return
        for uri, ranges in reshard.held(self.groups.get("m")).items():
            assert set(tokens(ranges)) <= set(self.members[uri].memory)


groups_unset = ReshardRequest(map="m", abort=1).commit


def tokens(ranges: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> list[int]:
    return [token for first, end in ranges for token in range(first, end)]


def run(seed: int, *, faults: bool) -> World:
    world = World(seed, faults=faults)
    for _ in range(6):
        target = world.random_map(0).shards
        with contextlib.suppress(KvspError):
            world.groups.begin("m", target, 300, world.now)
        world.carry_out()
        before = {uri: dict(member.memory) for uri, member in world.members.items()}
        version = world.groups.get("m").version
        world.now += world.random.choice((0, groups.LIFETIME_MS))
        for _ in range(200):
            world.step()
            world.check()
            if not world.bag and world.groups.next_deadline() is None:
                break
        if not faults and world.groups.get("m").version == version + 1:
            for uri, ranges in reshard.held(world.groups.get("m")).items():
                for token in tokens(ranges):
                    if token in before[uri]:
                        assert world.members[uri].memory[token] == before[uri][token]
    return world


@pytest.mark.spec("R-190", "R-192", "R-193", "R-194", "R-196", "U-38")
@pytest.mark.parametrize("seed", range(60))
def test_a_version_is_whole_at_every_moment_and_retained_tokens_stay_where_they_are(seed: int) -> None:
    world = run(seed, faults=False)
    assert world.settled
    final = reshard.held(world.groups.get("m"))
    if world.groups.next_deadline() is None and not world.bag:
        for uri, member in world.members.items():
            assert sorted(member.memory) == tokens(final.get(uri, []))  # what is released is gone


@pytest.mark.spec("R-193", "R-194", "R-195", "D12")
@pytest.mark.parametrize("seed", range(150))
def test_crashes_loss_and_repeats_leave_exactly_one_authoritative_version(seed: int) -> None:
    world = run(seed, faults=True)
    world.faults = False
    for _ in range(3000):
        if not world.bag and world.groups.next_deadline() is None:
            break
        world.step()
        world.check()
    assert world.groups.next_deadline() is None  # nothing hangs
    if not world.broken:
        current = world.groups.get("m")
        for uri, ranges in reshard.held(current).items():
            assert world.members[uri].rules.version("m") == current.version
            assert world.members[uri].rules.held("m") == ranges


def plan(**members: object) -> ReshardRequest:
    base: dict[str, object] = {
        "map": "m", "old": 1, "new": 2, "deadline_ms": 100, "retain": [], "fetch": [], "release": [],
    }  # fmt: skip
    return ReshardRequest(**{**base, **members})  # type: ignore[arg-type]


@pytest.mark.spec("R-195", "U-38")
def test_what_does_not_fit_the_current_version_is_a_conflict_and_changes_nothing() -> None:
    member = Shards(BLOCK)
    member.adopt("m", 1, [(0, 8)])
    good = plan(retain=[(0, 4)], release=[(4, 8)])
    for bad in (
        plan(old=3, new=4, retain=[(0, 8)]),
        plan(retain=[(0, 4)]),  # says nothing of 4..8
        plan(retain=[(0, 12)]),  # retains what is not held
        plan(retain=[(0, 4)], release=[(4, 8)], fetch=[ReshardFetch((4, 8), INSTANCES[1])]),
    ):
        with pytest.raises(KvspError) as raised:
            member.plan(bad)
        assert raised.value.problem.suffix == "kvsp-plan-conflict"
    with pytest.raises(KvspError) as raised:
        member.plan(plan(retain=[(0, 3)], release=[(3, 8)]))
    assert raised.value.status == 400  # unaligned
    for call in (lambda: member.commit("m", 2), lambda: member.abort("m", 1), lambda: member.commit("x", 1)):
        with pytest.raises(KvspError) as raised:
            call()
        assert raised.value.problem.suffix == "kvsp-plan-conflict"
    assert member.abort("x", 7) == 6  # of a map that never came here
    assert member.abort("m", 2) == 1  # of nothing prepared
    assert member.plan(good)
    assert member.plan(good)  # the same again joins the first
    with pytest.raises(KvspError):
        member.plan(plan(retain=[(0, 8)]))  # another while one is prepared
    assert member.held("m") == [(0, 8)]
    assert member.commit("m", 2) == 2
    assert member.commit("m", 2) == 2
    with pytest.raises(KvspError):
        member.abort("m", 2)  # after the commit
    assert member.held("m") == [(0, 4)]


@pytest.mark.spec("U-38")
def test_an_unseen_map_is_adopted_by_who_has_nothing_of_it() -> None:
    member = Shards(BLOCK)
    with pytest.raises(KvspError):
        member.plan(plan(retain=[(0, 4)]))
    assert not member.plan(plan(fetch=[ReshardFetch((0, 4), INSTANCES[1])]))
    assert member.loaded("m", 2)
    assert member.commit("m", 2) == 2
    assert member.held("m") == [(0, 4)]


@pytest.mark.spec("U-38")
def test_a_decision_is_told_again_to_who_has_left_or_never_came_in() -> None:
    member = Shards(BLOCK)
    member.adopt("m", 1, [(0, 4)])
    assert member.plan(plan(release=[(0, 4)]))
    assert member.commit("m", 2) == 2
    assert not member.knows("m")
    assert member.commit("m", 2) == 2  # "commit repeat at that version -> 200"
    for call in (
        lambda: member.abort("m", 2),  # "abort after commit ... -> 409"
        lambda: member.abort("m", 1),
        lambda: member.commit("m", 1),
        lambda: member.commit("m", 3),
        lambda: member.abort("x", 0),  # no plan ends there
    ):
        with pytest.raises(KvspError) as raised:
            call()
        assert raised.value.problem.suffix == "kvsp-plan-conflict"
    joins = plan(old=2, new=3, fetch=[ReshardFetch((0, 4), INSTANCES[1])])
    for _ in range(2):
        assert member.abort("m", 3) == 2  # its plan never came
        assert not member.plan(joins)
        assert member.abort("m", 3) == 2
    assert not member.knows("m")
    assert not member.plan(joins)
    assert member.loaded("m", 3)
    assert member.commit("m", 3) == 3
    assert member.held("m") == [(0, 4)]


@pytest.mark.spec("U-38", "D6")
def test_maps_that_were_left_are_remembered_and_not_too_many() -> None:
    member = Shards(BLOCK)
    for name in map(str, range(LEFT_MAX + 1)):
        assert member.plan(plan(map=name))
        member.commit(name, 2)
    assert member.commit("1", 2) == 2
    with pytest.raises(KvspError):
        member.commit("0", 2)


@pytest.mark.spec("R-194", "U-38")
def test_a_plan_that_cannot_be_loaded_waits_for_its_abort() -> None:
    member = Shards(BLOCK)
    joins = plan(fetch=[ReshardFetch((0, 4), INSTANCES[1])])
    member.failed("m", 2)  # of what is not known
    assert not member.plan(joins)
    member.failed("m", 2)
    assert not member.plan(joins)
    with pytest.raises(KvspError):
        member.commit("m", 2)
    assert member.abort("m", 2) == 1
    assert not member.knows("m")
