"""Sessions whose context is sharded, at their home: started, stopped, and gone on with when the group is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import Shard
from kvsp.rpc.convert import token_range
from kvsp.rpc.errors import translated
from kvsp.v1 import instance_pb2
from services.instance.checkpoints import TRANSIENT
from services.instance.controller import Controller
from services.instance.engine import Event, Finished, Started, Stats
from services.instance.group_member import DECODE_S, Member, Peers
from services.instance.groups import Groups
from services.instance.instructions import StartSession
from services.instance.memory import Key
from services.instance.session import RETRY_MS
from services.instance.sessions import FIRST_EPOCH
from services.instance.starting import work_of

COMPUTE_S: Final = 600.0
"""For a member's part of the prefill. That it is gone shows much sooner."""

log = structlog.get_logger()


class GroupRuns:
    """The sessions that run here as home of their group.

    `tell` takes what the engine tells of them. When its group is gone, `moved` is told of a session that goes
    elsewhere, and `alone` of one that nobody moves: it is to go on as any other.
    """

    def __init__(
        self,
        groups: Groups,
        controller: Controller,
        tell: Callable[[Event], None],
        moved: Callable[[Key], None],
        alone: Callable[[Key], None],
    ) -> None:
        self._groups = groups
        self._controller = controller
        self._tell = tell
        self._moved = moved
        self._alone = alone
        self._running: dict[str, Key] = {}
        self._lost: dict[str, Key] = {}
        """Those whose group is lost, until the placement controller knows."""
        self._calls: dict[str, set[asyncio.Task[None]]] = {}
        """By session: what the others compute, or that the group is lost."""

    def stats(self, stats: Stats) -> Stats:
        """The load, that of these sessions included."""
        utilization = max(stats.kv_utilization, self._groups.utilization)
        return replace(stats, running=stats.running + len(self._running), kv_utilization=utilization)

    def begin(self, start: StartSession) -> bool:
        """Run a session. False: it has no group here, or none any more, and is to be run as any other."""
        try:
            member = self._groups.find(start.session)
        except KvspError:
            return False
        if not member.at_home:
            return False  # of an earlier epoch, at another home
        if not self._fits(member, start) or not self._begin(member, start):
            self._groups.leave(start.session)
            return False
        return True

    def stop(self, key: Key) -> None:
        """The session is not this instance's any more, and so the context is of no use."""
        name = key[0]
        if key in (self._running.get(name), self._lost.get(name)):
            self._end(name)
            self._groups.leave(name)

    def leave(self, name: str) -> None:
        """The placement controller has no such group any more.

        While its session runs, that is so only when the session is over, or another's under a later epoch: there
        is nothing to go on with.
        """
        key = self._end(name)
        self._groups.leave(name)
        if key is not None:
            self._moved(key)

    async def close(self) -> None:
        """End everything."""
        tasks = [task for calls in self._calls.values() for task in calls]
        for name in list(self._calls):
            self._cancel(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._groups.close()

    def _fits(self, member: Member, start: StartSession) -> bool:
        """Is it the session that the group was made for? A resumed one is not (its map was forgotten)."""
        context = member.context
        return (
            member.run is None
            and start.epoch == FIRST_EPOCH
            and len(start.tokens) == start.prompt_tokens == context.prompt_tokens
            and start.block_keys == context.names
        )

    def _begin(self, member: Member, start: StartSession) -> bool:
        sharding, context, key = self._groups.sharding, member.context, (start.session, start.epoch)
        if sharding is None:
            return False
        peers = Peers(member, self._groups.learned)
        first = context.map.shards[-1].tokens[0]
        on_event, gone = partial(self._on_event, member, first), partial(self._gone, key)
        try:
            member.run = sharding.home(member.store, peers, work_of(start, None), first, tell=on_event, gone=gone)
        except KvspError as error:
            log.info("not run by a group", status=error.status)
            return False
        self._running[start.session] = key
        for shard in context.map.shards[:-1]:
            tokens = start.tokens[slice(*shard.tokens)]
            self._call(start.session, self._compute(member, shard, tokens))
        return True

    async def _compute(self, member: Member, shard: Shard, tokens: Sequence[int]) -> None:
        """Have another member compute its range."""
        request = instance_pb2.ComputeShardRequest(
            map=member.name, version=member.view[0], tokens=token_range(shard.tokens), ids=tokens
        )
        try:
            async with translated():
                await self._groups.stubs[shard.instance].ComputeShard(
                    request, metadata=self._groups.metadata, timeout=COMPUTE_S
                )
        except KvspError as error:
            log.warning("a member does not compute its range", status=error.status)
            member.links.close()  # so that the run does not wait for it

    def _on_event(self, member: Member, first: int, event: Event) -> None:
        if isinstance(event, Started):
            member.attend_s = DECODE_S
            self._groups.publish(member, (first, member.context.complete))
        elif isinstance(event, Finished):
            member.run = None
            self._end(event.session)
        self._tell(event)

    def _gone(self, key: Key) -> None:
        """The run ended because the context is not whole any more. Nothing that it sampled is in doubt."""
        log.warning("a group is lost")
        self._end(key[0])
        self._groups.leave(key[0])
        self._lost[key[0]] = key
        self._call(key[0], self._report(key))

    async def _report(self, key: Key) -> None:
        """Until the placement controller knows, who then has the session resumed, elsewhere if it can."""
        pause_ms, longest_ms = RETRY_MS
        while True:
            try:
                await self._controller.lost_group(key[0])
            except KvspError as error:
                if error.status < 500 and error.status not in TRANSIENT:
                    del self._lost[key[0]]
                    self._alone(key)
                    return
            else:
                del self._lost[key[0]]
                self._moved(key)
                return
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(longest_ms, 2 * pause_ms)

    def _end(self, session: str) -> Key | None:
        """The session is not run here any more, nor reported as lost. The one that was."""
        self._cancel(session)
        lost = self._lost.pop(session, None)
        return self._running.pop(session, lost)

    def _call(self, session: str, work: Coroutine[Any, Any, None]) -> None:
        calls = self._calls.setdefault(session, set())
        task = asyncio.create_task(work)
        calls.add(task)
        task.add_done_callback(partial(self._called, session))

    def _called(self, session: str, task: asyncio.Task[None]) -> None:
        calls = self._calls.get(session, set())
        calls.discard(task)
        if not calls:
            self._calls.pop(session, None)

    def _cancel(self, session: str) -> None:
        for task in self._calls.pop(session, ()):
            task.cancel()
