"""kill -9 of every process of a fleet while clients stream: no token is lost, repeated or altered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsp.protocol import limits
from kvsp.protocol.records import ReplicaRecord
from tests.stack.fleet_load import (
    Ask,
    active,
    ask,
    block_names,
    count,
    environment,
    is_alive,
    overview,
    put_checkpoint,
    put_status,
    shape_of,
    stopped,
    streaming,
    undisturbed,
    where,
)
from tests.stack.harness import RunningStack, start_fleet, temporary_layout
from tests.stack.traffic import assert_problem, chain, client_of, eventually

pytestmark = pytest.mark.stack

KILLS = 3

A_DAY_AGO = """
import time

now = time.time_ns
time.time_ns = lambda: now() - 86_400_000_000_000
"""
"""As `sitecustomize` it sets the clock back that epochs are taken from."""


@pytest.fixture(scope="module")
def frail() -> Iterator[RunningStack]:
    """Sampled tokens wait for their checkpoints here, and what nobody follows soon ends."""
    overrides = {"frontend": {"deterministic_sampling": False}, "placement": {"unfollowed_ms": 2000}}
    with temporary_layout() as layout, start_fleet(layout, overrides) as started:
        yield started


@pytest.fixture(scope="module")
def expected(frail: RunningStack) -> dict[Ask, str]:
    return undisturbed(frail)


def checkpoints(fleet: RunningStack) -> float:
    """How many the controller has recorded since its start."""
    return count(fleet, "placement", "kvsp_placement_checkpoints_total")


@pytest.mark.spec("R-172", "R-173", "R-175", "R-176", "R-177", "D12")
def test_placement_is_killed_amid_checkpoints(frail: RunningStack, expected: dict[Ask, str]) -> None:
    moment = random.Random(2026)  # of each run the same
    epochs = active(frail)
    for _ in range(KILLS):
        with streaming(frail, expected) as streams:
            more = checkpoints(frail) + moment.randrange(1, 100)
            eventually(lambda goal=more: checkpoints(frail) >= goal, "no checkpoints are recorded")
            frail.kill("placement")
            frail.start("placement")
            streams.finish()
    assert active(frail) == epochs


@pytest.mark.spec("R-088", "R-090")
def test_the_index_is_killed(frail: RunningStack, expected: dict[Ask, str]) -> None:
    fresh = Ask("Unheard of. " + next(iter(expected)).prompt, tokens=40)
    with streaming(frail, expected) as streams:
        frail.kill("index")
        alone = ask(frail, fresh)  # it is advisory: without it, all is computed
        assert alone.cached_tokens == 0
        streams.come(50)
        frail.start("index")
        streams.finish()
    # "publishes again": what is held is found
    again = eventually(lambda: (found := ask(frail, fresh)).cached_tokens and found, "nothing is listed again")
    assert again.text == alone.text


@pytest.mark.spec("R-088", "R-161", "R-177")
@pytest.mark.parametrize(("holder", "party"), [("h1", "h1"), ("ii1-blocks", "ii1")])
def test_a_holder_is_killed(frail: RunningStack, expected: dict[Ask, str], holder: str, party: str) -> None:
    with streaming(frail, expected) as streams:
        frail.kill(holder)
        streams.come(100)
        frail.start(holder)
        streams.finish()
    (sample,) = chain(frail, 1, shape_of(frail))
    named = frail.instances.get(party, frail.holder), sample.compat_id, sample.scope_id, sample.block_key
    with client_of(frail) as client:
        assert client.put(*named, sample.octets)
        assert client.get_from(*named).payload == sample.payload


@pytest.mark.spec("D9", "R-066")
@pytest.mark.parametrize("process", ["gateway", "envoy", "frontend"])
def test_what_holds_the_connections_is_killed(frail: RunningStack, expected: dict[Ask, str], process: str) -> None:
    with streaming(frail, expected) as streams:
        frail.kill(process)
        try:
            streams.break_off()
            assert overview(frail).sessions <= len(expected)
        finally:
            frail.start(process)


# --- instances that come back ---------------------------------------------------------------


def replicas_at(fleet: RunningStack, instance: str, prompt: str) -> list[ReplicaRecord]:
    """What an instance is known to hold of a prompt's leading blocks."""
    with client_of(fleet) as client:
        found = client.lookup(fleet.scope_id(), fleet.compat_id(shape_of(fleet)), block_names(fleet, prompt))
    return [each for replicas in found.replicas for each in replicas if each.holder == fleet.instances[instance]]


@pytest.mark.spec("R-101", "R-173", "R-174", "R-176", "R-178", "R-181", "D12", "U-34")
def test_a_stopped_instance_is_fenced_when_it_goes_on(frail: RunningStack, expected: dict[Ask, str]) -> None:
    with streaming(frail, expected) as streams:
        answer = streams.slowest()
        name, lost = where(answer), streams.at(where(answer))
        stored = eventually(lambda: replicas_at(frail, name, lost[0].prompt), "it stores nothing")
        fenced = count(frail, name, "kvsp_instance_sessions_total", outcome="fenced")
        with stopped(frail.pid(name)):
            eventually(lambda: answer.moved, "its sessions do not go elsewhere")
            session, old, new = answer.placement["session"], answer.placement["epoch"], answer.moved["epoch"]
            assert new > old
            assert_problem(put_checkpoint(frail, name, session, old), 409, "kvsp-stale-epoch")
            assert_problem(put_checkpoint(frail, name, session, new), 403)
            assert_problem(put_checkpoint(frail, name, session, limits.INT_MAX), 409)
            eventually(lambda: all(streams.answers[each].moved for each in lost), "not all of them go elsewhere")
            # What it has stored is still there, and of use.
            with client_of(frail) as client:
                for record in stored:
                    assert client.get([record], descriptor=shape_of(frail)).holder == frail.instances[name]
        # Each checkpoint that it still sends is refused, and ends what it had.
        eventually(
            lambda: count(frail, name, "kvsp_instance_sessions_total", outcome="fenced") == fenced + len(lost),
            "it goes on with sessions of others",
        )
        streams.finish()


@pytest.mark.spec("R-101", "R-103", "R-181", "R-102")
def test_an_instance_of_which_a_later_start_is_known_ends(frail: RunningStack, expected: dict[Ask, str]) -> None:
    epoch = active(frail)["ii1"] + 1
    with streaming(frail, expected) as streams:
        pid = frail.pid("ii1")
        with stopped(pid):
            assert put_status(frail, "ii1", epoch).status == 200
        eventually(lambda: not is_alive(pid), "it goes on")
        assert_problem(put_status(frail, "ii1", epoch - 1), 409, "kvsp-stale-epoch")
        frail.start("ii1")
        assert active(frail)["ii1"] > epoch
        streams.finish()


@pytest.mark.spec("R-102")
def test_the_epoch_rises_though_the_clock_is_set_back(
    frail: RunningStack, expected: dict[Ask, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(A_DAY_AGO)
    before = active(frail)
    with streaming(frail, expected) as streams:
        name = where(streams.slowest())
        frail.kill(name)
        with environment(frail, name, PYTHONPATH=str(tmp_path)):
            frail.start(name)
        assert active(frail)[name] == before[name] + 1  # its clock would have said much less
        streams.finish()
