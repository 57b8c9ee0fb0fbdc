"""The placement controller as an instance sees it: status and checkpoints, by gRPC or HTTPS."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

import grpc
import structlog

from kvsp.client import AsyncClient
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import CheckpointReply, InstanceStatus, SessionCheckpoint
from kvsp.rpc.convert import checkpoint_to_message, status_to_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, placement_pb2, placement_pb2_grpc
from services.instance import metrics

CHECKPOINT_S: Final = 3.0
STATUS_S: Final = 1.0

T = TypeVar("T")

log = structlog.get_logger()


class Controller(Protocol):
    """Methods raise KvspError."""

    async def put_status(self, status: InstanceStatus) -> str:
        """The state in which it sees this instance (R-104)."""

    async def put_checkpoint(self, checkpoint: SessionCheckpoint) -> CheckpointReply:
        """What it has recorded of the session (U-34)."""

    async def lost_group(self, name: str) -> None:
        """Say that the context of a group is not whole any more: its session is to go elsewhere."""


class InternalController:
    """By gRPC."""

    def __init__(self, channel: grpc.aio.Channel, principal: str) -> None:
        self._stub = placement_pb2_grpc.PlacementStub(channel)
        self._metadata = speak_for(principal)

    async def put_status(self, status: InstanceStatus) -> str:
        """See Controller."""
        request = placement_pb2.PutStatusRequest(
            instance_id=party_id(status.instance), status=status_to_message(status)
        )
        async with translated():
            reply = await self._stub.PutStatus(request, metadata=self._metadata, timeout=STATUS_S)
        return reply.state

    async def put_checkpoint(self, checkpoint: SessionCheckpoint) -> CheckpointReply:
        """See Controller."""
        request = placement_pb2.PutCheckpointRequest(
            session=checkpoint.session, checkpoint=checkpoint_to_message(checkpoint)
        )
        async with translated():
            reply = await self._stub.PutCheckpoint(request, metadata=self._metadata, timeout=CHECKPOINT_S)
        return CheckpointReply(reply.epoch, reply.output_offset)

    async def lost_group(self, name: str) -> None:
        """See Controller."""
        async with translated():
            await self._stub.LostGroup(
                common_pb2.GroupName(map=name), metadata=self._metadata, timeout=CHECKPOINT_S
            )


class HttpsController:
    """By HTTPS."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def put_status(self, status: InstanceStatus) -> str:
        """See Controller."""
        return await _within(STATUS_S, self._client.put_status(status))

    async def put_checkpoint(self, checkpoint: SessionCheckpoint) -> CheckpointReply:
        """See Controller."""
        return await _within(CHECKPOINT_S, self._client.put_checkpoint(checkpoint))

    async def lost_group(self, name: str) -> None:  # noqa: ARG002
        """See Controller. Groups are known inside alone: no such controller has made one."""
        raise KvspError(registry.NOT_FOUND, "no such group")


class Reporter:
    """Sends statuses one after the other: of those that wait only the newest, so that none overtakes another."""

    def __init__(
        self,
        controller: Controller,
        answered: Callable[[InstanceStatus, str], None],
        refused: Callable[[registry.ProblemType], None],
    ) -> None:
        self._controller = controller
        self._answered = answered
        self._refused = refused
        self._newest: InstanceStatus | None = None
        self._outcome = 200
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def report(self, status: InstanceStatus) -> None:
        """Send this one as soon as the one before has been answered."""
        self._newest = status
        self._wake.set()
        self._idle.clear()

    async def run(self) -> None:
        """Send, for ever. A status that got no answer is followed by the next at its time."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            status, self._newest = self._newest, None
            if status is not None:
                await self._send(status)
            if self._newest is None:
                self._idle.set()

    async def sent(self) -> None:
        """Wait until the newest has been answered, or has failed."""
        await self._idle.wait()

    async def _send(self, status: InstanceStatus) -> None:
        try:
            view = await self._controller.put_status(status)
        except KvspError as error:
            self._note(error.status)
            self._refused(error.problem)
        else:
            self._note(200)
            self._answered(status, view)

    def _note(self, status: int) -> None:
        """Count every outcome, and log where it changes: there are several a second."""
        metrics.STATUS_REPORTS.labels(str(status)).inc()
        if status != self._outcome:
            log.warning(
                "placement controller answers status reports otherwise", status=status, before=self._outcome
            )
        self._outcome = status


async def _within(seconds: float, call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise KvspError(registry.GATEWAY_TIMEOUT, "the placement controller did not answer in time") from None
