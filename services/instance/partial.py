"""Attention over a context that lies in pieces: each piece's output with its log-sum-exp, merged exactly.

With o_i = softmax(q k_i) v_i over piece i and l_i = log sum exp(q k_i), attention over all pieces is
sum_i exp(l_i - l) o_i with l = log sum exp(l_i): the identity behind FlashDecoding (Dao et al., 2023) and Ring
Attention (Liu et al., 2023, arXiv:2310.01889). Partials are float32 whatever the model computes in.

Shapes: queries [heads, new, dim], keys and values [kv_heads, tokens, dim], heads a multiple of kv_heads; a partial
is [heads, new, dim] with a log-sum-exp [heads, new].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


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


def merge(partials: Sequence[Partial]) -> torch.Tensor:
    """Attention over the tokens of all pieces, [heads, new, dim]. Their order does not matter but for rounding."""
    log_sums = torch.stack([partial.log_sum for partial in partials])
    weights = torch.exp(log_sums - torch.logsumexp(log_sums, dim=0)).unsqueeze(-1)
    return (weights * torch.stack([partial.output for partial in partials])).sum(dim=0)
