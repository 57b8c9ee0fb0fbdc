"""Starts sessions at the engine: what can be loaded of a prompt, and its loading while the engine computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from kvsp.rpc.interceptors import frames
from services.instance.engine import Engine, Stats, Work
from services.instance.instructions import StartSession
from services.instance.loading import Loading
from services.instance.memory import Key

if TYPE_CHECKING:
    from kvsp.connectors.prefix import PrefixCache

log = structlog.get_logger()


class Scheduler(Protocol):
    """What computes (scheduler.py). It calls back on the event loop."""

    async def room(self, session: str, epoch: int, prompt_tokens: int, max_tokens: int) -> None:
        """Return when memory is kept for a session. Raises KvspError (400) when there never is as much."""

    def submit(self, work: Work) -> None:
        """Take a session that has room."""

    def cancel(self, session: str, epoch: int) -> None:
        """Forget a session, if it has it, and its room."""

    def provide_tokens(self, session: str, epoch: int, prompt: list[int]) -> None:
        """The tokens of the prompt, after PrefixLost."""

    def stats(self) -> Stats:
        """Load, as measured."""

    def close(self) -> None:
        """End; waits for what is being computed."""


class Starting:
    """Sessions that are being started or loaded. `failed` is told of those that could not be."""

    def __init__(
        self, engine: Engine[Any], loading: Loading, scheduler: Scheduler, failed: Callable[[Key], None]
    ) -> None:
        self._engine = engine
        self._loading = loading
        self._scheduler = scheduler
        self._failed = failed
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def begin(self, start: StartSession) -> None:
        """Start a session, in the background."""
        key = start.session, start.epoch
        self._loading.lull.begin(key)
        self._tasks[key] = task = asyncio.create_task(self._start(start))
        task.add_done_callback(partial(self._started, key))

    def stop(self, key: Key) -> None:
        """Have the engine forget a session, and load nothing more for it."""
        self._scheduler.cancel(*key)
        self._loading.lull.end(key)
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Load nothing more for any."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, start: StartSession) -> None:
        """Find out what can be loaded, let the engine begin, and load while it computes.

        While there is no memory for it, nothing is loaded or held at a holder for it.
        """
        await self._scheduler.room(start.session, start.epoch, start.prompt_tokens, start.max_tokens)
        prefixes = self._loading.prefixes
        plan = await prefixes.find(start.scope_id, start.block_keys)
        try:
            links = self._loading.holders.links()
            if start.known_from == 0:
                prefixes.spare(plan, links, self._scheduler.stats().prefill_tokens_per_s)
            cache = None
            if plan.blocks:
                loaded = len(plan.blocks) * self._engine.descriptor.block_tokens
                cache = self._engine.prefix(len(plan.blocks), start.prompt_tokens + start.max_tokens - loaded)
            self._scheduler.submit(work_of(start, cache))
            if cache is not None:
                await prefixes.fill(plan, cache, links)
        finally:
            plan.close()

    def _started(self, key: Key, task: asyncio.Task[None]) -> None:
        """Loading is over, or has failed."""
        if self._tasks.get(key) is task:  # otherwise the session has been started again
            del self._tasks[key]
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("session not started", kind=type(error).__name__, where=frames(error))
        self.stop(key)
        self._failed(key)


def work_of(start: StartSession, prefix: PrefixCache | None) -> Work:
    """A session for the engine."""
    return Work(
        session=start.session,
        epoch=start.epoch,
        prompt_tokens=start.prompt_tokens,
        known_from=start.known_from,
        tokens=start.tokens,
        sampler=start.sampler,
        max_tokens=start.max_tokens,
        stop_tokens=start.stop_tokens,
        prefix=prefix,
    )
