"""The main job: a fleet serves prompts over the OpenAI API, reuses KV across instances, loses one of them, and
computes one context on several."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.local import acts, groups_act, moved
from deploy.local.acts import Act, Crash, Loss, Prefetch, Reuse
from deploy.local.api import Answer
from deploy.local.fleet import Fleet, place
from deploy.local.groups_act import Groups
from deploy.local.stack import Background
from kvsp.cli.controller import instance_name


def run_demo(
    background: Background,
    json_out: bool = False,
    long_tokens: int = acts.LONG_TOKENS,
    resized_tokens: int = groups_act.TOKENS,
) -> int:
    """Run the acts on a running fleet and print what came of them; the exit code.

    `long_tokens` is the length of the answers during which an instance is killed, `resized_tokens` of the one
    during which a group is resized. Raises StackError, KvspError.
    """
    console = Console(highlight=False)
    scenes: tuple[tuple[str, str, Callable[[Fleet], Any]], ...] = (
        ("reuse", "act 1: questions about a document that an instance has computed", acts.reuse),
        ("prefetch", "act 2: the KV goes ahead of the request", acts.prefetch),
        ("crash", "act 3: kill -9 of the serving instance", lambda fleet: acts.crash(fleet, long_tokens)),
        (
            "groups",
            "act 4: one context on several instances",
            lambda fleet: groups_act.groups(fleet, resized_tokens),
        ),
    )
    played: dict[str, Any] = {}
    with Fleet(background) as fleet:
        for name, title, play in scenes:
            with Console(stderr=True).status(title):
                played[name] = play(fleet)
                played[name].moved = fleet.moved.since()
            if not json_out:
                console.rule(f"[bold]{title}", align="left")
                _SHOW[name](console, played[name])
                console.print(moved.line(played[name].moved))
    failures = [f"{name}: {failure}" for name, act in played.items() for failure in act.failures]
    if json_out:
        console.print_json(json.dumps({name: asdict(act) for name, act in played.items()}))
    for failure in failures:
        Console(stderr=True, highlight=False).print(f"[red]demo failed:[/red] {failure}", soft_wrap=True)
    return 1 if failures else 0


def _show_reuse(console: Console, act: Reuse) -> None:
    table = _requests()
    _request(table, "computed and published", act.computed)
    _request(table, "the same again", act.again)
    _request(table, "another question", act.fetched)
    _request(table, "the same, from scratch", act.scratch)
    console.print(table)
    _explain(console, f"Why {place(act.again)}, asked again", act.again)
    _explain(
        console, f"Why {place(act.fetched)} for another question, while {act.drained} is drained", act.fetched
    )
    _agree(console, act, f"{act.blocks} blocks shared, every layer verified; tokens equal a run from scratch.")


def _show_prefetch(console: Console, act: Prefetch) -> None:
    console.print(
        f"Directive to {act.instance}, which was idle: {act.state}, {act.loaded} keys loaded "
        f"in {_ms(act.loaded_s)}, before the request was sent."
    )
    table = _requests()
    _request(table, "the request then", act.answer)
    _request(table, "the same, from scratch", act.scratch)
    console.print(table)
    _explain(console, "What placement saw", act.answer)
    _agree(console, act, "Tokens equal a run from scratch.")


def _show_crash(console: Console, act: Crash) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("sampler", "killed", "went on at"):
        table.add_column(heading)
    for heading in ("tokens before", "to next token", "in all", "epoch on return"):
        table.add_column(heading, justify="right")
    for loss in act.losses:
        table.add_row(*_loss(loss))
    console.print(table)
    _agree(console, act, "The client's streams went on, with the tokens of an undisturbed run.")


def _loss(loss: Loss) -> tuple[str, ...]:
    counts = str(loss.tokens_before), _ms(loss.next_token_s), str(loss.disturbed.output_tokens)
    went_on = instance_name(loss.disturbed.moved.get("instance", ""))
    return loss.sampler, loss.killed, went_on, *counts, f"+{loss.epoch_after - loss.epoch_before:,}"


def _show_groups(console: Console, act: Groups) -> None:
    console.print(
        f"{act.answer.prompt_tokens:,} tokens prefilled on {', '.join(act.prefilled_by)}: first token in "
        f"{_ms(act.answer.first_token_s)}; on one instance, {_ms(act.undisturbed.first_token_s)}."
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("then on")
    for heading in ("tokens before", "moved", "stayed in place", "took", "longest pause"):
        table.add_column(heading, justify="right")
    for step in act.steps:
        octets = _mib(step.moved), _mib(step.retained)
        times = _ms(step.took_s), _ms(step.pause_s)
        table.add_row(", ".join(step.members), str(step.tokens_before), *octets, *times)
    console.print(table)
    _agree(console, act, "Only what changed hands was moved; the tokens are those of one instance, undisturbed.")


_SHOW: Final[dict[str, Callable[[Console, Any], None]]] = {
    "reuse": _show_reuse,
    "prefetch": _show_prefetch,
    "crash": _show_crash,
    "groups": _show_groups,
}


def _requests() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request")
    table.add_column("instance")
    for heading in ("prompt tokens", "cached", "time to first token"):
        table.add_column(heading, justify="right")
    return table


def _request(table: Table, what: str, answer: Answer) -> None:
    counts = f"{answer.prompt_tokens:,}", f"{answer.cached_tokens:,}", _ms(answer.first_token_s)
    table.add_row(what, place(answer), *counts)


def _explain(console: Console, question: str, answer: Answer) -> None:
    """What placement weighed: the least cost wins."""
    console.print(f"{question}:")
    for candidate in answer.placement.get("candidates", ()):
        name = instance_name(candidate["instance"])
        wait, fetch, recompute, cost = (
            _us(candidate.get(member)) for member in ("wait_us", "fetch_us", "recompute_all_us", "cost_us")
        )
        mark = "[green]*[/green]" if name == place(answer) else " "
        console.print(f" {mark}{name}  cost {cost} (wait {wait}, fetch {fetch}; all recomputed {recompute})")


def _agree(console: Console, act: Act, text: str) -> None:
    if not act.failures:
        console.print(f"[green]{text}[/green]", soft_wrap=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _mib(octets: int) -> str:
    return f"{octets / (1 << 20):,.1f} MiB"


def _us(value: int | None) -> str:
    return "unknown" if value is None else _ms(value / 1e6)
