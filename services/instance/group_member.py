"""This instance in one group: the context, the KV held of it, and what is going on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.reshard import Range
from kvsp.v1 import instance_pb2
from services.instance.group import Context
from services.instance.group_links import Links

if TYPE_CHECKING:  # torch takes seconds to import
    from services.instance.shard_run import ShardRun
    from services.instance.shard_store import ShardStore

PREFILL_S: Final = 30.0
"""What a layer's partials may take while members may still be computing it."""
DECODE_S: Final = 5.0

View = tuple[int, tuple[Range, ...], int]
"""A version of the map, what is held of it here, and where it ends: see sharded.View."""


@dataclass(eq=False)
class Member:
    """Belongs to the event loop, but for `view`, which is replaced as a whole, for any thread."""

    context: Context
    store: ShardStore
    links: Links
    view: View
    """Of the authoritative version."""
    used_ms: int
    positions: int = 0
    """At home: the tokens that there must be room for, output included."""
    attend_s: float = PREFILL_S
    """How long the other members have to answer."""
    loaded: asyncio.Future[None] | None = None
    """What the plan under way waits for."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Loading and storing for it."""
    run: ShardRun | None = None
    computed: asyncio.Future[None] | None = None
    """At a member that is not home: its part of the prefill."""
    advanced: asyncio.Event = field(default_factory=asyncio.Event)
    """There may be more layers, or other ranges."""

    @property
    def name(self) -> str:
        """Of the map."""
        return self.context.map.map

    @property
    def at_home(self) -> bool:
        """This instance generates."""
        return self.context.home == self.context.own

    def show(self, version: int, ranges: list[Range]) -> None:
        """Change `view`. Home's last range ends where the map does for all that is computed here."""
        end = ranges[-1][1] if self.at_home and ranges else self.context.end
        self.view = version, tuple(ranges), end

    def watch(self) -> None:
        """Have `advanced` set when the store changes."""
        loop = asyncio.get_running_loop()

        def advanced() -> None:  # on the thread that computes
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.advanced.set)

        self.store.watch(advanced)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something for the plan under way."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def stop_plan(self) -> None:
        """Load and store nothing more; who waits for the plan is refused."""
        for task in self.tasks:
            task.cancel()
        settle(self.loaded, unavailable("the plan was aborted"))

    def stop(self) -> None:
        """The context is of no use any more."""
        self.stop_plan()
        self.links.close()
        if self.run is not None:
            self.run.cancel()
        settle(self.computed, unavailable("the group is gone"))
        self.advanced.set()


class Peers:
    """The other members as a run asks them (sharding.py).

    `learned` is told of a version that a member has been told to commit.
    """

    def __init__(self, member: Member, learned: Callable[[Member, int], None]) -> None:
        self._member = member
        self._learned = learned

    @property
    def name(self) -> str:
        """Of the map."""
        return self._member.name

    @property
    def view(self) -> View:
        """See Member; for any thread."""
        return self._member.view

    async def ask(self, request: instance_pb2.AttendRequest) -> list[instance_pb2.AttendReply]:
        """The partials of all others that hold tokens before `request.before`. Raises KvspError.

        If `view` is of another version by then, the question is to be asked again under that.
        """
        member = self._member
        if request.version != member.view[0]:
            raise KvspError(registry.PLAN_CONFLICT, "another version is authoritative")
        try:
            return await member.links.ask(member.context.others(request.before), request, member.attend_s)
        except KvspError as error:
            if error.problem is registry.PLAN_CONFLICT:
                self._learned(member, request.version + 1)
            raise


def outcome() -> asyncio.Future[None]:
    """A future that nobody need wait for."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def settle(future: asyncio.Future[None] | None, error: KvspError | None = None) -> None:
    """Set the outcome, unless there is one."""
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
