from __future__ import annotations

import json

import pytest

from deploy.local.acts import Act, _pause
from deploy.local.demo import run_demo
from tests.stack.harness import RunningStack

pytestmark = pytest.mark.stack

LONG_TOKENS = 1500
RESIZED_TOKENS = 4000
"""The tiny model must still be speaking when its instance is killed, and when its group is resized."""


@pytest.mark.spec(
    "R-022", "R-023", "R-033", "R-090", "R-101", "R-102", "R-108", "R-115", "R-116", "R-117", "R-119", "R-125",
    "R-128", "R-129", "R-155", "R-171", "R-176", "R-177", "R-178", "R-179", "R-180", "R-190", "R-191", "R-193",
    "U-18",
)  # fmt: skip
def test_the_demo_succeeds(fleet: RunningStack, capfd: pytest.CaptureFixture[str]) -> None:
    code = run_demo(fleet.background, json_out=True, long_tokens=LONG_TOKENS, resized_tokens=RESIZED_TOKENS)
    out, errors = capfd.readouterr()
    assert code == 0, errors
    acts = json.loads(out)
    assert all(act["failures"] == [] for act in acts.values())
    assert all(act["moved"]["shm"] > 0 for act in acts.values())
    reuse, prefetch, crash = acts["reuse"], acts["prefetch"], acts["crash"]
    assert reuse["computed"]["cached_tokens"] == 0
    assert reuse["again"]["cached_tokens"] == reuse["blocks"] * 32
    fetches = {each["instance"]: each["fetch_us"] for each in reuse["again"]["placement"]["candidates"]}
    assert fetches[reuse["computed"]["placement"]["instance"]] == 0
    assert len(fetches) == 2
    (only,) = reuse["fetched"]["placement"]["candidates"]
    assert only["instance"] == reuse["fetched"]["placement"]["instance"]
    assert only["instance"] != reuse["computed"]["placement"]["instance"]
    assert prefetch["state"] == "complete"
    assert prefetch["loaded"] >= prefetch["blocks"]
    assert {loss["sampler"] for loss in crash["losses"]} == {"greedy", "seeded top-p"}
    for loss in crash["losses"]:
        assert loss["disturbed"]["text"] == loss["undisturbed"]["text"]
        # it went on elsewhere
        assert loss["disturbed"]["moved"]["epoch"] > 1
    groups = acts["groups"]
    assert groups["answer"]["text"] == groups["undisturbed"]["text"]
    assert [len(step["members"]) for step in groups["steps"]] == [2, 1, 2, 3]
    assert all(step["moved"] == step["due"] for step in groups["steps"])


def test_a_complaint_is_a_failure() -> None:
    act = Act()
    act.require(True, "no complaint")
    assert act.failures == []
    act.require(False, "a complaint")
    assert act.failures == ["a complaint"]


@pytest.mark.parametrize(
    ("pieces", "kill", "pause"),
    [
        ([1, 2, 3, 10, 11], 2, 8),  # one more was on its way
        ([1, 2, 3], 3, 0),  # all had come
        ([1, 2, 9], 2, 7),
    ],
)
def test_the_pause_ends_the_longest_silence_after_the_kill(pieces: list[float], kill: int, pause: float) -> None:
    assert _pause(pieces, kill) == pause
