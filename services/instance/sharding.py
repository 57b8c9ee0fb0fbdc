"""What a member of a group computes, for the shell, which knows no tensors: stores, runs, answers to queries."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kvsp.connectors.layout import DTYPES, octets_of
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.reshard import Range
from kvsp.v1 import instance_pb2
from services.instance.engine import Engine, Event, Work
from services.instance.group_member import Peers
from services.instance.partial import Partial
from services.instance.shard_run import Computed, GroupGone, HomeRun, MemberRun, ShardEvent
from services.instance.shard_store import ShardStore
from services.instance.sharded import GroupLost, VersionMoved, View, attend_local

FLOAT_OCTETS = struct.calcsize("<f")


class GroupRemote:
    """See `sharded.Remote`: the other members, over the streams of `peers`. To be made on the event loop.

    `dtype` is the descriptor's, which all members have; other queries travel as float32.
    """

    def __init__(self, peers: Peers, dtype: torch.dtype) -> None:
        self._peers = peers
        self._dtype = dtype
        self._loop = asyncio.get_running_loop()

    def view(self) -> View:
        """See `sharded.Remote`."""
        return View(*self._peers.view)

    def attend(self, version: int, layer: int, queries: torch.Tensor, before: int) -> Future[list[Partial]]:
        """See `sharded.Remote`."""
        heads, new, dim = queries.shape
        if queries.dtype != self._dtype:
            queries = queries.float()
        request = instance_pb2.AttendRequest(
            version=version, layer=layer, before=before, heads=heads, new=new, dim=dim,
            queries=bytes(octets_of(queries)),
        )  # fmt: skip
        return asyncio.run_coroutine_threadsafe(self._attend(request), self._loop)

    async def _attend(self, request: instance_pb2.AttendRequest) -> list[Partial]:
        try:
            replies = await self._peers.ask(request)
            return [_partial(reply, request) for reply in replies]
        except KvspError:
            if self._peers.view[0] != request.version:
                raise VersionMoved from None
            raise GroupLost from None


class Sharding:
    """Groups on an engine that `can_shard`."""

    def __init__(self, engine: Engine[Any]) -> None:
        self.engine = engine
        self._dtype = DTYPES[engine.descriptor.kv_dtype]

    def store(self, octets_max: int) -> ShardStore:
        """For one map's KV."""
        return ShardStore(self.engine.descriptor, octets_max)

    def member(
        self,
        store: ShardStore,
        peers: Peers,
        tokens: Range,
        ids: Sequence[int],
        *,
        done: Callable[[bool], None],
    ) -> MemberRun:
        """Compute a range of the prompt; `done` is told whether it is there.

        Raises KvspError (400).
        """

        def on_event(event: ShardEvent) -> None:
            done(isinstance(event, Computed))

        key = peers.name, 0
        return MemberRun(
            self.engine, store, GroupRemote(peers, self._dtype), on_event, key, tokens=tokens, ids=ids
        )

    def home(
        self,
        store: ShardStore,
        peers: Peers,
        work: Work,
        first: int,
        *,
        tell: Callable[[Event], None],
        gone: Callable[[], None],
    ) -> HomeRun:
        """Run a session whose last range begins at `first`; `gone` is told when a member does not answer.

        Raises KvspError (400).
        """

        def on_event(event: ShardEvent) -> None:
            if isinstance(event, GroupGone):
                gone()
            elif not isinstance(event, Computed):
                tell(event)

        return HomeRun(self.engine, store, GroupRemote(peers, self._dtype), on_event, work, first=first)

    def check(self, request: instance_pb2.AttendRequest) -> None:
        """Raises KvspError (400) unless the queries are such as the model has."""
        made = self.engine.descriptor
        elements = request.heads * request.new * request.dim
        if (
            request.layer >= made.layers
            or request.dim != made.head_dim
            or not request.heads
            or request.heads % made.kv_heads
            or len(request.queries) not in (elements * FLOAT_OCTETS, elements * self._dtype.itemsize)
            or not elements
        ):
            raise bad_request("no queries of this model")

    @torch.inference_mode()
    def attend(
        self, store: ShardStore, ranges: Sequence[Range], request: instance_pb2.AttendRequest
    ) -> instance_pb2.AttendReply:
        """Answer checked queries from a layer that is there; on a thread that may compute.

        Raises NotHeld.
        """
        shape = request.heads, request.new, request.dim
        is_float = len(request.queries) == FLOAT_OCTETS * math.prod(shape)
        dtype = torch.float32 if is_float else self._dtype
        queries = torch.frombuffer(bytearray(request.queries), dtype=dtype).view(shape)
        scale = self.engine.scales[request.layer]
        partial = attend_local(store, ranges, request.layer, queries, request.before, scale=scale)
        return instance_pb2.AttendReply(
            output=partial.output.contiguous().numpy().tobytes(),
            log_sum=partial.log_sum.contiguous().numpy().tobytes(),
        )


def _partial(reply: instance_pb2.AttendReply, request: instance_pb2.AttendRequest) -> Partial:
    """Raises KvspError (400) when it is not one for the request."""
    rows = request.heads * request.new
    if len(reply.output) != rows * request.dim * FLOAT_OCTETS or len(reply.log_sum) != rows * FLOAT_OCTETS:
        raise bad_request("the partial has another shape than the queries")
    output = torch.frombuffer(bytearray(reply.output), dtype=torch.float32)
    log_sum = torch.frombuffer(bytearray(reply.log_sum), dtype=torch.float32)
    return Partial(output.view(request.heads, request.new, request.dim), log_sum.view(request.heads, request.new))
