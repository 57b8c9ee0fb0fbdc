from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deploy.local.demo import Outcome, run_demo
from deploy.local.layout import StackError
from tests.stack.harness import RunningStack

pytestmark = pytest.mark.stack

GOOD = Outcome(
    prompt_tokens=100,
    matched_tokens=96,
    recomputed_tokens=4,
    blocks_loaded=3,
    bytes_loaded=3 << 19,
    blocks_published=3,
    bytes_published=3 << 19,
    first_token_s=0.1,
    first_token_from_scratch_s=1.0,
    tokens_agree=True,
    trouble="",
)


@pytest.mark.spec("R-022", "R-023", "R-033", "R-075", "R-090", "R-150", "R-155", "R-157")
def test_one_engine_reuses_what_another_computed(stack: RunningStack, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_demo(stack, None, json_out=True) == 0
    outcome = Outcome(**json.loads(capfd.readouterr().out))
    assert outcome.tokens_agree
    assert outcome.matched_tokens > 5000
    assert outcome.recomputed_tokens < 400
    assert outcome.matched_tokens + outcome.recomputed_tokens == outcome.prompt_tokens
    assert outcome.bytes_loaded == outcome.blocks_loaded * (1 << 19)
    assert outcome.blocks_loaded * 32 == outcome.matched_tokens


def test_a_demo_without_an_index_fails_in_one_line(stack: RunningStack) -> None:
    stack.stop("index")
    try:
        with pytest.raises(StackError, match=r"^engine A: lookup: ") as failure:
            run_demo(stack, None)
        assert "\n" not in str(failure.value)
    finally:
        stack.start("index")


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (GOOD, ""),
        (replace(GOOD, matched_tokens=0), "nothing was reused"),
        (replace(GOOD, tokens_agree=False), "tokens differ"),
        (replace(GOOD, trouble="lookup: away"), "reuse failed: lookup: away"),
    ],
)
def test_a_demo_succeeds_only_when_all_of_it_did(outcome: Outcome, failure: str) -> None:
    assert outcome.failure.startswith(failure)
    assert bool(outcome.failure) == bool(failure)
