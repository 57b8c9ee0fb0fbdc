from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.holder.timers import Timers


@given(st.lists(st.tuples(st.sampled_from("setcanceldue"), st.integers(0, 4), st.integers(0, 20))))
def test_timers_against_a_dict(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, int] = {}
    for what, key, at in steps:
        if what in "set":
            timers.set(key, at)
            model[key] = at
        elif what in "cancel":
            timers.cancel(key)
            model.pop(key, None)
        else:
            due = timers.due(at)
            assert [model[each] for each in due] == sorted(model[each] for each in due)
            assert set(due) == {each for each, when in model.items() if when <= at}
            model = {each: when for each, when in model.items() if when > at}
        assert timers.next_ms() == min(model.values(), default=None)


def test_moving_a_deadline_again_and_again_takes_no_memory() -> None:
    timers: Timers[str] = Timers()
    for at in range(100_000):
        timers.set("one", at)
    assert len(timers._heap) < 100
