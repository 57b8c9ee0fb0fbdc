"""Attention in pieces equals attention in one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from services.instance import partial
from services.instance.partial import Partial, attend, joined, merge


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(0, 2**31),
    st.floats(0.1, 30),
)
def test_pieces_merge_to_the_attention_over_all(
    pieces: list[int], new: int, heads: tuple[int, int], seed: int, spread: float
) -> None:
    torch.manual_seed(seed)
    old, (query_heads, kv_heads), dim = sum(pieces), heads, 8
    queries = torch.randn(query_heads, new, dim) * spread
    keys, values = (torch.randn(kv_heads, old + new, dim) for _ in range(2))
    seen = torch.ones(new, old + new, dtype=torch.bool).tril(diagonal=old)
    expected = scaled_dot_product_attention(
        queries[None].double(),
        keys[None].double(),
        values[None].double(),
        attn_mask=seen,
        scale=0.3,
        enable_gqa=True,
    )[0]
    edges = [sum(pieces[:at]) for at in range(len(pieces) + 1)]
    partials = [attend(queries, keys[:, a:b], values[:, a:b], 0.3) for a, b in itertools.pairwise(edges)]
    partials.append(attend(queries, keys[:, old:], values[:, old:], 0.3, first=0))
    # Scores are float32: their rounding, absolute in the exponent, is relative in a weight, and so in the values.
    largest = 0.3 * 8 * float(queries.abs().max() * keys.abs().max())
    rounding = torch.finfo(torch.float32).eps * largest * float(values.abs().max())
    assert torch.allclose(merge(partials), expected.float(), atol=max(2e-6, rounding), rtol=2e-5)


def test_a_piece_that_no_new_token_sees_changes_nothing() -> None:
    torch.manual_seed(1)
    queries, keys, values = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    own = attend(queries, keys, values, 0.3)
    unseen = attend(queries, keys, values, 0.3, first=-10)
    assert torch.isneginf(unseen.log_sum).all()
    assert torch.equal(merge([own, unseen]), merge([own]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partials_of_short_types_are_float32(dtype: torch.dtype) -> None:
    queries, keys, values = (torch.randn(2, 3, 8, dtype=dtype) for _ in range(3))
    found = attend(queries, keys, values, 0.3)
    assert found.output.dtype == found.log_sum.dtype == torch.float32


@given(
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(1, 40),
    st.integers(1, 700),
    st.sampled_from([None, 0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_the_fused_kernel_gives_what_the_plain_product_gives(
    heads: tuple[int, int], new: int, tokens: int, first: int | None, dtype: torch.dtype, seed: int
) -> None:
    assert partial._fused_is_right()
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    tokens = tokens if first is None else new
    queries = torch.randn(query_heads, new, 16).to(dtype)
    # As a store shows them: tokens outside, heads inside.
    keys, values = torch.randn(2, tokens, kv_heads, 16).to(dtype).transpose(1, 2)
    fused = partial._fused(queries, keys, values, 0.25, causal=first == 0)
    plain = partial._plain(queries, keys, values, 0.25, first)
    for one, other in zip(fused, plain, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [None, 3, -2])
def test_rows_are_computed_some_at_a_time(first: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_fused_is_right", lambda: False)
    torch.manual_seed(2)
    queries, keys, values = torch.randn(4, 10, 8), torch.randn(2, 13, 8), torch.randn(2, 13, 8)
    whole = attend(queries, keys, values, 0.3, first=first)
    monkeypatch.setattr(partial, "SCORES_MAX", 3 * 4 * 13)
    parts = attend(queries, keys, values, 0.3, first=first)
    assert torch.allclose(whole.output, parts.output, atol=1e-6)
    assert torch.allclose(whole.log_sum, parts.log_sum, atol=1e-6)


def test_joined_partials_can_be_joined_again() -> None:
    torch.manual_seed(3)
    parts = [attend(torch.randn(2, 3, 8), *torch.randn(2, 2, 5, 8), 0.3) for _ in range(3)]
    nothing = Partial(torch.zeros(2, 3, 8), torch.full((2, 3), float("-inf")))
    again = joined([joined([nothing, parts[0]]), joined(parts[1:])])
    assert torch.allclose(again.output, merge(parts), atol=1e-6)
    assert torch.equal(joined([nothing, nothing]).output, nothing.output)
