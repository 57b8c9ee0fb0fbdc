"""Which instance is the cheapest, and what it has to load."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import estimate, keys
from kvsp.protocol.records import Link
from services.placement import cost
from services.placement.cost import Offer, Request, blocks_to_load, checkpoint_keys, rank
from tests.services import placement_records as records
from tests.services.placement_records import COMPAT, H1, H2, MIB, A, B, C, checkpoint, run, source

# 1 MiB in 8388.608 us at 1000 Mbit/s.
SLOW = {H1: Link(H1, 1_000, 100), H2: Link(H2, 1_000, 100)}


def offer(instance: str = A, wait_us: int = 0, load: int = 0, rate: float = 10_000, links: Any = SLOW) -> Offer:
    return Offer(instance, wait_us, load, rate, links)


def judged(offered: Offer, runs: list[estimate.Run], tokens: int = 100, block_tokens: int = 16) -> cost.Candidate:
    return rank(Request(runs, tokens, block_tokens), [offered])[0]


@pytest.mark.spec("R-117", "R-119", "U-42", "U-44", "U-45")
@pytest.mark.parametrize(
    ("offered", "runs", "expected"),  # expected: fetch, recompute of all, cost, usable
    [
        pytest.param(offer(), [], (0, 10_000, 10_000, 0), id="nothing matched: recompute all 100 tokens"),
        pytest.param(offer(wait_us=5_000), [], (0, 10_000, 15_000, 0), id="the queue comes first"),
        pytest.param(offer(), [run(4, A)], (0, 10_000, 3_600, 4), id="resident: the 36 tokens after four blocks"),
        pytest.param(
            offer(), [run(1, H1)], (8_489, 10_000, 10_000, 1), id="fetch 8489 + 8400 is worse than 10000"
        ),
        pytest.param(
            offer(), [run(4, source(H1, MIB // 8))], (4_295, 10_000, 7_895, 4), id="fetch 4295 + recompute 3600"
        ),
        pytest.param(offer(rate=0), [run(4, A)], (0, None, None, 4), id="prefill 0: not eligible"),
        pytest.param(offer(links={}), [run(4, H1)], (0, 10_000, 10_000, 0), id="no link: no usable prefix"),
        pytest.param(
            offer(links={H2: Link(H2, 1_000, 0)}),
            [run(2, source(H2, MIB // 64)), run(1, H1), run(1, source(H2, MIB // 64))],
            (263, 10_000, 263 + 6_800, 2),
            id="the usable prefix ends where a source is out of reach",
        ),
        pytest.param(
            offer(),
            [run(3, A), run(1, source(H1, MIB // 4, (0, 1)))],
            (0, 10_000, 5_200, 3),
            id="the usable prefix ends where layers are nowhere",
        ),
        pytest.param(
            offer(),
            [run(1, source(H1, MIB // 4, (0, 1)), source(A, MIB // 4, (2, 3)))],
            (1_149, 10_000, 1_149 + 8_400, 1),
            id="what the instance has completes what another has",
        ),
    ],
)
def test_cost_of_one_instance(
    offered: Offer, runs: list[estimate.Run], expected: tuple[int | None, int | None, int | None, int]
) -> None:
    found = judged(offered, runs)
    assert (found.fetch_us, found.recompute_all_us, found.cost_us, found.usable) == expected


@pytest.mark.spec("R-119")
@pytest.mark.parametrize(
    ("offers", "runs", "first"),
    [
        pytest.param([offer(A), offer(B)], [run(6, B)], B, id="where the blocks are"),
        pytest.param(
            [offer(A), offer(B, wait_us=20_000)], [run(6, B)], A, id="unless the queue there is too long"
        ),
        pytest.param([offer(A, rate=1_000), offer(B)], [], B, id="who computes faster"),
        pytest.param(
            [offer(A, load=2), offer(B, load=1), offer(C, load=3)], [], B, id="a tie: who has least to do"
        ),
        pytest.param([offer(B), offer(A)], [], A, id="a tie: the lower URI"),
        pytest.param([offer(A, rate=0), offer(B, wait_us=10**9)], [], B, id="whoever is eligible at all"),
    ],
)
def test_the_cheapest_comes_first(offers: list[Offer], runs: list[estimate.Run], first: str) -> None:
    ranked = rank(Request(runs, 100, 16), offers)
    assert ranked[0].instance == first
    assert len(ranked) == len(offers)


HOLDERS = (H1, H2, A, B, C)
sources = st.builds(
    lambda holder, octets, spans: source(holder, octets * 1000, spans),
    st.sampled_from(HOLDERS),
    st.integers(1, 50),
    st.sampled_from([(0, 3), (0, 3), (0, 1), (2, 3)]),
)
some_runs = st.lists(
    st.tuples(st.lists(sources, min_size=1, max_size=3, unique_by=lambda each: each.holder), st.integers(1, 4)),
    max_size=5,
).map(lambda rows: [(tuple(sorted(sources)), blocks) for sources, blocks in rows])
some_links = st.dictionaries(
    st.sampled_from(HOLDERS), st.builds(Link, st.just(H1), st.integers(1, 4_000), st.integers(0, 500))
)


@pytest.mark.spec("R-117", "R-119", "U-42")
@given(some_runs, st.lists(st.tuples(some_links, st.integers(0, 5_000), st.integers(0, 20_000)), min_size=1))
def test_passing_over_changes_nothing(
    runs: list[estimate.Run], instances: list[tuple[dict[str, Link], int, int]]
) -> None:
    """The choice is that of a plain minimum over all instances."""
    request = Request(runs, 16 * sum(count for _, count in runs) + 40, 16)
    offers = [
        offer(f"https://i{n:03}.example/", wait, 0, rate, links)
        if n > 2
        else offer((A, B, C)[n], wait, 0, rate, links)
        for n, (links, rate, wait) in enumerate(instances)
    ]
    ranked = rank(request, offers)
    full = {each.instance: judged(each, runs, request.tokens) for each in offers}
    assert {each.instance for each in ranked} == set(full)
    known = [each for each in full.values() if each.cost_us is not None]
    if not known:
        assert ranked[0].cost_us is None
        return
    least = min(known, key=lambda each: (each.cost_us, each.instance))
    assert ranked[0] == least
    for each in ranked[: cost.EXPLAINED]:
        assert each.cost_us is None or each == full[each.instance]


@pytest.mark.spec("R-119")
def test_far_dearer_instances_are_not_estimated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    judged_in_full = itertools.count()
    load = estimate.Survey.load

    def counting(*arguments: Any) -> Any:
        next(judged_in_full)
        return load(*arguments)

    monkeypatch.setattr(estimate.Survey, "load", counting)
    offers = [offer(f"https://i{n:03}.example/", wait_us=1_000 * n) for n in range(64)]
    assert rank(Request([], 100, 16), offers)[0].instance == "https://i000.example/"
    assert next(judged_in_full) < 16


@pytest.mark.spec("R-128", "R-130")
def test_a_directive_names_what_is_missing_in_prefix_order_fastest_source_first() -> None:
    links = {H1: Link(H1, 1_000, 0), H2: Link(H2, 2_000, 0)}
    request = Request([run(2, A, H1), run(2, H1, H2), run(1, source(A, MIB, (0, 1)), H1), run(3, H1)], 200, 16)
    blocks = blocks_to_load(records.keys(8), request, 6, A, links)
    assert [(each.block_key, each.sources) for each in blocks] == [
        (records.keys(8)[2], [H2, H1]),
        (records.keys(8)[3], [H2, H1]),
        (records.keys(8)[4], [H1]),
        (records.keys(8)[5], [H1]),
    ]


@pytest.mark.spec("U-33", "U-40", "R-179")
def test_keys_of_a_session_go_on_into_its_output_where_the_scope_key_is_known() -> None:
    secret = keys.ScopeKey(bytes(range(32)))
    tokens = list(range(1000, 1050))
    chain = [key.hex() for key in keys.block_keys(secret, bytes.fromhex(COMPAT), tokens, 4)]
    made = checkpoint(
        prompt_blocks=chain[:3], prompt_tail=tokens[12:14], generated=tokens[14:], output_offset=len(tokens) - 14
    )
    assert checkpoint_keys(made, 4, secret) == chain
    assert checkpoint_keys(made, 4, None) == chain[:3]
    assert checkpoint_keys(made, 0, secret) == chain[:3]
