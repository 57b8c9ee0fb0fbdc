from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol.errors import KvspError
from kvsp.protocol.limits import INT_MAX
from kvsp.protocol.records import Sampler
from services.instance import sampling
from services.instance.sampling import Choice

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], dtype=np.float32))
ROWS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40).map(lambda row: np.array(row, np.float32))


def frequencies(choice: Choice, draws: int = 4000) -> list[float]:
    counts = np.bincount([choice.pick(LOGITS, step) for step in range(draws)], minlength=len(LOGITS))
    return (counts / draws).tolist()  # type: ignore[no-any-return]


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert Choice("greedy").pick(LOGITS, 0) == 1
    assert Choice("greedy").pick(np.array([1.0, 3.0, 3.0]), 7) == 1


@pytest.mark.spec("R-180")
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice("top-k", 1, k=5), [0.1, 0.4, 0.05, 0.3, 0.15]),
        (Choice("top-k", 1, k=99), [0.1, 0.4, 0.05, 0.3, 0.15]),
        (Choice("top-k", 2, k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (Choice("top-p", 3, p=1.0), [0.1, 0.4, 0.05, 0.3, 0.15]),
        (Choice("top-p", 4, p=0.69), [0, 4 / 7, 0, 3 / 7, 0]),
        (Choice("top-p", 5, p=0.01), [0, 1, 0, 0, 0]),
        (Choice("top-k", 6, temperature=0.5, k=2), [0, 16 / 25, 0, 9 / 25, 0]),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(choice: Choice, expected: list[float]) -> None:
    assert frequencies(choice) == pytest.approx(expected, abs=0.03)


@pytest.mark.spec("R-180", "R-047")
def test_a_step_can_be_taken_again_and_in_any_order() -> None:
    choice = Choice("top-p", -9, 1.3, p=0.95)
    forward = [choice.pick(LOGITS, step) for step in range(200)]
    assert [choice.pick(LOGITS, step) for step in reversed(range(200))] == forward[::-1]
    assert forward != [Choice("top-p", 9, 1.3, p=0.95).pick(LOGITS, step) for step in range(200)]


def test_random_numbers_stay_the_same_for_ever() -> None:
    assert sampling.uniform(0, 0) == 0.011546754286331562
    assert sampling.uniform(7, 1) == 0.0828426870273763
    assert sampling.uniform(-1, INT_MAX) == 0.17605552379346245


@given(st.integers(-INT_MAX, INT_MAX), st.integers(0, INT_MAX))
def test_random_numbers_are_in_the_unit_interval(seed: int, step: int) -> None:
    assert 0 <= sampling.uniform(seed, step) < 1


def test_neighbouring_seeds_and_steps_are_independent() -> None:
    numbers = np.array([[sampling.uniform(seed, step) for step in range(100)] for seed in range(-50, 50)])
    assert len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 0.02
    for axis in (0, 1):
        moved = np.roll(numbers, 1, axis)
        assert abs(np.corrcoef(numbers.ravel(), moved.ravel())[0, 1]) < 0.05


@given(ROWS, st.integers(1, 50), st.integers(0, 100))
def test_top_k_takes_what_a_full_sort_would(row: np.ndarray[Any, Any], k: int, step: int) -> None:
    allowed = sorted(range(len(row)), key=lambda at: (-row[at], at))[:k]
    assert Choice("top-k", 1, k=k).pick(row, step) in allowed


@given(ROWS, st.floats(0.001, 1), st.integers(0, 100))
def test_top_p_takes_from_the_fewest_that_reach_p(row: np.ndarray[Any, Any], p: float, step: int) -> None:
    order = sorted(range(len(row)), key=lambda at: (-row[at], at))
    weights = np.exp(row.astype(np.float64) - row.max())
    place = order.index(Choice("top-p", 1, p=p).pick(row, step))
    before = sum(weights[at] for at in order[:place]) / weights.sum()
    assert place == 0 or before < p + 1e-9


def test_logits_that_are_not_numbers_are_an_error() -> None:
    for choice in (Choice("greedy"), Choice("top-k", k=1)):
        with pytest.raises(ValueError, match="not numbers"):
            choice.pick(np.array([1.0, np.nan]), 0)


@pytest.mark.spec("R-047")
def test_records_are_parsed() -> None:
    more = {"max_tokens": 5, "stop_tokens": [1]}
    assert sampling.parse(Sampler("greedy", {"temperature": "ignored", **more}, 3, 0, True)) == Choice("greedy")
    assert sampling.parse(Sampler("top-k", {"k": 4, **more}, 3, 0, True)) == Choice("top-k", 3, 1.0, k=4)
    parsed = sampling.parse(Sampler("top-p", {"p": 1, "temperature": 0.5}, -3, 9, False))
    assert parsed == Choice("top-p", -3, 0.5, p=1.0)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("beam", {}),
        ("", {}),
        ("top-k", {}),
        ("top-k", {"k": 0}),
        ("top-k", {"k": True}),
        ("top-k", {"k": 2.0}),
        ("top-k", {"k": 2, "temperature": 0}),
        ("top-k", {"k": 2, "temperature": -1}),
        ("top-k", {"k": 2, "temperature": float("inf")}),
        ("top-k", {"k": 2, "temperature": "1"}),
        ("top-p", {}),
        ("top-p", {"p": 0}),
        ("top-p", {"p": 1.1}),
        ("top-p", {"p": float("nan")}),
        ("top-p", {"p": True}),
    ],
)
def test_samplers_that_cannot_be_are_refused(method: str, params: dict[str, Any]) -> None:
    with pytest.raises(KvspError) as refused:
        sampling.parse(Sampler(method, params, 0, 0, True))
    assert refused.value.status == 400
