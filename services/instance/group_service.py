"""The RPCs of parallel groups: who may call, and what messages say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from kvsp.protocol import access, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity, Policy
from kvsp.protocol.routes import INSTANCE
from kvsp.rpc import convert, convert_groups
from kvsp.rpc.errors import to_message
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2, instance_pb2, instance_pb2_grpc
from services.instance.group_member import Member
from services.instance.host import Host

RESHARD: Final = access.find("POST", "reshard")

Context = grpc.aio.ServicerContext[Any, Any]


class GroupService(instance_pb2_grpc.InstanceServicer):
    """Only the placement controller makes, changes and ends groups; only a group's instances use it."""

    def __init__(self, host: Host, policy: Policy) -> None:
        self._host = host
        self._policy = policy

    def _caller(self, context: Context) -> Identity:
        return caller(context, self._policy)

    async def Reshard(  # noqa: N802 - the names are the RPCs'
        self, request: instance_pb2.ReshardRequest, context: Context
    ) -> instance_pb2.ReshardReply:
        """Plan, commit or abort the next version of a map."""
        access.authorize(self._policy, self._caller(context), RESHARD)
        plan = request.plan
        if max(len(plan.retain), len(plan.fetch), len(plan.release)) > limits.RESHARD_RANGES_MAX:
            raise KvspError(registry.CONTENT_TOO_LARGE, "too many ranges")
        reply = await self._host.groups.reshard(convert.reshard_from_message(request))
        return convert_groups.reshard_reply_to_message(reply)

    async def JoinGroup(  # noqa: N802
        self, request: instance_pb2.GroupContext, context: Context
    ) -> instance_pb2.JoinGroupReply:
        """Be a member of a group, or learn more of its context."""
        identity = self._caller(context)
        access.authorize(self._policy, identity, RESHARD)
        told = convert_groups.context_from_message(request)
        self._policy.require_scope(identity, told.checkpoint.scope_id)
        self._host.groups.join(told)
        return instance_pb2.JoinGroupReply()

    async def LeaveGroup(  # noqa: N802
        self, request: common_pb2.GroupName, context: Context
    ) -> instance_pb2.LeaveGroupReply:
        """Forget a group."""
        access.authorize(self._policy, self._caller(context), RESHARD)
        self._host.group_runs.leave(convert.session_id(request.map))
        return instance_pb2.LeaveGroupReply()

    async def ComputeShard(  # noqa: N802
        self, request: instance_pb2.ComputeShardRequest, context: Context
    ) -> instance_pb2.ComputeShardReply:
        """Compute a range of the prompt, for the group's home."""
        identity = self._caller(context)
        member = self._member(identity, request.map)
        if member.context.home not in identity.base_uris:
            raise KvspError(registry.FORBIDDEN, "not the home of the group")
        tokens = request.tokens.first, request.tokens.end
        await self._host.serving.compute(member, request.version, tokens, request.ids)
        return instance_pb2.ComputeShardReply()

    async def Attend(  # noqa: N802
        self, request_iterator: AsyncIterator[instance_pb2.AttendRequest], context: Context
    ) -> AsyncIterator[instance_pb2.AttendReply]:
        """Attention over what is held here, one answer a question."""
        identity = self._caller(context)
        self._policy.require_role(identity, INSTANCE)
        name = ""
        async for request in request_iterator:
            if not name:
                name = self._member(identity, request.map).name
                continue
            try:
                yield await self._host.serving.attend(self._member(identity, name), request)
            except KvspError as error:
                yield instance_pb2.AttendReply(problem=to_message(error))

    def _member(self, identity: Identity, name: str) -> Member:
        """A group that names the caller. Raises KvspError: 403, 404 also for those that do not."""
        self._policy.require_role(identity, INSTANCE)
        member = self._host.groups.find(convert.session_id(name))
        if member.context.instances.isdisjoint(identity.base_uris):
            raise KvspError(registry.NOT_FOUND, "no such group")
        return member
