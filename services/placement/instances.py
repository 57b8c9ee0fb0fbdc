"""The calls to instances: over internal gRPC where one has an address, else over HTTPS (third-party engines)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import grpc

from kvsp.client import AsyncClient, Credentials, Endpoints, Options
from kvsp.protocol.errors import unavailable
from kvsp.protocol.records import DirectiveStatus, PrefetchDirective, ReshardRequest, ResumeRequest
from kvsp.protocol.reshard import GroupContext
from kvsp.rpc.channel import channel_to
from kvsp.rpc.config import Party, Tls
from kvsp.rpc.convert import (
    checkpoint_to_message,
    directive_status_from_message,
    directive_to_message,
    reshard_to_message,
)
from kvsp.rpc.convert_groups import context_to_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, instance_pb2, instance_pb2_grpc

TIMEOUT_S: Final = 10.0
HTTPS_CALLS_MAX: Final = 32


class InstanceCalls(Protocol):
    """What the controller asks of one instance. Every method raises KvspError: the instance's, or 503, 504."""

    async def prefetch(self, directive: PrefetchDirective) -> DirectiveStatus:
        """Load blocks (R-125)."""

    async def directive(self, directive: str) -> DirectiveStatus:
        """How far a directive has come (R-129)."""

    async def resume(self, request: ResumeRequest) -> None:
        """Continue a session; returns once it is admitted (R-179)."""

    async def put_state(self, state: str) -> str:
        """Change state; the one in effect (R-107)."""


class GrpcInstance:
    """An instance at an internal address."""

    def __init__(self, channel: grpc.aio.Channel, principal: str) -> None:
        self._stub = instance_pb2_grpc.InstanceStub(channel)
        self._metadata = speak_for(principal)

    async def prefetch(self, directive: PrefetchDirective) -> DirectiveStatus:
        """See InstanceCalls."""
        message = directive_to_message(directive)
        async with translated():
            reply = await self._stub.Prefetch(message, metadata=self._metadata, timeout=TIMEOUT_S)
        return directive_status_from_message(reply)

    async def directive(self, directive: str) -> DirectiveStatus:
        """See InstanceCalls."""
        message = instance_pb2.GetDirectiveRequest(directive=directive)
        async with translated():
            reply = await self._stub.GetDirective(message, metadata=self._metadata, timeout=TIMEOUT_S)
        return directive_status_from_message(reply)

    async def resume(self, request: ResumeRequest) -> None:
        """See InstanceCalls."""
        message = instance_pb2.ResumeRequest(
            session=request.checkpoint.session,
            epoch=request.epoch,
            checkpoint=checkpoint_to_message(request.checkpoint),
        )
        async with translated():
            await self._stub.Resume(message, metadata=self._metadata, timeout=TIMEOUT_S)

    async def put_state(self, state: str) -> str:
        """See InstanceCalls."""
        message = common_pb2.StateChange(state=state)
        async with translated():
            reply = await self._stub.PutState(message, metadata=self._metadata, timeout=TIMEOUT_S)
        return reply.state

    async def join(self, context: GroupContext, timeout_s: float) -> None:
        """What a member of a group has to know; the instance is one when it returns. Raises KvspError."""
        message = context_to_message(context)
        async with translated():
            await self._stub.JoinGroup(message, metadata=self._metadata, timeout=timeout_s)

    async def leave(self, name: str, timeout_s: float) -> None:
        """The instance is no member of this group any more. Raises KvspError."""
        message = common_pb2.GroupName(map=name)
        async with translated():
            await self._stub.LeaveGroup(message, metadata=self._metadata, timeout=timeout_s)

    async def reshard(self, request: ReshardRequest, timeout_s: float) -> None:
        """A plan, returns once it is acknowledged; a commit or an abort (A15). Raises KvspError."""
        message = reshard_to_message(request)
        async with translated():
            await self._stub.Reshard(message, metadata=self._metadata, timeout=timeout_s)


class HttpsInstance:
    """An instance at its base URI."""

    def __init__(self, client: AsyncClient, base_uri: str) -> None:
        self._client = client
        self._base_uri = base_uri

    async def prefetch(self, directive: PrefetchDirective) -> DirectiveStatus:
        """See InstanceCalls."""
        return await self._client.prefetch(self._base_uri, directive)

    async def directive(self, directive: str) -> DirectiveStatus:
        """See InstanceCalls."""
        return await self._client.directive(self._base_uri, directive)

    async def resume(self, request: ResumeRequest) -> None:
        """See InstanceCalls."""
        await self._client.resume(self._base_uri, request.epoch, request.checkpoint)

    async def put_state(self, state: str) -> str:
        """See InstanceCalls."""
        return await self._client.set_state(self._base_uri, state)


class Instances:
    """The configured instances; no other is ever called (D10). Raises ConfigError for bad files."""

    def __init__(self, principal: str, peers: Iterable[Party], https: Tls | None) -> None:
        self._channels: list[grpc.aio.Channel] = []
        self._calls: dict[str, InstanceCalls] = {}
        self._members: dict[str, GrpcInstance] = {}
        self._client: AsyncClient | None = None
        outside = []
        for each in peers:
            if each.peer is None:
                outside.append(each.base_uri)
                continue
            channel = channel_to(each.base_uri, each.peer)
            self._channels.append(channel)
            self._calls[each.base_uri] = self._members[each.base_uri] = GrpcInstance(channel, principal)
        if outside and https is not None:
            credentials = Credentials(Path(https.ca), Path(https.cert), Path(https.key))
            options = Options(stall_s=TIMEOUT_S, total_s=TIMEOUT_S, pool_size=HTTPS_CALLS_MAX)
            self._client = AsyncClient(credentials, Endpoints(instances=frozenset(outside)), options)
            self._calls |= {base_uri: HttpsInstance(self._client, base_uri) for base_uri in outside}

    def __getitem__(self, base_uri: str) -> InstanceCalls:
        """The calls to an instance. Raises KvspError (503) when none can be made."""
        calls = self._calls.get(base_uri)
        if calls is None:
            raise unavailable("no way to call the instance is configured")
        return calls

    def member(self, base_uri: str) -> GrpcInstance:
        """The calls to a member of a group. Raises KvspError (503) without an internal address."""
        member = self._members.get(base_uri)
        if member is None:
            raise unavailable("no internal address of the instance is configured")
        return member

    async def close(self) -> None:
        """Close all connections."""
        closing = [channel.close(None) for channel in self._channels]
        if self._client is not None:
            closing.append(self._client.close())
        await asyncio.gather(*closing)
