"""The demo's first three acts. Each says what it saw, and what of it is not as it must be."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.local import prompts
from deploy.local.api import Answer
from deploy.local.fleet import GREEDY, Fleet, place
from kvsp.cli.controller import instance_name

NEW_TOKENS: Final = 24
LONG_TOKENS: Final = 96
KILL_AFTER: Final = 24
"""Tokens that the client has when the serving instance is killed."""

SEEDED: Final = {"temperature": 1.0, "top_p": 0.9, "seed": 1187}
OTHER_SCOPE: Final = "other"
"""A scope that shares nothing with the demo's: what is asked there is computed from scratch."""


@dataclass
class Act:
    """What all acts have: `failures` is empty when everything agreed; `moved` counts blocks by transport."""

    failures: list[str] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)

    def require(self, good: bool, complaint: str) -> None:
        """Note a complaint unless all is well."""
        if not good:
            self.failures.append(complaint)


@dataclass
class Reuse(Act):
    """Act 1: an instance computes a document and a question; then what is known of it is not computed again.

    `again` is the same request; `fetched` another question about the document while `drained` takes no requests,
    and `scratch` the same in a scope that knows nothing of it.
    """

    blocks: int = 0
    computed: Answer = field(default_factory=Answer)
    again: Answer = field(default_factory=Answer)
    drained: str = ""
    fetched: Answer = field(default_factory=Answer)
    scratch: Answer = field(default_factory=Answer)


def reuse(fleet: Fleet) -> Reuse:
    """Run act 1."""
    act = Reuse()
    first, second = prompts.prompt(1, 0), prompts.prompt(1, 1)
    act.computed = fleet.ask(first, NEW_TOKENS)
    act.blocks = fleet.wait_published(first)
    fleet.settle()
    act.again = fleet.ask(first, NEW_TOKENS)
    act.drained = place(act.computed)
    with fleet.drained(act.drained):
        act.fetched = fleet.ask(second, NEW_TOKENS)
        act.scratch = fleet.ask(second, NEW_TOKENS, scope=OTHER_SCOPE)
    act.require(act.scratch.cached_tokens == 0, "the other scope shares blocks")
    act.require(place(act.fetched) != act.drained, "a draining instance was given a request")
    for name, answer, like in (("again", act.again, act.computed), ("fetched", act.fetched, act.scratch)):
        _require_cheapest(act, answer, name)
        _require_reused(act, answer, name)
        act.require(answer.text == like.text, f"{name}: tokens differ from those of a run from scratch")
    return act


@dataclass
class Prefetch(Act):
    """Act 2: the controller directs an idle instance to load what a request will need, before it comes."""

    blocks: int = 0
    instance: str = ""
    state: str = ""
    loaded: int = 0
    loaded_s: float = 0.0
    answer: Answer = field(default_factory=Answer)
    scratch: Answer = field(default_factory=Answer)


def prefetch(fleet: Fleet) -> Prefetch:
    """Run act 2."""
    act = Prefetch()
    question = prompts.prompt(2, 2)
    computed = fleet.ask(prompts.prompt(2, 0), NEW_TOKENS)
    act.blocks = fleet.wait_published(prompts.shared(2))
    with fleet.drained(place(computed)):
        started = time.perf_counter()
        assigned = fleet.announce(question)
        act.instance = instance_name(assigned.binding.instance)
        if not assigned.directive:
            act.failures.append("placement sent no prefetch directive")
            return act
        status = fleet.directive(act.instance, assigned.directive)
        act.loaded_s = time.perf_counter() - started
        act.state, act.loaded = status.state, len(status.loaded)
        fleet.settle()
        act.answer = fleet.ask(question, NEW_TOKENS)
        act.scratch = fleet.ask(question, NEW_TOKENS, scope=OTHER_SCOPE)
    act.require(act.state == "complete", f"the directive is {act.state}")
    act.require(act.loaded >= act.blocks, f"{act.loaded} of {act.blocks} blocks were loaded")
    act.require(act.instance != place(computed), "a draining instance was directed to load")
    act.require(place(act.answer) == act.instance, "the request went elsewhere than its blocks")
    _require_cheapest(act, act.answer, "after the prefetch")
    _require_reused(act, act.answer, "after the prefetch")
    act.require(act.answer.text == act.scratch.text, "tokens differ from those of a run from scratch")
    return act


@dataclass
class Loss:
    """One session whose instance was killed. `next_token_s` is the time from the kill to the next token."""

    sampler: str
    undisturbed: Answer
    disturbed: Answer
    killed: str
    tokens_before: int
    next_token_s: float
    epoch_before: int
    epoch_after: int


@dataclass
class Crash(Act):
    """Act 3: kill -9 of the serving instance and the holder beside it, while tokens stream to the client."""

    losses: list[Loss] = field(default_factory=list)


def crash(fleet: Fleet, tokens: int = LONG_TOKENS) -> Crash:
    """Run act 3 with answers of so many tokens."""
    act = Crash()
    for name, sampler in (("greedy", GREEDY), ("seeded top-p", SEEDED)):
        loss = _lose(fleet, name, sampler, tokens)
        act.losses.append(loss)
        act.require(loss.disturbed.text == loss.undisturbed.text, f"{name}: tokens differ from an undisturbed run")
        act.require(loss.disturbed.output_tokens == tokens, f"{name}: not all tokens came")
        act.require(bool(loss.disturbed.moved), f"{name}: the session was over before the kill")
        act.require(loss.epoch_after > loss.epoch_before, f"{name}: the instance came back under an old epoch")
    act.require(act.losses[0].undisturbed.text != act.losses[1].undisturbed.text, "both samplers gave the same")
    return act


def _lose(fleet: Fleet, name: str, sampler: dict[str, Any], tokens: int) -> Loss:
    """The same request twice, the second time with a kill."""
    question = prompts.prompt(1, 2)
    undisturbed = fleet.ask(question, tokens, **sampler)
    epochs = fleet.epochs()
    killed: list[tuple[str, int, int]] = []

    def kill(answer: Answer) -> None:
        if not killed and (len(answer.pieces) >= KILL_AFTER or answer.finish_reason):
            killed.append((place(answer), len(answer.text), len(answer.pieces)))
            fleet.kill(place(answer))

    disturbed = fleet.ask(question, tokens, on_text=kill, **sampler)
    kill(disturbed)  # unless it was: all of it came in fewer pieces
    instance, before, at = killed[0]
    fleet.start_again(instance)
    return Loss(
        name, undisturbed, disturbed, instance, before, _pause(disturbed.pieces, at),
        epochs[instance], fleet.epochs()[instance],
    )  # fmt: skip


def _pause(pieces: list[float], kill: int) -> float:
    """Seconds from piece number `kill`, on which the kill followed, to the end of the longest silence after it.

    What was already on its way to the client still comes after the kill.
    """
    later = range(kill, len(pieces))
    end = max(later, key=lambda at: pieces[at] - pieces[at - 1], default=kill - 1)
    return pieces[end] - pieces[kill - 1]


def _require_reused(act: Act, answer: Answer, when: str) -> None:
    """All complete blocks but those of the question."""
    reused = answer.cached_tokens > 0.9 * answer.prompt_tokens
    act.require(reused, f"{when}: {answer.cached_tokens} of {answer.prompt_tokens} tokens were reused")


def _require_cheapest(act: Act, answer: Answer, when: str) -> None:
    """The request went to the active instance with the lowest cost (R-119)."""
    costs = {each["instance"]: each.get("cost_us") for each in answer.placement.get("candidates", ())}
    known = [cost for cost in costs.values() if cost is not None]
    chosen = costs.get(answer.placement.get("instance"))
    act.require(chosen is not None and chosen == min(known), f"{when}: another instance would have cost less")
