from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import kvsp.connectors.transformers as connectors
from kvsp.connectors.layout import export_blocks
from kvsp.connectors.prefix import PrefixShortened
from kvsp.connectors.transformers import KvspConnector
from kvsp.protocol import container
from kvsp.protocol.keys import ScopeKey
from tests.connectors.driver import HOLDER, Store, descriptor_of, from_scratch, greedy, prefilled, small_llama

B = 8
KEY = ScopeKey(bytes(range(32)))
TOKENS = random.Random(3).choices(range(97), k=61)


@contextmanager
def connected(store: Store, model: LlamaForCausalLM, parallel: int = 4) -> Iterator[KvspConnector]:
    connector = KvspConnector(store, KEY, descriptor_of(model, B), HOLDER, parallel)  # type: ignore[arg-type]
    yield connector
    connector.close()


def chain(connector: KvspConnector) -> list[str]:
    """Keys of the blocks of TOKENS, in their order."""
    return [replicas[0].block_key for replicas in connector.match(TOKENS).replicas]


def reused(
    connector: KvspConnector, model: LlamaForCausalLM, tokens: list[int], room: int = 64
) -> tuple[int, list[int]]:
    """Tokens that were not computed, and the greedy continuation."""
    prefix = connector.load(connector.match(tokens), room)
    with torch.inference_mode():
        output = prefix.forward(model, tokens)
    return prefix.tokens, greedy(model, output, 12)


@pytest.mark.spec("R-033", "R-030", "R-023")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_what_is_loaded_equals_what_was_exported_bit_for_bit(dtype: torch.dtype, kv_heads: int) -> None:
    model, store = small_llama(kv_heads, dtype), Store()
    cache = prefilled(model, TOKENS)
    with connected(store, model) as connector:
        assert connector.save(TOKENS, cache) == 7
        loaded = connector.load(connector.match(TOKENS)).wait()
    assert loaded.get_seq_length() == 56
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, :56])
        assert torch.equal(ours.values, theirs.values[:, :, :56])


@pytest.mark.spec("R-033", "R-034")
def test_a_section_holds_token_head_dim_rows_little_endian() -> None:
    model = small_llama(layers=2)
    cache = prefilled(model, TOKENS[:B])
    [octets] = export_blocks(cache, descriptor_of(model, B))
    header = container.parse_header(octets)
    container.check_geometry(header, descriptor_of(model, B))
    at = header.header_octets + header.layer_span(1)[0]
    rows = torch.frombuffer(bytearray(octets[at : at + header.sections[1][0]]), dtype=torch.float32).view(B, 2, 16)
    assert all(torch.equal(rows[t, h], cache.layers[1].keys[0, h, t]) for t in range(B) for h in range(2))


@pytest.mark.spec("R-030")
def test_a_loaded_prefix_exports_to_the_same_octets() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        prefix = connector.load(connector.match(TOKENS))
        with torch.inference_mode():
            prefix.forward(model, TOKENS)
        stored = [store.containers[key] for key in chain(connector)]
    assert list(export_blocks(prefix.cache, descriptor_of(model, B))) == stored


@pytest.mark.spec("R-023", "R-155")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("room", [0, 3, 64])
def test_computing_the_tail_alone_gives_the_tokens_of_a_run_from_scratch(
    attention: str, kv_heads: int, room: int
) -> None:
    model, store = small_llama(kv_heads, attention=attention), Store()
    tokens = [*TOKENS[:48], 5, 6, 7, 8, 9]
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        matched, continuation = reused(connector, model, tokens, room)
    assert matched == 48
    assert continuation == from_scratch(model, tokens)
    assert continuation != from_scratch(model, [*TOKENS[1:48], 5, 6, 7, 8, 9])


@pytest.mark.spec("R-023")
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B])
def test_at_least_one_token_is_computed(length: int) -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        matched, continuation = reused(connector, model, TOKENS[:length])
    assert matched == (length - 1) // B * B
    assert continuation == from_scratch(model, TOKENS[:length])


@pytest.mark.spec("R-157")
def test_blocks_that_are_known_are_not_put_again() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        assert connector.save(TOKENS[:24], prefilled(model, TOKENS[:24])) == 3
        cache = prefilled(model, TOKENS)
        assert connector.save(TOKENS, cache, known=3) == 4
        assert connector.save(TOKENS, cache) == 0


@pytest.mark.spec("R-034", "U-54")
def test_a_layer_is_used_before_the_next_one_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "REQUEST_OCTETS_MIN", 1)
    model, store = small_llama(), Store(gated=True)
    used: list[int] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda *_, at=layer.self_attn.layer_idx: (used.append(at), store.release(at + 1))[0]
        )
    with connected(store, model) as connector, ThreadPoolExecutor(1) as engine:
        cache = prefilled(model, TOKENS)
        used.clear()
        store.release(-1)
        connector.save(TOKENS, cache)
        running = engine.submit(reused, connector, model, TOKENS)
        # Layer l+1 leaves the store only when the model has done with layer l: were the cache to wait
        # for all layers, this would never end.
        store.release(0)
        matched, continuation = running.result(timeout=60)
    assert used[:4] == [0, 1, 2, 3]
    assert matched == 56
    assert [layers for _, layers in store.requests] == [(at, at) for at in range(4) for _ in range(7)]
    assert continuation == from_scratch(model, TOKENS)


@pytest.mark.spec("R-155", "R-161")
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("block", [0, 2, 6])
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_corrupt_layer_cuts_the_prefix_and_never_the_answer(
    monkeypatch: pytest.MonkeyPatch, layer: int, block: int, parallel: int
) -> None:
    monkeypatch.setattr(connectors, "REQUEST_OCTETS_MIN", 1)
    model, store = small_llama(), Store()
    with connected(store, model, parallel) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        store.corrupt(chain(connector)[block], layer)
        matched, continuation = reused(connector, model, TOKENS)
    assert matched == block * B
    assert continuation == from_scratch(model, TOKENS)


@pytest.mark.spec("R-161")
def test_a_block_lost_after_its_first_layers_were_computed_with_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connectors, "REQUEST_OCTETS_MIN", 1)
    model, store = small_llama(), Store(gated=True)
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        store.corrupt(chain(connector)[4], 2)
        prefix = connector.load(connector.match(TOKENS), 64)
        # The model gets through layers 0 and 1 of the whole prefix before the third is let go.
        hook = model.model.layers[1].register_forward_hook(lambda *_: store.release(3))
        store.release(1)
        with torch.inference_mode():
            output = prefix.forward(model, TOKENS)
        hook.remove()
    assert prefix.tokens == 4 * B
    assert greedy(model, output, 12) == from_scratch(model, TOKENS)


@pytest.mark.spec("R-033", "D5")
def test_a_section_of_another_length_is_a_lost_block() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        block_key = chain(connector)[1]
        record = store.records[block_key]
        del store.containers[block_key]
        store.put(HOLDER, record.compat_id, record.scope_id, block_key, container.build(0, B, [(b"k", b"v")] * 4))
        matched, continuation = reused(connector, model, TOKENS)
    assert matched == B
    assert continuation == from_scratch(model, TOKENS)


@pytest.mark.spec("R-037", "R-161")
def test_replicas_in_another_codec_are_not_loaded_from() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        replicas = connector.match(TOKENS).replicas
        for block in (1, 2):
            [raw] = replicas[block]
            coded = msgspec.structs.replace(raw, codec=0xFF01, holder="https://first.example/")
            store.others[raw.block_key] = [coded]
        del store.records[replicas[2][0].block_key]
        match = connector.match(TOKENS)
        matched, continuation = reused(connector, model, TOKENS)
    assert [[record.codec for record in row] for row in match.replicas] == [[1], [1]]
    assert matched == 2 * B
    assert continuation == from_scratch(model, TOKENS)


def test_a_shortened_prefix_is_stored_again() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector, torch.inference_mode():
        connector.save(TOKENS, prefilled(model, TOKENS))
        lost = chain(connector)[3]
        store.corrupt(lost, 3)
        prefix = connector.load(connector.match(TOKENS))
        prefix.forward(model, TOKENS)
        del store.containers[lost], store.records[lost]
        assert connector.save(TOKENS, prefix.cache, known=prefix.tokens // B) == 1
        assert connector.match(TOKENS).blocks == 7


def test_a_fault_of_the_loader_reaches_the_model() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        store.containers.clear()  # the driver raises KeyError, which stands for any fault of ours
        with pytest.raises(KeyError):
            reused(connector, model, TOKENS)


@pytest.mark.spec("R-017", "R-024")
def test_other_scopes_and_other_descriptors_do_not_match() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
    other_scope = KvspConnector(store, ScopeKey(bytes(32)), descriptor_of(model, B), HOLDER)  # type: ignore[arg-type]
    other_model = KvspConnector(store, KEY, descriptor_of(model, 16), HOLDER)  # type: ignore[arg-type]
    assert other_scope.match(TOKENS).blocks == other_model.match(TOKENS).blocks == 0


def test_a_cropped_or_reordered_cache_goes_on_as_a_dynamic_one() -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector, torch.inference_mode():
        connector.save(TOKENS, prefilled(model, TOKENS))
        prefix = connector.load(connector.match(TOKENS))
        prefix.forward(model, TOKENS)
        prefix.cache.crop(-5)
        output = model(torch.tensor([TOKENS[-5:]]), cache=prefix.cache)
        assert greedy(model, output, 12) == from_scratch(model, TOKENS)
        prefix.cache.crop(-11)
        prefix.cache.reorder_cache(torch.tensor([0]))
        assert greedy(model, model(torch.tensor([[1]]), cache=prefix.cache), 4) == from_scratch(
            model, [*TOKENS, 1], 4
        )


def test_caches_that_forget_tokens_are_not_exported() -> None:
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16,
    )  # fmt: skip
    cache = prefilled(MistralForCausalLM(config).eval(), TOKENS)
    with pytest.raises(ValueError, match="keep every token"):
        list(export_blocks(cache, descriptor_of(small_llama(), B)))


@pytest.mark.spec("R-010", "R-017")
def test_a_cache_of_another_geometry_is_not_exported() -> None:
    cache = prefilled(small_llama(kv_heads=2), TOKENS)
    for other in (small_llama(kv_heads=4), small_llama(layers=3), small_llama(dtype=torch.bfloat16)):
        with pytest.raises(ValueError):
            list(export_blocks(cache, descriptor_of(other, B)))
    with pytest.raises(ValueError):
        list(export_blocks(DynamicCache(config=small_llama().config), descriptor_of(small_llama(), B)))


def test_saving_more_than_the_cache_holds_is_refused() -> None:
    model = small_llama()
    with connected(Store(), model) as connector, pytest.raises(ValueError, match="fewer tokens"):
        connector.save(TOKENS, prefilled(model, TOKENS[:16]))


def test_prefix_shortened_is_raised_by_the_layer_that_lacks_a_block() -> None:
    model = small_llama()
    with connected(Store(), model):
        cache = connectors.PrefixCache(descriptor_of(model, B), 2, 4)
        cache.arrival.shorten(1)
        states = torch.zeros(1, 2, 1, 16)
        with pytest.raises(PrefixShortened):
            cache.update(states, states, 0)
        cache.rewind()
        cache.arrival.advance(1)
        assert cache.update(states, states, 0)[0].shape == (1, 2, B + 1, 16)


@pytest.mark.spec("R-033")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_computes_the_same_bits_as_with_a_cache_of_its_own(attention: str, dtype: torch.dtype) -> None:
    model, store = small_llama(dtype=dtype, attention=attention), Store()
    with connected(store, model) as connector, torch.inference_mode():
        own = prefilled(model, TOKENS[:56])
        connector.save(TOKENS[:56], own)
        output = connector.load(connector.match(TOKENS)).forward(model, TOKENS)
        assert torch.equal(output.logits, model(torch.tensor([TOKENS[56:]]), cache=own).logits)


@pytest.mark.spec("R-161")
@pytest.mark.parametrize("lost", [None, 3])
def test_generate_goes_on_from_a_prefix_that_was_waited_for(lost: int | None) -> None:
    model, store = small_llama(), Store()
    with connected(store, model) as connector:
        connector.save(TOKENS, prefilled(model, TOKENS))
        if lost is not None:
            store.corrupt(chain(connector)[lost], 3)
        cache = connector.load(connector.match(TOKENS)).wait()
    assert cache.get_seq_length() == (56 if lost is None else lost * B)
    answer = model.generate(
        torch.tensor([TOKENS]), cache=cache, max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert answer[0, len(TOKENS) :].tolist() == from_scratch(model, TOKENS)
