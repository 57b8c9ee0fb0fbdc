"""The bits of KV and the tokens of a session depend on its tokens alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvsp.protocol import container
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import Sampler
from services.instance.engine import Finished
from services.instance.torch_engine import TorchEngine
from tests.connectors.driver import descriptor_of, from_scratch, small_llama
from tests.services.instance_engine import (
    CHUNK,
    GREEDY,
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
)

PROMPT = tokens_of(5, 61)
SAMPLERS = pytest.mark.parametrize("sampler", [GREEDY, TOP_P], ids=["greedy", "top-p"])


@pytest.fixture(scope="module")
def invariant() -> TorchEngine:
    return engine()


async def undisturbed(invariant: TorchEngine, sampler: Sampler, count: int = 20) -> Outcome:
    outcome = await alone(invariant, work(PROMPT, count, sampler=sampler))
    assert outcome.finished.reason == "length"
    assert sorted(outcome.blocks) == list(range((len(PROMPT) + count - 1) // B))
    return outcome


@pytest.mark.spec("R-180")
async def test_it_computes_what_the_model_computes(invariant: TorchEngine) -> None:
    for length in (1, B, CHUNK - 1, CHUNK, CHUNK + 1, 61):
        outcome = await alone(invariant, work(PROMPT[:length], 12))
        assert outcome.tokens == from_scratch(small_llama(), PROMPT[:length])
        assert outcome.cached == 0


@pytest.mark.spec("R-049", "R-180")
@SAMPLERS
async def test_a_loaded_prefix_of_any_length_changes_no_bit(invariant: TorchEngine, sampler: Sampler) -> None:
    whole = await undisturbed(invariant, sampler)
    for blocks in range(len(PROMPT) // B + 1):
        prefix = loaded(invariant, [whole.blocks[block] for block in range(blocks)])
        outcome = await alone(invariant, work(PROMPT, sampler=sampler, prefix=prefix))
        assert outcome.tokens == whole.tokens
        assert outcome.cached == blocks * B
        assert outcome.blocks == {block: octets for block, octets in whole.blocks.items() if block >= blocks}


@pytest.mark.spec("R-049")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_the_prompts_length_does_not_show_in_its_blocks(dtype: torch.dtype) -> None:
    one = engine(dtype=dtype)
    whole = await alone(one, work(PROMPT, 1))
    for length in range(B, len(PROMPT), 5):
        part = await alone(one, work(PROMPT[:length], 1))
        assert part.blocks == {block: whole.blocks[block] for block in range(length // B)}


@pytest.mark.spec("R-033")
async def test_a_prefix_that_covers_the_whole_prompt_is_enough(invariant: TorchEngine) -> None:
    prompt = PROMPT[: 5 * B]
    whole = await alone(invariant, work(prompt))
    prefix = loaded(invariant, [whole.blocks[block] for block in range(5)])
    outcome = await alone(invariant, work(prompt, prefix=prefix))
    assert (outcome.tokens, outcome.cached) == (whole.tokens, 5 * B)
    assert outcome.blocks == {block: octets for block, octets in whole.blocks.items() if block >= 5}


@pytest.mark.spec("R-049", "R-180", "R-176")
@SAMPLERS
async def test_a_resume_at_every_offset_goes_on_bit_for_bit(invariant: TorchEngine, sampler: Sampler) -> None:
    first = work(PROMPT, 20, sampler=sampler)
    whole = await undisturbed(invariant, sampler)
    for offset in range(20):
        output = whole.tokens[:offset]
        complete = (len(PROMPT) + offset) // B
        for blocks in {0, 3, len(PROMPT) // B, complete}:
            held = [whole.blocks[block] for block in range(blocks) if block in whole.blocks]
            outcome = await alone(invariant, resumed(first, output, prefix=loaded(invariant, held)))
            assert outcome.first_index == offset
            assert output + outcome.tokens == whole.tokens
            assert outcome.blocks == {at: octets for at, octets in whole.blocks.items() if at >= len(held)}


@pytest.mark.spec("R-180", "U-33")
@SAMPLERS
async def test_a_checkpoint_alone_suffices_when_the_prompts_blocks_can_be_had(
    invariant: TorchEngine, sampler: Sampler
) -> None:
    first = work(PROMPT, 20, sampler=sampler)
    whole = await undisturbed(invariant, sampler)
    known_from = len(PROMPT) // B * B
    for offset in range(20):
        prefix = loaded(invariant, [whole.blocks[block] for block in range(len(PROMPT) // B)])
        again = resumed(first, whole.tokens[:offset], prefix=prefix)
        outcome = await alone(invariant, replace(again, tokens=again.tokens[known_from:], known_from=known_from))
        assert outcome.lost == []
        assert outcome.tokens == whole.tokens[offset:]


@pytest.mark.spec("R-049")
async def test_sessions_that_run_along_change_no_bit(invariant: TorchEngine) -> None:
    works = [
        work(tokens_of(seed, length), 15, session=str(seed), sampler=TOP_P if seed % 2 else GREEDY)
        for seed, length in enumerate((61, 3, 40, 17, 24, 70))
    ]
    apart = [await alone(invariant, each) for each in works]
    with bench(invariant, batch_size=4) as made:
        together = await made.run(*works)
    assert [each.tokens for each in together] == [each.tokens for each in apart]
    assert [each.blocks for each in together] == [each.blocks for each in apart]
    assert all(each.finished == Finished(str(at), 1, "length") for at, each in enumerate(together))


@pytest.mark.spec("R-033")
async def test_blocks_are_containers_of_the_descriptor(invariant: TorchEngine) -> None:
    outcome = await undisturbed(invariant, GREEDY)
    for octets in outcome.blocks.values():
        header = container.parse_header(octets)
        container.check_geometry(header, descriptor_of(small_llama(), B))
        assert len(octets) == header.total_octets


def test_work_that_cannot_be_done_is_refused(invariant: TorchEngine) -> None:
    wrong = [
        work([], 1),
        work(PROMPT, 0, tokens=[*PROMPT, 1]),
        work(PROMPT, known_from=-1),
        work(PROMPT, sampler=Sampler("greedy", {}, 0, 3, True)),
        work(PROMPT, sampler=Sampler("beam", {}, 0, 0, True)),
        work([1, 97, 2]),
        work([1, -1]),
        work(PROMPT * 100),
    ]
    for each in wrong:
        with pytest.raises(KvspError) as refused:
            invariant.begin(each)
        assert refused.value.status == 400


async def test_padding_at_the_end_of_the_models_positions_is_harmless() -> None:
    model = small_llama()
    model.config.max_position_embeddings = 64
    short = TorchEngine(model, descriptor_of(model, B), chunk_tokens=40)
    outcome = await alone(short, work(PROMPT, 20))
    assert outcome.tokens == from_scratch(small_llama(), PROMPT, 3)
    assert outcome.finished.reason == "length"
