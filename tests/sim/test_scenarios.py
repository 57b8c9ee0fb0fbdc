"""Single faults, aimed: what the many seeds meet by chance is looked at closely here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from msgspec import structs

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import InstanceStatus, ResumeRequest, SessionCheckpoint
from services.frontend.state import Delivery
from services.placement.instructions import SessionRow
from tests.sim.checker import Request
from tests.sim.cluster import Cluster
from tests.sim.instance import STATUS_TTL_MS, Event, InstanceNode
from tests.sim.kernel import Node
from tests.sim.network import Stream

T = TypeVar("T")
S = "00000000-0000-4000-8000-00000000000a"


class Scene:
    """A cluster in fine weather and one long session of a sampler that is not deterministic, under way."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.cluster = cluster = Cluster(seed)
        self.kernel = cluster.kernel
        for instance in cluster.instances:
            instance.sleep_after_ms = 0
        members = {"deterministic": False, "max_tokens": 200, "patience_ms": 10**9, "stop_tokens": []} | options
        self.request: Request = cluster.request(600, S, **members)
        cluster.start()

    @property
    def row(self) -> SessionRow:
        """The session on the placement controller's disk."""
        row = self.cluster.placement.row(S)
        assert row is not None
        return row

    @property
    def checkpoint(self) -> SessionCheckpoint:
        assert self.row.checkpoint is not None
        return self.row.checkpoint

    @property
    def instance(self) -> InstanceNode:
        """Who runs the session, as the disk has it."""
        return self.cluster.placement.instances[self.row.instance]

    def until(self, condition: Callable[[], bool], within_ms: int = 20_000) -> None:
        self.kernel.run_until(self.kernel.now_ms + within_ms, condition)
        assert condition()

    def until_tokens(self, count: int) -> None:
        self.until(lambda: len(self.request.tokens) >= count)

    def until_epoch(self, epoch: int) -> None:
        """Bound under it."""
        self.until(lambda: self.row.epoch == epoch and self.row.bound)

    def finish(self) -> None:
        """To the end: the client has all its tokens, and nothing is left over."""
        self.cluster.settle()
        assert self.request.outcome == "length"

    def ask(self, node: Node, call: Coroutine[Any, Any, T]) -> T | registry.ProblemType:
        """The outcome of a call that reaches a node out of the blue."""
        outcomes: list[T | registry.ProblemType] = []

        async def asked() -> None:
            try:
                outcomes.append(await call)
            except KvspError as error:
                outcomes.append(error.problem)

        node.enter(lambda: node.spawn(asked()))
        self.until(lambda: bool(outcomes), 100)
        return outcomes[0]

    def status(self, instance: InstanceNode) -> InstanceStatus:
        """What the controller was last told of an instance."""
        return next(each for each in self.cluster.placement.state.overview() if each.instance == instance.base_uri)


@pytest.mark.spec("R-101", "R-173", "R-178", "R-179", "R-181", "U-34", "U-35", "D12")
def test_a_zombie_is_fenced_everywhere() -> None:
    scene = Scene()
    placement = scene.cluster.placement
    scene.until_tokens(20)
    zombie, before = scene.instance, scene.checkpoint
    zombie.pause()
    scene.until_epoch(2)
    scene.until_tokens(40)
    assert scene.instance is not zombie
    zombie.resume()
    # Its own session goes as soon as the controller answers its first checkpoint.
    scene.until(lambda: zombie.state.sessions.get(S, 1) is None, 2 * STATUS_TTL_MS)
    late = structs.replace(before, generated=[*before.generated, 1], output_offset=before.output_offset + 1)
    assert scene.ask(placement, placement.put_checkpoint(zombie.base_uri, late)) is registry.STALE_EPOCH
    # The successor takes no message of the old epoch, and no resume that is not newer than its own.
    successor = scene.instance
    stale = ResumeRequest(1, structs.replace(before, epoch=0))
    assert scene.ask(successor, successor.resume_session(stale)) is registry.STALE_EPOCH
    assert scene.ask(zombie, zombie.resume_session(stale)) is registry.STALE_EPOCH
    # Nor does the front end.
    delivery = Delivery(2, 40)
    assert delivery.take(1, 40, [1, 2, 3]) == []
    assert delivery.next_index == 40
    scene.finish()
    assert scene.kernel.counts["migrations"] == 1


@pytest.mark.spec("R-172", "R-175", "R-179", "U-34")
@pytest.mark.parametrize("first", [0, 20, 40])
def test_the_controller_dies_at_every_boundary(first: int) -> None:
    """Between any two instructions, before and after each write; it is back before anybody is missed."""
    for boundary in range(first, first + 20):
        scene = Scene()
        placement = scene.cluster.placement
        scene.until_tokens(10)
        placement.doom = iter(itertools.chain([False] * boundary, itertools.repeat(True))).__next__
        scene.until(lambda scene=scene: not scene.cluster.placement.up)  # type: ignore[misc]
        acknowledged = scene.checkpoint.output_offset
        placement.start()
        scene.until_tokens(acknowledged + 10)
        assert scene.row.epoch == 1
        scene.finish()


@pytest.mark.spec("R-101", "R-103", "R-179")
def test_instance_and_controller_die_together() -> None:
    """What the disk has is enough to go on, and the controller's restart counts against the instance's TTL."""
    scene = Scene()
    scene.until_tokens(10)
    victim = scene.instance
    victim.crash()
    scene.cluster.placement.crash()
    scene.kernel.run_until(scene.kernel.now_ms + 300)
    scene.cluster.placement.start()
    scene.until_epoch(2)
    assert scene.instance is not victim
    victim.start()
    scene.finish()


@pytest.mark.spec("R-102", "R-103", "D12")
def test_a_clock_set_back_across_a_restart() -> None:
    scene = Scene()
    placement = scene.cluster.placement
    scene.until_tokens(10)
    victim, old = scene.instance, scene.status(scene.instance)
    victim.crash()
    victim.set_clock_back(3_600_000)
    scene.kernel.run_until(scene.kernel.now_ms + 100)
    victim.start()
    # "MUST increase every time it restarts": the session moves at once, not after a TTL.
    scene.until(lambda: scene.row.epoch >= 2, 300)
    assert scene.status(victim).epoch > old.epoch
    # What its former life sent late is discarded, also by a controller that has restarted since.
    assert scene.ask(placement, placement.put_status(old)) is registry.STALE_EPOCH
    placement.crash()
    placement.start()
    assert scene.ask(placement, placement.put_status(old)) is registry.STALE_EPOCH
    scene.finish()


@pytest.mark.spec("R-172", "U-34", "U-35", "D12")
def test_repeated_and_late_messages_change_nothing() -> None:
    scene = Scene()
    placement = scene.cluster.placement
    scene.until_tokens(20)
    early = scene.checkpoint
    scene.instance.crash()
    scene.until_epoch(2)
    scene.until_tokens(40)
    instance, now = scene.instance, scene.checkpoint
    # A checkpoint again, and an earlier one of the same epoch.
    for offset in (now.output_offset, now.output_offset - 5):
        again = structs.replace(now, generated=now.generated[:offset], output_offset=offset)
        reply = scene.ask(placement, placement.put_checkpoint(instance.base_uri, again))
        assert reply.epoch == 2  # type: ignore[union-attr]
        assert reply.output_offset >= now.output_offset  # type: ignore[union-attr]
    # The resume again: no restart. Another one under the same epoch is refused.
    running = instance.state.sessions.get(S, 2)
    assert running is not None
    assert running.origin is not None
    repeated = ResumeRequest(2, running.origin)
    assert scene.ask(instance, instance.resume_session(repeated)).epoch == 2  # type: ignore[union-attr]
    assert instance.state.sessions.get(S, 2) is running
    sampler = structs.replace(early.sampler, step=0)
    other = ResumeRequest(2, structs.replace(early, generated=[], output_offset=0, sampler=sampler))
    assert scene.ask(instance, instance.resume_session(other)) is registry.STALE_EPOCH
    # Above the current epoch, and from another instance.
    above = structs.replace(now, epoch=3)
    assert scene.ask(placement, placement.put_checkpoint(instance.base_uri, above)) is registry.CONFLICT
    others = [each for each in scene.cluster.instances if each is not instance]
    stranger = scene.ask(placement, placement.put_checkpoint(others[0].base_uri, now))
    assert stranger is registry.FORBIDDEN
    scene.cluster.mend()
    scene.finish()


@pytest.mark.spec("R-175", "R-180", "R-181")
def test_an_instance_restarts_before_anybody_has_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end, which has no token yet, reaches it before its first status reaches the controller.

    Its former life had a token recorded: another run under the same epoch would give another one, and the
    controller would acknowledge it as a repetition.
    """
    scene = Scene()
    cluster = scene.cluster
    scene.until(lambda: cluster.placement.row(S) is not None)
    victim = scene.instance
    cluster.network.cut_one_way(victim.name, "fe")
    scene.until(lambda: scene.checkpoint.output_offset == 1)
    victim.crash()

    async def lost(_: object) -> None:
        return

    with monkeypatch.context() as patched:
        patched.setattr(victim, "_status", lost)
        victim.start()
        cluster.network.heal()
        scene.kernel.run_until(scene.kernel.now_ms + 700)
        assert scene.row.epoch == 1
    cluster.settle()
    assert scene.request.outcome == "length"


@pytest.mark.spec("R-108", "R-109", "R-110")
def test_a_drained_instance_finishes_and_sleeps() -> None:
    scene = Scene()
    cluster = scene.cluster
    scene.until_tokens(10)
    drained = scene.instance
    cluster.placement.operate(drained.base_uri, "draining")
    scene.until(lambda: drained.state.state == "draining", 500)
    # Whatever the front end believes, it gets no new session in there.
    stream: Stream[Event] = Stream(cluster.network, drained, cluster.frontend)
    stranger = replace(scene.request, session=S[:-1] + "c")
    assert scene.ask(drained, drained.generate(stranger, 1, 0, stream)) is registry.INVALID_STATE
    later = cluster.request(10, S[:-1] + "b", patience_ms=10**9)
    scene.until(lambda: later.outcome is not None)
    scene.until(lambda: scene.request.outcome is not None)
    assert scene.kernel.counts["migrations"] == 0
    assert scene.kernel.counts["sessions started"] == 2
    scene.until(lambda: scene.status(drained).state == "sleeping", STATUS_TTL_MS)
    scene.finish()
    cluster.placement.operate(drained.base_uri, "active")
    scene.until(lambda: drained.state.state == "active", 500)


@pytest.mark.spec("R-128", "R-132", "R-140")
@pytest.mark.parametrize("dies", [False, True])
def test_what_a_directive_leases_is_released(dies: bool) -> None:
    """Also when its instance dies in the middle: then the leases run out."""
    cluster = Cluster(3)
    kernel, placement = cluster.kernel, cluster.placement

    def leased() -> bool:
        return any(holder.leases() for holder in cluster.holders)

    def only(name: str) -> None:
        for instance in cluster.instances:
            placement.operate(instance.base_uri, "active" if instance.name == name else "draining")

    prompt = list(range(40))
    kernel.after(600, lambda: only("ii1"))
    first = cluster.request(800, S, prompt=[*prompt, 1], max_tokens=4, patience_ms=10**9)
    cluster.start()
    kernel.run_until(3_000, lambda: first.outcome is not None)
    only("ii2")
    kernel.run_until(kernel.now_ms + 1_000)
    cluster.request(0, S[:-1] + "b", prompt=[*prompt, 2], max_tokens=4, patience_ms=10**9)
    kernel.run_until(kernel.now_ms + 2_000, leased)
    assert leased()
    assert kernel.counts["directives sent"] == 1
    if dies:
        cluster.instances[1].crash()
        kernel.run_until(kernel.now_ms + 50)
        assert leased()
    cluster.mend()
    cluster.settle()
    assert not leased()
