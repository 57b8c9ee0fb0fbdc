"""Attention over a context that lies in pieces: each piece's output with its log-sum-exp, merged exactly.

With o_i = softmax(q k_i) v_i over piece i and l_i = log sum exp(q k_i), attention over all pieces is
sum_i exp(l_i - l) o_i with l = log sum exp(l_i): the identity behind FlashDecoding (Dao et al., 2023) and Ring
Attention (Liu et al., 2023, arXiv:2310.01889). Partials are float32 whatever the model computes in.

Shapes: queries [heads, new, dim], keys and values [kv_heads, tokens, dim], heads a multiple of kv_heads; a partial
is [heads, new, dim] with a log-sum-exp [heads, new].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

SCORES_MAX: Final = 4 << 20
"""Scores (float32) that exist at a time where they have to."""


class Partial(NamedTuple):
    """Attention over some of the tokens."""

    output: torch.Tensor
    log_sum: torch.Tensor


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    first: int | None = None,
) -> Partial:
    """Attention of new tokens over one piece.

    `first` is the place of the first new token among the piece's tokens, which are then hidden from those before
    them; None: every token of the piece is older than every new one. A row that sees no token has log-sum -inf.
    """
    square = first == 0 and queries.shape[1] == keys.shape[1]
    if (first is None or square) and _fused_is_right():
        return _fused(queries, keys, values, scale, causal=square)
    rows = max(1, SCORES_MAX // (queries.shape[0] * keys.shape[1]))
    parts = [
        _plain(queries[:, at : at + rows], keys, values, scale, None if first is None else first + at)
        for at in range(0, queries.shape[1], rows)
    ]
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([part.output for part in parts], 1), torch.cat([part.log_sum for part in parts], 1))


def joined(partials: Sequence[Partial]) -> Partial:
    """The partial over the tokens of all pieces. Their order does not matter but for rounding."""
    if len(partials) == 1:
        return partials[0]
    log_sums = torch.stack([partial.log_sum for partial in partials])
    log_sum = torch.logsumexp(log_sums, dim=0)
    weights = torch.exp(log_sums - log_sum.nan_to_num(neginf=0.0)).unsqueeze(-1)
    return Partial((weights * torch.stack([partial.output for partial in partials])).sum(dim=0), log_sum)


def merge(partials: Sequence[Partial]) -> torch.Tensor:
    """Attention over the tokens of all pieces, [heads, new, dim]."""
    return joined(partials).output


def _plain(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, first: int | None
) -> Partial:
    """See `attend`; makes the whole matrix of scores."""
    heads, new, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    # The query heads of a group share its keys: one product for all of them.
    grouped = queries.float().reshape(kv_heads, heads // kv_heads * new, dim)
    scores = grouped @ keys.float().transpose(1, 2) * scale
    if first is not None:
        seen = torch.arange(tokens) <= torch.arange(first, first + new).unsqueeze(1)
        scores.view(kv_heads, -1, new, tokens).masked_fill_(~seen, float("-inf"))
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - log_sum.nan_to_num(neginf=0.0).unsqueeze(-1))
    return Partial((weights @ values.float()).reshape(heads, new, dim), log_sum.reshape(heads, new))


def _fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool
) -> Partial:
    """See `attend`, by torch's own kernel, which makes no matrix of scores; `causal`: of a square."""
    heads, new, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    grouped = queries.float().reshape(kv_heads, heads // kv_heads, new, dim)
    if not causal:  # the query heads of a group share its keys: they are rows of one head
        grouped = grouped.reshape(kv_heads, 1, -1, dim)
    shape = kv_heads, grouped.shape[1], tokens, dim
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped,
        keys.float().unsqueeze(1).expand(shape),
        values.float().unsqueeze(1).expand(shape),
        is_causal=causal,
        scale=scale,
    )
    return Partial(output.reshape(heads, new, dim), log_sum.reshape(heads, new))


@functools.cache
def _fused_is_right() -> bool:
    """A trial: the kernel is not part of torch's public interface."""
    queries, keys, values = torch.linspace(-2, 2, 4 * 6 * 8).view(4, 6, 8).sin(), *torch.ones(2, 2, 6, 8).cumsum(2)
    try:
        found = [_fused(queries, keys, values, 0.3, causal=causal) for causal in (False, True)]
    except Exception:  # whatever another release of torch says
        return False
    expected = [_plain(queries, keys, values, 0.3, first) for first in (None, 0)]
    return all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-4)
        for pair in zip(found, expected, strict=True)
        for one, other in zip(*pair, strict=True)
    )
