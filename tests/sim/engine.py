"""A model of compute: takes time, and gives tokens by which every mistake shows.

A token is a hash of the prompt, the seed, the sampler's step and the token before it, so that a lost, repeated or
altered token changes all that follow. Of a sampler that is not deterministic it also depends on the run, that
is on where and when the session was started or resumed: no two runs agree on any token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvsp.protocol.records import Sampler
from services.instance.engine import BlockDone, Event, Finished, FinishReason, Sampled, Started
from tests.sim.kernel import Node
from tests.sim.storage import BLOCK_TOKENS

STOP: Final = 7
PREFILL_MS: Final = 4  # per block
DECODE_MS: Final = (5, 30)
BATCH: Final = 4


def prompt_name(keys: Sequence[bytes], tail: Sequence[int]) -> str:
    """What a checkpoint says of the prompt: the key of its last complete block, and the tokens behind."""
    return f"{keys[-1].hex()[:16] if keys else ''}|{list(tail)}"


def next_token(prompt: str, sampler: Sampler, step: int, previous: int, run: str) -> int:
    """Output token number `step`."""
    told = "" if sampler.deterministic else run
    crc = zlib.crc32(f"{prompt}|{sampler.method}|{sampler.seed}|{step}|{previous}|{told}".encode())
    return STOP if crc % 61 == 0 else crc


def undisturbed(prompt: str, sampler: Sampler, max_tokens: int) -> list[int]:
    """All output of a deterministic session that nothing befalls."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] not in sampler.params["stop_tokens"]):
        tokens.append(next_token(prompt, sampler, len(tokens), tokens[-1] if tokens else 0, ""))
    return tokens


@dataclass
class Job:
    """A session at the engine. `step` is the sampler's own; `output` is what it samples from."""

    session: str
    epoch: int
    prompt: str
    prompt_tokens: int
    sampler: Sampler
    max_tokens: int
    stop_tokens: frozenset[int]
    output: list[int]
    cached_blocks: int = 0
    load_ms: int = 0
    step: int = 0
    run: str = ""
    cancelled: bool = False
    blocks_done: int = 0
    group: str = ""  # the map whose members have the context together, "": it is all here


class EngineModel:
    """Up to BATCH jobs at a time, the rest in a queue; events come on the node's own time."""

    def __init__(
        self, node: Node, report: Callable[[Event], None], attend: Callable[[Job, Callable[[], None]], None]
    ) -> None:
        """`attend(job, proceed)` calls `proceed` once a sharded context is there for one more token."""
        self._node = node
        self._report = report
        self._attend = attend
        self._running: list[Job] = []
        self._queue: list[Job] = []
        self._runs = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, job: Job) -> None:
        self._runs += 1
        job.run = f"{self._node.name}-{self._node.life}-{self._runs}"
        job.step = job.sampler.step
        self._queue.append(job)
        self._admit()

    def cancel(self, session: str, epoch: int) -> None:
        for job in [*self._running, *self._queue]:
            if (job.session, job.epoch) == (session, epoch):
                self._end(job)

    def _end(self, job: Job) -> None:
        job.cancelled = True
        self._running = [each for each in self._running if each is not job]
        self._queue = [each for each in self._queue if each is not job]
        self._admit()

    def _admit(self) -> None:
        while self._queue and len(self._running) < BATCH:
            job = self._queue.pop(0)
            self._running.append(job)
            blocks = job.prompt_tokens // BLOCK_TOKENS - job.cached_blocks
            delay_ms = job.load_ms + PREFILL_MS * max(1, blocks)
            self._node.after(delay_ms, lambda job=job: self._start(job))  # type: ignore[misc]

    def _start(self, job: Job) -> None:
        if not job.cancelled:
            self._report(Started(job.session, job.epoch, job.cached_blocks * BLOCK_TOKENS))
            if not self._finish(job):  # a checkpoint may hold all there is
                self._decode(job)

    def _decode(self, job: Job) -> None:
        if job.group and not job.cancelled:
            self._attend(job, lambda: self._sample(job))
        else:
            self._sample(job)

    def _sample(self, job: Job) -> None:
        if job.cancelled:
            return
        token = next_token(job.prompt, job.sampler, job.step, job.output[-1] if job.output else 0, job.run)
        index = len(job.output)
        job.output.append(token)
        job.step += 1
        self._report(Sampled(job.session, job.epoch, index, token))
        self._blocks(job)
        if not job.cancelled and not self._finish(job):
            low, high = DECODE_MS
            self._node.after(self._node.kernel.random.randint(low, high), lambda: self._decode(job))

    def _blocks(self, job: Job) -> None:
        """Complete blocks: tokens whose KV is there, that is all but the last."""
        complete = (job.prompt_tokens + len(job.output) - 1) // BLOCK_TOKENS
        for block in range(max(job.blocks_done, job.cached_blocks), complete):
            if not job.cancelled:
                self._report(BlockDone(job.session, job.epoch, block, b""))
        job.blocks_done = complete

    def _finish(self, job: Job) -> bool:
        reason: FinishReason
        if job.output and job.output[-1] in job.stop_tokens:
            reason = "stop"
        elif len(job.output) >= job.max_tokens:
            reason = "length"
        else:
            return False
        self._end(job)
        self._report(Finished(job.session, job.epoch, reason))
        return True
