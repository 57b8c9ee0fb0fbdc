"""The Instance role: `run(config)`, and its gRPC service."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog

from kvsp.protocol import access, keys, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.names import normal_uuid
from kvsp.protocol.policy import FRONTEND, Identity, Policy
from kvsp.protocol.records import ResumeRequest
from kvsp.rpc import convert, server
from kvsp.rpc.authority import Authority
from kvsp.rpc.channel import channel_to
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import ConfigError, load, load_policy, load_scope_keys
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, common_pb2_grpc, instance_pb2, instance_pb2_grpc
from services.instance import loading, sampling
from services.instance.config import InstanceConfig, check_identity, check_model, check_parties
from services.instance.controller import Controller, HttpsController, InternalController
from services.instance.directory import Directory
from services.instance.engine import Engine
from services.instance.epoch import next_epoch
from services.instance.group_blocks import GroupBlocks
from services.instance.group_links import Stubs
from services.instance.group_service import Context, GroupService
from services.instance.groups import Groups
from services.instance.host import Host, Schedule
from services.instance.loading import Holders, Loading
from services.instance.memory import positions_in
from services.instance.sessions import Output
from services.instance.settings import Settings
from services.instance.state import InstanceState
from services.instance.tiers import TierNews

if TYPE_CHECKING:
    from services.instance.sharding import Sharding

SERVICES: Final = ("kvsp.v1.Instance", "kvsp.v1.Authority")

PREFETCH: Final = access.find("POST", "prefetch")
DIRECTIVE: Final = access.find("GET", "prefetch/{directive}")
RESUME: Final = access.find("POST", "sessions/{session}/resume")
PUT_STATE: Final = access.find("PUT", "state")

log = structlog.get_logger()


class InstanceService(GroupService):
    """Authorizes callers and translates messages; `Host` does the work. "Only the PC" directs (R-210)."""

    async def Prefetch(  # noqa: N802 - the names are the RPCs'
        self, request: instance_pb2.PrefetchDirective, context: Context
    ) -> instance_pb2.DirectiveStatus:
        """Accept a prefetch directive."""
        identity = self._caller(context)
        access.authorize(self._policy, identity, PREFETCH)
        directive = convert.directive_from_message(request)
        self._policy.require_scope(identity, directive.scope_id)
        return convert.directive_status_to_message(self._host.prefetch(directive))

    async def GetDirective(  # noqa: N802
        self, request: instance_pb2.GetDirectiveRequest, context: Context
    ) -> instance_pb2.DirectiveStatus:
        """How far a directive is."""
        access.authorize(self._policy, self._caller(context), DIRECTIVE)
        with suppress(ValueError):  # a malformed id names no directive (U-05)
            found = self._host.state.directive(normal_uuid(request.directive))
            return convert.directive_status_to_message(found)
        raise KvspError(registry.NOT_FOUND, "no such directive")

    async def Resume(  # noqa: N802
        self, request: instance_pb2.ResumeRequest, context: Context
    ) -> instance_pb2.ResumeReply:
        """Continue a session from its checkpoint."""
        identity = self._caller(context)
        access.authorize(self._policy, identity, RESUME)
        checkpoint = convert.checkpoint_from_message(request.checkpoint)
        # "checkpoint.epoch >= epoch, or session != path -> 400" (U-35)
        if request.session.lower() != checkpoint.session:
            raise bad_request("the checkpoint is another session's")
        try:
            resume = ResumeRequest(request.epoch, checkpoint)
        except ValueError as error:
            raise bad_request(str(error)) from None
        sampling.parse(checkpoint.sampler)
        self._policy.require_scope(identity, checkpoint.scope_id)
        reply = self._host.resume(resume)
        return instance_pb2.ResumeReply(
            session=reply.session, epoch=reply.epoch, output_offset=reply.output_offset
        )

    async def PutState(  # noqa: N802
        self, request: common_pb2.StateChange, context: Context
    ) -> common_pb2.StateChange:
        """Change the lifecycle state."""
        access.authorize(self._policy, self._caller(context), PUT_STATE)
        if request.state not in registry.INSTANCE_STATES:
            raise bad_request("unknown state")
        return common_pb2.StateChange(state=self._host.put_state(request.state))

    async def Generate(  # noqa: N802
        self, request: instance_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[instance_pb2.GenerateEvent]:
        """Start a session or attach to it, and follow its output."""
        identity = self._caller(context)
        self._policy.require_role(identity, FRONTEND)
        session, sampler = convert.session_id(request.session), convert.sampler_from_message(request.sampler)
        sampling.parse(sampler)
        self._policy.require_scope(identity, request.scope_id.hex())
        self._host.generate(
            session=session,
            epoch=request.epoch,
            from_index=request.from_index,
            scope_id=request.scope_id.hex(),
            compat_id=request.compat_id.hex(),
            prompt=list(request.prompt),
            sampler=sampler,
        )
        index, has_reused = request.from_index, False
        async for output in self._host.outputs(session, request.epoch, index):
            for event in _events(request.epoch, index, output, has_reused=has_reused):
                yield event
            index += len(output.tokens)
            has_reused = has_reused or output.cached_tokens is not None

    async def EndGeneration(  # noqa: N802
        self, request: instance_pb2.EndGenerationRequest, context: Context
    ) -> instance_pb2.EndGenerationReply:
        """Nobody waits for the session any more."""
        identity = self._caller(context)
        self._policy.require_role(identity, FRONTEND)
        await self._host.end(convert.session_id(request.session), identity.scopes)
        return instance_pb2.EndGenerationReply()


def _events(epoch: int, index: int, output: Output, *, has_reused: bool) -> list[instance_pb2.GenerateEvent]:
    """Output as it travels: "each output token carries (index, session epoch)" (R-177)."""
    events: list[instance_pb2.GenerateEvent] = []
    if output.cached_tokens is not None and not has_reused:
        reused = instance_pb2.Reused(prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens)
        events.append(instance_pb2.GenerateEvent(epoch=epoch, reused=reused))
    if output.tokens:
        tokens = instance_pb2.Tokens(first_index=index, tokens=output.tokens)
        events.append(instance_pb2.GenerateEvent(epoch=epoch, tokens=tokens))
    if output.ended is not None:
        finished = instance_pb2.Finished(reason=output.ended.reason, output_tokens=output.ended.output_tokens)
        events.append(instance_pb2.GenerateEvent(epoch=epoch, finished=finished))
    return events


def register(target: grpc.aio.Server, host: Host, policy: Policy) -> None:
    """Add the services of the role to a server."""
    instance_pb2_grpc.add_InstanceServicer_to_server(InstanceService(host, policy), target)
    common_pb2_grpc.add_AuthorityServicer_to_server(Authority(policy), target)


@asynccontextmanager
async def hosted(
    config: InstanceConfig,
    policy: Policy,
    engine: Engine[Any],
    schedule: Schedule,
    news: TierNews,
    *,
    sharding: Sharding | None = None,
) -> AsyncIterator[Host]:
    """A host at work around an engine, whose device tier tells its changes to `news`. Raises ConfigError.

    Without `sharding` it is a member of no parallel group.
    """
    identity = check_identity(config, policy)
    check_parties(config, policy)
    scopes = _scopes(config, identity)
    settings = _settings(config, engine, next_epoch(Path(config.state_dir), time.time_ns() // 1_000_000))
    async with AsyncExitStack() as stack:
        workers = stack.enter_context(loading.hash_workers())
        holders = await stack.enter_async_context(loading.holders_of(config, policy, engine.descriptor))
        directory = await _directory(stack, config, engine, holders)
        made = Loading(
            config, holders, directory, workers,
            descriptor=engine.descriptor, compat_id=settings.compat_id, device=engine.device, news=news,
        )  # fmt: skip
        controller = await _controller(stack, config, policy)
        state = InstanceState(settings, scopes, holders.sources, now_ms())
        blocks = GroupBlocks(
            holders, directory, workers, made.store,
            descriptor=engine.descriptor, compat_id=settings.compat_id, parallel=config.parallel,
        )  # fmt: skip
        groups = Groups(
            state, scopes, sharding, blocks,
            stubs=await _instances(stack, config), metadata=speak_for(config.principal),
            descriptor=engine.descriptor, octets_max=config.group_octets,
        )  # fmt: skip
        host = Host(state, engine, made, controller, schedule, groups=groups)
        running = asyncio.create_task(host.run())
        running.add_done_callback(server.stop_if_failed)
        try:
            yield host
        finally:
            await host.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _settings(config: InstanceConfig, engine: Engine[Any], epoch: int) -> Settings:
    return Settings(
        base_uri=config.base_uri,
        epoch=epoch,
        compat_id=engine.compat_id.hex(),
        block_tokens=engine.descriptor.block_tokens,
        positions_max=min(engine.positions_max, positions_in(config.kv_octets, engine.descriptor)),
        batch_invariant=engine.batch_invariant,
        batch_size=config.batch_size,
        queue_max=config.queue_max,
        status_ttl_ms=config.status_ttl_ms,
        sleep_after_ms=config.sleep_after_ms,
        keep_output_ms=config.keep_output_ms,
        prompt_wait_ms=config.prompt_wait_ms,
    )


def _scopes(config: InstanceConfig, identity: Identity) -> dict[str, ScopeKey]:
    """The scope keys by scope id. Raises ConfigError for one that the policy does not let this instance have."""
    scopes = {keys.scope_id(key).hex(): key for key in load_scope_keys(config.scopes).values()}
    if scopes.keys() - identity.scopes:
        raise ConfigError(f"{config.policy}: {config.principal} has a key of a scope that is not its own")
    return scopes


async def _instances(stack: AsyncExitStack, config: InstanceConfig) -> Stubs:
    """The instances that a context may be shared with. Raises ConfigError."""
    stubs: dict[str, instance_pb2_grpc.InstanceAsyncStub] = {}
    for party in config.instances:
        assert party.peer is not None  # noqa: S101  (check_parties)
        channel = await stack.enter_async_context(channel_to(party.base_uri, party.peer))
        stubs[party.base_uri] = instance_pb2_grpc.InstanceStub(channel)
    return stubs


async def _directory(
    stack: AsyncExitStack, config: InstanceConfig, engine: Engine[Any], holders: Holders
) -> Directory:
    channel = await stack.enter_async_context(channel_to("index", config.index))
    client = loading.lookups(config.index, channel)
    stack.push_async_callback(client.close)
    return Directory(
        channel, client, config.principal,
        compat_id=engine.compat_id.hex(), descriptor=engine.descriptor, holders=holders.usable,
    )  # fmt: skip


async def _controller(stack: AsyncExitStack, config: InstanceConfig, policy: Policy) -> Controller:
    peer = config.placement.peer
    if peer is None:
        client = await stack.enter_async_context(loading.https_client(config, policy))
        return HttpsController(client)
    channel = await stack.enter_async_context(channel_to("placement", peer))
    return InternalController(channel, config.principal)


async def serve(config: InstanceConfig) -> None:
    """Run the instance until a signal. Raises ConfigError."""
    policy = load_policy(config.policy)
    check_identity(config, policy)
    check_model(config)
    made = server.make_server(config, SERVICES)  # first: refuses when this instance already runs
    # Torch takes seconds to import and a gigabyte to hold: only where an engine runs.
    from services.instance.scheduler import Scheduler

    news = TierNews()
    engine = await asyncio.to_thread(_load, config, news)
    schedule = partial(Scheduler, engine, batch_size=config.batch_size, kv_octets=config.kv_octets)
    sharding = await asyncio.to_thread(_sharding, config, engine)
    async with hosted(config, policy, engine, schedule, news, sharding=sharding) as host:
        watching = asyncio.create_task(_stop_when_failed(host))

        async def drain() -> None:
            watching.cancel()
            await host.leave()

        register(made.grpc, host, policy)
        await server.serve(made, drain)


def _load(config: InstanceConfig, news: TierNews) -> Engine[Any]:
    from services.instance.torch_engine import load_engine

    try:
        return load_engine(
            Path(config.model),
            block_tokens=config.block_tokens,
            threads=config.threads,
            batch_invariant=config.batch_invariant,
            chunk_tokens=config.chunk_tokens,
            device_octets=config.device_octets,
            device_layers=config.device_layers,
            device_changed=news.changed,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"model {config.model}: {error}") from None


def _sharding(config: InstanceConfig, engine: Engine[Any]) -> Sharding | None:
    """None without others to share a context with, or with a model that cannot be sharded, as a trial shows."""
    from services.instance.sharding import Sharding

    return Sharding(engine) if config.instances and engine.can_shard else None


async def _stop_when_failed(host: Host) -> None:
    """A failed instance stays so (R-110): a restart makes a new one."""
    await host.failed.wait()
    log.critical("the instance has failed, or a later start of it is known")
    signal.raise_signal(signal.SIGTERM)


def run(config: Path) -> int:
    """`kvspd serve instance`. Returns the exit code; an unusable config is one line on stderr."""
    return server.run(config, lambda path: load(path, InstanceConfig), serve)
