"""POST reshard over HTTPS, as another maker's controller sends it: A15, U-38, D6, against real instances."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from kvsp.protocol import limits
from tests.stack.harness import Reply, RunningStack
from tests.stack.wire import JSON, PLAIN, Wire, expect

pytestmark = pytest.mark.stack

CONFLICT = "kvsp-plan-conflict"
BLOCK = 32
MILLION = 1_000_000


@pytest.fixture(scope="module")
def wire(fleet: RunningStack) -> Wire:
    return Wire(fleet)


class Group:
    """A map that ii1 has never heard of; `tokens` counts blocks."""

    def __init__(self, wire: Wire, version: int = 4) -> None:
        self.wire, self.version = wire, version
        self.map = str(uuid.uuid4())

    def plan(self, **changes: Any) -> dict[str, Any]:
        """The plan to the next version that asks nothing of ii1."""
        plan = {"map": self.map, "from": self.version, "to": self.version + 1, "deadline_ms": 300}
        return plan | {"retain": [], "fetch": [], "release": []} | changes

    def fetch(self, first: int, end: int, source: str | None = None) -> dict[str, Any]:
        """An entry of a plan's `fetch`, in blocks."""
        return {"tokens": [first * BLOCK, end * BLOCK], "from": source or self.wire.ii2}

    def send(self, body: Any, identity: str = "pc") -> Reply:
        """POST reshard to ii1."""
        fields = {"content-type": JSON} if isinstance(body, bytes) else {}
        return self.wire.call("POST", self.wire.ii1 + "reshard", body, fields, identity)

    def commit(self, version: int | None = None) -> Reply:
        """Commit of a version, the next one unless given."""
        return self.send({"map": self.map, "commit": self.version + 1 if version is None else version})

    def abort(self, version: int | None = None) -> Reply:
        """Abort of a version, the next one unless given."""
        return self.send({"map": self.map, "abort": self.version + 1 if version is None else version})


@pytest.fixture
def group(wire: Wire) -> Group:
    return Group(wire)


# --- the two phases -----------------------------------------------------------------------


@pytest.mark.spec("R-055", "R-190", "R-192", "U-38")
def test_a_plan_of_an_unseen_map_that_asks_nothing_is_acknowledged_and_committed(group: Group) -> None:
    assert expect(group.send(group.plan()), 200).json() == {"map": group.map, "to": 5}
    for _ in range(2):  # told again
        assert expect(group.commit(), 200).json() == {"map": group.map, "version": 5}


@pytest.mark.spec("R-194", "U-38")
def test_an_abort_of_nothing_is_answered(group: Group) -> None:
    for _ in range(2):
        assert expect(group.abort(), 200).json() == {"map": group.map, "version": 4}
    expect(group.send(group.plan()), 200)
    for _ in range(2):
        assert expect(group.abort(), 200).json() == {"map": group.map, "version": 4}
    expect(group.commit(), 409, CONFLICT)


@pytest.mark.spec("R-195", "U-38")
def test_an_identical_plan_joins_the_first_and_another_is_a_conflict(group: Group) -> None:
    first = expect(group.send(group.plan()), 200)
    again = expect(group.send(group.plan()), 200)
    assert again.json() == first.json()
    expect(group.send(group.plan(deadline_ms=301)), 409, CONFLICT)
    expect(group.send(group.plan(**{"from": 5, "to": 6})), 409, CONFLICT)
    expect(group.abort(), 200)


@pytest.mark.spec("R-194", "U-38")
def test_what_cannot_be_loaded_by_the_deadline_is_503_and_goes_with_the_abort(group: Group) -> None:
    plan = group.plan(fetch=[group.fetch(0, 4)])
    refused = expect(group.send(plan), 503, PLAIN)
    assert int(refused.headers["retry-after"]) >= 1
    expect(group.commit(), 409, CONFLICT)  # it was not acknowledged
    assert expect(group.abort(), 200).json() == {"map": group.map, "version": 4}
    # the next step has the same number, and no trace of the first is left
    expect(group.send(group.plan()), 200)
    expect(group.abort(), 200)


@pytest.mark.spec("D10", "U-38")
@pytest.mark.parametrize("source", ["https://elsewhere.example/kvsp/", "https://localhost:1/ii2/"])
def test_nothing_is_fetched_from_who_is_not_registered(group: Group, source: str) -> None:
    expect(group.send(group.plan(fetch=[group.fetch(0, 1, source)])), 503, PLAIN)
    expect(group.abort(), 200)


@pytest.mark.spec("R-195", "U-38")
def test_what_does_not_match_the_current_version_is_a_conflict(group: Group) -> None:
    expect(group.commit(), 409, CONFLICT)  # of a map that is not known
    expect(group.send(group.plan(retain=[[0, BLOCK]])), 409, CONFLICT)
    expect(group.send(group.plan(release=[[0, BLOCK]])), 409, CONFLICT)
    expect(group.send(group.plan()), 200)
    expect(group.commit(6), 409, CONFLICT)  # of a version that is not prepared
    expect(group.abort(4), 409, CONFLICT)  # of the one that is in effect
    expect(group.commit(), 200)
    expect(group.abort(), 409, CONFLICT)  # after the commit


# --- bad bodies ---------------------------------------------------------------------------

CHANGES: dict[str, dict[str, Any]] = {
    "to is from": {"to": 4},
    "to skips one": {"to": 6},
    "to is before from": {"to": 3},
    "overlap within retain": {"retain": [[0, 64], [32, 96]]},
    "overlap of retain and release": {"retain": [[0, 64]], "release": [[32, 96]]},
    "overlap of retain and fetch": {"retain": [[0, 64]], "fetch": [{"tokens": [32, 96], "from": "https://a.example/"}]},
    "the same range twice": {"release": [[0, 32], [0, 32]]},
    "reversed": {"retain": [[64, 32]]},
    "empty": {"release": [[32, 32]]},
    "negative": {"retain": [[-32, 32]]},
    "beyond 2^53": {"retain": [[0, 2**53]]},
    "three ends": {"retain": [[0, 32, 64]]},
    "one end": {"release": [[0]]},
    "a fraction": {"retain": [[0, 32.5]]},
    "a string": {"retain": [["0", "32"]]},
    "unaligned retain": {"retain": [[0, 33]]},
    "unaligned release": {"release": [[1, 32]]},
    "unaligned fetch": {"fetch": [{"tokens": [0, 48], "from": "https://a.example/"}]},
    "no deadline": {"deadline_ms": 0},
    "fetch from nowhere": {"fetch": [{"tokens": [0, 32]}]},
    "fetch from no base URI": {"fetch": [{"tokens": [0, 32], "from": "ii2"}]},
    "a commit, too": {"commit": 5},
    "an abort, too": {"abort": 5},
}  # fmt: skip


@pytest.mark.spec("D6", "R-005", "R-055", "U-02", "U-38")
@pytest.mark.parametrize("name", CHANGES)
def test_a_bad_plan_is_refused_and_leaves_no_trace(group: Group, name: str) -> None:
    expect(group.send(group.plan(**CHANGES[name])), 400, PLAIN)
    expect(group.commit(), 409, CONFLICT)


@pytest.mark.spec("R-055", "U-38")
@pytest.mark.parametrize("missing", ["map", "from", "to", "deadline_ms", "retain", "fetch", "release"])
def test_every_member_of_a_plan_is_required(group: Group, missing: str) -> None:
    plan = group.plan()
    del plan[missing]
    expect(group.send(plan), 400, PLAIN)


@pytest.mark.spec("R-055", "U-38")
def test_it_is_exactly_one_of_the_three(group: Group) -> None:
    for body in ({"map": group.map}, {"map": group.map, "commit": 5, "abort": 5}, {"commit": 5}, {}):
        expect(group.send(body), 400, PLAIN)


@pytest.mark.spec("D6", "U-10")
def test_a_million_ranges(group: Group) -> None:
    within = limits.RESHARD_RANGES_MAX
    ranges = [[2 * at * BLOCK, (2 * at + 1) * BLOCK] for at in range(within + 1)]
    expect(group.send(group.plan(retain=ranges[:within])), 409, CONFLICT)
    expect(group.send(group.plan(retain=ranges)), 413, PLAIN)
    expect(group.send(group.plan(fetch=[{"tokens": each, "from": group.wire.ii2} for each in ranges])), 413, PLAIN)
    short = json.dumps(group.plan(retain=[0])).encode().replace(b"[0]", b"[" + b"[0,1]," * MILLION + b"[0,1]]")
    assert len(short) < limits.JSON_OCTETS_MAX
    expect(group.send(short), 400, PLAIN)
    long = len(json.dumps(group.plan(retain=[[at, at + 1] for at in range(MILLION)])))
    declared = {"content-type": JSON, "content-length": str(long)}  # refused before the first octet of the body
    expect(group.wire.call("POST", group.wire.ii1 + "reshard", b"", declared, "pc"), 413, PLAIN)


# --- who may ------------------------------------------------------------------------------


@pytest.mark.spec("R-197", "R-210", "U-09")
def test_only_a_placement_controller_plans_and_a_stranger_learns_nothing(group: Group) -> None:
    expect(group.send(group.plan()), 200)
    for identity in sorted(group.wire.stack.endpoints["identities"].keys() - {"pc"}):
        for body in (group.plan(), {"map": group.map, "commit": 5}, {"map": group.map, "abort": 5}, {}):
            expect(group.send(body, identity), 403, PLAIN)
    assert expect(group.commit(), 200).json() == {"map": group.map, "version": 5}
