"""Attention in pieces equals attention in one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from services.instance.partial import attend, merge


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
    partial = attend(queries, keys, values, 0.3)
    assert partial.output.dtype == partial.log_sum.dtype == torch.float32
