"""The Instance role: `run(config)`, and its gRPC service."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

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
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2, common_pb2_grpc, instance_pb2, instance_pb2_grpc
from services.instance import loading, sampling
from services.instance.config import InstanceConfig, check_identity, check_model, check_parties
from services.instance.controller import Controller, HttpsController, InternalController
from services.instance.directory import Directory
from services.instance.engine import Engine
from services.instance.epoch import next_epoch
from services.instance.host import Host, Schedule
from services.instance.loading import Holders, Loading
from services.instance.sessions import Output
from services.instance.settings import Settings
from services.instance.state import InstanceState
from services.instance.tiers import TierNews

SERVICES: Final = ("kvsp.v1.Instance", "kvsp.v1.Authority")

PREFETCH: Final = access.find("POST", "prefetch")
DIRECTIVE: Final = access.find("GET", "prefetch/{directive}")
RESUME: Final = access.find("POST", "sessions/{session}/resume")
RESHARD: Final = access.find("POST", "reshard")
PUT_STATE: Final = access.find("PUT", "state")

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]


class InstanceService(instance_pb2_grpc.InstanceServicer):
    """Authorizes callers and translates messages; `Host` does the work. "Only the PC" directs (R-210)."""

    def __init__(self, host: Host, policy: Policy) -> None:
        self._host = host
        self._policy = policy

    def _caller(self, context: Context) -> Identity:
        return caller(context, self._policy)

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

    async def Reshard(  # noqa: N802
        self, request: instance_pb2.ReshardRequest, context: Context
    ) -> instance_pb2.ReshardReply:
        """Plan, commit or abort a reshard: this instance is in no parallel group.

        So every map is unknown to it: "commit unprepared/unknown map -> 409 plan-conflict" (U-38), and a plan it
        cannot carry out is refused as one that could not be loaded.
        """
        access.authorize(self._policy, self._caller(context), RESHARD)
        record = convert.reshard_from_message(request)
        if request.WhichOneof("step") == "plan":
            raise KvspError(registry.UNAVAILABLE, f"cannot load for map version {record.new}", retry_after_s=60)
        raise KvspError(registry.PLAN_CONFLICT, "unknown map")

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
    config: InstanceConfig, policy: Policy, engine: Engine[Any], schedule: Schedule, news: TierNews
) -> AsyncIterator[Host]:
    """A host at work around an engine, whose device tier tells its changes to `news`. Raises ConfigError."""
    identity = check_identity(config, policy)
    check_parties(config, policy)
    scopes = _scopes(config, identity)
    settings = _settings(config, engine, next_epoch(Path(config.state_dir), time.time_ns() // 1_000_000))
    async with AsyncExitStack() as stack:
        workers = stack.enter_context(loading.hash_workers())
        holders = await stack.enter_async_context(loading.holders_of(config, policy, engine.descriptor, workers))
        directory = await _directory(stack, config, engine, holders)
        made = Loading(
            config, holders, directory, workers,
            descriptor=engine.descriptor, compat_id=settings.compat_id, device=engine.device, news=news,
        )  # fmt: skip
        controller = await _controller(stack, config, policy)
        host = Host(InstanceState(settings, scopes, holders.sources, now_ms()), engine, made, controller, schedule)
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
        positions_max=engine.positions_max,
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
    schedule = partial(Scheduler, engine, batch_size=config.batch_size)
    async with hosted(config, policy, engine, schedule, news) as host:
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
            device_octets=config.device_octets,
            device_layers=config.device_layers,
            device_changed=news.changed,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"model {config.model}: {error}") from None


async def _stop_when_failed(host: Host) -> None:
    """A failed instance stays so (R-110): a restart makes a new one."""
    await host.failed.wait()
    log.critical("the instance has failed, or a later start of it is known")
    signal.raise_signal(signal.SIGTERM)


def run(config: Path) -> int:
    """`kvspd serve instance`. Returns the exit code; an unusable config is one line on stderr."""
    return server.run(config, lambda path: load(path, InstanceConfig), serve)
