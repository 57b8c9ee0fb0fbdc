"""The Placement Controller over gRPC: authorizes, converts, asks the state, answers when it is on disk."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import prometheus_client
import structlog

from kvsp.protocol import access, keys, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import FRONTEND, Policy
from kvsp.protocol.records import ShardMap
from kvsp.rpc import server
from kvsp.rpc.authority import Authority
from kvsp.rpc.channel import channel_to
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import ConfigError, load, load_descriptors, load_policy, load_scope_keys
from kvsp.rpc.convert import checkpoint_from_message, session_id, status_from_message, status_to_message
from kvsp.rpc.convert_groups import shards_to_messages
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2, common_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.placement import metrics
from services.placement.config import PlacementConfig, check_config
from services.placement.controller import Controller
from services.placement.cost import Candidate
from services.placement.followers import Followers
from services.placement.instances import Instances
from services.placement.instructions import Binding
from services.placement.journal import Journal
from services.placement.state import Assignment, PlacementState
from services.placement.store import SqliteStore, StoreError

SERVICES: Final = ("kvsp.v1.Placement", "kvsp.v1.Authority")
CHECKPOINT: Final = access.find("PUT", "sessions/{session}/checkpoint")
STORE_NAME: Final = "placement.sqlite"
WATCH_S: Final = 1.0
FAR_MS: Final = 86_400_000
"""An epoch further beyond now than this is no start time: it may lock its instance out for good (D12)."""

Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger()


class PlacementServicer(placement_pb2_grpc.PlacementServicer):
    """proto/kvsp/v1/placement.proto; the duties and errors of each method are stated there."""

    def __init__(self, principal: str, policy: Policy, controller: Controller) -> None:
        self.draining = asyncio.Event()
        self._principal = principal
        self._policy = policy
        self._controller = controller
        self._state = controller.state

    async def PutStatus(  # noqa: N802
        self, request: placement_pb2.PutStatusRequest, context: Context
    ) -> common_pb2.StateChange:
        """An instance reports."""
        identity = caller(context, self._policy)
        access.authorize(self._policy, identity, access.STATUS, party_id=request.instance_id)
        status = status_from_message(request.status)
        if party_id(status.instance) != request.instance_id:
            raise bad_request("instance is not that of the path")
        # "alarm on epochs far beyond now in ms ..., but do not refuse" (D12)
        if status.epoch > 1000 * time.time() + FAR_MS:
            metrics.FAR_EPOCHS.inc()
            log.warning("epoch far beyond now", instance=status.instance, epoch=status.epoch)
        return common_pb2.StateChange(
            state=await self._controller.event(lambda now: self._state.status(status, now))
        )

    async def PutCheckpoint(  # noqa: N802
        self, request: placement_pb2.PutCheckpointRequest, context: Context
    ) -> placement_pb2.PutCheckpointReply:
        """Record a checkpoint; in the order of checks, what the path and the body say comes before the scope."""
        identity = caller(context, self._policy)
        access.authorize(self._policy, identity, CHECKPOINT)
        checkpoint = checkpoint_from_message(request.checkpoint)
        if session_id(request.session) != checkpoint.session:
            raise bad_request("session is not that of the path")
        self._state.check_bounds(checkpoint)
        self._policy.require_scope(identity, checkpoint.scope_id)
        if not identity.base_uris:
            raise KvspError(registry.FORBIDDEN, "an identity without base URI is no instance")
        created, reply = await self._controller.event(
            lambda now: self._state.checkpoint(identity.base_uris, checkpoint, now)
        )
        return placement_pb2.PutCheckpointReply(
            created=created, epoch=reply.epoch, output_offset=reply.output_offset
        )

    async def Assign(  # noqa: N802
        self, request: placement_pb2.AssignRequest, context: Context
    ) -> placement_pb2.AssignReply:
        """Look up, choose, persist, answer; the prefetch directive is on its way then."""
        identity = caller(context, self._policy)
        self._policy.require_role(identity, FRONTEND)
        start = checkpoint_from_message(request.start)
        self._state.check_start(start, request.prompt_tokens)
        self._policy.require_scope(identity, start.scope_id)
        # Before the lookup, so that a flood of what is refused anyway costs the index nothing (D13).
        self._state.check_assign(identity.uri, start, request.prompt_tokens)
        named = request.start
        runs = await self._controller.survey(named.scope_id, named.compat_id, named.prompt_blocks)
        made = await self._controller.event(
            lambda now: self._state.assign(identity.uri, start, request.prompt_tokens, runs, now)
        )
        metrics.COST_SECONDS.observe((made.candidates[0].cost_us or 0) / 1e6)
        members = await self._controller.members.formed(made.binding.session)
        return _assigned(made, members)

    async def Follow(  # noqa: N802
        self, request: placement_pb2.SessionName, context: Context
    ) -> AsyncIterator[placement_pb2.Binding]:
        """The bindings of a session, until it ends."""
        identity = caller(context, self._policy)
        self._policy.require_role(identity, FRONTEND)
        session = session_id(request.session)
        self._state.binding(identity.uri, session)  # refuses strangers before anything is kept for them
        with self._controller.followers.follow(session) as follower:
            binding = await self._controller.event(lambda _: self._state.binding(identity.uri, session))
            await self._controller.members.formed(session)  # before that, its instance may not begin
            if binding is not None:
                follower.tell(binding)
            async for each in follower.bindings():
                yield _binding(each)

    async def EndSession(  # noqa: N802
        self, request: placement_pb2.SessionName, context: Context
    ) -> placement_pb2.EndSessionReply:
        """Forget a session."""
        identity = caller(context, self._policy)
        self._policy.require_role(identity, FRONTEND)
        session = session_id(request.session)
        await self._controller.event(lambda now: self._state.end(identity.uri, session, now))
        return placement_pb2.EndSessionReply()

    async def SetInstanceState(  # noqa: N802
        self, request: placement_pb2.SetInstanceStateRequest, context: Context
    ) -> common_pb2.StateChange:
        """Drain or wake."""
        self._require_operator(context)
        return common_pb2.StateChange(state=await self._controller.order(request.instance, request.state))

    async def ResetInstanceEpoch(  # noqa: N802
        self, request: placement_pb2.ResetInstanceEpochRequest, context: Context
    ) -> placement_pb2.ResetInstanceEpochReply:
        """Take an instance back that a record with an absurd epoch has locked out (D12)."""
        operator = self._require_operator(context)
        instance = request.instance
        epoch = await self._controller.event(lambda now: self._state.reset_epoch(instance, now))
        log.warning("epoch reset by an operator", operator=operator, instance=instance, epoch=epoch)
        return placement_pb2.ResetInstanceEpochReply(epoch=epoch)

    async def Watch(  # noqa: N802
        self, _: placement_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[placement_pb2.Overview]:
        """What the controller sees, now and once a second."""
        self._require_operator(context)
        while not self.draining.is_set():
            yield self._overview()
            try:
                await asyncio.wait_for(self.draining.wait(), WATCH_S)
            except TimeoutError:
                continue

    async def ResizeGroup(  # noqa: N802
        self, request: placement_pb2.ResizeGroupRequest, context: Context
    ) -> placement_pb2.ShardMapMessage:
        """Shard a context over so many instances."""
        self._require_operator(context)
        members = self._controller.members
        return _shard_map(await members.resize(session_id(request.session), request.members))

    async def LostGroup(  # noqa: N802
        self, request: common_pb2.GroupName, context: Context
    ) -> placement_pb2.LostGroupReply:
        """A member says that the context is not whole any more."""
        identity = caller(context, self._policy)
        self._policy.require_role(identity, {"instance"})
        name = session_id(request.map)
        await self._controller.event(lambda now: self._state.groups.lost(identity.base_uris, name, now))
        return placement_pb2.LostGroupReply()

    async def drain(self) -> None:
        """End the kept streams: their peers come back to the controller's successor."""
        self.draining.set()
        self._controller.followers.close()

    def _require_operator(self, context: Context) -> str:
        uri = caller(context, self._policy).uri
        if uri != self._principal:
            raise KvspError(registry.FORBIDDEN, "only the controller's own identity may do this")
        return uri

    def _overview(self) -> placement_pb2.Overview:
        totals = self._state.totals
        return placement_pb2.Overview(
            instances=[status_to_message(each) for each in self._state.overview()],
            sessions=self._state.sessions,
            assignments=totals.assignments,
            migrations=totals.migrations,
            prompt_tokens=totals.prompt_tokens,
            matched_tokens=totals.matched_tokens,
            checkpoints=totals.checkpoints,
            directives=totals.directives,
            groups=map(_shard_map, self._state.groups),
        )


def _binding(binding: Binding) -> placement_pb2.Binding:
    return placement_pb2.Binding(session=binding.session, epoch=binding.epoch, instance=binding.instance)


def _shard_map(shard_map: ShardMap) -> placement_pb2.ShardMapMessage:
    shards = shards_to_messages(shard_map.shards)
    return placement_pb2.ShardMapMessage(map=shard_map.map, version=shard_map.version, shards=shards)


def _assigned(made: Assignment, members: Sequence[str]) -> placement_pb2.AssignReply:
    return placement_pb2.AssignReply(
        binding=_binding(made.binding),
        matched=made.matched,
        cost_us=made.candidates[0].cost_us or 0,
        candidates=map(_candidate, made.candidates),
        directive=made.directive,
        members=members,
    )


def _candidate(candidate: Candidate) -> placement_pb2.Candidate:
    return placement_pb2.Candidate(
        instance=candidate.instance,
        wait_us=candidate.wait_us,
        fetch_us=candidate.fetch_us,
        recompute_all_us=candidate.recompute_all_us,
        cost_us=candidate.cost_us,
    )


def register(target: grpc.aio.Server, servicer: PlacementServicer, policy: Policy) -> None:
    """Add the services of the role to a server."""
    placement_pb2_grpc.add_PlacementServicer_to_server(servicer, target)
    common_pb2_grpc.add_AuthorityServicer_to_server(Authority(policy), target)


def _serves(config: PlacementConfig, policy: Policy) -> Any:
    """Instances that are directed from here and are trusted with the scope (R-211)."""
    directed = frozenset(peer.base_uri for peer in config.instances)
    by_scope: dict[str, frozenset[str]] = {}

    def serves(scope_id: str, _compat_id: str) -> Collection[str]:
        found = by_scope.get(scope_id)
        if found is None:
            found = directed & policy.trusted_holders(scope_id)
            if found:  # a scope of the policy: of these there are few
                by_scope[scope_id] = found
        return found

    return serves


@asynccontextmanager
async def controlling(
    config: PlacementConfig, policy: Policy, on_failure: Any = server.stop_if_failed
) -> AsyncIterator[Controller]:
    """A controller with what an earlier one has left. Raises ConfigError."""
    descriptors = load_descriptors(config.descriptors)
    scope_keys = {keys.scope_id(key).hex(): key for key in load_scope_keys(config.scopes).values()}
    try:
        store = SqliteStore(Path(config.state_dir) / STORE_NAME)
        rows = store.load()
    except StoreError as error:
        raise ConfigError(f"state_dir: {error}") from None
    journal, followers = Journal(store), Followers()
    try:
        index = channel_to("index", config.index)
        instances = Instances(config.principal, config.instances, config.https)
    except ConfigError:
        journal.close()
        raise
    state = PlacementState(
        config.settings(),
        new_id=lambda: str(uuid.uuid4()),
        block_tokens={compat_id.hex(): each.block_tokens for compat_id, each in descriptors.items()},
        serves=_serves(config, policy),
        is_followed=followers.__contains__,
        rows=rows,
        now_ms=now_ms(),
    )
    controller = Controller(
        config,
        state,
        followers=followers,
        journal=journal,
        instances=instances,
        index=index,
        scope_keys=scope_keys,
        on_failure=on_failure,
    )
    controller.start()
    try:
        yield controller
    finally:
        await controller.close()
        await asyncio.to_thread(journal.close)
        await instances.close()
        await index.close(None)


async def _main(config: PlacementConfig) -> None:
    policy = load_policy(config.policy)
    check_config(config, policy)
    made = server.make_server(config, SERVICES)  # first: refuses when this controller already runs
    async with controlling(config, policy) as controller:
        prometheus_client.REGISTRY.register(metrics.StateCollector(controller.state))
        servicer = PlacementServicer(config.principal, policy, controller)
        register(made.grpc, servicer, policy)
        await server.serve(made, servicer.drain)


def run(config: Path) -> int:
    """`kvspd serve placement`. Returns the exit code; an unusable config is one line on stderr."""
    return server.run(config, lambda path: load(path, PlacementConfig), _main)
