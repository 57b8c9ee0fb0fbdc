"""A transformers cache as KV Block Containers: codec raw, layout kvsp-layout-1 (R-033).

The cache keeps a layer as [batch, kv_heads, tokens, head_dim]; a section holds [token, head, dim] rows.
Octets are copied, never converted: what is loaded equals what was exported, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvsp.protocol import container
from kvsp.protocol.descriptor import Descriptor

DTYPES: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
}
"""Torch types of the registered element types."""

LayerStates = tuple[torch.Tensor, torch.Tensor]

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

if sys.byteorder != "little":
    raise ImportError("kvsp-layout-1 holds little-endian elements; this host is big-endian")


def dtype_name(dtype: torch.dtype) -> str:
    """The registered element type of a torch type. Raises ValueError when there is none."""
    if dtype not in _NAMES:
        raise ValueError(f"{dtype} is not a registered element type")
    return _NAMES[dtype]


def octets_of(tensor: torch.Tensor) -> memoryview:
    """The octets of a contiguous CPU tensor, shared with it."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def export_blocks(cache: Cache, descriptor: Descriptor) -> Iterator[bytes]:
    """The containers of the complete blocks of a cache of batch size 1, built one at a time.

    Raises ValueError when the cache cannot be that of the descriptor, or does not keep every token (a
    sliding window).
    """
    states = layer_states(cache, descriptor)
    for block in range(states[0][0].shape[-2] // descriptor.block_tokens):
        yield export_block(states, descriptor.block_tokens, block)


def export_block(states: list[LayerStates], block_tokens: int, block: int) -> bytes:
    """The container of one complete block, by its number, of a cache's `layer_states`."""
    rows = slice(block * block_tokens, (block + 1) * block_tokens)
    return container.build(0, block_tokens, [(_section(k, rows), _section(v, rows)) for k, v in states])


def layer_states(cache: Cache, descriptor: Descriptor) -> list[LayerStates]:
    """Keys and values of every layer, [1, kv_heads, tokens, head_dim]. Raises as `export_blocks`."""
    if len(cache.layers) != descriptor.layers:
        raise ValueError("cache and descriptor differ in layers")
    shape = (1, descriptor.kv_heads, cache.get_seq_length(), descriptor.head_dim)
    states: list[LayerStates] = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.is_sliding:
            raise ValueError("only caches that keep every token can be shared")
        if layer.keys is None or layer.values is None:
            raise ValueError("cache layer is empty")
        for tensor in (layer.keys, layer.values):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"cache layer is not of shape {shape}")
            if dtype_name(tensor.dtype) != descriptor.kv_dtype:
                raise ValueError("cache and descriptor differ in element type")
        states.append((layer.keys, layer.values))
    return states


def _section(states: torch.Tensor, rows: slice) -> memoryview:
    """These rows of [1, heads, tokens, dim] as [token, head, dim] octets."""
    return octets_of(states[0, :, rows].transpose(0, 1).contiguous().cpu())
