"""The shell around the rules: clock, engine, placement controller, holders. One per process, one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import (
    DirectiveStatus,
    InstanceStatus,
    PrefetchDirective,
    ResumeReply,
    ResumeRequest,
)
from kvsp.rpc.clock import now_ms
from services.instance import instructions as rules
from services.instance import metrics
from services.instance.checkpoints import Checkpoints
from services.instance.controller import Controller, Reporter
from services.instance.engine import BlockDone, Engine, Event, Finished, PrefixLost, Sampled, Started
from services.instance.group_runs import GroupRuns
from services.instance.group_serving import GroupServing
from services.instance.groups import Groups
from services.instance.loading import Loading
from services.instance.memory import Key
from services.instance.sessions import Output
from services.instance.starting import Scheduler, Starting
from services.instance.state import InstanceState

GOODBYE_S: Final = 1.0

log = structlog.get_logger()

K = TypeVar("K", bound=Hashable)

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
        *,
        groups: Groups,
    ) -> None:
        self.state = state
        self.groups = groups
        self.serving = GroupServing(groups)
        self.group_runs = GroupRuns(groups, controller, self.on_event, self._moved, self._alone)
        self.failed = asyncio.Event()
        self._engine = engine
        self._loading = loading
        self._reporter = Reporter(controller, self._status_answered, self._status_refused)
        self._scheduler = schedule(self.on_event)
        self._attached: dict[str, Attached] = {}
        self._starting = Starting(engine, loading, self._scheduler, self._not_started)
        self._directives: dict[str, asyncio.Task[None]] = {}
        self._checkpoints = Checkpoints(controller, state.sessions, self._done)
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
            rules.UseDevice: self._use_device,
        }

    # --- lifetime ---

    async def run(self) -> None:
        """Everything that goes on by itself, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_timers())
            group.create_task(self._reporter.run())
            group.create_task(self._loading.run())
            group.create_task(self.groups.run())

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
        tasks = list(self._directives.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._starting.close(), self._checkpoints.close(), return_exceptions=True)
        await self.group_runs.close()
        await self.serving.close()
        await asyncio.to_thread(self._scheduler.close)

    async def _run_timers(self) -> None:
        while True:
            stats = self.group_runs.stats(self._scheduler.stats())
            self.state.measure(stats, list(self._loading.holders.links().values()))
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
        self.state.sessions.end(now_ms(), session, scopes)
        self._done()
        await self._checkpoints.settled(session)

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

    def _not_started(self, key: Key) -> None:
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

    def _moved(self, key: Key) -> None:
        # Nothing is computed here that a checkpoint could be made of, whose refusal would say so.
        self.state.sessions.checkpoint_refused(now_ms(), *key)
        self._done()

    def _alone(self, key: Key) -> None:
        self.state.sessions.restart(*key)
        self._done()

    def _start_session(self, start: rules.StartSession) -> None:
        if not self.group_runs.begin(start):
            self._starting.begin(start)

    def _provide_prompt(self, provide: rules.ProvidePrompt) -> None:
        self._scheduler.provide_tokens(provide.session, provide.epoch, provide.prompt)

    def _stop_session(self, stop: rules.StopSession) -> None:
        self._starting.stop((stop.session, stop.epoch))
        self.group_runs.stop((stop.session, stop.epoch))

    def _checkpoint(self, send: rules.SendCheckpoint) -> None:
        self._checkpoints.send(send.checkpoint)

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
            self._engine.device.close()

    def _use_device(self, _: rules.UseDevice) -> None:
        if self._engine.device is not None:
            self._engine.device.open()

    def _wake(self, session: str) -> None:
        attached = self._attached.get(session)
        if attached is not None:
            attached.wake.set()

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
