"""The Front end role: `run(config)`, and its gRPC service. The API that it serves is not part of KVSP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from kvsp.protocol.policy import Policy
from kvsp.rpc import server
from kvsp.rpc.channel import channel_to
from kvsp.rpc.config import ConfigError, Peer, load, load_policy
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2, common_pb2_grpc, frontend_pb2, frontend_pb2_grpc
from services.frontend.api import Api
from services.frontend.config import FrontendConfig, check, load_served
from services.frontend.fleet import Fleet
from services.frontend.tokenizer import Tokenizer

SERVICES: Final = ("kvsp.v1.Frontend", "kvsp.v1.Authority")
CALLERS: Final = frozenset({"client", "frontend"})
GRACE_S: Final = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


class FrontendService(frontend_pb2_grpc.FrontendServicer):
    """Authorizes callers and writes what the API answers, as fast as they take it."""

    def __init__(self, policy: Policy, api: Api) -> None:
        self._policy = policy
        self._api = api

    # No generator: where the caller has gone, this is cancelled at once and ends its sessions.
    async def Call(  # type: ignore[override]  # noqa: N802 - the name is the RPC's
        self, request: frontend_pb2.ApiRequest, context: Context
    ) -> None:
        """One OpenAI request."""
        identity = caller(context, self._policy)
        self._policy.require_role(identity, CALLERS)
        async with aclosing(self._api.answer(identity, request)) as parts:
            async for part in parts:
                try:
                    await context.write(part)
                except Exception:
                    if context.done():  # the caller has left; gRPC's error for that has no public name
                        return
                    raise


class FrontendAuthority(common_pb2_grpc.AuthorityServicer):
    """As `Authority`, for an API whose paths are none of the protocol's routes: who may call may use all of it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def Authorize(  # noqa: N802 - the name is the RPC's
        self, request: common_pb2.AuthorizeRequest, context: Context
    ) -> common_pb2.AuthorizeReply:
        """Raise KvspError (403) unless the caller may call."""
        del request
        self._policy.require_role(caller(context, self._policy), CALLERS)
        return common_pb2.AuthorizeReply()


def register(target: grpc.aio.Server, service: FrontendService, policy: Policy) -> None:
    """Add the services of the role to a server."""
    frontend_pb2_grpc.add_FrontendServicer_to_server(service, target)
    common_pb2_grpc.add_AuthorityServicer_to_server(FrontendAuthority(policy), target)


@asynccontextmanager
async def fleet_of(config: FrontendConfig) -> AsyncIterator[Fleet]:
    """The fleet that a config names. Raises ConfigError."""
    async with AsyncExitStack() as stack:

        async def connect(peer: Peer) -> grpc.aio.Channel:
            return await stack.enter_async_context(channel_to(peer.address, peer))

        placement = await connect(config.placement)
        instances = {peer.base_uri: await connect(peer) for peer in config.instances}
        fleet = Fleet(config.principal, placement, instances, config.timing)
        try:
            yield fleet
        finally:
            await fleet.close(GRACE_S)


async def serve(config: FrontendConfig) -> None:
    """Run the front end until a signal. Raises ConfigError."""
    policy = load_policy(config.policy)
    scopes = check(config, policy)
    made = server.make_server(config, SERVICES)  # before what takes long: refuses when this one already runs
    try:
        tokenizer = Tokenizer(Path(config.model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.model}: {error}") from None
    api_of = load_served(config, scopes, tokenizer)
    async with fleet_of(config) as fleet:
        register(made.grpc, FrontendService(policy, Api(api_of, tokenizer, fleet)), policy)
        try:
            await server.serve(made, _nothing)
        finally:
            tokenizer.close()


async def _nothing() -> None:
    """Streams end by themselves, or are cut when the server's grace is over."""


def run(config: Path) -> int:
    """`kvspd serve frontend`. Returns the exit code; an unusable config is one line on stderr."""
    return server.run(config, lambda path: load(path, FrontendConfig), serve)
