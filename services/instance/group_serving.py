"""What this instance computes for the homes of other groups: its part of a prefill, and attention."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.reshard import Range, common
from kvsp.rpc.clock import now_ms
from kvsp.v1 import instance_pb2
from services.instance.group_member import PREFILL_S, Member, Peers, outcome, settle
from services.instance.groups import Groups

ATTEND_THREADS: Final = 4


class GroupServing:
    """Raises KvspError as said."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._workers = ThreadPoolExecutor(ATTEND_THREADS, "kvsp-attend")

    async def close(self) -> None:
        """Wait for what is being computed."""
        await asyncio.to_thread(self._workers.shutdown)

    async def compute(self, member: Member, version: int, tokens: Range, ids: Sequence[int]) -> None:
        """Compute a range of the first version; a repeated call waits for the first.

        Raises KvspError: 400, 409 kvsp-plan-conflict, 503 another member does not answer.
        """
        if member.view[0] != version or tokens not in member.view[1] or member.at_home:
            raise KvspError(registry.PLAN_CONFLICT, "the range is not held here")
        member.used_ms = now_ms()
        if member.computed is None:
            self._compute(member, tokens, ids)
        if member.computed is not None:
            await asyncio.shield(member.computed)

    def _compute(self, member: Member, tokens: Range, ids: Sequence[int]) -> None:
        sharding = self._groups.sharding
        if sharding is None:
            raise unavailable("this instance shares no contexts")
        member.context.check_ids(tokens, ids)
        computed = outcome()

        def done(is_whole: bool) -> None:
            settle(computed, None if is_whole else unavailable("the range could not be computed"))
            if is_whole:
                self._groups.publish(member, tokens)

        peers = Peers(member, self._groups.learned)
        member.run = sharding.member(member.store, peers, tokens, ids, done=done)
        member.computed = computed

    async def attend(self, member: Member, request: instance_pb2.AttendRequest) -> instance_pb2.AttendReply:
        """Attention of queries over what is held here, as soon as the layer is there.

        Raises KvspError: 400, 409 kvsp-plan-conflict a later version is authoritative, 404, 503.
        """
        sharding = self._groups.sharding
        if sharding is None:
            raise unavailable("this instance shares no contexts")
        sharding.check(request)
        member.used_ms = now_ms()
        ranges = common(self._groups.serves(member, request.version), [(0, request.before)])
        try:
            await self._wait(member, request.layer, ranges)
            attend = partial(sharding.attend, member.store, ranges, request)
            return await asyncio.get_running_loop().run_in_executor(self._workers, attend)
        except LookupError:  # released meanwhile
            self._groups.serves(member, request.version)
            raise unavailable("the ranges are not held any more") from None

    async def _wait(self, member: Member, layer: int, ranges: Sequence[Range]) -> None:
        """Not on a thread: groups that wait for each other must not find all threads taken by waiting."""
        try:
            async with asyncio.timeout(PREFILL_S):
                while not member.store.ready(layer, ranges):
                    member.advanced.clear()
                    await member.advanced.wait()
                    if self._groups.find(member.name) is not member:
                        raise KvspError(registry.NOT_FOUND, "no such group")
        except TimeoutError:
            raise unavailable("the layer was not computed in time") from None
