"""The main job: two engines with one model share KV through the running stack.

Engine A computes a long prompt and publishes its blocks. Engine B gets other questions about the same
document: it looks the prefix up over HTTPS through Envoy, fetches, verifies and loads it, computes the
tail and generates. Then B does the same from scratch, and the tokens must agree.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from rich.console import Console
from rich.table import Table

from deploy.local.layout import Layout, StackError
from deploy.local.model import BLOCK_TOKENS, ensure_model

PREAMBLE: Final = """You are the night clerk of the harbour archive. Answer from the document alone.

"""
DOCUMENT: Final = """THE BREAKWATER LOG, WINTER QUARTER

The breakwater was begun in the spring by two crews who never met, one working out from the lighthouse and
one from the customs stairs, and the stones of the two halves are still of different colours. The eastern
half is grey and was cut at the quarry above the mill; the western half is nearly black and came by barge,
forty blocks to a load, each with a number painted on the side that faces the sea. A clerk kept the numbers
in a ledger. When a block was lost the clerk wrote the weather beside its number and nothing else.

In the second week of December the wind went round to the north and stayed there for nine days. The pilot
boats were drawn up to the chapel wall. On the fourth day a block of the western half, number 1187, was
found lying on the quay, forty paces from its place and the right way up, and nobody had heard it come.
The harbour master had it measured and weighed, compared the number with the ledger, found that both
agreed, and had it put back. He gave the order that from then on no stone should be set unless it had been
compared with the ledger first, however well it seemed to fit, because a stone that fits and is not the
right one holds until the day on which it is needed.

The lamp was tended by three sisters in turns of eight hours. The eldest trimmed it at dusk, the second at
midnight, and the youngest before dawn, and each began where the one before had stopped, by reading the
page that had been left open on the table. They did not wake each other to ask. In the whole of that winter
the lamp was dark for eleven minutes, on the night when the page had been closed by the draught, and the
youngest had to read the log again from the beginning to learn how the wick stood.

Question: """
QUESTIONS: Final = (
    "Why are the two halves of the breakwater of different colours?",
    "Which number had the block that was found on the quay?",
    "What did the harbour master order after the storm?",
    "How long was the lamp dark, and what was the reason?",
)
NEW_TOKENS: Final = 16
PUBLISH_PATIENCE_S: Final = 15.0
"""How long the holder may take to tell the index of what it was given."""


class Stack(Protocol):
    """What the demo needs of a running stack."""

    @property
    def layout(self) -> Layout:
        """Where its files are."""


@dataclass(frozen=True)
class Outcome:
    """What the demo found; times are medians over the questions, in seconds."""

    prompt_tokens: int
    matched_tokens: int
    recomputed_tokens: int
    blocks_loaded: int
    bytes_loaded: int
    blocks_published: int
    bytes_published: int
    first_token_s: float
    first_token_from_scratch_s: float
    tokens_agree: bool
    trouble: str

    @property
    def failure(self) -> str:
        """Why the demo did not succeed, in one line; empty when it did."""
        if self.trouble:
            return f"reuse failed: {self.trouble}"
        if self.matched_tokens == 0:
            return "nothing was reused"
        return "" if self.tokens_agree else "tokens differ from those of a run from scratch"


class EngineProcess:
    """One engine, spoken to in JSON lines."""

    def __init__(self, identity: str, endpoints: Path, model_dir: Path) -> None:
        self._identity = identity
        options = ("--endpoints", str(endpoints), "--as", identity, "--model", str(model_dir), "--scope", "demo")
        self._process = subprocess.Popen(
            (sys.executable, "-m", "deploy.local.engine", *options, "--block-tokens", str(BLOCK_TOKENS)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Compute threads that spin while they wait take the cores from the processes that bring the KV:
            # measured on 2 cores under load, prefill is three times as fast without.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def wait_ready(self) -> None:
        """Return when the model is loaded. Raises StackError."""
        self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one line, read one. Raises StackError when the engine has ended."""
        if self._process.stdin is None:
            raise StackError(f"engine {self._identity} takes no input")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise StackError(f"engine {self._identity} has ended") from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise StackError(f"engine {self._identity} has ended")
        reply: dict[str, Any] = json.loads(line)
        return reply


def prepare(layout: Layout, model_dir: Path | None) -> list[Path]:
    """The descriptor files to configure the services with; makes the demo model at first use."""
    layout.make_directories()
    if model_dir is None:
        ensure_model(layout.home)
        return [layout.descriptor]
    from kvsp.connectors.describe import describe
    from kvsp.protocol.descriptor import canonical

    try:
        octets = canonical(describe(model_dir, block_tokens=BLOCK_TOKENS))
    except (OSError, ValueError) as error:
        raise StackError(f"model cannot be used: {str(error).partition(chr(10))[0]}") from None
    target = layout.home / "descriptor-given.json"
    target.write_bytes(octets)
    return [target]


def run_demo(stack: Stack, model_dir: Path | None, json_out: bool = False) -> int:
    """Run the main job on a running stack and print what came of it; the exit code. Raises StackError."""
    console = Console(highlight=False)
    model_dir = ensure_model(stack.layout.home)[0] if model_dir is None else model_dir
    with Console(stderr=True).status("two engines load the model") as status:
        outcome = measure(stack.layout.endpoints, model_dir, status.update)
    if json_out:
        console.print_json(json.dumps(asdict(outcome)))
    else:
        _show(console, outcome)
    if outcome.failure:
        Console(stderr=True, highlight=False).print(f"[red]demo failed:[/red] {outcome.failure}", soft_wrap=True)
    return 1 if outcome.failure else 0


def measure(endpoints: Path, model_dir: Path, report: Callable[[str], None]) -> Outcome:
    """Start both engines, publish with one, reuse with the other. Raises StackError."""
    first, *others = (PREAMBLE + DOCUMENT + question for question in QUESTIONS)
    with EngineProcess("ii1", endpoints, model_dir) as a, EngineProcess("ii2", endpoints, model_dir) as b:
        a.wait_ready()
        b.wait_ready()
        report("engine A reads the document and publishes its KV")
        published = a.ask(prompt=first, max_new_tokens=NEW_TOKENS, publish=True)
        if trouble := published.get("trouble"):
            raise StackError(f"engine A: {trouble}")
        blocks = _wait_published(b, first)
        _warm_up(b)
        report("engine B answers, reusing A's KV")
        reused = [b.ask(prompt=prompt, max_new_tokens=NEW_TOKENS) for prompt in others]
        report("engine B answers from scratch")
        scratch = [b.ask(prompt=prompt, max_new_tokens=NEW_TOKENS, reuse=False) for prompt in others]
    return _outcome(published, blocks, reused, scratch)


def _wait_published(engine: EngineProcess, prompt: str) -> int:
    """Blocks of the prompt that the index knows, once it knows all that another prompt can share."""
    until = time.monotonic() + PUBLISH_PATIENCE_S
    while True:
        reply = engine.ask(match=prompt)
        if trouble := reply.get("trouble"):
            raise StackError(f"engine B: {trouble}")
        if reply["blocks"] == reply["complete"]:
            return int(reply["blocks"])
        if time.monotonic() > until:
            raise StackError(
                f"the index knows {reply['blocks']} of {reply['complete']} blocks that engine A stored"
            )
        time.sleep(0.05)


def _warm_up(engine: EngineProcess) -> None:
    """The first forward passes of a process pay for what later ones do not; neither side is charged for it."""
    engine.ask(prompt=DOCUMENT[::-1], max_new_tokens=2, reuse=False)


def _outcome(
    published: dict[str, Any], blocks: int, reused: list[dict[str, Any]], scratch: list[dict[str, Any]]
) -> Outcome:
    trouble = next((answer["trouble"] for answer in (*reused, *scratch) if answer.get("trouble")), "")
    if trouble and any("tokens" not in answer for answer in (*reused, *scratch)):
        raise StackError(f"engine B: {trouble}")

    def total(name: str) -> int:
        return sum(answer[name] for answer in reused)

    return Outcome(
        prompt_tokens=total("prompt_tokens"),
        matched_tokens=min((answer["matched_tokens"] for answer in reused), default=0) and total("matched_tokens"),
        recomputed_tokens=total("recomputed_tokens"),
        blocks_loaded=total("blocks_loaded"),
        bytes_loaded=total("bytes_moved"),
        blocks_published=blocks,
        bytes_published=published["bytes_moved"],
        first_token_s=statistics.median(answer["first_token_s"] for answer in reused),
        first_token_from_scratch_s=statistics.median(answer["first_token_s"] for answer in scratch),
        tokens_agree=[answer["tokens"] for answer in reused] == [answer["tokens"] for answer in scratch],
        trouble=trouble,
    )


def _show(console: Console, outcome: Outcome) -> None:
    table = Table(title="Engine B, asked about what engine A has read", title_justify="left")
    table.add_column("")
    table.add_column("reusing A's KV", justify="right")
    table.add_column("from scratch", justify="right")
    questions = len(QUESTIONS) - 1
    table.add_row("prompts", str(questions), str(questions))
    table.add_row("prompt tokens", f"{outcome.prompt_tokens:,}", f"{outcome.prompt_tokens:,}")
    table.add_row("  matched", f"{outcome.matched_tokens:,}", "0")
    table.add_row("  recomputed", f"{outcome.recomputed_tokens:,}", f"{outcome.prompt_tokens:,}")
    table.add_row("blocks loaded", f"{outcome.blocks_loaded:,}", "0")
    table.add_row("KV moved", f"{outcome.bytes_loaded / 2**20:,.1f} MiB", "0 MiB")
    table.add_row(
        "time to first token (median)",
        f"{outcome.first_token_s * 1e3:,.0f} ms",
        f"{outcome.first_token_from_scratch_s * 1e3:,.0f} ms",
    )
    console.print(table)
    published = f"{outcome.blocks_published} blocks ({outcome.bytes_published / 2**20:,.1f} MiB)"
    console.print(
        f"Engine A published {published}, over HTTPS through Envoy; B verified every layer.", soft_wrap=True
    )
    if not outcome.failure:
        faster = outcome.first_token_from_scratch_s / outcome.first_token_s
        agree = f"[green]B's tokens equal a run from scratch[/green]; first token {faster:.1f} times as fast."
        console.print(agree, soft_wrap=True)
