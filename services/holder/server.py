"""The Holder role: `run(config)`, and its gRPC service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from kvsp.bulk.control import refuse_all
from kvsp.protocol import access, limits, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.names import check_token
from kvsp.protocol.policy import Identity, Policy
from kvsp.protocol.records import check_range
from kvsp.rpc import server
from kvsp.rpc.authority import Authority
from kvsp.rpc.channel import channel_to
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import ConfigError, load, load_policy
from kvsp.rpc.convert import split_keys
from kvsp.rpc.framed import local_socket
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2_grpc, holder_pb2, holder_pb2_grpc
from services.holder.blocks import Kept
from services.holder.config import HolderConfig
from services.holder.host import Host
from services.holder.local import local_peers
from services.holder.stream import TransferStream, name_of

SERVICES: Final = ("kvsp.v1.Holder", "kvsp.v1.Authority")

RENEW_LEASE: Final = access.find("PUT", "leases/{lease}")
RELEASE_LEASE: Final = access.find("DELETE", "leases/{lease}")

Context = grpc.aio.ServicerContext[Any, Any]


class HolderService(holder_pb2_grpc.HolderServicer):
    """Authorizes callers and translates messages; `Host` does the work."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def _caller(self, context: Context) -> Identity:
        return caller(context, self._host.policy)

    # Both sides write when they have something, so this is no generator; grpc.aio takes either.
    async def Transfer(  # type: ignore[override]  # noqa: N802 - the names are the RPCs'
        self, request_iterator: AsyncIterator[holder_pb2.TransferRequest], context: Context
    ) -> None:
        """The kept control stream of one principal."""
        writing = asyncio.Lock()  # gRPC takes one message of a stream at a time

        async def send(reply: holder_pb2.TransferReply) -> None:
            async with writing:
                await context.write(reply)

        try:
            identity = self._caller(context)
        except KvspError as error:
            await server.run_until(refuse_all(request_iterator, send, error), self._host.draining.wait())
        else:
            same_host = context.peer().startswith("unix:")
            await TransferStream(self._host, identity, send, same_host=same_host).serve(request_iterator)

    async def ReadBlock(  # noqa: N802
        self, request: holder_pb2.ReadBlockRequest, context: Context
    ) -> AsyncIterator[holder_pb2.BlockChunk]:
        """Octets of a pinned block."""
        pin = self._host.state.pin(request.transfer, self._caller(context).uri)
        for at in range(0, pin.header.payload_octets, limits.GRPC_CHUNK_OCTETS):
            yield holder_pb2.BlockChunk(octets=self._host.read(pin, at))

    async def WriteBlock(  # noqa: N802
        self, request_iterator: AsyncIterator[holder_pb2.WriteBlockRequest], context: Context
    ) -> holder_pb2.WriteBlockReply:
        """Octets of a reserved block."""
        identity = self._caller(context)
        reservation, octets = None, 0
        async for message in request_iterator:
            if reservation is None:
                reservation = self._host.state.reservation(message.transfer, identity.uri)
            self._host.write(reservation, message.octets)
            octets += len(message.octets)
        return holder_pb2.WriteBlockReply(octets=octets)

    async def CreateLease(  # noqa: N802
        self, request: holder_pb2.CreateLeaseRequest, context: Context
    ) -> holder_pb2.LeaseReply:
        """Lease blocks, all or nothing."""
        identity = self._caller(context)
        access.authorize(self._host.policy, identity, access.CREATE_LEASE)
        keys = split_keys(request.block_keys)
        if len(dict.fromkeys(keys)) > limits.LEASE_KEYS_MAX:
            raise KvspError(registry.CONTENT_TOO_LARGE, "too many blocks in one lease")
        if not keys:
            raise bad_request("block_keys is empty")
        _check_ttl(request.ttl_ms)
        if request.scope_id:
            self._host.authorize(identity, access.CREATE_LEASE, request.scope_id)
        lease = self._host.lease(identity, keys, request.ttl_ms, request.scope_id, request.compat_id)
        return holder_pb2.LeaseReply(lease=lease.id, ttl_ms=request.ttl_ms)

    async def RenewLease(  # noqa: N802
        self, request: holder_pb2.RenewLeaseRequest, context: Context
    ) -> holder_pb2.LeaseReply:
        """Count the TTL anew."""
        identity = self._caller(context)
        access.authorize(self._host.policy, identity, RENEW_LEASE)
        _check_ttl(request.ttl_ms)
        lease = self._host.renew(identity, request.lease, request.ttl_ms)
        return holder_pb2.LeaseReply(lease=lease.id, ttl_ms=request.ttl_ms)

    async def ReleaseLease(  # noqa: N802
        self, request: holder_pb2.ReleaseLeaseRequest, context: Context
    ) -> holder_pb2.ReleaseLeaseReply:
        """End a lease."""
        identity = self._caller(context)
        access.authorize(self._host.policy, identity, RELEASE_LEASE)
        self._host.state.release_lease(identity, request.lease, now_ms())
        return holder_pb2.ReleaseLeaseReply()

    async def PurgeBlock(  # noqa: N802
        self, request: holder_pb2.PurgeBlockRequest, context: Context
    ) -> holder_pb2.PurgeBlockReply:
        """Withdraw a block and drop it, leased or not."""
        self._require_own(context)
        await self._host.purge(name_of(request.name))
        return holder_pb2.PurgeBlockReply()

    async def SetTier(  # noqa: N802
        self, request: holder_pb2.SetTierRequest, context: Context
    ) -> holder_pb2.SetTierReply:
        """Publish what the engine beside this holder keeps in its own memory."""
        self._require_own(context)
        self._host.set_tier(_kept(request), [name_of(each) for each in request.names])
        return holder_pb2.SetTierReply()

    def _require_own(self, context: Context) -> None:
        if self._caller(context).uri != self._host.config.principal:
            raise KvspError(registry.FORBIDDEN, "the holder's own identity alone may do this")


def _kept(request: holder_pb2.SetTierRequest) -> Kept | None:
    first, last = request.layers.first, request.layers.last
    try:
        check_token(request.tier, "tier")
        check_range(first, last)
    except ValueError as error:
        raise bad_request(str(error)) from None
    if request.tier == "host":
        raise bad_request("the host tier is the holder's own")
    return Kept(request.tier, first, last) if request.HasField("layers") else None


def _check_ttl(ttl_ms: int) -> None:
    if not 0 < ttl_ms <= limits.INT_MAX:
        raise bad_request("ttl_ms out of bounds")


def register(target: grpc.aio.Server, host: Host) -> None:
    """Add the services of the role to a server."""
    holder_pb2_grpc.add_HolderServicer_to_server(HolderService(host), target)
    common_pb2_grpc.add_AuthorityServicer_to_server(Authority(host.policy), target)


@asynccontextmanager
async def hosted(config: HolderConfig, policy: Policy) -> AsyncIterator[Host]:
    """A host with its timers and its stream to the index. Raises ConfigError."""
    async with channel_to("index", config.index) as index:
        host = Host(config, policy, index)
        try:
            await host.offers.start()
        except ConfigError:
            host.close()
            raise
        tasks = [asyncio.create_task(host.run_timers()), asyncio.create_task(host.publisher.run())]
        for task in tasks:
            task.add_done_callback(server.stop_if_failed)
        try:
            yield host
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await host.offers.close()
            host.close()


async def serve(config: HolderConfig) -> None:
    """Run the holder until a signal. Raises ConfigError."""
    policy = load_policy(config.policy)
    made = server.make_server(config, SERVICES)  # first: refuses when this holder already runs
    async with hosted(config, policy) as host, local_peers(host, local_socket(config.listen)) as close_local:

        async def drain() -> None:
            close_local()  # a successor may listen there at once
            await host.drain()

        register(made.grpc, host)
        await server.serve(made, drain)


def run(config: Path) -> int:
    """`kvspd serve holder`. Returns the exit code; an unusable config is one line on stderr."""
    return server.run(config, lambda path: load(path, HolderConfig), serve)
