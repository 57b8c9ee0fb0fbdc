"""Simulated engines on a virtual clock: they queue, load, prefill, decode, and keep blocks in a tier of their own.

Times are microseconds. What a real fleet does in parallel happens here in the order of an event heap, so that a
run is the same every time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsp.protocol.records import InstanceStatus, Link


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now_us = 0
        self._serial = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []

    @property
    def now_ms(self) -> int:
        """What the rules of index and placement take."""
        return self.now_us // 1000

    def at(self, time_us: int, event: Callable[[], None]) -> None:
        """Do `event` then, or now if that is over."""
        self._serial += 1
        heapq.heappush(self._events, (max(time_us, self.now_us), self._serial, event))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now_us, _, event = heapq.heappop(self._events)
            event()


@dataclass(frozen=True)
class Hardware:
    """An instance: a model of 80 layers and 320 KiB of KV a token (8 KV heads of 128, 16 bits) on one machine."""

    prefill_tokens_per_s: int = 8_000
    decode_us: int = 30_000  # a token of one session, whoever else is in the batch
    batch_size: int = 64
    tier_blocks: int = 3_000  # 0.5 TB of host memory
    link_mbit_per_s: float = 100_000.0
    rtt_us: float = 20.0
    block_tokens: int = 512
    layers: int = 80
    token_octets: int = 320 << 10

    @property
    def block_octets(self) -> int:
        """Payload of a block."""
        return self.block_tokens * self.token_octets

    @property
    def block_us(self) -> int:
        """How long a block takes over a link that is free."""
        return int(8 * self.block_octets / self.link_mbit_per_s)


@dataclass
class Job:
    """A request at its instance. `blocks` are the ids of the complete prompt blocks."""

    number: int
    arrived_us: int
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    keys: Sequence[bytes] = ()
    names: Sequence[str] = ()
    loading: bool = False
    loads: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    first_token_us: int = 0


Wanted = Sequence[tuple[int, Sequence["Engine"]]]
"""Blocks to load, and who has them."""


class Engine:
    """One instance: a prefill at a time, first come first served among those that are loaded; decode beside it."""

    def __init__(self, uri: str, hardware: Hardware, clock: Clock) -> None:
        self.uri = uri
        self.hardware = hardware
        self.tier: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.waiting: deque[Job] = deque()
        self.running = 0
        self.fetched = 0
        self.ended = 0
        self.on_change: Callable[[Engine, int, bool], None] = lambda engine, block, held: None
        self.on_first_token: Callable[[Engine, Job], None] = lambda engine, job: None
        self.on_end: Callable[[Engine, Job], None] = lambda engine, job: None
        self._clock = clock
        self._prefilling = False
        self._receives_us = self._sends_us = 0  # when its link is free again, each way
        self._arriving: dict[int, int] = {}

    @property
    def unanswered(self) -> int:
        """Requests that have not had their first token."""
        return len(self.waiting) + self._prefilling

    def load(self, job: Job, wanted: Wanted) -> None:
        """Fetch blocks for a job: each from the holder that is free first, one after the other on each link."""
        ready_us = self._clock.now_us
        for block, sources in wanted:
            if block not in self._arriving and block not in self.tier:
                self._arriving[block] = self._receive(min(sources, key=lambda each: each._sends_us))
            if block in self._arriving:
                job.loads.append(block)
                ready_us = max(ready_us, self._arriving[block])
        if job.loads:
            job.loading = True
            self._clock.at(ready_us, lambda: self._loaded(job))

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self.leading(job)
        self.waiting.append(job)
        self._next()

    def leading(self, job: Job) -> int:
        """How many leading blocks of it are here; they count as used now."""
        held = 0
        for block in job.blocks:
            if block not in self.tier:
                break
            held += 1
        for block in reversed(job.blocks[:held]):  # the end of a prefix goes before its beginning
            self.tier.move_to_end(block)
        return held

    def status(self, links: Sequence[Link], ttl_ms: int) -> InstanceStatus:
        """What it reports."""
        rate = self.hardware.prefill_tokens_per_s
        fill = len(self.tier) / self.hardware.tier_blocks
        decode = self.running * 1e6 / self.hardware.decode_us
        return InstanceStatus(
            self.uri, 1, "active", self.running, len(self.waiting), self.hardware.batch_size, fill, rate, decode,
            ttl_ms, list(links),
        )  # fmt: skip

    def _receive(self, source: Engine) -> int:
        begins_us = max(self._clock.now_us, self._receives_us, source._sends_us)
        done_us = begins_us + self.hardware.block_us
        self._receives_us = source._sends_us = done_us
        self.fetched += 1
        return done_us + int(self.hardware.rtt_us)

    def _loaded(self, job: Job) -> None:
        self._keep(job.loads)
        for block in job.loads:
            self._arriving.pop(block, None)
        job.loading = False
        self._next()

    def _next(self) -> None:
        if self._prefilling or self.running >= self.hardware.batch_size:
            return
        job = next((each for each in self.waiting if not each.loading), None)
        if job is None:
            return
        self.waiting.remove(job)
        self.running += 1
        self._prefilling = True
        # "the last token is always computed": its logits begin the output
        job.cached_tokens = min(self.leading(job) * self.hardware.block_tokens, job.prompt_tokens - 1)
        computed = job.prompt_tokens - job.cached_tokens
        duration_us = 1_000_000 * computed // self.hardware.prefill_tokens_per_s
        self._clock.at(self._clock.now_us + duration_us, lambda: self._prefilled(job))

    def _prefilled(self, job: Job) -> None:
        self._prefilling = False
        job.first_token_us = self._clock.now_us
        self._keep(job.blocks)
        self.on_first_token(self, job)
        decode_us = (job.output_tokens - 1) * self.hardware.decode_us
        self._clock.at(self._clock.now_us + decode_us, lambda: self._ended(job))
        self._next()

    def _ended(self, job: Job) -> None:
        self.running -= 1
        self.ended += 1
        self.on_end(self, job)
        self._next()

    def _keep(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block not in self.tier:
                self.on_change(self, block, True)
            self.tier[block] = None
            self.tier.move_to_end(block)
        while len(self.tier) > self.hardware.tier_blocks:
            block, _ = self.tier.popitem(last=False)
            self.on_change(self, block, False)
