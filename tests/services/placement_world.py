"""A real controller with a real index and stub instances, each a gRPC server on a Unix socket of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from msgspec import structs

from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.protocol.records import (
    DirectiveStatus,
    InstanceStatus,
    PrefetchDirective,
    ReshardRequest,
    ResumeRequest,
    SessionCheckpoint,
)
from kvsp.protocol.reshard import GroupContext
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import Party, Peer
from kvsp.rpc.convert import (
    checkpoint_from_message,
    checkpoint_to_message,
    directive_from_message,
    directive_status_to_message,
    replica_to_message,
    reshard_from_message,
    status_to_message,
)
from kvsp.rpc.convert_groups import context_from_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import caller, speak_for
from kvsp.v1 import (
    common_pb2,
    index_pb2,
    index_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from services.index import server as index_server
from services.index.config import IndexConfig
from services.index.state import IndexState
from services.placement.config import PlacementConfig
from services.placement.controller import Controller
from services.placement.server import PlacementServicer, controlling, register
from tests.services import index_records
from tests.services.placement_records import (
    H1,
    OTHER_SCOPE,
    PROMPT_TOKENS,
    SCOPE,
    A,
    B,
    C,
    checkpoint,
    session_id,
    status,
)
from tests.services.rpc import served

TIMEOUT_S = 10


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what nothing tells of."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


TTL_MS = status().ttl_ms


def identity(name: str, role: str, *scopes: str, base_uri: str = "") -> str:
    uris = f'base_uris = ["{base_uri}"]\n' if base_uri else ""
    quoted = ", ".join(f'"{scope}"' for scope in scopes)
    return f'[identities."spiffe://t/{name}"]\nroles = ["{role}"]\n{uris}scopes = [{quoted}]\n'


POLICY = (
    identity("is", "index")
    + identity("pc", "placement", SCOPE, OTHER_SCOPE)
    + identity("h1", "holder", SCOPE, OTHER_SCOPE, base_uri=H1)
    + identity("ii1", "instance", SCOPE, base_uri=A)
    + identity("ii2", "instance", SCOPE, base_uri=B)
    + identity("ii3", "instance", OTHER_SCOPE, base_uri=C)
    + identity("bare", "instance", SCOPE)
    + identity("fe", "frontend", SCOPE)
    + identity("fe2", "frontend", SCOPE, OTHER_SCOPE)
    + identity("client", "client", SCOPE, OTHER_SCOPE)
)
NAMES = {A: "ii1", B: "ii2", C: "ii3"}


class StubInstance(instance_pb2_grpc.InstanceServicer):
    """Takes what it is told and remembers it; `refusals` are raised first, one a call."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state = "active"
        self.refusals: list[KvspError] = []
        self.resumes: list[ResumeRequest] = []
        self.directives: list[PrefetchDirective] = []
        self.asked: list[str] = []
        self.joined: list[GroupContext] = []
        self.left: list[str] = []
        self.reshards: list[ReshardRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.changed = asyncio.Condition()

    async def Prefetch(
        self, request: instance_pb2.PrefetchDirective, context: Any
    ) -> instance_pb2.DirectiveStatus:
        await self._begin(context)
        self.directives.append(directive_from_message(request))
        await self._end()
        return directive_status_to_message(DirectiveStatus(request.directive, "pending", []))

    async def GetDirective(
        self, request: instance_pb2.GetDirectiveRequest, context: Any
    ) -> instance_pb2.DirectiveStatus:
        await self._begin(context)
        self.asked.append(request.directive)
        await self._end()
        return directive_status_to_message(DirectiveStatus(request.directive, "complete", []))

    async def Resume(self, request: instance_pb2.ResumeRequest, context: Any) -> instance_pb2.ResumeReply:
        await self._begin(context)
        made = ResumeRequest(request.epoch, checkpoint_from_message(request.checkpoint))
        assert made.checkpoint.session == request.session
        self.resumes.append(made)
        await self._end()
        return instance_pb2.ResumeReply(
            session=request.session, epoch=request.epoch, output_offset=made.checkpoint.output_offset
        )

    async def PutState(self, request: common_pb2.StateChange, context: Any) -> common_pb2.StateChange:
        await self._begin(context)
        self.state = request.state
        await self._end()
        return common_pb2.StateChange(state=self.state)

    async def JoinGroup(self, request: instance_pb2.GroupContext, context: Any) -> instance_pb2.JoinGroupReply:
        await self._begin(context)
        self.joined.append(context_from_message(request))
        await self._end()
        return instance_pb2.JoinGroupReply()

    async def LeaveGroup(self, request: common_pb2.GroupName, context: Any) -> instance_pb2.LeaveGroupReply:
        await self._begin(context)
        self.left.append(request.map)
        await self._end()
        return instance_pb2.LeaveGroupReply()

    async def Reshard(self, request: instance_pb2.ReshardRequest, context: Any) -> instance_pb2.ReshardReply:
        await self._begin(context)
        self.reshards.append(reshard_from_message(request))
        await self._end()
        return instance_pb2.ReshardReply(map=request.map)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until something that it was told makes this true."""
        async with asyncio.timeout(TIMEOUT_S), self.changed:
            await self.changed.wait_for(condition)

    async def _begin(self, context: Any) -> None:
        self.policy.require_role(caller(context, self.policy), {"placement"})
        await self.gate.wait()
        if self.refusals:
            raise self.refusals.pop(0)

    async def _end(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class World:
    """All of it; methods speak for a named identity and raise KvspError."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.policy = Policy.load(POLICY)
        self.index = IndexState(block_tokens={})
        self.instances = {uri: StubInstance(self.policy) for uri in NAMES}
        made = PlacementConfig(
            listen=f"unix:{folder}/pc.sock",
            principal="spiffe://t/pc",
            policy="",
            state_dir=str(folder / "state"),
            index=Peer(f"unix:{folder}/is.sock"),
            instances=tuple(Party(uri, f"unix:{folder}/{name}.sock") for uri, name in NAMES.items()),
        )
        self.config = structs.replace(made, **config)
        self.controller: Controller
        self.failures: list[asyncio.Task[Any]] = []

    async def serve_others(self, stack: AsyncExitStack) -> None:
        config = IndexConfig(listen=f"unix:{self.folder}/is.sock", principal="spiffe://t/is", policy="")
        servicer = index_server.IndexServicer(config, self.policy, self.index)
        await stack.enter_async_context(
            served(config.listen, lambda grpc_server: index_server.register(grpc_server, servicer, self.policy))
        )
        stack.callback(servicer.draining.set)
        for uri, name in NAMES.items():
            await stack.enter_async_context(served(f"unix:{self.folder}/{name}.sock", self._adds(uri)))

    def _adds(self, uri: str) -> Callable[[grpc.aio.Server], None]:
        return lambda target: instance_pb2_grpc.add_InstanceServicer_to_server(self.instances[uri], target)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[World]:
        """The controller; leaving is like kill -9, but for what is on its way to the disk."""
        async with AsyncExitStack() as stack:
            self.controller = await stack.enter_async_context(
                controlling(self.config, self.policy, on_failure=self._failed)
            )
            servicer = PlacementServicer(self.config.principal, self.policy, self.controller)
            await stack.enter_async_context(
                served(self.config.listen, lambda target: register(target, servicer, self.policy))
            )
            channel = await stack.enter_async_context(open_channel(self.config.listen))
            self.stub: Any = placement_pb2_grpc.PlacementStub(channel)
            stack.push_async_callback(servicer.drain)
            yield self

    def _failed(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task)

    async def call(self, method: str, name: str, request: Any) -> Any:
        async with translated():
            return await getattr(self.stub, method)(
                request, metadata=speak_for(f"spiffe://t/{name}"), timeout=TIMEOUT_S
            )

    def stream(self, method: str, name: str, request: Any) -> Any:
        return getattr(self.stub, method)(request, metadata=speak_for(f"spiffe://t/{name}"), timeout=TIMEOUT_S)

    async def report(self, made: InstanceStatus, name: str = "", instance_id: str = "") -> str:
        if made.ttl_ms == TTL_MS:  # of tests on a virtual clock; this one is real, and the machine may be busy
            made = structs.replace(made, ttl_ms=60_000)
        request = placement_pb2.PutStatusRequest(
            instance_id=instance_id or party_id(made.instance), status=status_to_message(made)
        )
        reply = await self.call("PutStatus", name or NAMES[made.instance], request)
        assert isinstance(reply.state, str)
        return reply.state

    async def put(
        self, name: str, made: SessionCheckpoint, session: str = "", **changes: Any
    ) -> tuple[bool, int, int]:
        """`changes` are of the message, which may thus say what no record can."""
        message = checkpoint_to_message(made)
        for member, value in changes.items():
            setattr(message, member, value)
        request = placement_pb2.PutCheckpointRequest(session=session or made.session, checkpoint=message)
        reply = await self.call("PutCheckpoint", name, request)
        return reply.created, reply.epoch, reply.output_offset

    async def assign(self, session: int = 1, name: str = "fe", tokens: int = 0, **changes: Any) -> Any:
        start = checkpoint_to_message(checkpoint(session, 0, 0, **changes))
        request = placement_pb2.AssignRequest(start=start, prompt_tokens=tokens or PROMPT_TOKENS)
        return await self.call("Assign", name, request)

    def follow(self, session: int = 1, name: str = "fe") -> Any:
        return self.stream("Follow", name, placement_pb2.SessionName(session=session_id(session)))

    async def end(self, session: int = 1, name: str = "fe") -> None:
        await self.call("EndSession", name, placement_pb2.SessionName(session=session_id(session)))

    async def order(self, instance: str, state: str, name: str = "pc") -> str:
        request = placement_pb2.SetInstanceStateRequest(instance=instance, state=state)
        reply = await self.call("SetInstanceState", name, request)
        assert isinstance(reply.state, str)
        return reply.state

    async def reset_epoch(self, instance: str, name: str = "pc") -> int:
        request = placement_pb2.ResetInstanceEpochRequest(instance=instance)
        reply = await self.call("ResetInstanceEpoch", name, request)
        assert isinstance(reply.epoch, int)
        return reply.epoch

    async def publish(self, block: int, holder: str = H1) -> None:
        """A replica of block `block` of every prompt, at the index."""
        record = index_records.record(block, holder, block_key=f"{block:064x}", size=1000, ttl_ms=600_000)
        request = index_pb2.PutReplicaRequest(
            holder_id=party_id(holder),
            block_key=bytes.fromhex(record.block_key),
            record=replica_to_message(record),
        )
        name = {H1: "h1", **NAMES}[holder]
        async with open_channel(f"unix:{self.folder}/is.sock") as channel, translated():
            stub = index_pb2_grpc.IndexStub(channel)
            await stub.PutReplica(request, metadata=speak_for(f"spiffe://t/{name}"), timeout=TIMEOUT_S)


@asynccontextmanager
async def world(folder: Path, **config: Any) -> AsyncIterator[World]:
    """A controller that serves, with all it talks to."""
    made = World(folder, **config)
    async with AsyncExitStack() as stack:
        await made.serve_others(stack)
        async with made.serve():
            yield made
    assert made.failures == []
