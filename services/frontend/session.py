"""One session of a request: assigned, generated, followed to wherever it is moved, ended.

The loss of an instance, of the placement controller or of a connection costs the client nothing but time: the
front end attaches again, under the newest binding, from the first index that it has not delivered.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import structlog

from kvsp.protocol import keys, registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import Sampler, SessionCheckpoint
from kvsp.rpc.convert import checkpoint_to_message, sampler_to_message
from kvsp.v1 import instance_pb2, placement_pb2
from services.frontend.fleet import Fleet, Pauses, refusal
from services.frontend.metrics import ATTACHES, SESSIONS, STALE
from services.frontend.state import Delivery

ASSIGNMENTS_MAX: Final = 3
"""An instance may refuse a session that it was just assigned, as it drains or its queue is full."""

Event = instance_pb2.GenerateEvent

_PASSING: Final = (registry.UNAVAILABLE, registry.TOO_MANY_REQUESTS, registry.INTERNAL)
"""What a placement controller may say that is not of the session."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to generate. `prompt` are tokens; the keys of its blocks are of `scope` and `compat_id`."""

    scope: ScopeKey
    compat_id: bytes
    block_tokens: int
    prompt: Sequence[int]
    sampler: Sampler

    def start(self, session: str) -> SessionCheckpoint:
        """The session's checkpoint before its first token."""
        blocks = keys.block_keys(self.scope, self.compat_id, self.prompt, self.block_tokens)
        return SessionCheckpoint(
            session=session,
            epoch=0,
            compat_id=self.compat_id.hex(),
            scope_id=keys.scope_id(self.scope).hex(),
            prompt_blocks=[key.hex() for key in blocks],
            prompt_tail=list(self.prompt[len(blocks) * self.block_tokens :]),
            generated=[],
            output_offset=0,
            sampler=self.sampler,
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a session is. `assigned`: what the controller chose between; None when it was moved there."""

    session: str
    instance: str
    epoch: int
    assigned: placement_pb2.AssignReply | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What came of a session: output tokens, how many of the prompt's were cached, why it has ended.

    `placed` comes with the first that came of it under a binding.
    """

    tokens: Sequence[int] = ()
    cached: int | None = None
    finished: str | None = None
    placed: Placed | None = None


async def generate(fleet: Fleet, plan: Plan) -> AsyncGenerator[Progress, None]:
    """The output of a plan, each token once and in order, and last the reason of its end.

    Close the iterator to end the session early. Raises KvspError.
    """
    for attempt in range(1, ASSIGNMENTS_MAX + 1):
        session = Session(fleet, plan)
        try:
            async with aclosing(session.run()) as running:
                async for progress in running:
                    yield progress
                return
        except _NotAdmittedError as error:
            if attempt == ASSIGNMENTS_MAX:
                raise error.refusal from None


class _NotAdmittedError(Exception):
    """The assigned instance would not begin the session."""

    def __init__(self, refusal: KvspError) -> None:
        super().__init__()
        self.refusal = refusal


class Session:
    """A session at the fleet, from its assignment to its end."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self.id = str(uuid.uuid4())
        self._fleet = fleet
        self._plan = plan
        self._delivery = Delivery()
        self._instance: str | None = None
        self._placed: Placed | None = None
        self._moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._following = True
        self._lost: KvspError | None = None
        self._began = False

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Everything that comes of it. Raises KvspError, or _NotAdmittedError before anything came."""
        start = checkpoint_to_message(self._plan.start(self.id))
        request = placement_pb2.AssignRequest(start=start, prompt_tokens=len(self._plan.prompt))
        following = None
        SESSIONS.inc()
        self._fleet.begin()
        try:
            assigned = await self._fleet.assign(request)
            if assigned is not None:
                self._bind(assigned.binding, assigned)
            following = asyncio.create_task(self._follow())
            async with aclosing(self._output()) as output:
                async for progress in output:
                    yield progress
        finally:
            SESSIONS.dec()
            STALE.inc(self._delivery.stale)
            if following is not None:
                following.cancel()
            self._fleet.end(self.id, None if self._delivery.finished else self._instance)

    # --- bindings ---

    def _bind(self, binding: placement_pb2.Binding, assigned: placement_pb2.AssignReply | None = None) -> None:
        """Take a binding that is newer than all; from now on, what older ones send counts for nothing."""
        if self._delivery.bind(binding.epoch):
            self._instance = binding.instance
            self._placed = Placed(self.id, binding.instance, binding.epoch, assigned)
            moved, self._moved = self._moved, asyncio.get_running_loop().create_future()
            moved.set_result(None)

    async def _follow(self) -> None:
        """Keep up with the binding for as long as the session lives."""
        pauses = Pauses(self._fleet.timing, float("inf"))
        name = placement_pb2.SessionName(session=self.id)
        while True:
            call: Any = self._fleet.placement.Follow(name, metadata=self._fleet.metadata)
            try:
                async for binding in call:
                    self._following = True
                    pauses.reset()
                    self._bind(binding)
            except grpc.aio.AioRpcError as error:
                self._lost = _loss(refusal(error))
            finally:
                call.cancel()
            self._following = False
            if self._lost is not None:
                log.warning("session lost", session=self.id, status=self._lost.status, reason=self._lost.detail)
                return
            await pauses.wait()

    # --- output ---

    async def _output(self) -> AsyncGenerator[Progress, None]:
        """Attach to the newest binding, and again until the session is finished."""
        pauses = Pauses(self._fleet.timing, self._fleet.timing.patience_s)
        epoch = 0
        while not self._delivery.finished:
            moved = self._moved
            if self._instance is not None:
                if self._delivery.epoch > epoch:
                    epoch = self._delivery.epoch
                    pauses.reset()
                async with aclosing(self._attached(self._instance, moved)) as events:
                    async for event in events:
                        progress = replace(self._taken(event), placed=self._placed)
                        self._placed = None
                        if progress.tokens:
                            pauses.reset()
                        yield progress
            if self._delivery.finished or moved.done():
                continue
            if self._lost is not None:
                raise self._lost
            await pauses.wait(moved)

    async def _attached(self, instance: str, moved: asyncio.Future[None]) -> AsyncGenerator[Event, None]:
        """What an instance sends, until it stops or breaks off, or the session moves."""
        cause = "reconnected" if self._began else "started"
        ATTACHES.labels(cause if self._delivery.epoch == 1 else "moved").inc()
        call: Any = self._fleet.instance(instance).Generate(self._request(), metadata=self._fleet.metadata)
        try:
            while (event := await self._read(call, moved)) is not None:
                self._began = True
                yield event
        except grpc.aio.AioRpcError as error:
            self._consider(refusal(error))
        finally:
            call.cancel()

    async def _read(self, call: Any, moved: asyncio.Future[None]) -> Event | None:
        """The next event; None when there is none or the session has moved."""
        reading = asyncio.ensure_future(call.read())
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {reading, moved}
                done, _ = await asyncio.wait(
                    waiting, timeout=self._fleet.timing.patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if moved in done:
                    return None
                if done:
                    event = reading.result()
                    return event if isinstance(event, Event) else None
                # A queue may be long. But nobody would tell us if this instance had failed.
                if not self._following:
                    raise self._lost or unavailable(
                        "neither instance nor placement controller has been heard of for too long"
                    )
        finally:
            reading.cancel()

    def _request(self) -> instance_pb2.GenerateRequest:
        plan = self._plan
        return instance_pb2.GenerateRequest(
            session=self.id,
            epoch=self._delivery.epoch,
            from_index=self._delivery.next_index,
            scope_id=keys.scope_id(plan.scope),
            compat_id=plan.compat_id,
            prompt=plan.prompt,
            sampler=sampler_to_message(plan.sampler),
        )

    def _taken(self, event: Event) -> Progress:
        """What of an event is new. Raises KvspError (503) when the session has failed."""
        if event.HasField("tokens"):
            tokens = self._delivery.take(event.epoch, event.tokens.first_index, event.tokens.tokens)
            return Progress(tokens=tokens, finished=self._delivery.finished)
        if event.HasField("reused"):
            return Progress(cached=event.reused.cached_tokens)
        if event.HasField("finished") and event.epoch >= self._delivery.epoch:
            if event.finished.reason == "failed":
                raise unavailable("the instance could not complete the session")
            self._delivery.finish(event.epoch, event.finished.reason, event.finished.output_tokens)
        return Progress(finished=self._delivery.finished)

    def _consider(self, refused: KvspError | None) -> None:
        """An attempt to attach has ended. Raises what another one cannot change; returns to try again."""
        if refused is None or refused.problem in (registry.STALE_EPOCH, registry.NOT_FOUND):
            return  # broken, or the instance and we know of different bindings, which Follow will settle
        if refused.problem in (registry.INVALID_STATE, registry.UNAVAILABLE):
            if not self._began and self._delivery.epoch == 1:
                raise _NotAdmittedError(refused)
            return
        raise refused


def _loss(refused: KvspError | None) -> KvspError | None:
    """Why a session that cannot be followed any more will not go on; None: it may, so follow it again."""
    if refused is None or refused.problem in _PASSING:
        return None
    return unavailable("the session was lost") if refused.problem is registry.NOT_FOUND else refused
