from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol.errors import KvspError
from services.instance.engine import BlockDone, Event, Finished, Sampled, Started
from services.instance.torch_engine import TorchEngine
from tests.connectors.driver import descriptor_of, small_llama
from tests.services.instance_engine import (
    CHUNK,
    TOP_P,
    B,
    Outcome,
    alone,
    bench,
    engine,
    loaded,
    resumed,
    tokens_of,
    work,
    write,
)

PROMPT = tokens_of(5, 61)
LAYERS = 4


@pytest.fixture(scope="module")
def invariant() -> TorchEngine:
    return engine()


@pytest.fixture
async def whole(invariant: TorchEngine) -> Outcome:
    """The undisturbed run of PROMPT."""
    return await alone(invariant, work(PROMPT))


def arriving(invariant: TorchEngine, whole: Outcome, blocks: int = 7) -> PrefixCache:
    """A prefix whose octets are all in place, of which nothing has been announced."""
    cache = invariant.prefix(blocks, 100)
    for block in range(blocks):
        write(cache, block, whole.blocks[block])
    return cache


@pytest.fixture
def gated(invariant: TorchEngine) -> Iterator[list[int]]:
    """Which layers the model has been through."""
    been: list[int] = []
    layers = invariant._model.model.layers
    hooks = [layer.register_forward_hook(lambda *_, at=at: been.append(at)) for at, layer in enumerate(layers)]
    yield been
    for hook in hooks:
        hook.remove()


async def test_decoding_never_waits_for_a_whole_prefill(invariant: TorchEngine) -> None:
    chunks = 8
    order: list[Event] = []
    with bench(invariant) as made:

        def hook(event: Event) -> None:
            order.append(event)
            if event == Sampled("a", 1, 0, event.token if isinstance(event, Sampled) else -1):
                made.scheduler.submit(work(tokens_of(2, chunks * CHUNK), 2, session="b"))

        made.on(hook)
        await made.run(work(PROMPT, 60, session="a"))
        await made.until(lambda: made.ended("b"))
    first = next(at for at, event in enumerate(order) if isinstance(event, Started) and event.session == "b")
    since = [event for event in order[:first] if isinstance(event, Sampled)]
    # The first is what b was submitted after, and a turn may have been under way.
    assert chunks - 1 <= len(since) <= chunks + 3


async def test_prompts_blocks_come_after_the_first_token_and_all_before_the_end(invariant: TorchEngine) -> None:
    outcome = await alone(invariant, work(tokens_of(1, 20 * B + 3), 30))
    kinds = [type(event) for event in outcome.events]
    assert kinds[:2] == [Started, Sampled]
    assert kinds[-1] is Finished
    assert kinds.index(BlockDone) > 1
    assert kinds.index(BlockDone, kinds.index(Sampled, 2)) > 2
    assert sorted(outcome.blocks) == list(range((20 * B + 3 + 29) // B))


@pytest.mark.spec("R-034", "U-54")
async def test_a_layer_is_computed_while_the_next_is_on_its_way(
    invariant: TorchEngine, whole: Outcome, gated: list[int]
) -> None:
    prefix = arriving(invariant, whole)
    layers = invariant._model.model.layers
    # Layer l+1 is there only after the model has been through layer l: were all waited for, this would never end.
    hooks = [
        layer.register_forward_hook(lambda *_, at=at: prefix.arrival.advance(at + 2))
        for at, layer in enumerate(layers[:-1])
    ]
    with bench(invariant) as made:
        made.scheduler.submit(work(PROMPT, prefix=prefix))
        gated.clear()
        prefix.arrival.advance(1)
        await made.until(lambda: made.ended("a"))
    for hook in hooks:
        hook.remove()
    assert gated[:LAYERS] == list(range(LAYERS))
    assert made.outcomes["a"].tokens == whole.tokens
    assert made.outcomes["a"].cached == 7 * B


@pytest.mark.spec("R-127")
async def test_a_prefix_that_does_not_come_stalls_nobody(
    invariant: TorchEngine, whole: Outcome, gated: list[int]
) -> None:
    prefix = arriving(invariant, whole)
    stalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def passed(*_: object) -> None:
        loop.call_soon_threadsafe(stalled.set)

    hook = invariant._model.model.layers[1].register_forward_hook(passed)
    with bench(invariant) as made:
        made.scheduler.submit(work(PROMPT, session="late", prefix=prefix))
        prefix.arrival.advance(2)
        await stalled.wait()  # the compute thread is, or is about to be, inside a pass that waits for layer 2
        hook.remove()
        assert made.scheduler.stats().running == 1
        # It is called out of there for the first of these, and does not go back while the second runs.
        for session in ("b", "c"):
            [outcome] = await made.run(work(PROMPT, session=session))
            assert outcome.tokens == whole.tokens
        assert "late" not in made.outcomes
        prefix.arrival.advance(LAYERS)
        await made.until(lambda: made.ended("late"))
    assert made.outcomes["late"].tokens == whole.tokens
    assert made.outcomes["late"].cached == 7 * B


@pytest.mark.spec("R-161", "U-54")
@pytest.mark.parametrize("blocks", [0, 1, 4])
@pytest.mark.parametrize("after", [0, 2, LAYERS])
async def test_a_shortened_prefix_is_computed_from_there(
    invariant: TorchEngine, whole: Outcome, blocks: int, after: int
) -> None:
    prefix = arriving(invariant, whole)
    with bench(invariant) as made:
        made.scheduler.submit(work(PROMPT, prefix=prefix))
        prefix.arrival.advance(min(after, LAYERS - 1))
        prefix.arrival.shorten(blocks)
        prefix.arrival.advance(LAYERS)
        await made.until(lambda: made.ended("a"))
    outcome = made.outcomes["a"]
    assert outcome.tokens == whole.tokens
    assert outcome.cached == blocks * B
    assert outcome.blocks == {at: octets for at, octets in whole.blocks.items() if at >= blocks}


@pytest.mark.spec("R-161", "R-180")
@pytest.mark.parametrize("early", [False, True])
async def test_lost_blocks_whose_tokens_are_not_known_are_asked_for(
    invariant: TorchEngine, whole: Outcome, early: bool
) -> None:
    known_from, output = 7 * B, whole.tokens[:9]
    prefix = arriving(invariant, whole)
    again = resumed(work(PROMPT), output, prefix=prefix)
    again = replace(again, tokens=again.tokens[known_from:], known_from=known_from)
    with bench(invariant) as made:
        made.scheduler.submit(again)
        if early:
            made.scheduler.provide_tokens("a", 2, PROMPT)
        prefix.arrival.shorten(3)
        prefix.arrival.advance(LAYERS)
        if not early:
            await made.until(lambda: "a" in made.outcomes)
            assert made.outcomes["a"].lost == [3]
            # Others go on meanwhile.
            [other] = await made.run(work(PROMPT, session="b"))
            assert other.tokens == whole.tokens
            assert len(made.outcomes["a"].events) == 1
            made.scheduler.provide_tokens("a", 1, [])  # of an older epoch: nobody's
            made.scheduler.provide_tokens("a", 2, PROMPT)
        await made.until(lambda: made.ended("a"))
    outcome = made.outcomes["a"]
    assert outcome.tokens == whole.tokens[9:]
    assert outcome.blocks == {at: octets for at, octets in whole.blocks.items() if at >= 3}


async def test_the_last_token_of_the_prompt_is_asked_for_when_it_is_needed(invariant: TorchEngine) -> None:
    prompt = PROMPT[: 5 * B]
    whole = await alone(invariant, work(prompt))
    prefix = loaded(invariant, [whole.blocks[at] for at in range(5)])
    with bench(invariant) as made:
        made.scheduler.submit(work(prompt, known_from=5 * B, tokens=[], prefix=prefix))
        await made.until(lambda: "a" in made.outcomes)
        assert made.outcomes["a"].lost == [5]
        made.scheduler.provide_tokens("a", 1, prompt)
        await made.until(lambda: made.ended("a"))
    assert made.outcomes["a"].tokens == whole.tokens
    assert made.outcomes["a"].cached == 5 * B


@pytest.mark.parametrize("provided", [[], [1] * 10, [97] * 56])
async def test_tokens_that_cannot_be_the_prompts_end_the_session(
    invariant: TorchEngine, whole: Outcome, provided: list[int]
) -> None:
    prefix = arriving(invariant, whole)
    with bench(invariant) as made:
        made.scheduler.submit(work(PROMPT, known_from=56, tokens=PROMPT[56:], prefix=prefix))
        prefix.arrival.shorten(0)
        prefix.arrival.advance(LAYERS)
        made.scheduler.provide_tokens("a", 1, provided)
        await made.until(lambda: made.ended("a"))
    assert made.outcomes["a"].finished.reason == "failed"


async def test_a_fault_of_the_loader_ends_its_session_alone(invariant: TorchEngine, whole: Outcome) -> None:
    prefix = arriving(invariant, whole)
    with bench(invariant) as made:
        made.scheduler.submit(work(PROMPT, prefix=prefix))
        made.scheduler.submit(work(PROMPT, session="b"))
        prefix.arrival.fail(OSError("nothing that others should read"))
        await made.until(lambda: made.ended("a") and made.ended("b"))
    assert made.outcomes["a"].finished == Finished("a", 1, "failed", "OSError")
    assert made.outcomes["b"].tokens == whole.tokens


@pytest.mark.parametrize("batch_invariant", [True, False])
async def test_an_error_ends_its_session_alone(batch_invariant: bool) -> None:
    one = engine(batch_invariant=batch_invariant)
    good = [token % 96 for token in PROMPT]
    # Whoever reads token 96 gets no numbers; it is the least likely of all to be sampled.
    model = one._model
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight.clone()))
    model.get_input_embeddings().weight[96] = float("nan")
    expected = await alone(one, work(good))
    with bench(one) as made:
        bad, fine = await made.run(work([*good, 96], session="bad"), work(good, session="fine"))
    assert bad.finished == Finished("bad", 1, "failed", "ValueError")
    assert bad.tokens == []
    assert fine.tokens == expected.tokens
    assert fine.finished.reason == "length"


@pytest.mark.spec("R-180")
async def test_output_ends_at_stop_tokens_and_at_max_tokens(invariant: TorchEngine, whole: Outcome) -> None:
    stop = whole.tokens[7]
    first = whole.tokens.index(stop)
    stopped = await alone(invariant, work(PROMPT, stop_tokens=frozenset({stop})))
    assert stopped.tokens == whole.tokens[: first + 1]
    assert stopped.finished.reason == "stop"
    one = await alone(invariant, work(PROMPT, 1))
    assert (one.tokens, one.finished.reason) == (whole.tokens[:1], "length")


@pytest.mark.spec("R-180")
async def test_a_session_resumed_after_its_end_ends_at_once(invariant: TorchEngine, whole: Outcome) -> None:
    stop = whole.tokens[7]
    ended = resumed(work(PROMPT, stop_tokens=frozenset({stop})), whole.tokens[: whole.tokens.index(stop) + 1])
    for each, reason in ((ended, "stop"), (resumed(work(PROMPT), whole.tokens), "length")):
        outcome = await alone(invariant, each)
        assert outcome.events == [Finished("a", 2, reason)]  # type: ignore[arg-type]


async def test_a_batch_has_so_many_sessions_and_no_more(invariant: TorchEngine) -> None:
    works = [work(tokens_of(seed, 30), 10, session=str(seed)) for seed in range(7)]
    with bench(invariant, batch_size=2) as made:
        seen: list[tuple[int, int]] = []

        def look(_: Event) -> None:
            stats = made.scheduler.stats()
            seen.append((stats.running, stats.queued))

        made.on(look)
        outcomes = await made.run(*works)
        assert max(running for running, _ in seen) == 2
        assert made.scheduler.stats().running == made.scheduler.stats().queued == 0
    assert [each.finished.session for each in outcomes] == [each.session for each in works]
    firsts = [outcome.events[0] for outcome in made.outcomes.values()]
    assert [event.session for event in firsts] == [each.session for each in works]


async def test_kv_memory_is_bounded(invariant: TorchEngine) -> None:
    token_octets = invariant.descriptor.payload_octets // B
    most = 0.0
    with bench(invariant, kv_octets=50 * token_octets) as made:

        def look(_: Event) -> None:
            nonlocal most
            stats = made.scheduler.stats()
            assert stats.running <= 1
            most = max(most, stats.kv_utilization)

        made.on(look)
        await made.run(*(work(tokens_of(seed, 30), 10, session=str(seed)) for seed in range(3)))
        with pytest.raises(KvspError):
            made.scheduler.submit(work(PROMPT, 20))
        assert made.scheduler.stats().kv_utilization == 0.0
        # Output that would need more ends earlier.
        [cut] = await made.run(work(tokens_of(1, 45), 10, session="long"))
    assert most == pytest.approx(1.0)
    assert (len(cut.tokens), cut.finished.reason) == (5, "length")


async def test_rates_are_measured(invariant: TorchEngine) -> None:
    with bench(invariant) as made:
        before = made.scheduler.stats()
        await made.run(work(tokens_of(1, 4 * CHUNK)))
        after = made.scheduler.stats()
    for stats in (before, after):
        assert stats.prefill_tokens_per_s > 0
        assert stats.decode_tokens_per_s > 0
    assert before != after


async def test_a_session_is_taken_once_until_it_has_ended(invariant: TorchEngine) -> None:
    with bench(invariant) as made:
        made.scheduler.submit(work(PROMPT))
        with pytest.raises(ValueError, match="already"):
            made.scheduler.submit(work(PROMPT))
        await made.until(lambda: made.ended("a"))
        made.scheduler.submit(work(PROMPT))


@pytest.mark.spec("R-181")
@pytest.mark.parametrize("at", ["queued", "loading", "asking", "prefill", "decode", "last"])
async def test_nothing_is_heard_of_a_cancelled_session(invariant: TorchEngine, whole: Outcome, at: str) -> None:
    prefix = arriving(invariant, whole) if at in {"loading", "asking"} else None
    victim = work(PROMPT, session="victim", sampler=TOP_P, prefix=prefix)
    if at == "prefill":
        victim = work(tokens_of(3, 40 * CHUNK), session="victim")
    if at == "asking":
        victim = work(PROMPT, session="victim", known_from=56, tokens=PROMPT[56:], prefix=prefix)
    with bench(invariant, batch_size=1 if at == "queued" else 4) as made:
        if at == "queued":
            made.scheduler.submit(work(PROMPT, session="first"))
        made.scheduler.submit(victim)
        if prefix is not None:
            prefix.arrival.advance(2)
        if at == "asking" and prefix is not None:
            prefix.arrival.shorten(2)
            prefix.arrival.advance(LAYERS)
        wanted = {"asking": 1, "decode": 5, "last": 20}.get(at, 0)
        if wanted:
            await made.until(lambda: len(made.outcomes.get("victim", Outcome()).events) >= wanted)
        made.scheduler.cancel("victim", 1)
        made.scheduler.cancel("victim", 1)
        made.scheduler.cancel("nobody", 1)
        heard = len(made.outcomes.get("victim", Outcome()).events)
        [other] = await made.run(work(PROMPT, session="other"))
        assert other.tokens == whole.tokens
        assert len(made.outcomes.get("victim", Outcome()).events) == heard
        assert made.scheduler.stats().running == made.scheduler.stats().queued == 0


async def test_closing_waits_for_no_loader_and_tells_nothing_more(invariant: TorchEngine, whole: Outcome) -> None:
    with bench(invariant) as made:
        made.scheduler.submit(work(PROMPT, session="late", prefix=arriving(invariant, whole)))
        made.scheduler.submit(work(PROMPT))
        await made.until(lambda: made.sampled("a") > 2)
    heard = len(made.outcomes["a"].events)
    await asyncio.sleep(0)
    assert len(made.outcomes["a"].events) == heard
    assert not made.scheduler._thread.is_alive()


def test_the_engine_is_of_the_descriptor(invariant: TorchEngine) -> None:
    assert invariant.descriptor == descriptor_of(small_llama(), B)
    assert invariant.chunk_tokens == CHUNK
