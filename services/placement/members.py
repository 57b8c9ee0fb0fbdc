"""The calls of groups: joins, plans and decisions; and who waits for their outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

import structlog
from msgspec import UnsetType

from kvsp.protocol import registry, reshard
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ShardMap
from kvsp.protocol.reshard import GroupContext
from services.placement.grouping import Grouping
from services.placement.groups import LIFETIME_MS, Settled
from services.placement.instances import Instances
from services.placement.instructions import Form, Reshard, SendLeave

JOIN_S: Final = 2.0
DECISION_S: Final = LIFETIME_MS / 1000
"""No message of a step may arrive when the next one of the same number can be under way."""
LEAVE_S: Final = DECISION_S / 2
"""Nor may this one, which is sent when the rows of the step's end are on disk."""
LATE_S: Final = 1.0
"""How long after a plan's deadline its answer is waited for: "BP(503)" (U-38) is one."""

T = TypeVar("T")
log = structlog.get_logger()


class Event(Protocol):
    """`Controller.event`."""

    def __call__(self, rule: Callable[[int], T], /) -> Awaitable[T]:
        """Let the state decide."""


class Members:
    """Speaks with the members of all groups; `spawn` keeps a background task."""

    def __init__(
        self,
        groups: Grouping,
        instances: Instances,
        event: Event,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._groups = groups
        self._instances = instances
        self._event = event
        self._spawn = spawn
        self._forming: dict[str, asyncio.Future[tuple[str, ...]]] = {}
        self._left = asyncio.Event()
        self._resizing: list[tuple[ShardMap, asyncio.Future[ShardMap]]] = []

    def act(self, instruction: Form | Reshard | SendLeave | Settled) -> None:
        """Carry out what the rules want."""
        match instruction:
            case Form():
                self._forming[instruction.context.map.map] = asyncio.get_running_loop().create_future()
                self._spawn(self._form(instruction.context))
            case Reshard():
                self._spawn(self._reshard(instruction))
            case SendLeave():
                self._spawn(self._leave(instruction.instance, instruction.map))
            case Settled():
                self._settled(instruction)

    async def formed(self, session: str) -> tuple[str, ...]:
        """The members of the group of a session just assigned, once all have joined; none: it has no group."""
        forming = self._forming.get(session)
        return () if forming is None else await asyncio.shield(forming)

    async def resize(self, session: str, members: int) -> ShardMap:
        """Have a group that many members, as an operator, a little after the last step if there was one just now.

        Raises KvspError: the rules', or kvsp-plan-conflict.
        """
        outcome: asyncio.Future[ShardMap] = asyncio.get_running_loop().create_future()

        def begin(now_ms: int) -> None:
            wanted = self._groups.resize(session, members, now_ms)
            if self._groups.is_settled(wanted):
                outcome.set_result(wanted)
            else:
                self._resizing.append((wanted, outcome))

        await self._paused(session)
        await self._event(begin)
        return await outcome

    # --- inside -----------------------------------------------------------------------

    async def _paused(self, session: str) -> None:
        """Wait until no message of the last step can arrive any more."""
        while True:
            self._left.clear()
            pause_ms = await self._event(lambda now: self._groups.pause_ms(session, now))
            if not pause_ms:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_ms / 1000):
                    await self._left.wait()

    async def _form(self, context: GroupContext) -> None:
        """All or nobody: a home that has joined would wait for members that have not.

        So it has to have left before the session begins; the others may take their time.
        """
        name, home = context.map.map, context.map.shards[-1].instance
        members = sorted(reshard.held(context.map))
        formed: tuple[str, ...] = ()
        try:
            joined = await asyncio.gather(*(self._join(instance, context) for instance in members))
            if not all(joined):
                for instance in members:
                    if instance != home:
                        self._spawn(self._leave(instance, name))
                await self._leave(home, name)
            formed = await self._event(lambda now: self._groups.formed(context.map, now, ok=all(joined)))
        finally:
            self._forming.pop(name).set_result(formed)

    async def _join(self, instance: str, context: GroupContext) -> bool:
        try:
            await self._instances.member(instance).join(context, JOIN_S)
        except KvspError as error:
            log.warning("not joined", map=context.map.map, instance=instance, status=error.status)
            return False
        return True

    async def _reshard(self, send: Reshard) -> None:
        name, is_plan = send.request.map, send.context is not None
        ok = True
        if send.context is not None:
            ok = await self._join(send.instance, send.context)
            if not self._groups.is_waited_for(name, send.step):
                return  # aborted meanwhile: a plan after its abort would be prepared by nobody's order
        timeout_s = DECISION_S
        if is_plan and not isinstance(send.request.deadline_ms, UnsetType):
            timeout_s = send.request.deadline_ms / 1000 + LATE_S
        try:
            if ok:
                await self._instances.member(send.instance).reshard(send.request, timeout_s)
        except KvspError as error:
            log.warning("not resharded", map=name, instance=send.instance, plan=is_plan, status=error.status)
            if not is_plan and error.status >= registry.INTERNAL.status:
                return  # no answer: it is told again
            ok = False
        await self._event(lambda now: self._groups.answered(name, send.step, send.instance, now, ok=ok))

    def _settled(self, step: Settled) -> None:
        log.info("resharded", map=step.map.map, version=step.map.version, committed=step.committed)
        for new, outcome in [each for each in self._resizing if each[0] is step.new]:
            self._resizing.remove((new, outcome))
            if outcome.done():
                continue  # nobody waits any more
            if step.committed:
                outcome.set_result(step.map)
            else:
                outcome.set_exception(KvspError(registry.PLAN_CONFLICT, "the step was aborted"))

    async def _leave(self, instance: str, name: str) -> None:
        """Once: who is not told forgets a group that nobody uses."""
        try:
            await self._instances.member(instance).leave(name, LEAVE_S)
        except KvspError as error:
            log.info("not told to leave", map=name, instance=instance, status=error.status)
        else:
            await self._event(lambda _: self._groups.left(name, instance))
            self._left.set()
