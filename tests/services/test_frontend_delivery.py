"""The delivery of one session against a fleet that repeats, reorders, loses and comes back from the dead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.state import EARLY_MAX, Delivery

OUTPUT = list(range(1000, 1040))


def test_tokens_in_turn_are_delivered_at_once() -> None:
    delivery = Delivery()
    assert delivery.take(1, 0, [5, 6]) == [5, 6]
    assert delivery.take(1, 2, [7]) == [7]
    assert (delivery.epoch, delivery.next_index) == (1, 3)


@pytest.mark.spec("R-176")
def test_duplicates_are_dropped_by_index() -> None:
    delivery = Delivery()
    delivery.take(1, 0, OUTPUT[:10])
    assert delivery.take(2, 4, OUTPUT[4:12]) == OUTPUT[10:12]
    assert delivery.take(2, 0, OUTPUT[:12]) == []
    assert delivery.next_index == 12


@pytest.mark.spec("R-178", "R-181")
def test_tokens_of_a_lower_epoch_than_seen_are_dropped() -> None:
    delivery = Delivery()
    assert delivery.take(2, 0, [1]) == [1]
    assert delivery.take(1, 1, [9, 9]) == []
    assert (delivery.next_index, delivery.stale) == (1, 2)
    assert delivery.take(2, 1, [2]) == [2]


@pytest.mark.spec("R-178", "R-181")
def test_a_binding_fences_the_epochs_before_it() -> None:
    delivery = Delivery()
    delivery.take(1, 0, [1])
    assert delivery.bind(2)
    assert not delivery.bind(2)
    assert not delivery.bind(1)
    assert delivery.take(1, 1, [9]) == []
    delivery.finish(1, "stop", 1)
    assert delivery.finished is None


@pytest.mark.spec("R-178")
def test_what_an_old_epoch_sent_ahead_is_forgotten_with_it() -> None:
    delivery = Delivery()
    assert delivery.take(1, 1, [99]) == []
    assert delivery.take(2, 0, [1]) == [1]
    assert delivery.take(2, 1, [2]) == [2]


def test_reordered_tokens_wait_for_their_turn() -> None:
    delivery = Delivery()
    assert delivery.take(1, 2, [7]) == []
    assert delivery.take(1, 1, [6]) == []
    assert delivery.take(1, 0, [5]) == [5, 6, 7]


def test_what_comes_too_early_is_not_kept_without_bound() -> None:
    delivery = Delivery()
    for index in range(1, 3 * EARLY_MAX):
        delivery.take(1, index, [index])
    assert delivery.take(1, 2**53, [1]) == []
    assert len(delivery.take(1, 0, [0])) == EARLY_MAX
    assert delivery.next_index == EARLY_MAX


def test_the_end_waits_for_every_token() -> None:
    delivery = Delivery()
    delivery.take(1, 0, [1])
    delivery.finish(1, "length", 3)
    assert delivery.finished is None
    delivery.take(1, 1, [2, 3])
    assert delivery.finished == "length"


def test_an_empty_output_ends_too() -> None:
    delivery = Delivery(epoch=1)
    delivery.finish(1, "stop", 0)
    assert delivery.finished == "stop"


@st.composite
def messages(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """Pieces of one output under rising epochs, repeated, reordered and lost; zombies say something else."""
    sent = []
    for _ in range(draw(st.integers(0, 40))):
        first = draw(st.integers(0, len(OUTPUT)))
        length = draw(st.integers(0, 8))
        sent.append((draw(st.integers(3, 5)), first, OUTPUT[first : first + length]))
        if draw(st.booleans()):
            sent.append((draw(st.integers(0, 2)), draw(st.integers(0, 40)), [1] * length))
    return sent


@pytest.mark.spec("R-176", "R-178", "R-180")
@given(messages())
def test_each_index_is_delivered_once_in_order_and_unaltered(sent: list[tuple[int, int, list[int]]]) -> None:
    delivery = Delivery(epoch=3)
    delivered: list[int] = []
    highest = 3
    for epoch, first, tokens in sent:
        before = delivery.next_index
        ready = delivery.take(epoch, first, tokens)
        assert not (epoch < highest and ready)
        highest = max(highest, epoch)
        delivered += ready
        assert (delivery.epoch, delivery.next_index) == (highest, before + len(ready))
    assert delivered == OUTPUT[: len(delivered)]
    # Nothing is lost for good: attach again from next_index.
    assert delivered + delivery.take(highest, len(delivered), OUTPUT[len(delivered) :]) == OUTPUT
