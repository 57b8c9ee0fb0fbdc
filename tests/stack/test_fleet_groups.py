"""Groups of real processes: resized while tokens stream, and members killed in the middle of a step."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tomllib
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.local import prompts
from deploy.local.acts import OTHER_SCOPE
from deploy.local.configs import ALL_INSTANCES
from deploy.local.fleet import Fleet
from deploy.local.groups_act import Groups, Stream, resized_while_streaming
from deploy.local.model import BLOCK_TOKENS
from kvsp.cli.controller import instance_name
from kvsp.protocol import reshard
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ShardMap
from services.placement.resizing import resized
from tests.stack.harness import RunningStack
from tests.stack.test_fleet_operator import kvsp
from tests.stack.traffic import eventually, metric
from tests.stack.wire import Wire, expect

pytestmark = pytest.mark.stack

TOKENS = 4000
"""The tiny model must still be speaking when something happens, also on a busy machine."""
CONFLICT = "kvsp-plan-conflict"
COPIES = itertools.count(100)  # of documents that no other test asks about


@pytest.fixture(scope="module")
def three(fleet: RunningStack) -> Iterator[Fleet]:
    """The fleet with three instances."""
    with Fleet(fleet.background) as opened, opened.spare():
        yield opened


@pytest.fixture
def prompt() -> str:
    """One that nobody has asked before: what could be loaded is not computed by a group."""
    return prompts.long(next(COPIES))


@pytest.fixture
def undisturbed(three: Fleet, prompt: str) -> str:
    """What one instance answers."""
    with three.drained("ii2"), three.drained("ii3"):
        return three.ask(prompt, TOKENS, scope=OTHER_SCOPE).text


class Scene:
    """A stream that a group computes."""

    def __init__(self, stack: RunningStack, fleet: Fleet, stream: Stream) -> None:
        self.stack, self.fleet, self.stream = stack, fleet, stream
        self.killed: list[str] = []

    def kill(self, instance: str) -> None:
        """It is started again when the test is over."""
        self.fleet.kill(instance)
        self.killed.append(instance)

    def map(self) -> ShardMap:
        """The authoritative version, once there is one."""
        return eventually(lambda: next(iter(self.fleet.groups()), None), "no group")

    def members(self) -> list[str]:
        """Names of the members, home last."""
        return [instance_name(shard.instance) for shard in self.map().shards]

    def until_tokens(self, more: int = 1) -> None:
        """Wait for so many more tokens."""
        wanted = self.stream.tokens + more
        eventually(lambda: self.stream.tokens >= wanted, "no tokens come")

    def calls(self, instance: str, method: str) -> float:
        """How often an instance has answered a call."""
        admin = tomllib.loads(self.stack.layout.config(instance).read_text())["admin"]
        return metric(admin, "kvsp_rpc_calls_total", method=f"kvsp.v1.Instance/{method}", status="200")

    def fetchers(self, members: int) -> dict[str, set[str]]:
        """Who would fetch from whom in a step to so many members."""
        old = self.map()
        new = resized(old, members, [self.stack.instances[name] for name in ALL_INSTANCES], BLOCK_TOKENS)
        plans = reshard.plans(old, ShardMap(old.map, old.version + 1, new), 1000)
        return {
            instance_name(uri): {instance_name(each.source) for each in plan.fetch}  # type: ignore[union-attr]
            for uri, plan in plans.items()
            if plan.fetch
        }

    @contextlib.contextmanager
    def stopped(self, *processes: str) -> Iterator[None]:
        """While this lasts, processes stand still."""
        pids = [self.stack.pid(name) for name in processes]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.fixture
def scene(fleet: RunningStack, three: Fleet, prompt: str, undisturbed: str) -> Iterator[Scene]:
    del undisturbed  # first
    eventually(lambda: not three.groups(), "groups are left")
    with ThreadPoolExecutor(1) as pool:
        made = Scene(fleet, three, Stream(pool, three, prompt, TOKENS))
        yield made
        for instance in made.killed:
            three.start_again(instance)


@pytest.mark.spec("R-190", "R-191", "R-193", "R-196")
def test_a_group_is_resized_while_tokens_stream(three: Fleet, prompt: str, undisturbed: str) -> None:
    act = Groups()
    resized_while_streaming(three, act, prompt, TOKENS)
    assert act.answer.text == undisturbed
    assert len(act.prefilled_by) == 3
    assert [len(step.members) for step in act.steps] == [2, 1, 2, 3]
    assert [step.moved for step in act.steps] == [step.due for step in act.steps]
    assert all(step.due > 0 for step in act.steps)
    assert not act.answer.moved
    eventually(lambda: not three.groups(), "the map outlives its session")


@pytest.mark.spec("R-194", "U-38")
def test_a_joining_member_is_killed_while_it_fetches(scene: Scene, undisturbed: str) -> None:
    """The others abort, and the session goes on where it is."""
    scene.until_tokens()
    scene.fleet.resize(scene.map().map, 2)
    before = scene.map()
    ((joining, sources),) = scene.fetchers(3).items()
    _killed_while_fetching(scene, 3, joining, sources)
    after = scene.map()
    assert after.version == before.version
    assert [each.instance for each in after.shards] == [each.instance for each in before.shards]
    answer = scene.stream.result()
    assert answer.text == undisturbed
    assert not answer.moved


@pytest.mark.spec("R-194", "U-38")
def test_a_member_with_ranges_is_killed_while_it_fetches(scene: Scene, undisturbed: str) -> None:
    """The others abort; its ranges are lost, so the session goes on elsewhere."""
    scene.until_tokens()
    ((member, sources),) = scene.fetchers(2).items()
    assert member != scene.members()[-1]
    _killed_while_fetching(scene, 2, member, sources)
    answer = scene.stream.result()
    assert answer.text == undisturbed
    assert answer.moved


def _killed_while_fetching(scene: Scene, members: int, member: str, sources: set[str]) -> None:
    """Begin a step, and kill a member that waits for blocks."""
    asked = scene.calls(member, "JoinGroup")
    with ThreadPoolExecutor(1) as pool, scene.stopped(*(f"{name}-blocks" for name in sources)):
        resizing = pool.submit(scene.fleet.resize, scene.map().map, members)
        eventually(lambda: scene.calls(member, "JoinGroup") > asked, "no step begins")
        scene.kill(member)
        with pytest.raises(KvspError) as raised:
            resizing.result()
    assert raised.value.problem.suffix == CONFLICT


@pytest.mark.parametrize("at", [0, -1], ids=["a member", "home"])
def test_a_member_is_killed_between_steps(scene: Scene, undisturbed: str, at: int) -> None:
    scene.until_tokens()
    member = scene.members()[at]
    scene.kill(member)
    answer = scene.stream.result()
    assert answer.text == undisturbed
    assert answer.moved


@pytest.mark.spec("R-195", "U-38")
def test_what_a_foreign_controller_says_of_a_map_must_match_it(scene: Scene, undisturbed: str) -> None:
    scene.until_tokens()
    wire, shard_map = Wire(scene.stack), scene.map()
    last = shard_map.shards[-1]
    version, held = shard_map.version, list(last.tokens)

    def send(body: dict[str, Any], status: int) -> dict[str, Any]:
        reply = wire.call("POST", f"{last.instance}reshard", {"map": shard_map.map} | body, identity="pc")
        return dict(expect(reply, status, CONFLICT).json())

    def plan(**changes: Any) -> dict[str, Any]:
        body = {
            "from": version,
            "to": version + 1,
            "deadline_ms": 500,
            "retain": [held],
            "fetch": [],
            "release": [],
        }
        return body | changes

    assert send({"abort": version + 1}, 200)["version"] == version  # of nothing prepared
    assert send({"commit": version}, 200)["version"] == version  # a repeat
    send({"abort": version}, 409)
    send({"commit": version + 1}, 409)
    send(plan(**{"from": version + 1, "to": version + 2}), 409)
    send(plan(retain=[], release=[]), 409)
    send(plan(retain=[], release=[[held[0], held[1] + BLOCK_TOKENS]]), 409)
    others = [each.instance for each in shard_map.shards[:-1]]
    send(plan(fetch=[{"tokens": held, "from": others[0]}], retain=[]), 409)
    assert scene.stream.result().text == undisturbed


def test_an_operator_lists_groups_and_resizes_one(scene: Scene, undisturbed: str) -> None:
    scene.until_tokens()
    shard_map = scene.map()
    listed = kvsp(scene.stack, "group", "list")
    assert (listed.returncode, listed.stdout.count("\n")) == (0, 1), listed.stderr
    assert listed.stdout.startswith(f"{shard_map.map} v1: ")
    narrow = kvsp(scene.stack, "group", "resize", shard_map.map, "1")
    home, end = scene.members()[-1], scene.map().shards[-1].tokens[1]
    assert (narrow.returncode, narrow.stdout) == (0, f"{shard_map.map} v2: {home} 0-{end}\n"), narrow.stderr
    unknown = kvsp(scene.stack, "group", "resize", str(uuid.uuid4()), "1")
    assert unknown.returncode != 0
    answer = scene.stream.result()
    assert answer.text == undisturbed
    assert not answer.moved


def test_a_short_prompt_has_no_group(three: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        stream = Stream(pool, three, f"{uuid.uuid4()} {prompts.prompt(1, 0)}", TOKENS)
        eventually(lambda: stream.tokens > 0, "no token comes")
        assert three.groups() == []
        stream.result()
