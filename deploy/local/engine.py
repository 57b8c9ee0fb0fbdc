"""An inference engine of the dev stack: prompts as JSON lines in, answers as JSON lines out.

    python -m deploy.local.engine --endpoints .kvsp/endpoints.json --as ii1 --model DIR --scope demo

A line is `{"prompt": TEXT, "max_new_tokens": 16, "reuse": true, "publish": false}`; all but the prompt
may be left out. `{"match": TEXT}` only asks how many blocks of a prompt are known. When an index or a
holder fails, the engine computes by itself and says why in `trouble`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import msgspec
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvsp.client import Client, load_stack
from kvsp.connectors.describe import describe
from kvsp.connectors.transformers import KvspConnector, Match
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ScopeKey

THREADS_MAX: Final = 8


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """One line of input."""

    prompt: str = ""
    match: str = ""
    max_new_tokens: int = 16
    reuse: bool = True
    publish: bool = False


class Answer(msgspec.Struct, omit_defaults=True):
    """One line of output. Times are from receipt of the prompt; `bytes_moved` counts KV data, in and out."""

    prompt_tokens: int
    matched_tokens: int
    recomputed_tokens: int
    blocks_loaded: int
    blocks_stored: int
    bytes_moved: int
    first_token_s: float
    total_s: float
    tokens: list[int]
    text: str
    trouble: str = ""


class Engine:
    """A model, its tokenizer and the connector that shares its KV."""

    def __init__(self, model_dir: Path, connector: KvspConnector, payload_octets: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self._model = load_model(model_dir)
        self._connector = connector
        self._payload_octets = payload_octets

    def match(self, prompt: str) -> dict[str, int]:
        """Blocks of a prompt that are known, and that could be. Raises KvspError."""
        tokens = self._encode(prompt)
        complete = (len(tokens) - 1) // self._connector.block_tokens
        return {"blocks": self._connector.match(tokens).blocks, "complete": complete}

    @torch.inference_mode()
    def answer(self, request: Request) -> Answer:
        """Compute what is not known of the prompt, then generate greedily."""
        started = time.perf_counter()
        tokens = self._encode(request.prompt)
        output, matched, trouble = self._prefill(tokens, request)
        generated = [int(output.logits[0, -1].argmax())]
        first_token_s = time.perf_counter() - started
        stored = 0
        if request.publish:
            # Before generating, so that others have the prompt's blocks as early as can be.
            stored, trouble = self._publish(tokens, output.cache, matched, trouble)
        self._generate(output, generated, request.max_new_tokens)
        loaded = matched // self._connector.block_tokens
        return Answer(
            prompt_tokens=len(tokens),
            matched_tokens=matched,
            recomputed_tokens=len(tokens) - matched,
            blocks_loaded=loaded,
            blocks_stored=stored,
            bytes_moved=(loaded + stored) * self._payload_octets,
            first_token_s=first_token_s,
            total_s=time.perf_counter() - started,
            tokens=generated,
            text=str(self._tokenizer.decode(generated)),
            trouble=trouble,
        )

    def _encode(self, prompt: str) -> list[int]:
        return list(self._tokenizer(prompt)["input_ids"])

    def _prefill(self, tokens: list[int], request: Request) -> tuple[Any, int, str]:
        """Output of the prompt's last token, how many tokens were not computed, and what went wrong."""
        try:
            match = self._connector.match(tokens if request.reuse else [])
            trouble = ""
        except KvspError as error:
            match, trouble = Match([]), f"lookup: {error}"
        room = len(tokens) - match.blocks * self._connector.block_tokens + request.max_new_tokens
        prefix = self._connector.load(match, room)
        output = prefix.forward(self._model, tokens, logits_to_keep=1)
        if prefix.tokens < match.blocks * self._connector.block_tokens:
            trouble = "a block that the index knew could not be had"
        return output, prefix.tokens, trouble

    def _publish(self, tokens: list[int], cache: Any, matched: int, trouble: str) -> tuple[int, str]:
        try:
            return self._connector.save(tokens, cache, matched // self._connector.block_tokens), trouble
        except KvspError as error:
            return 0, trouble or f"put: {error}"

    def _generate(self, output: Any, generated: list[int], count: int) -> None:
        while len(generated) < count and generated[-1] != self._tokenizer.eos_token_id:
            output = self._model(torch.tensor([generated[-1:]]), cache=output.cache, use_cache=True)
            generated.append(int(output.logits[0, -1].argmax()))


def load_model(model_dir: Path) -> Any:
    """The model in the type its weights are stored in."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, dtype="auto")
    return model.eval()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    *,
    endpoints: Annotated[Path, typer.Option(help="endpoints.json of the running stack")],
    identity: Annotated[str, typer.Option("--as", help="party that the engine is, for example ii1")],
    model: Annotated[Path, typer.Option(help="directory of a Hugging Face causal language model")],
    scope: Annotated[str, typer.Option(help="scope whose KV is shared")] = "demo",
    holder: Annotated[str, typer.Option(help="holder that takes new blocks")] = "h1",
    block_tokens: Annotated[int, typer.Option(min=1, help="tokens per block")] = 32,
    threads: Annotated[int, typer.Option(min=0, help="compute threads, 0: one per core")] = 0,
    no_reuse: Annotated[bool, typer.Option("--no-reuse", help="compute every prompt from scratch")] = False,
) -> None:
    """Answer prompts until the end of input."""
    torch.set_num_threads(threads or min(len(os.sched_getaffinity(0)), THREADS_MAX))
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    try:
        stack = load_stack(endpoints, identity)
        descriptor = describe(model, block_tokens=block_tokens)
        scope_key = ScopeKey.parse(stack.scope_keys[scope].read_bytes())
        with Client(stack.credentials, stack.endpoints) as client:
            connector = KvspConnector(client, scope_key, descriptor, stack.holders[holder])
            _serve(Engine(model, connector, descriptor.payload_octets), no_reuse)
            connector.close()
    except KeyError as error:
        _end(identity, f"the stack has no {error}")
    except (KvspError, OSError, ValueError) as error:
        _end(identity, str(error).partition("\n")[0])


def _end(identity: str, reason: str) -> NoReturn:
    typer.echo(f"engine {identity}: {reason}", err=True)
    raise typer.Exit(1)


def _serve(engine: Engine, no_reuse: bool) -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(_reply(engine, line, no_reuse), flush=True)


def _reply(engine: Engine, line: str, no_reuse: bool) -> str:
    try:
        request = msgspec.json.decode(line, type=Request)
        if request.match:
            return json.dumps(engine.match(request.match))
        request.reuse = request.reuse and not no_reuse
        return msgspec.json.encode(engine.answer(request)).decode()
    except (KvspError, msgspec.DecodeError) as error:
        return json.dumps({"trouble": str(error)})


if __name__ == "__main__":
    app()
