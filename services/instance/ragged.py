"""Attention of this engine's own, through the registry that transformers has for it.

It makes a ragged forward pass possible: one token of each of several sessions, without padding. The tokens stand
side by side as one sequence, each with its own position; all layers but attention treat rows alike, and attention
takes each row to the keys and values of its own session. It makes a pass over a sharded context possible
(sharded.py). It also spares prefill the copies of keys and values that transformers makes for grouped queries when
there is a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol.descriptor import Descriptor

if TYPE_CHECKING:
    from services.instance.sharded import Sharded

NAME: Final = "kvsp-ragged"
_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")

_log = structlog.get_logger(__name__)


class RaggedCache(Cache):
    """The caches of several sessions, which get one row each."""

    def __init__(self, caches: Sequence[PrefixCache]) -> None:
        super().__init__(layers=[])
        self._caches = caches
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a row to each; what attention reads of the layer is then in `states`."""
        del args, kwargs
        self.states = [
            cache.update(key_states[:, :, at : at + 1], value_states[:, :, at : at + 1], layer_idx)
            for at, cache in enumerate(self._caches)
        ]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing comes before the rows of this pass, as far as the model is concerned."""
        del layer_idx
        return 0


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ragged: RaggedCache | None = None,
    sharded: Sharded | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; over each session's own states if `ragged` is passed to the model, over
    a sharded context if `sharded` is.
    """
    if any(options.get(name) is not None for name in _UNSUPPORTED):
        raise NotImplementedError("a kind of attention that is not computed by rows")
    if sharded is not None:
        if options.get("sliding_window") is not None:
            raise NotImplementedError("not every token sees all before it")
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        return sharded.attend(query[0], key[0], value[0], scale).unsqueeze(0), None
    if ragged is None:
        return _attend(module, query, key, value, attention_mask, **options), None
    window = options.get("sliding_window")
    rows = []
    for at, (keys, values) in enumerate(ragged.states):
        seen = (keys, values) if window is None else (keys[:, :, -window:], values[:, :, -window:])
        rows.append(_attend(module, query[:, :, at : at + 1], *seen, None, **options))
    return torch.cat(rows, dim=1), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Queries [1, heads, new, dim], keys and values [1, kv_heads, tokens, dim]; returns [1, new, heads, dim]."""
    if mask is None:
        output: torch.Tensor = sdpa_attention_forward(module, query, key, value, None, **options)[0]
        return output
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=options.get("scaling"), enable_gqa=query.shape[1] != key.shape[1]
    ).transpose(1, 2).contiguous()  # fmt: skip


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def forward(model: Any, caches: Sequence[PrefixCache], tokens: Sequence[int], positions: Sequence[int]) -> Any:
    """Logits [sessions, vocabulary] of one token each; each cache must end before its position."""
    ragged = RaggedCache(caches)
    output = model(
        torch.tensor([tokens]),
        position_ids=torch.tensor([positions]),
        # A mask of four dimensions is passed on as it is; none is needed, as every row sees all that is there.
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=model.dtype),
        cache=ragged,
        use_cache=True,
        ragged=ragged,
    )
    return output.logits[0]


def enable(model: Any, descriptor: Descriptor) -> bool:
    """Let the model use `attention`. False, and nothing is changed, when it cannot, as a trial shows."""
    usual = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        if _trial(model, descriptor):
            return True
        reason = "other logits than one by one"
    except Exception as error:  # whatever a model that was not made for it does
        reason = type(error).__name__
    model.set_attn_implementation(usual)
    _log.warning("sessions are computed one by one: the model cannot use the engine's attention", reason=reason)
    return False


@torch.inference_mode()
def _trial(model: Any, descriptor: Descriptor) -> bool:
    """Two sessions give the logits together that they give one by one, but for rounding."""
    prompts = ([1, 2, 3, 4, 5], [6, 7, 8])
    caches = [PrefixCache(descriptor, 0, len(prompt) + 1) for prompt in prompts]
    for cache, prompt in zip(caches, prompts, strict=True):
        cache.arrival.advance(descriptor.layers)
        model(torch.tensor([prompt]), cache=cache, use_cache=True)
    single = []
    for cache, prompt in zip(caches, prompts, strict=True):
        single.append(model(torch.tensor([[9]]), cache=cache, use_cache=True).logits[0, -1].float())
        cache.seek(len(prompt))
    together = forward(model, caches, [9, 9], [len(prompt) for prompt in prompts]).float()
    tolerance = torch.finfo(model.dtype).eps ** 0.5
    scale = float(torch.stack(single).abs().max())
    return bool(torch.allclose(together, torch.stack(single), rtol=tolerance, atol=tolerance * scale))
