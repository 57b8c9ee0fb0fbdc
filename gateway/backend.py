"""The process behind a base URI, and one request on its way there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from gateway.config import RoleConfig
from gateway.exchange import Exchange
from kvsp.bulk.holder import HolderClient
from kvsp.bulk.source import SCHEMES
from kvsp.protocol.errors import KvspError
from kvsp.protocol.routes import Route
from kvsp.rpc.channel import DEFAULT_TIMEOUT_S, open_channel
from kvsp.rpc.errors import translated
from kvsp.rpc.framed import local_socket
from kvsp.rpc.identity import speak_for
from kvsp.rpc.lookup import LookupClient
from kvsp.v1 import (
    common_pb2,
    common_pb2_grpc,
    frontend_pb2_grpc,
    holder_pb2_grpc,
    index_pb2_grpc,
    instance_pb2_grpc,
    placement_pb2_grpc,
)

HOLDER_SERVICE: Final = "kvsp.v1.Holder/"


class Backend:
    """Channels to the processes behind one base URI, and their services.

    They reconnect by themselves; calls meanwhile are 503. Blocks and leases of an instance are served by the
    holder beside it, also while the instance itself is away.
    """

    def __init__(self, config: RoleConfig, schemes: Sequence[str] = SCHEMES) -> None:
        self.role = config.role
        self.path = config.path
        self._channel = open_channel(config.backend.address, config.backend.tls)
        self.authority = common_pb2_grpc.AuthorityStub(self._channel)
        self.index = index_pb2_grpc.IndexStub(self._channel)
        self.lookups = LookupClient(self._channel, local_socket(config.backend.address))
        self.placement = placement_pb2_grpc.PlacementStub(self._channel)
        self.instance = instance_pb2_grpc.InstanceStub(self._channel)
        self.frontend = frontend_pb2_grpc.FrontendStub(self._channel)
        holder = config.blocks or config.backend
        local = local_socket(holder.address)
        self._holder_channel = open_channel(holder.address, holder.tls) if config.blocks else self._channel
        self._holder_authority = common_pb2_grpc.AuthorityStub(self._holder_channel)
        self.holder = holder_pb2_grpc.HolderStub(self._holder_channel)
        self.blocks = HolderClient(self._holder_channel, schemes, same_host=local is not None, local=local)

    def authority_of(self, route: Route) -> common_pb2_grpc.AuthorityAsyncStub:
        """Of the process that serves the route."""
        return self._holder_authority if route.rpc.startswith(HOLDER_SERVICE) else self.authority

    async def close(self) -> None:
        """End everything that is open."""
        await self.blocks.close()
        await self.lookups.close()
        await self._holder_channel.close(None)
        await self._channel.close(None)


@dataclass(slots=True)
class Call:
    """A request that names a resource, from a client with an identity."""

    exchange: Exchange
    backend: Backend
    route: Route
    segments: Mapping[str, str]
    principal: str

    @property
    def rpc(self) -> dict[str, Any]:
        """What every RPC made for this request carries: whom it speaks for, and its deadline."""
        return {"metadata": speak_for(self.principal), "timeout": DEFAULT_TIMEOUT_S}

    async def authorize(self) -> None:
        """Raise KvspError (403) unless the caller may use the route at all."""
        request = common_pb2.AuthorizeRequest(
            method=self.route.method,
            path=self.route.path,
            scope_id=bytes.fromhex(self.segments.get("scope", "")),
            party_id=self.segments.get("holder_id") or self.segments.get("instance_id") or "",
        )
        async with translated():
            await self.backend.authority_of(self.route).Authorize(request, **self.rpc)

    @asynccontextmanager
    async def checking(self) -> AsyncIterator[None]:
        """Around the gateway's own checks: what is wrong is told only to callers that may be here.

        The order of checks puts role and scope first, and services authorize; asking them costs a
        call on this path alone.
        """
        try:
            yield
        except KvspError as error:
            await self.authorize()
            raise error from None
