import math
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import estimate
from kvsp.protocol.estimate import cost_us, fetch_us, recompute_us, wait_us
from kvsp.protocol.records import Link, Residency

T, A, B, C = (f"https://{name}.example/" for name in ("ii7", "h1", "h2", "h3"))


@dataclass
class Replica:
    holder: str
    size: int = 1000
    layer_count: int = 4
    residency: list[Residency] = field(default_factory=lambda: [Residency("device", (0, 3))])


def part(holder: str, *layers: tuple[int, int], rate: float | None = None, size: int = 1000) -> Replica:
    entries = [Residency("host", span) if rate is None else Residency("host", span, rate) for span in layers]
    return Replica(holder, size, 4, entries)


def links(*rows: tuple[str, float, float]) -> dict[str, Link]:
    return {holder: Link(holder, rate, rtt) for holder, rate, rtt in rows}


ONE = links((A, 8, 10))  # 8 Mbit/s: one octet a microsecond
TWO = links((A, 8, 10), (B, 8, 10))


@pytest.mark.spec("R-115")
def test_the_example_of_the_text() -> None:
    replica = Replica(A, 2097152, 32, [Residency("device", (0, 31))])
    assert fetch_us(T, [[replica]], links((A, 200_000, 12))) == 96


@pytest.mark.spec("R-116", "U-45")
@pytest.mark.parametrize(
    ("tokens", "rate", "expected"), [(16, 42000, 381), (0, 1, 0), (1, 1e6, 1), (1, 0, None), (3, 1e6, 3)]
)
def test_recompute(tokens: int, rate: float, expected: int | None) -> None:
    assert recompute_us(tokens, rate) == expected


@pytest.mark.spec("R-117")
@pytest.mark.parametrize(
    ("wait", "fetch", "unmatched", "everything", "expected"),
    [
        (5, 100, 50, 200, 155),
        (5, 100, 150, 200, 205),
        (5, None, 50, 200, 205),
        (5, 100, None, None, None),
        (5, 100, 50, None, 155),
        (0, 0, 0, 9, 0),
    ],
)
def test_cost(
    wait: int, fetch: int | None, unmatched: int | None, everything: int | None, expected: int | None
) -> None:
    assert cost_us(wait, fetch, unmatched, everything) == expected
    assert wait_us(3, 1.5) == 5


@pytest.mark.spec("R-115", "R-118", "U-42", "U-43")
@pytest.mark.parametrize(
    ("matched", "known", "expected"),
    [
        pytest.param([], ONE, 0, id="nothing matched"),
        pytest.param([[Replica(T)]], {}, 0, id="resident"),
        pytest.param([[Replica(A), Replica(T)]], ONE, 0, id="resident and elsewhere"),
        pytest.param([[Replica(A)]], {}, None, id="no link"),
        pytest.param([[Replica(A)], [Replica(B)]], ONE, None, id="no link for one block"),
        pytest.param([[Replica(A)]] * 3, ONE, 3010, id="one round trip for a source"),
        pytest.param([[Replica(A)], [Replica(B)]], TWO, 1010, id="sources run in parallel"),
        pytest.param([[Replica(A), Replica(B)]] * 4, TWO, 2010, id="blocks spread over equal sources"),
        pytest.param([[Replica(B), Replica(A)]], links((A, 8, 10), (B, 16, 10)), 510, id="faster source"),
        pytest.param([[Replica(B), Replica(A)]] * 3, links((A, 8, 10), (B, 16, 10)), 1010, id="balanced"),
        pytest.param([[part(A, (0, 3), rate=4)]], ONE, 2010, id="slow tier"),
        pytest.param([[part(A, (0, 3), rate=80)]], ONE, 1010, id="fast tier is bounded by the link"),
        pytest.param(
            [[Replica(A, 1000, 4, [Residency("device", (0, 1)), Residency("host", (2, 3), 4)])]],
            ONE, 1510, id="tiers add up",
        ),
        pytest.param([[part(A, (0, 1), size=500)]], ONE, None, id="layers missing everywhere"),
        pytest.param([[part(A, (0, 1), size=500), part(B, (2, 3), size=500)]], TWO, 510, id="split"),
        pytest.param([[part(A, (0, 2), size=750), part(B, (1, 3), size=750)]], TWO, 760, id="split overlap"),
        pytest.param([[part(A, (0, 1), size=500), part(B, (2, 3), size=500)]], ONE, None, id="split no link"),
        pytest.param([[part(A, (0, 1), size=500), Replica(B)]], TWO, 1010, id="whole source first"),
        pytest.param([[part(T, (0, 1), size=500), Replica(A)]], ONE, 510, id="partly resident"),
        pytest.param([[part(T, (0, 1), size=500), part(A, (2, 3), size=500)]], ONE, 510, id="completes"),
        pytest.param([[part(T, (0, 0), (2, 2), size=500), Replica(A)]], ONE, 510, id="holes"),
        pytest.param([[part(T, (0, 1), size=500)]], ONE, None, id="rest nowhere"),
        pytest.param([[]], ONE, None, id="no replica at all"),
    ],
)  # fmt: skip
def test_fetch(matched: list[list[Replica]], known: dict[str, Link], expected: int | None) -> None:
    assert fetch_us(T, matched, known) == expected


@pytest.mark.spec("U-43")
def test_tie_goes_to_the_lower_uri() -> None:
    # The tie on the first block sends it to A, so the second, which only A has, waits behind it.
    assert fetch_us(T, [[Replica(B), Replica(A)], [Replica(A)]], TWO) == 2010
    assert fetch_us(T, [[Replica(B), Replica(A)], [Replica(B)]], TWO) == 1010


@pytest.mark.spec("U-43")
@given(st.lists(st.sets(st.sampled_from([A, B, C]), min_size=1), max_size=12))
def test_whole_blocks_against_the_greedy_rule(blocks: list[set[str]]) -> None:
    known = links((A, 8, 10), (B, 16, 400), (C, 3, 0))
    done: dict[str, float] = {}

    def after(holder: str) -> float:
        return done.get(holder, known[holder].rtt_us) + 8000 / known[holder].mbit_per_s

    for holders in blocks:
        best = min(holders, key=lambda holder: (max([after(holder), *done.values()]), holder))
        done[best] = after(best)
    expected = math.ceil(round(max(done.values(), default=0), 6))
    assert fetch_us(T, [[Replica(holder) for holder in holders] for holders in blocks], known) == expected


@pytest.mark.spec("R-115")
def test_absurd_numbers_are_unknown_not_errors() -> None:
    assert fetch_us(T, [[Replica(A, 2**53 - 1)]], links((A, 5e-324, 0))) is None
    assert recompute_us(2**53 - 1, 5e-324) is None
    assert wait_us(2**53 - 1, 1e300) is None


@pytest.mark.spec("U-43")
@given(
    st.lists(st.tuples(st.sets(st.sampled_from([A, B, C]), min_size=1), st.integers(1, 60)), max_size=4),
    # Whole microseconds a block: at 3 Mbit/s it depends on how thirds are rounded who of two gets a block.
    st.lists(st.sampled_from([1, 2, 4, 5, 8]), min_size=3, max_size=3),
    st.lists(st.sampled_from([0, 10, 4000]), min_size=3, max_size=3),
)
def test_long_runs_against_the_greedy_rule(
    rows: list[tuple[set[str], int]], rates: list[int], rtts: list[int]
) -> None:
    """Block by block in whole microseconds, where long runs are filled at once."""
    known = links(*zip((A, B, C), rates, rtts, strict=True))
    done = {holder: Fraction(link.rtt_us) for holder, link in known.items()}
    latest = Fraction(0)
    for holders, count in rows:
        for _ in range(count):
            after = {holder: done[holder] + Fraction(8000, int(known[holder].mbit_per_s)) for holder in holders}
            best = min(holders, key=lambda holder: (max(latest, after[holder]), holder))
            done[best] = after[best]
            latest = max(latest, after[best])
    matched = [[Replica(holder) for holder in holders] for holders, count in rows for _ in range(count)]
    assert fetch_us(T, matched, known) == pytest.approx(math.ceil(latest), abs=1)


def test_one_survey_serves_many_targets() -> None:
    matched = [[Replica(A), Replica(B)]] * 100 + [[Replica(A)]] * 50
    runs = estimate.survey(matched)
    assert [count for _, count in runs] == [100, 50]
    survey = estimate.Survey(runs)
    assert (survey.blocks, len(survey)) == (150, 2)
    for target in (A, B, T):
        assert survey.fetch_us(target, TWO) == fetch_us(target, matched, TWO)


@pytest.mark.spec("U-42")
@pytest.mark.parametrize(
    ("matched", "known", "expected"),
    [
        pytest.param([[Replica(A)], [Replica(B)]], ONE, (1, 1010), id="up to who is out of reach"),
        pytest.param([[Replica(B)], [Replica(A)]], ONE, (0, 0), id="nothing"),
        pytest.param([[Replica(T)], [part(T, (0, 1), size=500)]], ONE, (1, 0), id="up to a layer that is nowhere"),
        pytest.param([[Replica(A)]] * 3, ONE, (3, 3010), id="all"),
    ],
)
def test_the_usable_prefix(
    matched: list[list[Replica]], known: dict[str, Link], expected: tuple[int, int]
) -> None:
    assert estimate.Survey(estimate.survey(matched)).load(T, known) == expected
