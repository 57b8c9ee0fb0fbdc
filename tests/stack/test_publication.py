"""What the index lists: long chains, refreshed and expired records, and an index that dies and comes back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvsp.client import BlockUnavailable
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from tests.stack.harness import SMALL, RunningStack, start_stack, temporary_layout
from tests.stack.traffic import (
    assert_problem,
    chain,
    client_of,
    eventually,
    get,
    look_up,
    matched,
    published,
    random_tokens,
    store,
)

pytestmark = pytest.mark.stack

TTL_S = 60
SHORT_TTL_MS = 2000


@pytest.fixture(scope="module")
def steady() -> Iterator[RunningStack]:
    """Records that no test sees expire, and that are refreshed every 20 s."""
    holder = {"publish_ttl_ms": TTL_S * 1000, "arena_octets": 16 << 20}
    with temporary_layout() as layout, start_stack(layout, {"h1": holder}) as started:
        yield started


@pytest.fixture(scope="module")
def brief() -> Iterator[RunningStack]:
    """Records that live for two seconds."""
    holder = {"publish_ttl_ms": SHORT_TTL_MS, "arena_octets": 1 << 20}
    with temporary_layout() as layout, start_stack(layout, {"h1": holder}) as started:
        yield started


@pytest.mark.spec("R-022", "R-023", "R-090", "R-091", "R-092", "R-150", "R-155")
def test_a_chain_of_a_thousand_blocks(steady: RunningStack) -> None:
    blocks, cut = 1000, 500
    tokens = [*random_tokens(blocks), 1, 2, 3]  # the incomplete last block has no key
    samples = chain(steady, blocks, tokens=tokens)
    assert len(samples) == blocks
    parts = [samples[at::4] for at in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: store(steady, part), parts))
    with client_of(steady) as client:
        found = published(steady, client, samples)
        for sample, replicas in zip(samples, found.replicas, strict=True):
            assert [each.holder for each in replicas] == [steady.holder]
            assert client.get(replicas).payload == sample.payload
    where = f"replicas/{party_id(steady.holder)}/{samples[cut].block_key}"
    assert steady.request("DELETE", steady.index + where, identity="pc").status == 204
    reply = look_up(steady, samples).json()
    assert reply["matched"] == len(reply["replicas"]) == cut
    # "the IS MUST stop at the first key without a replica": what follows is listed, but never matched.
    assert matched(steady, samples[cut + 1 :]) == blocks - cut - 1


@pytest.mark.spec("R-088", "R-218", "R-065", "R-067", "R-085", "U-01")
def test_an_index_that_dies_and_comes_back(steady: RunningStack) -> None:
    before, during = chain(steady, 20), chain(steady, 20)
    store(steady, before)
    eventually(lambda: matched(steady, before) == 20, "not published")
    steady.kill("index")
    try:
        assert_problem(look_up(steady, before), 503, retry=True)
        # Blocks do not depend on the index.
        store(steady, during)
        for each in (*before, *during):
            assert get(steady, each).body == each.octets
        with client_of(steady) as client, pytest.raises(KvspError) as refused:
            client.lookup(before[0].scope_id, before[0].compat_id, [before[0].block_key])
        assert refused.value.status == 503
        assert refused.value.retry_after_s
    finally:
        steady.start("index")

    def rebuilt() -> bool:
        replies = [look_up(steady, each) for each in (before, during)]  # 503 until the gateway has found it again
        return all(each.status == 200 and each.json()["matched"] == 20 for each in replies)

    eventually(rebuilt, "not published anew within a third of the TTL", TTL_S / 3)


@pytest.mark.spec("R-086", "U-51")
def test_a_holder_that_stops_withdraws(steady: RunningStack) -> None:
    samples = chain(steady, 50)
    store(steady, samples)
    eventually(lambda: matched(steady, samples) == 50, "not published")
    steady.stop("h1")
    try:
        assert all(matched(steady, [each]) == 0 for each in samples)
    finally:
        steady.start("h1")


@pytest.mark.spec("R-085", "R-218", "R-154", "U-31")
def test_records_are_refreshed_before_they_expire(brief: RunningStack) -> None:
    sample = chain(brief, 1)[0]
    store(brief, [sample])
    eventually(lambda: matched(brief, [sample]) == 1, "not published")
    left, refreshed = 0, 0

    def outlives_itself() -> bool:
        nonlocal left, refreshed
        before, left = left, int(look_up(brief, [sample]).json()["replicas"][0][0]["ttl_ms"])
        refreshed += left > before  # it only goes down by itself
        age = re.search(r"max-age=(\d+)", get(brief, sample).headers["cache-control"])
        assert age is not None
        assert int(age[1]) * 1000 <= left <= SHORT_TTL_MS
        return refreshed > 5  # one every third of the TTL

    eventually(outlives_itself, "not refreshed")


@pytest.mark.spec("R-083", "R-088", "U-51")
def test_records_of_a_holder_that_died_expire(brief: RunningStack) -> None:
    samples = chain(brief, 8, SMALL)
    store(brief, samples)
    with client_of(brief) as client:
        found = published(brief, client, samples)
        brief.kill("h1")
        try:
            with pytest.raises(BlockUnavailable) as gone:
                client.get(found.replicas[0])
            assert gone.value.status == 503
            eventually(lambda: all(matched(brief, [each]) == 0 for each in samples), "records never expired")
        finally:
            brief.start("h1")

        def is_a_miss() -> bool:
            with pytest.raises(BlockUnavailable) as missed:
                client.get(found.replicas[0])
            return missed.value.status == 404  # 503 until the gateway has found it again

        eventually(is_a_miss, "the holder is not found again")
