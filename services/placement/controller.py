"""Around the state: persists before it acts, keeps timers, calls instances and index."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import structlog

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.estimate import Run
from kvsp.protocol.keys import ScopeKey
from kvsp.rpc.clock import now_ms
from kvsp.rpc.convert import join_keys, survey_from_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import index_pb2, index_pb2_grpc
from services.placement import metrics
from services.placement.config import PlacementConfig
from services.placement.cost import checkpoint_keys
from services.placement.feed import IndexFeed
from services.placement.followers import Followers
from services.placement.groups import Settled
from services.placement.instances import Instances
from services.placement.instructions import (
    Bind,
    Ended,
    Feed,
    Form,
    Instruction,
    Persist,
    Reshard,
    SendLeave,
    SendPrefetch,
    SendResume,
    SendState,
    Survey,
    WantInstance,
)
from services.placement.journal import Journal
from services.placement.members import Members
from services.placement.state import PlacementState

SURVEY_TIMEOUT_S: Final = 2.0
SURVEYS_MAX: Final = 32
RESUMES_MAX: Final = 32
"""Sessions that are surveyed, or resumed by one instance, at once: a large instance that fails must not flood the
others, nor one that hangs hold up those that go elsewhere."""
OUTCOME_MS: Final = 100
"""How long after its deadline a directive is asked for its outcome."""

T = TypeVar("T")
log = structlog.get_logger()


class Controller:
    """One placement controller. `on_failure` is told when a background task fails: the process must end then."""

    def __init__(
        self,
        config: PlacementConfig,
        state: PlacementState,
        *,
        followers: Followers,
        journal: Journal,
        instances: Instances,
        index: grpc.aio.Channel,
        scope_keys: Mapping[str, ScopeKey],
        on_failure: Callable[[asyncio.Task[Any]], None],
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.state = state
        self.followers = followers
        self.members = Members(state.groups, instances, self.event, self._spawn)
        self._config = config
        self._journal = journal
        self._instances = instances
        self._index = index_pb2_grpc.IndexStub(index)
        self._feed = IndexFeed(index, config.principal, clock)
        self._scope_keys = scope_keys
        self._on_failure = on_failure
        self._clock = clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._surveying = asyncio.Semaphore(SURVEYS_MAX)
        self._resuming: dict[str, asyncio.Semaphore] = {}
        self._orders: dict[tuple[str, str], list[asyncio.Future[str]]] = {}
        self._order_locks: dict[str, asyncio.Lock] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_ms = 0
        self._starting = False

    def start(self) -> None:
        """Begin with what a restart has left to do."""
        self._spawn(self._journal.run())
        self._spawn(self._feed.run())
        self._carry_out()

    async def close(self) -> None:
        """Stop all that is under way; what is not on disk was not acknowledged."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def event(self, rule: Callable[[int], T]) -> T:
        """Let the state decide; the outcome, also a refusal, leaves when what it rests on is on disk.

        Raises what `rule` raises, and KvspError (503) when nothing can be written.
        """
        try:
            return rule(self._clock())
        finally:
            written = self._carry_out()
            if written is not None:
                await asyncio.shield(written)  # others wait for the same one

    async def order(self, instance: str, state: str) -> str:
        """Bring an instance into a state; the one in effect. Raises KvspError: the state's, or the instance's."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = self._orders.setdefault((instance, state), [])
        waiting.append(answer)
        try:
            await self.event(lambda now: self.state.order(instance, state, now))
            return await answer
        finally:
            if answer in waiting:
                waiting.remove(answer)

    async def survey(self, scope_id: bytes, compat_id: bytes, block_keys: bytes) -> Sequence[Run]:
        """Who holds the leading blocks. The index is advisory: without its answer, nobody does."""
        if not block_keys:
            return ()
        request = index_pb2.LookupRequest(scope_id=scope_id, compat_id=compat_id, block_keys=block_keys)
        try:
            async with translated():
                metadata = speak_for(self._config.principal)
                reply = await self._index.Survey(request, metadata=metadata, timeout=SURVEY_TIMEOUT_S)
            return survey_from_message(reply)
        except KvspError as error:
            metrics.SURVEY_FAILURES.inc()
            log.warning("index did not answer", status=error.status)
            return ()

    # --- inside -----------------------------------------------------------------------

    def _carry_out(self) -> asyncio.Future[None] | None:
        """Pass on what is to be done: at once, or when the rows that come first are on disk."""
        todo = self.state.instructions()
        rows: Sequence[Any] = ()
        if todo and isinstance(todo[0], Persist):
            rows = todo[0].rows
            todo = todo[1:]
        self._arm()
        return self._journal.enter(rows, [partial(self._act, each) for each in todo])

    def _arm(self) -> None:
        """Wake up at the state's next deadline."""
        due_ms = self.state.next_deadline()
        if self._timer is not None:
            if due_ms >= self._due_ms:
                return
            self._timer.cancel()
        self._due_ms = due_ms
        delay_s = max(0, due_ms - self._clock()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._spawn(self.event(self.state.tick))

    def _act(self, instruction: Instruction) -> None:
        match instruction:
            case Feed():
                self._feed.tell(instruction.status)
            case Bind():
                self.followers.bound(instruction.binding)
            case Ended():
                self.followers.ended(instruction.session, instruction.problem)
                if instruction.problem is not None:
                    log.warning(
                        "no instance continues the session",
                        session=instruction.session,
                        status=instruction.problem.status,
                    )
            case Survey():
                self._spawn(self._survey_session(instruction))
            case SendResume():
                self._spawn(self._resume(instruction))
            case SendPrefetch():
                self._spawn(self._prefetch(instruction))
            case SendState():
                self._spawn(self._send_state(instruction))
            case WantInstance():
                self._spawn(self._want(instruction))
            case Form() | Reshard() | SendLeave() | Settled():
                self.members.act(instruction)
            case Persist():
                raise AssertionError("rows come first, and once")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._on_failure)

    async def _survey_session(self, survey: Survey) -> None:
        checkpoint = survey.checkpoint
        key = self._scope_keys.get(checkpoint.scope_id)
        async with self._surveying:
            runs = await self.survey(
                bytes.fromhex(checkpoint.scope_id),
                bytes.fromhex(checkpoint.compat_id),
                join_keys(checkpoint_keys(checkpoint, survey.block_tokens, key)),
            )
        await self.event(lambda now: self.state.surveyed(survey.session, survey.epoch, runs, now))

    async def _resume(self, send: SendResume) -> None:
        session, epoch = send.request.checkpoint.session, send.request.epoch
        try:
            async with self._resuming.setdefault(send.instance, asyncio.Semaphore(RESUMES_MAX)):
                if not self.state.is_offered(session, epoch):
                    return  # it has ended, or this instance has failed, while others were resumed there
                # Who drains by now gets no session, but may have one that it is asked to continue again.
                if not (send.again or self.state.is_active(send.instance)):
                    raise KvspError(registry.INVALID_STATE, "no longer active")
                await self._instances[send.instance].resume(send.request)
        except KvspError as error:
            metrics.RESUMES.labels(str(error.status)).inc()
            log.warning("not resumed", session=session, epoch=epoch, instance=send.instance, status=error.status)
            problem = error.problem
            await self.event(lambda now: self.state.resume_failed(session, epoch, problem, now))
        else:
            metrics.RESUMES.labels("202").inc()
            log.info("resumed", session=session, epoch=epoch, instance=send.instance)
            await self.event(lambda now: self.state.resumed(session, epoch, now))

    async def _prefetch(self, send: SendPrefetch) -> None:
        """Nothing waits for it; its outcome is counted."""
        outcome = "not sent"
        try:
            # "MUST NOT ... send prefetch directives to an instance that is not active"; it was, then.
            if self.state.is_active(send.instance):
                calls = self._instances[send.instance]
                status = await calls.prefetch(send.directive)
                if status.state == "pending":
                    await asyncio.sleep((send.directive.deadline_ms + OUTCOME_MS) / 1000)
                    status = await calls.directive(send.directive.directive)
                outcome = status.state
        except KvspError as error:
            outcome = "refused"
            log.info("directive refused", instance=send.instance, status=error.status)
        metrics.DIRECTIVES.labels(outcome).inc()

    async def _send_state(self, send: SendState) -> None:
        """One order at a time, so that an instance gets them in the order in which they were given."""
        effective, failure = "", None
        try:
            async with self._order_locks.setdefault(send.instance, asyncio.Lock()):
                effective = await self._instances[send.instance].put_state(send.state)
        except KvspError as error:
            failure = error
            refused = error.status == registry.CONFLICT.status
            log.warning("state not changed", instance=send.instance, state=send.state, status=error.status)
            await self.event(lambda _: self.state.order_failed(send.instance, refused=refused))
        else:
            log.info("state changed", instance=send.instance, state=effective)
            await self.event(lambda now: self.state.ordered(send.instance, effective, now))
        for answer in self._orders.pop((send.instance, send.state), ()):
            if answer.done():
                continue
            if failure is None:
                answer.set_result(effective)
            else:
                answer.set_exception(failure)

    async def _want(self, want: WantInstance) -> None:
        """The operator's command, if there is one and it does not run yet, starts one more instance."""
        metrics.WANTED.inc()
        log.warning("no acceptable instance", compat_id=want.compat_id, scope_id=want.scope_id)
        if not self._config.want_instance or self._starting:
            return
        self._starting = True
        environment = os.environ | {"KVSP_COMPAT_ID": want.compat_id, "KVSP_SCOPE_ID": want.scope_id}
        try:
            started = await asyncio.create_subprocess_exec(*self._config.want_instance, env=environment)
            code = await started.wait()
            log.info("command for one more instance ended", code=code)
        except OSError as error:
            log.error("command for one more instance failed", reason=error.strerror)
        finally:
            self._starting = False
