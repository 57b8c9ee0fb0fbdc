"""The demo's fourth act: one context sharded over several instances, whose number changes while tokens stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final, TypeVar

from msgspec import UnsetType

from deploy.local import prompts
from deploy.local.acts import OTHER_SCOPE, Act
from deploy.local.api import Answer
from deploy.local.configs import ALL_INSTANCES, INSTANCES
from deploy.local.fleet import POLL_S, Fleet
from deploy.local.layout import StackError
from deploy.local.moved import PATIENCE_S
from kvsp.cli.controller import instance_name
from kvsp.protocol import reshard
from kvsp.protocol.records import ShardMap

T = TypeVar("T")
TOKENS: Final = 160
STEPS: Final = ((8, 2), (28, 1), (48, 2), (68, 3))
"""When so many tokens have come, the context goes to so many instances."""

DEADLINE_MS: Final = 2_000  # plans are only compared here


@dataclass
class Step:
    """One change of the group while tokens streamed. Octets are of KV: `moved` as the holders counted them, `due`
    those of the ranges that changed hands, `retained` those that stayed where they were. `pause_s` is the longest
    silence between two pieces of text meanwhile. `largest` is what one member fetched at most."""

    members: list[str]
    tokens_before: int
    due: int
    largest: int
    moved: int
    retained: int
    took_s: float
    pause_s: float


@dataclass
class Groups(Act):
    """Act 4: `undisturbed` was computed on one instance, `answer` on a group that was resized."""

    prefilled_by: list[str] = field(default_factory=list)
    undisturbed: Answer = field(default_factory=Answer)
    answer: Answer = field(default_factory=Answer)
    steps: list[Step] = field(default_factory=list)


def groups(fleet: Fleet, tokens: int = TOKENS) -> Groups:
    """Run act 4 with an answer of so many tokens."""
    act = Groups()
    prompt = prompts.long(3)  # a copy that no other act has asked about
    with fleet.drained(INSTANCES[1]):  # a single instance cannot be a group
        act.undisturbed = fleet.ask(prompt, tokens, scope=OTHER_SCOPE)
    with fleet.spare():
        fleet.settle()
        resized_while_streaming(fleet, act, prompt, tokens)
    act.require(len(act.prefilled_by) == len(ALL_INSTANCES), f"prefilled by {len(act.prefilled_by)} instances")
    act.require(len(act.steps) == len(STEPS), f"the answer was over after {len(act.steps)} steps")
    act.require(act.answer.text == act.undisturbed.text, "tokens differ from an undisturbed run on one instance")
    act.require(act.answer.output_tokens == tokens, "not all tokens came")
    act.require(not act.answer.moved, "the session had to go elsewhere")
    for step in act.steps:
        act.require(step.moved <= 1.02 * step.due, f"{step.moved} octets moved where {step.due} changed hands")
    return act


class Stream:
    """An answer on its way, asked for in a thread of its own. Times are seconds since it was asked for."""

    def __init__(self, pool: Executor, fleet: Fleet, prompt: str, tokens: int) -> None:
        self._seen: list[Answer] = []
        self._began = time.perf_counter()
        self._asking = pool.submit(fleet.ask, prompt, tokens, on_text=self._seen.append)

    @property
    def tokens(self) -> int:
        """Those that have come; each is one character."""
        return len(self._seen[-1].text) if self._seen else 0

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self._asking.done()

    def now(self) -> float:
        """The time since it was asked for."""
        return time.perf_counter() - self._began

    def until(self, condition: Callable[[], T]) -> T | None:
        """What is true at last; None when the answer ended before. Raises StackError when that takes too long."""
        end = time.monotonic() + PATIENCE_S
        while not self.is_over:
            if found := condition():
                return found
            if time.monotonic() > end:
                raise StackError("nothing happened for a long time")
            time.sleep(POLL_S)
        return None

    def silence(self, begin: float, end: float) -> float:
        """The longest time between two pieces of text that lay at least partly between `begin` and `end`."""
        pairs = pairwise(self._seen[-1].pieces if self._seen else ())
        return max((after - before for before, after in pairs if after > begin and before < end), default=0.0)

    def result(self) -> Answer:
        """The whole answer, waited for. Raises StackError."""
        return self._asking.result()


def resized_while_streaming(fleet: Fleet, act: Groups, prompt: str, tokens: int) -> None:
    """Ask, and resize the group as the tokens come."""
    with ThreadPoolExecutor(1) as pool:
        stream = Stream(pool, fleet, prompt, tokens)
        shard_map = stream.until(lambda: next(iter(fleet.groups()), None))
        if shard_map is None:
            raise StackError("the long prompt was given to no group")
        act.prefilled_by = _members(shard_map)
        for at, members in STEPS:
            stream.until(partial(_has, stream, at))
            if stream.is_over:
                break
            step, shard_map = resized(fleet, stream, shard_map, members)
            act.steps.append(step)
        act.answer = stream.result()


def resized(fleet: Fleet, stream: Stream, old: ShardMap, members: int) -> tuple[Step, ShardMap]:
    """Resize the group that computes a stream; what came of it, and the new version."""
    served, tokens, began = fleet.octets_served(), stream.tokens, stream.now()
    new = fleet.resize(old.map, members)
    ended = stream.now()
    moved = fleet.octets_served() - served
    stream.until(partial(_has, stream, stream.tokens + 1))  # a silence that began meanwhile is over then
    plans = reshard.plans(reshard.grown(old, reshard.covered(new)[1]), new, DEADLINE_MS).values()
    due = [fleet.kv_octets(_length(each.tokens for each in _listed(plan.fetch))) for plan in plans]
    retained = fleet.kv_octets(_length(each for plan in plans for each in _listed(plan.retain)))
    silence = stream.silence(began, ended)
    return Step(_members(new), tokens, sum(due), max(due), moved, retained, ended - began, silence), new


def _has(stream: Stream, tokens: int) -> bool:
    return stream.tokens >= tokens


def _members(shard_map: ShardMap) -> list[str]:
    """Names of the members in the order of their ranges."""
    return [instance_name(shard.instance) for shard in shard_map.shards]


def _length(ranges: Iterable[reshard.Range]) -> int:
    return sum(end - first for first, end in ranges)


def _listed(member: list[T] | UnsetType) -> list[T]:
    return [] if isinstance(member, UnsetType) else member
