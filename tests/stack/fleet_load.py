"""Clients that stream from a fleet while something is done to it, and what must hold of it afterwards."""

from __future__ import annotations

import os
import signal
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deploy.local.acts import SEEDED
from deploy.local.api import Answer, Api
from deploy.local.fleet import GREEDY
from deploy.local.layout import StackError
from kvsp.cli.controller import instance_name
from kvsp.protocol import descriptor, keys
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.names import party_id
from kvsp.v1 import placement_pb2
from tests.stack.harness import Reply, RunningStack
from tests.stack.traffic import eventually, metric

MODEL = "kvsp-tiny-llama-1"
TOKENS = 1500
HOLDERS = ("h1", "ii1-blocks", "ii2-blocks")
PROMPT = "How long was the lamp dark? The page had been closed by the draught. "


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for `tokens` tokens, that many come. `sampler` decides which."""

    prompt: str
    sampler: Mapping[str, Any] = field(default_factory=lambda: GREEDY, hash=False)
    tokens: int = TOKENS


ASKS = (
    Ask("First. " + 4 * PROMPT),
    Ask("Second. " + 3 * PROMPT, SEEDED),
    Ask("Third. " + 2 * PROMPT, {**SEEDED, "seed": 2}),
)


def ask(fleet: RunningStack, wanted: Ask, on_text: Any = None, scope: str = "demo") -> Answer:
    """One request to its end. Raises StackError."""
    options = {**wanted.sampler, "model": MODEL, "ignore_eos": True, "kvsp_explain": True}
    return Api(fleet.endpoints, f"client-{scope}").complete(wanted.prompt, wanted.tokens, on_text, **options)


def undisturbed(fleet: RunningStack, asks: Sequence[Ask] = ASKS) -> dict[Ask, str]:
    """What comes of the requests when nothing happens, computed in a scope that shares no cache with theirs."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return dict(zip(asks, pool.map(lambda each: ask(fleet, each, scope="other").text, asks), strict=True))


class Streams:
    """Streams under way, one for each request."""

    def __init__(self, fleet: RunningStack, expected: Mapping[Ask, str]) -> None:
        self.expected = expected
        self.answers = {each: Answer() for each in expected}
        self._pool = ThreadPoolExecutor(len(expected))
        self.runs: dict[Ask, Future[Answer]] = {
            each: self._pool.submit(ask, fleet, each, self._noting(each)) for each in expected
        }

    def _noting(self, wanted: Ask) -> Any:
        def note(answer: Answer) -> None:
            self.answers[wanted] = answer

        return note

    def come(self, more: int) -> None:
        """Wait until each has so many tokens more, or all. Raises what a stream failed with."""
        goals = {each: min(len(self.answers[each].text) + more, each.tokens) for each in self.expected}
        eventually(lambda: all(map(self._reached, goals.items())), f"not {more} tokens more")

    def _reached(self, goal: tuple[Ask, int]) -> bool:
        wanted, tokens = goal
        if self.runs[wanted].done():
            self.runs[wanted].result()
        return len(self.answers[wanted].text) >= tokens

    def slowest(self) -> Answer:
        """The one that will last longest."""
        return min(self.answers.values(), key=lambda answer: len(answer.text))

    def at(self, instance: str) -> list[Ask]:
        """Those that an instance was given."""
        return [each for each, answer in self.answers.items() if where(answer) == instance]

    def finish(self) -> None:
        """Each ends with exactly the tokens of an undisturbed run."""
        for wanted, run in self.runs.items():
            answer = run.result()
            assert answer.text == self.expected[wanted]
            assert (answer.output_tokens, answer.finish_reason) == (wanted.tokens, "length")

    def break_off(self) -> None:
        """Each that was under way ends with an error, and what came before it is right; one was, at least."""
        errors = [run.exception() for run in self.runs.values()]
        assert any(errors), "all streams were over"
        for (wanted, text), error in zip(self.expected.items(), errors, strict=True):
            came = self.answers[wanted].text
            if error is None:  # its last token had come before
                assert came == text
                continue
            assert isinstance(error, StackError), error
            assert came == text[: len(came)]
            assert len(came) < wanted.tokens

    def close(self) -> None:
        """After a failure nobody waits for what is left."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def streaming(fleet: RunningStack, expected: Mapping[Ask, str]) -> Iterator[Streams]:
    """Streams that have all begun; they must have ended, and the fleet be whole, when it is left."""
    streams = Streams(fleet, expected)
    try:
        streams.come(8)
        yield streams
        assert all(run.done() for run in streams.runs.values()), "finish() or break_off() is missing"
    finally:
        streams.close()
    is_whole(fleet, expected)


def is_whole(fleet: RunningStack, expected: Mapping[Ask, str]) -> None:
    """Both instances serve, no session or lease is left, and requests are answered rightly."""
    instances = active(fleet)
    eventually(lambda: overview(fleet).sessions == 0, "sessions are left")
    running = "kvsp_instance_sessions_running"
    eventually(lambda: all(count(fleet, each, running) == 0 for each in instances), "sessions are computed on")
    eventually(lambda: all(count(fleet, each, "kvsp_holder_leases") == 0 for each in HOLDERS), "leases are left")
    for each, text in expected.items():
        assert ask(fleet, Ask(each.prompt, each.sampler, 40)).text == text[:40]


# --- names ---------------------------------------------------------------------------------


def shape_of(fleet: RunningStack) -> Descriptor:
    """The descriptor of the fleet's model."""
    return descriptor.load(fleet.layout.descriptor.read_bytes())


def block_names(fleet: RunningStack, prompt: str) -> list[str]:
    """Keys of the complete blocks of a prompt in the demo scope."""
    model, shape = fleet.background.stack.model, shape_of(fleet)
    assert model is not None
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids
    found = keys.block_keys(fleet.scope_key(), descriptor.compat_id(shape), tokens, shape.block_tokens)
    return [key.hex() for key in found]


def empty_checkpoint(fleet: RunningStack, session: str, epoch: int) -> dict[str, Any]:
    """A checkpoint that says nothing new of a session."""
    return {
        "session": session, "epoch": epoch, "compat_id": fleet.compat_id(shape_of(fleet)),
        "scope_id": fleet.scope_id(), "prompt_blocks": [], "prompt_tail": [1], "generated": [], "output_offset": 0,
        "sampler": {"method": "greedy", "params": {}, "seed": 0, "step": 0, "deterministic": True},
    }  # fmt: skip


def put_checkpoint(fleet: RunningStack, identity: str, session: str, epoch: int) -> Reply:
    """PUT such a checkpoint."""
    url = f"{fleet.placement}sessions/{session}/checkpoint"
    return fleet.request("PUT", url, empty_checkpoint(fleet, session, epoch), identity=identity)


def put_status(fleet: RunningStack, identity: str, epoch: int) -> Reply:
    """PUT the status of an instance that takes nothing, under this epoch."""
    base = fleet.instances[identity]
    body = {
        "instance": base, "epoch": epoch, "state": "sleeping", "running": 0, "queued": 0, "batch_size": 1,
        "kv_utilization": 0.0, "prefill_tokens_per_s": 1.0, "decode_tokens_per_s": 1.0, "ttl_ms": 1500,
        "links": [],
    }  # fmt: skip
    return fleet.request("PUT", f"{fleet.placement}instances/{party_id(base)}/status", body, identity=identity)


# --- what can be seen of a fleet -----------------------------------------------------------


def where(answer: Answer) -> str:
    """The instance that an answer was first given to; "" while that is not known."""
    return instance_name(answer.placement["instance"]) if answer.placement else ""


def active(fleet: RunningStack, *names: str) -> dict[str, int]:
    """Epochs of these instances, by default both, once they are active."""
    return fleet.background.call(fleet.background.stack.wait_active(*(names or ("ii1", "ii2"))))


def overview(fleet: RunningStack) -> placement_pb2.Overview:
    """What the controller sees now."""

    async def first() -> placement_pb2.Overview:
        async with fleet.background.stack.controller() as controller:
            return await anext(aiter(controller.watch()))

    return fleet.background.call(first())


def is_alive(pid: int) -> bool:
    """Is there such a process?"""
    return Path(f"/proc/{pid}").exists()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still for as long."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def environment(fleet: RunningStack, name: str, **variables: str) -> Iterator[None]:
    """A process that is started meanwhile has these variables."""
    supervisor = fleet.background.stack.supervisor
    before = supervisor.programs
    supervisor.programs = [
        replace(each, environment={**each.environment, **variables}) if each.name == name else each
        for each in before
    ]
    try:
        yield
    finally:
        supervisor.programs = before


def states(fleet: RunningStack) -> dict[str, str]:
    """The state in which the controller sees each instance."""
    return {instance_name(each.instance): each.state for each in overview(fleet).instances}


def count(fleet: RunningStack, process: str, name: str, **labels: str) -> float:
    """A metric of one process."""
    return metric(tomllib.loads(fleet.layout.config(process).read_text())["admin"], name, **labels)
