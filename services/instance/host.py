"""The shell around the rules: clock, engine, placement controller, holders. One per process, one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import (
    DirectiveStatus,
    InstanceStatus,
    PrefetchDirective,
    ResumeReply,
    ResumeRequest,
    SessionCheckpoint,
)
from kvsp.rpc.clock import now_ms
from kvsp.rpc.interceptors import frames
from services.instance import instructions as rules
from services.instance import metrics
from services.instance.controller import Controller, Reporter
from services.instance.engine import BlockDone, Engine, Event, Finished, PrefixLost, Sampled, Started, Stats, Work
from services.instance.loading import Loading
from services.instance.sessions import Output
from services.instance.state import InstanceState

TRANSIENT: Final = frozenset({408, 429})
"""Statuses of 4xx after which a checkpoint is sent again, as after 5xx."""

GOODBYE_S: Final = 1.0
SETTLE_S: Final = 1.0

log = structlog.get_logger()

K = TypeVar("K", bound=Hashable)

Key = tuple[str, int]
"""A session and its epoch."""


class Scheduler(Protocol):
    """What computes (scheduler.py). It calls back on the event loop."""

    def submit(self, work: Work) -> None:
        """Take a session."""

    def cancel(self, session: str, epoch: int) -> None:
        """Forget a session, if it has it."""

    def provide_tokens(self, session: str, epoch: int, prompt: list[int]) -> None:
        """The tokens of the prompt, after PrefixLost."""

    def stats(self) -> Stats:
        """Load, as measured."""

    def close(self) -> None:
        """End; waits for what is being computed."""


Schedule = Callable[[Callable[[Event], None]], Scheduler]
"""Makes the scheduler that tells its events to a function."""


@dataclass(eq=False)
class Attached:
    """One call that takes a session's output; a later one takes its place."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: bool = False


class Host:
    """What the RPCs do, after authorization. Raises KvspError as the state does."""

    def __init__(
        self,
        state: InstanceState,
        engine: Engine[Any],
        loading: Loading,
        controller: Controller,
        schedule: Schedule,
    ) -> None:
        self.state = state
        self.failed = asyncio.Event()
        self._engine = engine
        self._loading = loading
        self._controller = controller
        self._reporter = Reporter(controller, self._status_answered, self._status_refused)
        self._scheduler = schedule(self.on_event)
        self._attached: dict[str, Attached] = {}
        self._starting: dict[Key, asyncio.Task[None]] = {}
        self._directives: dict[str, asyncio.Task[None]] = {}
        self._checkpoints: dict[Key, asyncio.Task[None]] = {}
        self._timers = asyncio.Event()
        self._hands: dict[type, Callable[[Any], None]] = {
            rules.StartSession: self._start_session,
            rules.ProvidePrompt: self._provide_prompt,
            rules.StopSession: self._stop_session,
            rules.SendCheckpoint: self._checkpoint,
            rules.Release: self._release,
            rules.Ended: self._ended,
            rules.Fenced: self._fenced,
            rules.BeginDirective: self._begin_directive,
            rules.StopDirective: self._stop_directive,
            rules.SendStatus: self._send_status,
            rules.EmptyDevice: self._empty_device,
        }

    # --- lifetime ---

    async def run(self) -> None:
        """Everything that goes on by itself, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_timers())
            group.create_task(self._reporter.run())
            group.create_task(self._loading.run())

    async def leave(self) -> None:
        """Prepare to stop: sessions go elsewhere at once, and new blocks to holders that stay."""
        self.state.fail(now_ms())  # "Instance self-reporting failed triggers migration immediately" (U-37)
        self._carry_out()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._reporter.sent()
        await self._loading.close()

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._starting.values(), *self._directives.values(), *self._checkpoints.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._scheduler.close)

    async def _run_timers(self) -> None:
        while True:
            self.state.measure(self._scheduler.stats(), list(self._loading.holders.links().values()))
            self.state.tick(now_ms())
            self._carry_out()
            metrics.SESSIONS_RUNNING.set(self.state.sessions.running)
            self._timers.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0, self.state.next_deadline() - now_ms()) / 1000):
                    await self._timers.wait()

    # --- requests ---

    def generate(self, **request: Any) -> None:
        """Start or attach; see Sessions.generate."""
        self.state.sessions.generate(now_ms(), **request)
        self._done()

    async def outputs(self, session: str, epoch: int, from_index: int) -> AsyncIterator[Output]:
        """The session's output from an index on, as it may leave, until its end.

        Raises KvspError: kvsp-stale-epoch when the session goes elsewhere, 409 when another call takes its output.
        """
        attached, before = Attached(), self._attached.get(session)
        self._attached[session] = attached
        if before is not None:
            before.replaced = True
            before.wake.set()
        try:
            while not attached.replaced:
                attached.wake.clear()
                output = self.state.sessions.output(session, epoch, from_index)
                from_index += len(output.tokens)
                yield output
                if output.ended is not None:
                    return
                await attached.wake.wait()
            raise KvspError(registry.CONFLICT, "another call takes the session's output")
        finally:
            if self._attached.get(session) is attached:
                del self._attached[session]

    async def end(self, session: str, scopes: Collection[str]) -> None:
        """See Sessions.end. Returns when no checkpoint of the session is under way: none comes after the end."""
        under_way = [task for (each, _), task in self._checkpoints.items() if each == session]
        self.state.sessions.end(now_ms(), session, scopes)
        self._done()
        if under_way:
            await asyncio.wait(under_way, timeout=SETTLE_S)

    def resume(self, request: ResumeRequest) -> ResumeReply:
        """See Sessions.resume."""
        reply = self.state.sessions.resume(now_ms(), request)
        self._done()
        return reply

    def prefetch(self, directive: PrefetchDirective) -> DirectiveStatus:
        """See InstanceState.prefetch."""
        try:
            status = self.state.prefetch(now_ms(), directive)
        except KvspError as error:
            metrics.DIRECTIVE_REFUSALS.labels(str(error.status)).inc()
            raise
        self._done()
        return status

    def put_state(self, wanted: str) -> str:
        """See InstanceState.put_state."""
        state = self.state.put_state(now_ms(), wanted)
        self._done()
        return state

    # --- engine ---

    def on_event(self, event: Event) -> None:
        """What the engine tells, on the event loop."""
        sessions = self.state.sessions
        match event:
            case Sampled(session, epoch, index, token):
                sessions.sampled(now_ms(), session, epoch, index, token)
                self._carry_out()
                return
            case BlockDone(session, epoch, block, octets):
                named = sessions.block_key(session, epoch, block)
                if named is not None:
                    self._loading.add(*named, octets)
                return
            case Started(session, epoch, cached_tokens):
                self._loading.lull.end((session, epoch))
                found = sessions.get(session, epoch)
                if found is not None:
                    metrics.PROMPT_TOKENS.labels("loaded").inc(cached_tokens)
                    metrics.PROMPT_TOKENS.labels("computed").inc(found.prompt_tokens - cached_tokens)
                sessions.started(session, epoch, cached_tokens)
                self._wake(session)
            case PrefixLost(session, epoch, _):
                sessions.prefix_lost(now_ms(), session, epoch)
            case Finished(session, epoch, reason, detail):
                self._loading.lull.end((session, epoch))
                if reason == "failed":
                    log.error("session failed", detail=detail)
                sessions.finished(now_ms(), session, epoch, reason)
        self._done()

    async def _start(self, start: rules.StartSession) -> None:
        """Find out what can be loaded, let the engine begin, and load while it computes."""
        prefixes = self._loading.prefixes
        plan = await prefixes.find(start.scope_id, start.block_keys)
        try:
            links = self._loading.holders.links()
            if start.known_from == 0:
                prefixes.spare(plan, links, self._scheduler.stats().prefill_tokens_per_s)
            cache = None
            if plan.blocks:
                loaded = len(plan.blocks) * self.state.settings.block_tokens
                cache = self._engine.prefix(len(plan.blocks), start.prompt_tokens + start.max_tokens - loaded)
            self._scheduler.submit(
                Work(
                    session=start.session,
                    epoch=start.epoch,
                    prompt_tokens=start.prompt_tokens,
                    known_from=start.known_from,
                    tokens=start.tokens,
                    sampler=start.sampler,
                    max_tokens=start.max_tokens,
                    stop_tokens=start.stop_tokens,
                    prefix=cache,
                )
            )
            if cache is not None:
                await prefixes.fill(plan, cache, links)
        finally:
            plan.close()

    def _started(self, key: Key, task: asyncio.Task[None]) -> None:
        """Loading is over, or has failed."""
        self._starting.pop(key, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._loading.lull.end(key)
        log.error("session not started", kind=type(error).__name__, where=frames(error))
        self._scheduler.cancel(*key)
        self.state.sessions.finished(now_ms(), *key, "failed")
        self._done()

    # --- instructions ---

    def _done(self) -> None:
        """After an event: carry out what it leads to, and look at the timers anew."""
        self._carry_out()
        self._timers.set()

    def _carry_out(self) -> None:
        for instruction in self.state.instructions():
            self._hands[type(instruction)](instruction)
        if self.state.state == "failed":
            self.failed.set()

    def _start_session(self, start: rules.StartSession) -> None:
        key = start.session, start.epoch
        self._loading.lull.begin(key)
        self._starting[key] = task = asyncio.create_task(self._start(start))
        task.add_done_callback(partial(self._started, key))

    def _provide_prompt(self, provide: rules.ProvidePrompt) -> None:
        self._scheduler.provide_tokens(provide.session, provide.epoch, provide.prompt)

    def _stop_session(self, stop: rules.StopSession) -> None:
        self._scheduler.cancel(stop.session, stop.epoch)
        self._loading.lull.end((stop.session, stop.epoch))
        starting = self._starting.get((stop.session, stop.epoch))
        if starting is not None:
            starting.cancel()

    def _checkpoint(self, send: rules.SendCheckpoint) -> None:
        key = send.checkpoint.session, send.checkpoint.epoch
        _begin(self._checkpoints, key, self._send_checkpoint(send.checkpoint))

    def _release(self, release: rules.Release) -> None:
        metrics.OUTPUT_TOKENS.inc(len(release.tokens))
        self._wake(release.session)

    def _ended(self, ended: rules.Ended) -> None:
        metrics.SESSIONS.labels(ended.reason).inc()
        self._wake(ended.session)

    def _fenced(self, fenced: rules.Fenced) -> None:
        self._wake(fenced.session)

    def _begin_directive(self, begin: rules.BeginDirective) -> None:
        _begin(self._directives, begin.directive, self._load(begin))

    def _stop_directive(self, stop: rules.StopDirective) -> None:
        loading = self._directives.get(stop.directive)
        if loading is not None:
            loading.cancel()

    def _send_status(self, send: rules.SendStatus) -> None:
        self._reporter.report(send.status)

    def _empty_device(self, _: rules.EmptyDevice) -> None:
        if self._engine.device is not None:
            self._engine.device.clear()

    def _wake(self, session: str) -> None:
        attached = self._attached.get(session)
        if attached is not None:
            attached.wake.set()

    async def _send_checkpoint(self, checkpoint: SessionCheckpoint) -> None:
        session, epoch = checkpoint.session, checkpoint.epoch
        try:
            reply = await self._controller.put_checkpoint(checkpoint)
        except KvspError as error:
            metrics.CHECKPOINTS.labels(str(error.status)).inc()
            if error.status < 500 and error.status not in TRANSIENT:
                log.warning(
                    "checkpoint refused, session stopped", status=error.status, problem=error.problem.suffix
                )
                metrics.SESSIONS.labels("fenced").inc()
                self.state.sessions.checkpoint_refused(now_ms(), session, epoch)
            else:
                self.state.sessions.unanswered(now_ms(), session, epoch)
            self._done()
        else:
            metrics.CHECKPOINTS.labels("done").inc()
            # A controller that answers for another epoch knows of another run of the session.
            if reply.epoch != epoch:
                self.state.sessions.checkpoint_refused(now_ms(), session, epoch)
            self.state.sessions.acknowledged(now_ms(), session, reply)
            self._carry_out()

    async def _load(self, begin: rules.BeginDirective) -> None:
        try:
            await self._loading.prefetch(begin, self._outcome)
        finally:
            metrics.DIRECTIVES.labels(self.state.directive(begin.directive).state).inc()

    def _outcome(self, directive: str, block_key: bytes, loaded: bool) -> None:
        self.state.block_outcome(now_ms(), directive, block_key, loaded=loaded)
        self._done()

    def _status_answered(self, status: InstanceStatus, view: str) -> None:
        self.state.status_answered(now_ms(), status, view)
        self._done()

    def _status_refused(self, problem: registry.ProblemType) -> None:
        self.state.status_refused(now_ms(), problem)
        self._done()


def _begin(tasks: dict[K, asyncio.Task[None]], key: K, work: Coroutine[Any, Any, None]) -> None:
    """Run a task that is found under its key until it is done."""
    task = tasks[key] = asyncio.create_task(work)

    def done(_: asyncio.Task[None]) -> None:
        if tasks.get(key) is task:
            del tasks[key]

    task.add_done_callback(done)
