"""Prompts to tokens and back, with the tokenizer and the chat template that a model directory ships."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from kvsp.protocol.errors import KvspError, bad_request

T = TypeVar("T")

PLAIN_TEMPLATE: Final = (
    "{{ bos_token or '' }}{% for message in messages %}[{{ message.role }}]\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
"""For a model that ships no chat template: each message under its role in brackets."""


class Tokenizer:
    """A model's tokenizer, and what its configuration says of tokens.

    `vocabulary` bounds token ids, `stop_tokens` end an answer, `context_tokens` is the most that prompt and
    output may have together (0: the model does not say). Raises ValueError or OSError when it cannot be read.
    """

    def __init__(self, model_dir: Path) -> None:
        # transformers takes seconds and hundreds of MB to import, and would ask its hub for what it lacks.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoConfig, AutoTokenizer

        if not model_dir.is_dir():
            raise ValueError(f"{model_dir}: no such directory")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        config: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True).get_text_config(decoder=True)
        self._template = self._tokenizer.chat_template or PLAIN_TEMPLATE
        self._longest = max(map(len, self._tokenizer.get_vocab()))
        # One thread: encoding takes a second a megabyte, and a tokenizer is not meant for several at once.
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.vocabulary: int = max(config.vocab_size, len(self._tokenizer))
        self.context_tokens: int = getattr(config, "max_position_embeddings", None) or 0
        self.stop_tokens = frozenset(_stop_tokens(model_dir, config, self._tokenizer))

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model wants around it."""
        return await self._run(lambda: list(self._tokenizer(text)["input_ids"]))

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a conversation that the assistant is to continue.

        Raises KvspError (400) when the model's template refuses it.
        """
        return await self._run(lambda: self._encode_chat(list(messages)))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out. Bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def least_tokens(self, texts: Iterable[str]) -> int:
        """Fewer tokens than this the texts cannot have; costs nothing."""
        return sum(map(len, texts)) // self._longest

    def close(self) -> None:
        """Stop the encoding thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise _refused(error) from None
        # The template has put the special tokens where they belong.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _refused(error: Exception) -> KvspError:
    """Only what the template itself says by raise_exception is for others to read (R-215)."""
    from jinja2 import TemplateError

    said = f": {error}" if type(error) is TemplateError else ""
    return bad_request(f"the model's chat template refuses these messages{said}")


def _stop_tokens(model_dir: Path, config: Any, tokenizer: Any) -> Iterable[int]:
    """What generation stops at, wherever the model says so."""
    from transformers import GenerationConfig

    stated = [tokenizer.eos_token_id, config.eos_token_id]
    if (model_dir / "generation_config.json").is_file():
        stated.append(GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id)
    for each in stated:
        if each is not None:
            yield from each if isinstance(each, list) else [each]
