"""Models of the dev stack: small Llamas with weights from a fixed seed, and a byte-level tokenizer.

They have not been trained, so their text means nothing; all that makes prefix reuse correct or wrong is
there: rotary positions, grouped-query attention, a real tokenizer, safetensors on disk. They speak printable
ASCII, one character a token, so that equal text is equal tokens.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.local.layout import StackError
from kvsp.protocol import descriptor as descriptors
from kvsp.protocol.descriptor import Descriptor

BLOCK_TOKENS: Final = 32
"""Tokens per block: 512 KiB of the demo model's KV."""

SEED: Final = 20240817
_BEGIN, _END = "<s>", "</s>"
_CHAT: Final = (
    "{% for message in messages %}[{{ message.role }}]\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
_LIVELY: Final = 2.2
"""Standard deviation of what a matrix makes of a normalised vector."""

_DECISIVE: Final = 3.0
"""Factor on the weights that choose a character: sampled text then stays among the printable ones, too."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model: `name` is that of its directory, too; a change of anything else needs another one."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


DEMO: Final = Recipe("kvsp-demo-llama-2", 768, 1920, 8, 12, 4)
"""194 MB; to compute 2,000 tokens takes seconds, to load their KV (31 MiB) a small part of one."""

TINY: Final = Recipe("kvsp-tiny-llama-1", 64, 128, 2, 4, 2)
"""For tests: computes next to nothing."""


def ensure_model(home_dir: Path, recipe: Recipe = DEMO) -> tuple[Path, Descriptor]:
    """The model's directory under `home_dir`, made at first use (seconds), and its descriptor.

    The descriptor is written to `home_dir/descriptor.json`, which the services are configured with.
    """
    model_dir, descriptor_file = home_dir / recipe.name, home_dir / "descriptor.json"
    if model_dir.is_dir() and descriptor_file.is_file():
        known = descriptors.load(descriptor_file.read_bytes())
        if known.model == recipe.name:
            return model_dir, known
    home_dir.mkdir(parents=True, exist_ok=True)
    if not model_dir.is_dir():
        _make(model_dir, recipe)
    from kvsp.connectors.describe import describe

    descriptor = describe(model_dir, block_tokens=BLOCK_TOKENS)
    descriptor_file.write_bytes(descriptors.canonical(descriptor))
    return model_dir, descriptor


def describe_given(home_dir: Path, model_dir: Path) -> Path:
    """The file with the descriptor of a given model, made anew. Raises StackError."""
    from kvsp.connectors.describe import describe

    try:
        octets = descriptors.canonical(describe(model_dir, block_tokens=BLOCK_TOKENS))
    except (OSError, ValueError) as error:
        raise StackError(f"model cannot be used: {str(error).partition(chr(10))[0]}") from None
    target = home_dir / "descriptor-given.json"
    target.write_bytes(octets)
    return target


def _make(model_dir: Path, recipe: Recipe) -> None:
    """Save model and tokenizer; the directory appears whole or not at all."""
    from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging
    quiet.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=model_dir.parent) as scratch:
        draft = Path(scratch) / recipe.name
        vocabulary = _save_tokenizer(draft)
        _save_weights(draft, recipe, vocabulary)
        shutil.move(draft, model_dir)


def _save_tokenizer(target: Path) -> list[str]:
    """One token per byte, made without any download; returns the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [_BEGIN, _END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_BEGIN, eos_token=_END)  # type: ignore[no-untyped-call]
    fast.chat_template = _CHAT
    fast.save_pretrained(target)
    return names


def _save_weights(target: Path, recipe: Recipe, vocabulary: list[str]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=8192,
        # Larger than usual: what the model says then depends on all that it has read.
        initializer_range=_LIVELY / math.sqrt(recipe.hidden),
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        is_printable = [len(name) == 1 and name.isascii() for name in vocabulary]
        model.lm_head.weight *= _DECISIVE * torch.tensor(is_printable).unsqueeze(1)
    model.save_pretrained(target)
