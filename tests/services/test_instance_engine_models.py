"""Engines of other models, the batched forward pass, the device tier, and loading from a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from kvsp.protocol import container
from kvsp.protocol.descriptor import Descriptor, compat_id
from kvsp.protocol.errors import KvspError
from services.instance.device import DeviceTier
from services.instance.torch_engine import TorchEngine, load_engine
from tests.connectors.driver import DIGEST, descriptor_of, from_scratch, small_llama
from tests.services.instance_engine import CHUNK, B, alone, bench, engine, loaded, tokens_of, work, write

PROMPT = tokens_of(5, 61)
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL),
    "mistral, sliding window": MistralConfig(**SMALL, sliding_window=16),
    "gemma2, softcap": Gemma2Config(**SMALL, sliding_window=16, query_pre_attn_scalar=16),
    "gpt2, learned positions": GPT2Config(
        vocab_size=97, n_positions=96, n_embd=64, n_layer=4, n_head=4, initializer_range=0.3, bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        initializer_range=0.3,
    ),
}  # fmt: skip


def model_of(name: str) -> tuple[Any, Descriptor]:
    torch.manual_seed(3)
    config = CONFIGS[name]
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    descriptor = Descriptor(
        model="small", model_digest=DIGEST, tokenizer_digest=DIGEST, layers=4, kv_heads=heads, head_dim=16,
        kv_dtype="fp32", positional="none", block_tokens=B, layout="kvsp-layout-1",
    )  # fmt: skip
    return model, descriptor


def own_answer(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers itself generates."""
    answer = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    return answer[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.spec("R-033", "R-049")
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
async def test_models_of_many_kinds_run_and_reuse_prefixes(name: str, batch_invariant: bool) -> None:
    model, descriptor = model_of(name)
    expected = own_answer(model, PROMPT, 12)
    one = TorchEngine(model, descriptor, batch_invariant=batch_invariant, chunk_tokens=CHUNK)
    assert one.ragged == (not batch_invariant and "softcap" not in name)
    whole = await alone(one, work(PROMPT, 12))
    assert whole.tokens == expected
    prefix = loaded(one, [whole.blocks[block] for block in range(4)])
    with bench(one) as made:
        again, _ = await made.run(work(PROMPT, 12, prefix=prefix), work(PROMPT[:30], 12, session="b"))
    assert again.tokens == expected
    if batch_invariant:
        assert again.blocks == {block: octets for block, octets in whole.blocks.items() if block >= 4}


async def test_a_ragged_batch_answers_as_transformers_does() -> None:
    one = engine(batch_invariant=False)
    assert one.ragged
    works = [
        work(tokens_of(seed, length), 15, session=str(seed)) for seed, length in enumerate((61, 1, 40, 24, 70))
    ]
    with bench(one, batch_size=4) as made:
        outcomes = await made.run(*works)
    model = small_llama()
    for each, outcome in zip(works, outcomes, strict=True):
        assert outcome.tokens == from_scratch(model, list(each.tokens), 15)
        blocks = (len(each.tokens) + 14) // B
        assert sorted(outcome.blocks) == list(range(blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_ragged_batch_are_those_of_single_passes_but_for_rounding(dtype: torch.dtype) -> None:
    one = engine(batch_invariant=False, dtype=dtype)
    ragged, single = [[one.begin(work(tokens_of(seed, 10 + 20 * seed))) for seed in range(4)] for _ in range(2)]
    for sequence in (*ragged, *single):
        while not sequence.ready:
            one.prefill(sequence)
        sequence.tokens.append(7)
    assert one.step(ragged) == {}
    assert all(one.step([sequence]) == {} for sequence in single)
    for left, right in zip(ragged, single, strict=True):
        assert left.logits is not None
        assert right.logits is not None
        # The same to what the type resolves, of values about 10.
        assert torch.allclose(left.logits, right.logits, rtol=0, atol=100 * torch.finfo(dtype).eps)
        assert left.done == right.done == left.length


@pytest.mark.spec("R-010", "R-018")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_engine_is_loaded_from_a_directory(tmp_path: Path, dtype: torch.dtype) -> None:
    small_llama(dtype=dtype).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    one = load_engine(tmp_path, block_tokens=B, threads=2, device_octets=1 << 20, device_layers=2)
    assert one.compat_id == compat_id(one.descriptor)
    assert one.device is not None
    assert one.device.layers == (0, 1)
    assert one.rates[0] > 0
    outcome = await alone(one, work(PROMPT, 12))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert outcome.tokens == from_scratch(model, PROMPT, 12)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        load_engine(tmp_path / "absent", block_tokens=B)


# --- the device tier ---

DESCRIPTOR = descriptor_of(small_llama(), B)
SECTION = DESCRIPTOR.section_octets


def block_of(number: int) -> bytes:
    """A container whose octets say which block, layer and section they are of."""

    def section(layer: int, which: int) -> bytes:
        return bytes([number, layer, which, 7]) * (SECTION // 4)

    return container.build(0, B, [(section(layer, 0), section(layer, 1)) for layer in range(4)])


@pytest.mark.spec("R-044")
@pytest.mark.parametrize("layers", [0, 1, 3])
async def test_the_tier_gives_back_what_was_put(layers: int) -> None:
    one = engine()
    tier = DeviceTier(DESCRIPTOR, 10 * DESCRIPTOR.payload_octets, layers)
    held = layers or 4
    assert tier.layers == (0, held - 1)
    whole = await alone(one, work(PROMPT))
    for block in range(5):
        tier.put(str(block), whole.blocks[block])
    cache = one.prefix(5, 100)
    for block in range(5):
        assert tier.fill(str(block), cache, block) == held
        write(cache, block, whole.blocks[block], range(held, 4))
    assert tier.fill("other", cache, 0) == 0
    cache.arrival.advance(4)
    again = await alone(one, work(PROMPT, prefix=cache))
    assert (again.tokens, again.cached) == (whole.tokens, 5 * B)
    assert tier.octets == 5 * held * 2 * SECTION


@pytest.mark.spec("R-044", "U-49")
@settings(max_examples=60)
@given(
    room=st.integers(0, 4),
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "fill", "drop", "close", "open"]), st.integers(0, 6)), max_size=30
    ),
)
def test_the_tier_is_a_bounded_lru_that_tells_what_it_holds(room: int, steps: list[tuple[str, int]]) -> None:
    told: dict[str, tuple[int, int]] = {}

    def changed(names: Sequence[str], layers: tuple[int, int] | None) -> None:
        assert names
        for name in names:
            if layers is None:
                del told[name]
            else:
                told[name] = layers

    octets = room * 2 * 2 * SECTION + 17
    tier = DeviceTier(DESCRIPTOR, octets, 2, changed=changed)
    cache = engine_prefix()
    model: list[str] = []
    is_open = True
    for action, number in steps:
        name = str(number)
        if action == "put":
            tier.put(name, block_of(number))
            if is_open and room:
                model = [*[each for each in model if each != name], name][-room:]
        elif action == "fill":
            assert tier.fill(name, cache, 0) == (2 if name in model else 0)
            if name in model:
                assert bytes(cache.rows(1, 0)[1]) == bytes([number, 1, 1, 7]) * (SECTION // 4)
                model = [*[each for each in model if each != name], name]
        elif action == "drop":
            tier.drop([name, "unknown"])
            model = [each for each in model if each != name]
        else:
            is_open = action == "open"
            (tier.open if is_open else tier.close)()
            model = model if is_open else []
        assert tier.names() == model
        assert told == dict.fromkeys(model, (0, 1))
        assert tier.octets <= octets


def engine_prefix() -> Any:
    from kvsp.connectors.prefix import PrefixCache

    return PrefixCache(DESCRIPTOR, 1, 0)


@pytest.mark.spec("U-25", "D5")
def test_the_tier_takes_whole_raw_blocks_of_its_descriptor_only() -> None:
    tier = DeviceTier(DESCRIPTOR, 1 << 20)
    sections = [(b"x" * SECTION, b"y" * SECTION)] * 4
    good = container.build(0, B, sections)
    wrong = [
        good[:-1],
        good + b"z",
        b"",
        container.build(0, B, sections[:3]),
        container.build(0, B + 1, sections),
        container.build(0, B, [(b"x", b"y")] * 4),
        good[:6] + b"\xff\x01" + good[8:],
    ]
    for octets in wrong:
        with pytest.raises(KvspError):
            tier.put("a", octets)
    assert tier.names() == []
