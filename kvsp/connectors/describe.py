"""The Compatibility Descriptor of a local Hugging Face model directory (R-010 ... R-014)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from msgspec import UNSET
from transformers import AutoConfig, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvsp.connectors.layout import dtype_name
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.digests import format_digest

LAYOUT: Final = "kvsp-layout-1"
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")
_ROPE_NAMED: Final = ("rope_theta", "rope_type")
"""The rotary parameters that the registered syntax can say (R-014)."""


def describe(
    model_dir: Path,
    config: PretrainedConfig | None = None,
    *,
    block_tokens: int,
    dtype: torch.dtype | None = None,
    model: str | None = None,
    adapters: Sequence[str] = (),
) -> Descriptor:
    """The descriptor under which the caches of a model are shared.

    `config` is what the model is run with, the directory's own by default; `dtype` is the type of the
    cache; `model` is the name that all parties use (R-011), the directory's by default; `adapters` are
    digests in the order of application (R-013). Reads every weight file. Raises ValueError when the model
    cannot be described, OSError when it cannot be read.
    """
    if not model_dir.is_dir():  # transformers would take the name for one on its hub
        raise ValueError(f"{model_dir}: no such directory")
    shipped = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    config = shipped if config is None else config
    text = config.get_text_config(decoder=True)
    _check_shareable(text)
    return Descriptor(
        model=model or model_dir.resolve().name,
        model_digest=model_digest(model_dir),
        tokenizer_digest=tokenizer_digest(model_dir),
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        kv_dtype=dtype_name(_cache_dtype(config) if dtype is None else dtype),
        positional=positional(text, shipped.get_text_config(decoder=True)),
        block_tokens=block_tokens,
        layout=LAYOUT,
        adapters=list(adapters) or UNSET,
    )


def model_digest(model_dir: Path) -> str:
    """SHA-256 over the weight files "concatenated in ascending byte order of their file names" (R-012)."""
    for pattern in _WEIGHTS:
        files = sorted(model_dir.glob(pattern), key=lambda path: os.fsencode(path.name))
        if files:
            return _digest(files)
    raise ValueError(f"no weight files in {model_dir}")


def tokenizer_digest(model_dir: Path) -> str:
    """SHA-256 over the tokenizer definition file (R-012)."""
    for name in _TOKENIZERS:
        if (model_dir / name).is_file():
            return _digest([model_dir / name])
    raise ValueError(f"no tokenizer file in {model_dir}")


def positional(config: PretrainedConfig, shipped: PretrainedConfig) -> str:
    """The positional encoding of a model run with `config`.

    "Parameters that are absent take the defaults of the model, and a descriptor MUST include them
    whenever the model is run with non-default values" (R-014): the model's defaults are what its
    directory ships. Raises ValueError for a difference that the registered syntax cannot say.
    """
    run, own = _rope(config), _rope(shipped)
    if not run:
        return "none"
    changed = {name for name in run.keys() | own.keys() if run.get(name) != own.get(name)}
    if not changed:
        return "rope"
    if not changed <= run.keys() & set(_ROPE_NAMED) or run["rope_theta"] != int(run["rope_theta"]):
        raise ValueError("rotary parameters differ from the model's own in a way that has no registered name")
    theta = f"theta={int(run['rope_theta'])}" if "rope_theta" in changed else ""
    scaling = f",scaling={run['rope_type']}" if "rope_type" in changed else ""
    return f"rope;{theta}{scaling}"


def _check_shareable(config: PretrainedConfig) -> None:
    """Every layer keeps K and V of every token, both of one width: what a descriptor can say."""
    layers = DynamicCache(config=config).layers
    if not all(type(layer) in {DynamicLayer, DynamicSlidingWindowLayer} for layer in layers):
        raise ValueError("the model keeps state that is not K and V of each token")
    if getattr(config, "v_head_dim", None) not in {None, getattr(config, "head_dim", None)}:
        raise ValueError("K and V of the model differ in width")


def _cache_dtype(config: PretrainedConfig) -> torch.dtype:
    dtype = config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _digest(files: Iterable[Path]) -> str:
    hasher = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: hasher)
    return format_digest(hasher.digest())
