"""A small engine, sessions that run on it to their end, and what came of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol import container
from kvsp.protocol.records import Sampler
from services.instance.engine import BlockDone, Event, Finished, PrefixLost, Sampled, Started, Work
from services.instance.scheduler import Scheduler
from services.instance.torch_engine import TorchEngine
from tests.connectors.driver import descriptor_of, small_llama

B = 8
CHUNK = 3 * B
GREEDY = Sampler("greedy", {}, 0, 0, True)
TOP_P = Sampler("top-p", {"p": 0.9, "temperature": 1.5}, -77, 0, True)


def engine(
    *, batch_invariant: bool = True, dtype: torch.dtype = torch.float32, chunk_tokens: int = CHUNK, **options: Any
) -> TorchEngine:
    torch.set_num_threads(2)
    model = small_llama(dtype=dtype)
    return TorchEngine(
        model, descriptor_of(model, B), batch_invariant=batch_invariant, chunk_tokens=chunk_tokens, **options
    )


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(97), k=count)


def work(prompt: Sequence[int], max_tokens: int = 20, *, session: str = "a", **changes: Any) -> Work:
    values: dict[str, Any] = {
        "session": session, "epoch": 1, "prompt_tokens": len(prompt), "known_from": 0, "tokens": list(prompt),
        "sampler": GREEDY, "max_tokens": max_tokens,
    }  # fmt: skip
    return Work(**{**values, **changes})


def resumed(first: Work, output: Sequence[int], **changes: Any) -> Work:
    """The work of another instance that goes on after `output`."""
    sampler = Sampler(first.sampler.method, first.sampler.params, first.sampler.seed, len(output), True)
    return replace(first, epoch=2, tokens=[*first.tokens, *output], sampler=sampler, **changes)


def write(cache: PrefixCache, block: int, octets: bytes, layers: Iterable[int] | None = None) -> None:
    """Do what the loader does."""
    header = container.parse_header(octets)
    for layer in range(header.layer_count) if layers is None else layers:
        k, v = cache.rows(layer, block)
        at = header.header_octets + header.layer_span(layer)[0]
        k[:], v[:] = octets[at : at + len(k)], octets[at + len(k) : at + len(k) + len(v)]


def loaded(engine_: TorchEngine, blocks: Sequence[bytes], room: int = 200) -> PrefixCache:
    """A prefix that is there."""
    cache = engine_.prefix(len(blocks), room)
    for block, octets in enumerate(blocks):
        write(cache, block, octets)
    cache.arrival.advance(engine_.descriptor.layers)
    return cache


@dataclass
class Outcome:
    """What a session told."""

    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Sampled)]

    @property
    def first_index(self) -> int:
        return next(event.index for event in self.events if isinstance(event, Sampled))

    @property
    def cached(self) -> int:
        [started] = [event for event in self.events if isinstance(event, Started)]
        return started.cached_tokens

    @property
    def blocks(self) -> dict[int, bytes]:
        return {event.block: event.octets for event in self.events if isinstance(event, BlockDone)}

    @property
    def finished(self) -> Finished:
        [finished] = [event for event in self.events if isinstance(event, Finished)]
        assert self.events[-1] is finished
        return finished

    @property
    def lost(self) -> list[int]:
        return [event.blocks for event in self.events if isinstance(event, PrefixLost)]


class Bench:
    """A scheduler, and everything that it told, by session."""

    def __init__(self, engine_: TorchEngine, **options: Any) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._told = asyncio.Condition()
        self._hook: Callable[[Event], None] = lambda event: None
        self._notices: set[asyncio.Task[None]] = set()
        self.scheduler = Scheduler(engine_, self._on_event, **options)

    def on(self, hook: Callable[[Event], None]) -> None:
        self._hook = hook

    def _on_event(self, event: Event) -> None:
        self.outcomes.setdefault(event.session, Outcome()).events.append(event)
        self._hook(event)
        notice = asyncio.ensure_future(self._notify())
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def _notify(self) -> None:
        async with self._told:
            self._told.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self._told:
            await self._told.wait_for(condition)

    async def run(self, *works: Work) -> list[Outcome]:
        for each in works:
            self.scheduler.submit(each)
        await self.until(lambda: all(self.ended(each.session) for each in works))
        return [self.outcomes[each.session] for each in works]

    def ended(self, session: str) -> bool:
        events = self.outcomes.get(session, Outcome()).events
        return bool(events) and isinstance(events[-1], Finished)

    def sampled(self, session: str) -> int:
        return len(self.outcomes.get(session, Outcome()).tokens)


@contextmanager
def bench(engine_: TorchEngine, **options: Any) -> Any:
    made = Bench(engine_, **options)
    try:
        yield made
    finally:
        made.scheduler.close()


async def alone(engine_: TorchEngine, each: Work) -> Outcome:
    """The outcome of a session that runs by itself."""
    with bench(engine_) as made:
        [outcome] = await made.run(each)
    return outcome  # type: ignore[no-any-return]
