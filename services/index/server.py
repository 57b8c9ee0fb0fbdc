"""The Index Service over gRPC: authorizes, converts, asks the state, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import prometheus_client
import structlog

from kvsp.protocol import access, limits, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.names import check_base_uri, party_id
from kvsp.protocol.policy import HOLDER_ROLES, Identity, Policy
from kvsp.protocol.routes import PLACEMENT
from kvsp.rpc import errors, server
from kvsp.rpc.authority import Authority
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import ConfigError, load_descriptors, load_policy
from kvsp.rpc.convert import replica_from_message, split_keys, status_from_message, survey_to_message
from kvsp.rpc.framed import local_socket
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2_grpc, index_pb2, index_pb2_grpc
from services.index.config import IndexConfig, load_config
from services.index.local import local_peers
from services.index.metrics import TallyCollector
from services.index.state import Found, IndexState, render_targets

SERVICES: Final = ("kvsp.v1.Index", "kvsp.v1.Authority")
_SCOPE_OCTETS: Final = 16
_COMPAT_OCTETS: Final = 32
_EXPIRY_S: Final = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger()


class IndexServicer(index_pb2_grpc.IndexServicer):
    """proto/kvsp/v1/index.proto; the duties and errors of each method are stated there."""

    def __init__(
        self, config: IndexConfig, policy: Policy, state: IndexState, now_ms: Callable[[], int] = now_ms
    ) -> None:
        self.draining = asyncio.Event()
        self._config = config
        self._policy = policy
        self._state = state
        self._now_ms = now_ms

    async def Lookup(  # noqa: N802
        self, request: index_pb2.LookupRequest, context: Context
    ) -> AsyncIterator[index_pb2.LookupChunk]:
        """Longest-prefix lookup, its JSON in chunks."""
        head, pieces = await self.look_up(caller(context, self._policy), request)
        yield index_pb2.LookupChunk(head=head)
        for chunk in _chunks(pieces):
            yield index_pb2.LookupChunk(json=chunk)

    async def look_up(
        self, identity: Identity, request: index_pb2.LookupRequest
    ) -> tuple[index_pb2.LookupHead, list[bytes]]:
        """Longest-prefix lookup and its JSON text in pieces. Raises KvspError: 400, 403, 413."""
        keys = self._admit(request, identity)
        with_targets = request.want_targets or bool(request.targets)
        found = self._state.lookup(request.scope_id, request.compat_id, keys, self._now_ms(), survey=with_targets)
        pieces = found.pieces
        if with_targets:
            pieces.append(await self._targets(found, request.targets))
        pieces.append(b"}")
        return index_pb2.LookupHead(matched=found.matched, json_octets=sum(map(len, pieces))), pieces

    async def Survey(  # noqa: N802
        self, request: index_pb2.LookupRequest, context: Context
    ) -> index_pb2.SurveyReply:
        """A lookup reduced to what placement decides on."""
        identity = caller(context, self._policy)
        self._policy.require_role(identity, PLACEMENT)
        keys = self._admit(request, identity)
        return survey_to_message(self._state.survey(request.scope_id, request.compat_id, keys, self._now_ms()))

    async def PutReplica(  # noqa: N802
        self, request: index_pb2.PutReplicaRequest, context: Context
    ) -> index_pb2.PutReplicaReply:
        """Publish or refresh."""
        return self._put(request, caller(context, self._policy))

    async def DeleteReplica(  # noqa: N802
        self, request: index_pb2.DeleteReplicaRequest, context: Context
    ) -> index_pb2.DeleteReplicaReply:
        """Withdraw."""
        return self._withdraw(request, caller(context, self._policy))

    async def Publish(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[index_pb2.PublishRequest], context: Context
    ) -> None:
        """A holder's kept stream. Ended when the index stops; what was not answered the holder sends again."""
        identity = caller(context, self._policy)

        writing = asyncio.Lock()

        async def answer() -> None:
            async for item in request_iterator:
                async with writing:
                    await context.write(self._published(item, identity))

        async def drained() -> None:
            await self.draining.wait()
            await writing.acquire()  # a call cannot be ended while a reply is being written

        await server.run_until(answer(), drained())

    async def Feed(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> index_pb2.FeedReply:
        """The placement side's kept stream; a stale epoch is dropped, as the PC itself drops it (R-103)."""
        self._policy.require_role(caller(context, self._policy), PLACEMENT)

        async def take() -> None:
            async for message in request_iterator:
                status = status_from_message(message)
                if not self._state.observe(status, self._now_ms()):
                    log.info("stale status dropped", instance=status.instance, epoch=status.epoch)

        await server.run_until(take(), self.draining.wait())
        return index_pb2.FeedReply()

    async def drain(self) -> None:
        """End the kept streams: their peers come back to the index's successor."""
        self.draining.set()

    def _admit(self, request: index_pb2.LookupRequest, identity: Identity) -> list[bytes]:
        """The keys, once role (403), bounds (413), syntax (400) and scope (403) are in order."""
        access.authorize(self._policy, identity, access.LOOKUP)
        # "Quotas on ... lookup size are REQUIRED."
        if len(request.block_keys) > self._config.lookup_keys_max * _COMPAT_OCTETS:
            raise KvspError(registry.CONTENT_TOO_LARGE, f"more than {self._config.lookup_keys_max} block_keys")
        if len(request.targets) > self._config.lookup_targets_max:
            raise KvspError(registry.CONTENT_TOO_LARGE, f"more than {self._config.lookup_targets_max} targets")
        if len(request.scope_id) != _SCOPE_OCTETS or len(request.compat_id) != _COMPAT_OCTETS:
            raise bad_request("an id has a wrong length")
        keys = split_keys(request.block_keys)
        try:
            for target in request.targets:
                check_base_uri(target)
        except ValueError as error:
            raise bad_request(str(error)) from None
        access.authorize(self._policy, identity, access.LOOKUP, scope_id=request.scope_id.hex())
        return keys

    async def _targets(self, found: Found, targets: Iterable[str]) -> bytes:
        estimates = []
        for target in targets:
            estimates.append(self._state.estimate(found, target, self._now_ms()))
            await asyncio.sleep(0)  # many targets over many sources take a while: others get their turn
        return render_targets(estimates)

    def _put(self, request: index_pb2.PutReplicaRequest, identity: Identity) -> index_pb2.PutReplicaReply:
        access.authorize(self._policy, identity, access.PUBLISH, party_id=request.holder_id)
        record = replica_from_message(request.record)
        if party_id(record.holder) != request.holder_id:
            raise bad_request("holder is not that of the path")
        if request.block_key != request.record.name.block_key:
            raise bad_request("block_key is not that of the path")
        self._policy.require_scope(identity, record.scope_id)
        # "restrict publication and service of blocks to holders trusted for the scope", also
        # when another publishes for the holder
        if record.holder not in self._policy.trusted_holders(record.scope_id):
            raise KvspError(registry.SCOPE_DENIED)
        records_max = min(self._config.records_per_holder_max, identity.quotas.records)
        created, ttl_ms = self._state.publish(record, records_max, self._now_ms())
        return index_pb2.PutReplicaReply(created=created, ttl_ms=ttl_ms)

    def _withdraw(
        self, request: index_pb2.DeleteReplicaRequest, identity: Identity
    ) -> index_pb2.DeleteReplicaReply:
        access.authorize(self._policy, identity, access.WITHDRAW, party_id=request.holder_id)
        now_ms = self._now_ms()
        if identity.roles & HOLDER_ROLES and identity.is_party(request.holder_id):
            self._state.withdraw(request.holder_id, request.block_key, now_ms)
        else:
            holder, scope_id = self._state.withdraw_on_behalf(
                identity.uri, identity.scopes, request.holder_id, request.block_key, now_ms
            )
            log.warning("withdrawn on behalf", identity=identity.uri, holder=holder, scope_id=scope_id)
        return index_pb2.DeleteReplicaReply()

    def _published(self, item: index_pb2.PublishRequest, identity: Identity) -> index_pb2.PublishReply:
        try:
            if item.HasField("put"):
                put = index_pb2.PutReplicaRequest(
                    holder_id=party_id(item.put.holder), block_key=item.put.name.block_key, record=item.put
                )
                return index_pb2.PublishReply(seq=item.seq, put=self._put(put, identity))
            if item.HasField("withdraw"):
                withdrawn = self._withdraw(item.withdraw, identity)
                return index_pb2.PublishReply(seq=item.seq, withdrawn=withdrawn)
            raise bad_request("an item is neither a publication nor a withdrawal")
        except KvspError as error:
            return index_pb2.PublishReply(seq=item.seq, problem=errors.to_message(error))


def _chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces joined to messages of GRPC_CHUNK_OCTETS (the fastest measured) and at most a piece more."""
    batch: list[bytes] = []
    octets = 0
    for piece in pieces:
        batch.append(piece)
        octets += len(piece)
        if octets >= limits.GRPC_CHUNK_OCTETS:
            yield b"".join(batch)
            batch = []
            octets = 0
    if batch:
        yield b"".join(batch)


def register(target: grpc.aio.Server, servicer: IndexServicer, policy: Policy) -> None:
    """Add the services of the role to a server."""
    index_pb2_grpc.add_IndexServicer_to_server(servicer, target)
    common_pb2_grpc.add_AuthorityServicer_to_server(Authority(policy), target)


async def _expire(state: IndexState) -> None:
    """Free the memory of what has expired, also when nobody asks."""
    while True:
        await asyncio.sleep(_EXPIRY_S)
        state.table.expire(now_ms())


async def _main(config: IndexConfig) -> None:
    policy = load_policy(config.policy)
    own = policy.identities.get(config.principal)
    if own is None or "index" not in own.roles:
        raise ConfigError(f"principal {config.principal}: not an index in {config.policy}")
    block_tokens = {key: each.block_tokens for key, each in load_descriptors(config.descriptors).items()}
    state = IndexState(replica_ttl_ms_max=config.replica_ttl_ms_max, block_tokens=block_tokens)
    prometheus_client.REGISTRY.register(TallyCollector(state.table.tallies))
    made = server.make_server(config, SERVICES)
    servicer = IndexServicer(config, policy, state)
    register(made.grpc, servicer, policy)
    expiry = asyncio.create_task(_expire(state))
    try:
        async with local_peers(policy, servicer.look_up, local_socket(config.listen)) as drain_local:

            async def drain() -> None:
                await asyncio.gather(servicer.drain(), drain_local())

            await server.serve(made, drain)
    finally:
        expiry.cancel()


def run(config: Path) -> int:
    """`kvspd serve index`. Returns the exit code; an unusable config is one line on stderr."""
    return server.run(config, load_config, _main)
