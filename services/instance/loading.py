"""Everything of an instance that moves blocks, put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from kvsp.bulk.holder import HolderClient
from kvsp.bulk.verified import THREADS
from kvsp.client import AsyncClient, Credentials, Endpoints, Options
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.policy import Policy
from kvsp.protocol.records import Link
from kvsp.rpc.channel import channel_to
from kvsp.rpc.config import ConfigError, Peer
from kvsp.rpc.framed import local_socket
from kvsp.rpc.lookup import LookupClient
from services.instance import storing, tiers
from services.instance.config import InstanceConfig
from services.instance.directory import Directory
from services.instance.filling import Prefixes
from services.instance.instructions import BeginDirective
from services.instance.loads import Loads
from services.instance.lull import Lull
from services.instance.peers import Holder, HttpsHolder, InternalHolder
from services.instance.prefetch import Outcome, Prefetch
from services.instance.storing import Store
from services.instance.tiers import TierNews

if TYPE_CHECKING:
    from services.instance.device import DeviceTier

RTT_US_ASSUMED: Final = 1000.0
"""Of a holder that nothing has been fetched from yet."""


class Holders:
    """The holders that may be loaded from, and which of them for a scope."""

    def __init__(self, policy: Policy, own: InternalHolder, others: dict[str, Holder], mbit_per_s: float) -> None:
        self._policy = policy
        self._mbit_per_s = mbit_per_s
        self.own = own
        self.others = others

    def sources(self, scope_id: str) -> Collection[str]:
        """Base URIs of those that are trusted for the scope (R-211, D10)."""
        return self.others.keys() & self._policy.trusted_holders(scope_id)

    def usable(self, scope_id: str) -> Collection[str]:
        """`sources`, and this instance's own."""
        return {*self.sources(scope_id), self.own.base_uri}

    def links(self) -> dict[str, Link]:
        """What is known of the way to each, assumed where nothing was measured (R-046)."""
        found: dict[str, Link] = {}
        for uri, holder in self.others.items():
            rate = holder.link()
            mbit_per_s, rtt_us = (
                (self._mbit_per_s, RTT_US_ASSUMED) if rate is None else (rate.mbit_per_s, rate.rtt_us)
            )
            found[uri] = Link(uri, mbit_per_s, rtt_us)
        return found


class Loading:
    """Blocks in and out: for sessions (`prefixes`), for directives, and new ones to the holders that keep them."""

    def __init__(
        self,
        config: InstanceConfig,
        holders: Holders,
        directory: Directory,
        workers: ThreadPoolExecutor,
        *,
        descriptor: Descriptor,
        compat_id: str,
        device: DeviceTier | None,
        news: TierNews,
    ) -> None:
        self.holders = holders
        self._directory = directory
        self._compat_id = compat_id
        self._news = news
        self.lull = Lull()
        keep = partial(tiers.keep, device)
        self._loads = Loads(
            holders.own, holders.others, directory, descriptor, compat_id,
            parallel=config.parallel, fetch_s=config.fetch_timeout_ms / 1000, stored=keep,
            lull=self.lull,
        )  # fmt: skip
        self.prefixes = Prefixes(
            holders.own, directory, self._loads, workers,
            descriptor=descriptor, compat_id=compat_id, lease_ms=config.lease_ms, device=device,
        )  # fmt: skip
        durable = [holders.others[uri] for uri in config.durable]
        self.store = Store(holders.own, durable, compat_id, octets_max=config.queue_octets, stored=keep)

    async def prefetch(self, begin: BeginDirective, outcome: Outcome) -> None:
        """Carry out a directive, until all its blocks have had their outcome."""
        await Prefetch(
            begin, outcome, compat_id=self._compat_id, own=self.holders.own,
            directory=self._directory, loads=self._loads,
        ).run()  # fmt: skip

    def add(self, scope_id: str, key: bytes, octets: bytes) -> None:
        """A new block was computed here."""
        self.store.add(scope_id, key, octets)

    async def run(self) -> None:
        """What goes on in the background, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._news.run(self.holders.own, self._compat_id))
            for _ in range(storing.WORKERS):
                group.create_task(self.store.run())

    async def close(self) -> None:
        """Bring out what waits, if that is soon, and end the rest."""
        await self.store.flushed()
        await self._loads.close()
        await self._news.end(self.holders.own)


@asynccontextmanager
async def holders_of(config: InstanceConfig, policy: Policy, descriptor: Descriptor) -> AsyncIterator[Holders]:
    """Connections to this instance's own holder and to the others. Raises ConfigError."""
    async with AsyncExitStack() as stack:

        async def internal(base_uri: str, peer: Peer) -> InternalHolder:
            channel = await stack.enter_async_context(channel_to(base_uri, peer))
            same_host = peer.address.startswith("unix:")
            local = local_socket(peer.address)
            client = HolderClient(channel, config.schemes, same_host=same_host, local=local)
            stack.push_async_callback(client.close)
            holder = InternalHolder(
                base_uri, channel, client, config.principal, descriptor=descriptor, same_host=same_host
            )
            stack.push_async_callback(holder.close)
            return holder

        others: dict[str, Holder] = {}
        for party in config.holders:
            peer = party.peer
            if peer is None:
                client = await stack.enter_async_context(https_client(config, policy))
                others[party.base_uri] = HttpsHolder(party.base_uri, client, descriptor)
            else:
                others[party.base_uri] = await internal(party.base_uri, peer)
        own = await internal(config.base_uri, config.holder)
        yield Holders(policy, own, others, config.link_mbit_per_s)


def https_client(config: InstanceConfig, policy: Policy) -> AsyncClient:
    """For parties without an internal address. Raises ConfigError."""
    files = config.https
    if files is None:
        raise ConfigError("[https] is missing")
    public = frozenset(party.base_uri for party in config.holders if not party.address)
    scopes = policy.identities[config.principal].scopes
    endpoints = Endpoints(
        holders=public,
        trusted={scope: policy.trusted_holders(scope) for scope in scopes},
        placement=config.placement.base_uri,
    )
    # A mismatch is reported at the index by who has looked the block up there (directory.py).
    options = Options(total_s=config.fetch_timeout_ms / 1000, report_mismatch=False, pool_size=config.parallel)
    return AsyncClient(Credentials(Path(files.ca), Path(files.cert), Path(files.key)), endpoints, options)


def hash_workers() -> ThreadPoolExecutor:
    """Threads that verify octets."""
    return ThreadPoolExecutor(THREADS, "kvsp-verify")


def lookups(peer: Peer, channel: grpc.aio.Channel) -> LookupClient:
    """The index, over its control socket when it is on this host."""
    return LookupClient(channel, local_socket(peer.address))
