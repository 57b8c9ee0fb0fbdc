"""The model of the dev stack: a small Llama with weights from a fixed seed, and a byte-level tokenizer.

It has not been trained, so its text means nothing; all that makes prefix reuse correct or wrong is
there: rotary positions, grouped-query attention, eight layers, a real tokenizer, safetensors on disk.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from kvsp.protocol import descriptor as descriptors
from kvsp.protocol.descriptor import Descriptor

NAME: Final = "kvsp-demo-llama-1"
"""Name of the model and of its directory; a change of the recipe below needs another one."""

BLOCK_TOKENS: Final = 32
"""Tokens per block: 512 KiB of KV."""

SEED: Final = 20240817
_BEGIN, _END = "<s>", "</s>"


def ensure_model(home_dir: Path) -> tuple[Path, Descriptor]:
    """The model's directory under `home_dir`, made at first use (seconds), and its descriptor.

    The descriptor is written to `home_dir/descriptor.json`, which the services are configured with.
    """
    model_dir, descriptor_file = home_dir / NAME, home_dir / "descriptor.json"
    if model_dir.is_dir() and descriptor_file.is_file():
        known = descriptors.load(descriptor_file.read_bytes())
        if known.model == NAME:
            return model_dir, known
    home_dir.mkdir(parents=True, exist_ok=True)
    if not model_dir.is_dir():
        _make(model_dir)
    from kvsp.connectors.describe import describe

    descriptor = describe(model_dir, block_tokens=BLOCK_TOKENS)
    descriptor_file.write_bytes(descriptors.canonical(descriptor))
    return model_dir, descriptor


def _make(model_dir: Path) -> None:
    """Save model and tokenizer; the directory appears whole or not at all."""
    from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging
    quiet.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=model_dir.parent) as scratch:
        draft = Path(scratch) / NAME
        vocabulary = _save_tokenizer(draft)
        _save_weights(draft, vocabulary)
        shutil.move(draft, model_dir)


def _save_tokenizer(target: Path) -> int:
    """One token per byte, made without any download; returns the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [_BEGIN, _END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_BEGIN, eos_token=_END)  # type: ignore[no-untyped-call]
    fast.save_pretrained(target)
    return len(names)


def _save_weights(target: Path, vocabulary: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        # Larger than the usual 0.02: what the model says then depends on all that it has read.
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    model.save_pretrained(target)
