"""An instance's part in groups on the virtual clock: what placement has it do, and attention over all members.

Before each token the home asks every other member for its ranges of the home's version; what is answered and what
it holds itself must together be the whole context, no token twice.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvsp.protocol import registry, reshard
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.records import ReshardRequest
from kvsp.protocol.reshard import GroupContext, Range
from services.instance.shards import Fetch
from tests.sim.engine import Job
from tests.sim.members import Member
from tests.sim.network import UnreachableError
from tests.sim.storage import BLOCK_TOKENS

if TYPE_CHECKING:
    from tests.sim.instance import InstanceNode

ATTEND_TRIES: Final = 8
PAUSE_MS: Final = 150


class GroupPart:
    """One life of an instance as a member and as a home."""

    def __init__(self, node: InstanceNode) -> None:
        self.member = Member(node.base_uri, BLOCK_TOKENS, node.checker.need)
        self._node = node

    # --- what placement asks for ---

    async def join(self, context: GroupContext) -> None:
        self.member.join(context)

    async def leave(self, name: str) -> None:
        self.member.leave(name)

    async def reshard(self, request: ReshardRequest) -> None:
        """Raises KvspError: kvsp-plan-conflict, 503 when a range cannot be had."""
        if isinstance(request.new, int):
            wanted = self.member.plan(request)
            if wanted is not None and not await self._load(wanted):
                raise unavailable("a range cannot be had")
        else:
            if isinstance(request.commit, int):
                self._node.checker.commits(self._node, request.map, request.commit)
            self.member.decide(request)

    async def _load(self, wanted: Fetch) -> bool:
        for entry in wanted.ranges:
            source = self._node.placement.instances[entry.source]
            read = partial(_read, source, wanted.map, entry.tokens)
            try:
                await self._node.network.call(self._node, source, read)
            except (KvspError, UnreachableError):
                return False
        return self.member.fetched(wanted, lambda *_: True)

    # --- what other members ask for ---

    async def read(self, name: str, tokens: Range) -> None:
        """Raises KvspError (kvsp-not-found)."""
        if not self.member.holds(name, [tokens]):
            raise KvspError(registry.NOT_FOUND)

    async def attend(self, name: str, version: int) -> list[Range]:
        """Raises KvspError (kvsp-plan-conflict)."""
        return self.member.attend(name, version)

    # --- the home ---

    async def attend_all(self, job: Job, proceed: Callable[[], None]) -> None:
        """Go on once the context was whole; where it is lost, placement is told, and has the session migrate."""
        node = self._node
        for _ in range(ATTEND_TRIES):
            with suppress(KvspError, UnreachableError):
                if job.cancelled or await self._is_whole(job.group):
                    proceed()
                    return
            await node.sleep(PAUSE_MS)
        node.kernel.count("groups lost")
        lost = partial(node.placement.lost_group, node.base_uri, job.group)
        while not job.cancelled:
            try:
                await node.network.call(node, node.placement, lost)
                node.fenced(job.session, job.epoch)  # it goes on under another one
                return
            except KvspError as error:
                if error.status < registry.INTERNAL.status:
                    break  # nobody will have it migrate: it goes on here, as any other
            except UnreachableError:
                pass
            await node.sleep(PAUSE_MS)
        job.group = ""
        proceed()

    async def _is_whole(self, name: str) -> bool:
        """Raises KvspError, UnreachableError."""
        node, version = self._node, self.member.rules.version(name)
        shards = self.member.shards(name, version)
        ranges: list[Range] = []
        for shard in shards[:-1]:
            other = node.placement.instances[shard.instance]
            try:
                ranges += await node.network.call(node, other, partial(_attend, other, name, version))
            except KvspError as error:
                if error.problem is registry.PLAN_CONFLICT and self.member.rules.version(name) == version:
                    # It has committed what is prepared here, so that is what was decided.
                    node.checker.commits(node, name, version + 1)
                    self.member.decide(ReshardRequest(map=name, commit=version + 1))
                raise
        if self.member.rules.version(name) != version:
            return False  # of two versions
        own = self.member.rules.held(name)
        whole = reshard.merged([*ranges, *own])
        node.checker.need(whole == [(0, own[-1][1])], node, "attends to", whole, "of", name, version)
        node.kernel.count("attended")
        return True


def _read(source: InstanceNode, name: str, tokens: Range) -> Coroutine[Any, Any, None]:
    return source.groups.read(name, tokens)  # of the life that it is in when the call arrives


def _attend(other: InstanceNode, name: str, version: int) -> Coroutine[Any, Any, list[Range]]:
    return other.groups.attend(name, version)
