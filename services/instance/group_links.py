"""Kept streams to the other members of a group: attention is asked for over them, a message per layer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc

from kvsp.protocol.errors import unavailable
from kvsp.rpc.errors import from_message, from_rpc_error
from kvsp.v1 import instance_pb2, instance_pb2_grpc

Stubs = Mapping[str, "instance_pb2_grpc.InstanceAsyncStub"]
"""The instances that a context may be shared with, by base URI."""

Metadata = tuple[tuple[str, str], ...]


class Link:
    """One stream to one member, opened again when it has ended. Replies come in the order of requests."""

    def __init__(self, stub: instance_pb2_grpc.InstanceAsyncStub, name: str, metadata: Metadata) -> None:
        self._attend: Any = stub.Attend  # also without an iterator of requests, which its type asks for
        self._name = name
        self._metadata = metadata
        self._writing = asyncio.Lock()
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[instance_pb2.AttendReply]] = deque()

    async def ask(self, request: instance_pb2.AttendRequest) -> instance_pb2.AttendReply:
        """Raises KvspError: the member's, or 503 when it is gone."""
        reply: asyncio.Future[instance_pb2.AttendReply] = asyncio.get_running_loop().create_future()
        async with self._writing:
            messages = [request]
            if self._call is None:
                self._call, self._waiting = self._attend(metadata=self._metadata), deque()
                self._reading = asyncio.create_task(self._read(self._call, self._waiting))
                messages = [instance_pb2.AttendRequest(map=self._name), request]
            self._waiting.append(reply)  # before there is anything to wait for: the stream may end at any time
            try:
                await self._write(self._call, messages)
            except asyncio.CancelledError:
                self._drop()  # nobody knows whether it was sent, and so whose the next reply would be
                raise
        return await reply

    def close(self) -> None:
        """End the stream; whoever waits gets KvspError (503)."""
        if self._call is not None:
            self._call.cancel()

    async def _write(self, call: Any, messages: Sequence[instance_pb2.AttendRequest]) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended: the reader learns why
            for message in messages:
                await call.write(message)

    def _drop(self) -> None:
        self.close()
        self._call = None

    async def _read(self, call: Any, waiting: deque[asyncio.Future[instance_pb2.AttendReply]]) -> None:
        error = unavailable("the member has ended the stream")
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                future = waiting.popleft()
                if future.done():
                    continue
                if reply.HasField("problem"):
                    future.set_exception(from_message(reply.problem))
                else:
                    future.set_result(reply)
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed)
        except (asyncio.CancelledError, IndexError):
            pass  # closed here, or a reply too many
        finally:
            call.cancel()
            if self._call is call:
                self._call = None
            for future in waiting:
                if not future.done():
                    future.set_exception(error)


class Links:
    """The links of one group, each opened when it is first needed."""

    def __init__(self, stubs: Stubs, name: str, metadata: Metadata) -> None:
        self._stubs = stubs
        self._name = name
        self._metadata = metadata
        self._links: dict[str, Link] = {}
        self._closed = False

    async def ask(
        self, members: Collection[str], request: instance_pb2.AttendRequest, timeout_s: float
    ) -> list[instance_pb2.AttendReply]:
        """One reply of each. Raises KvspError: that of the first who refuses, 503 for one who is silent."""
        if self._closed:
            raise unavailable("the group is lost")
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*(self._link(member).ask(request) for member in members)))
        except TimeoutError:
            raise unavailable("a member did not answer in time") from None

    def close(self) -> None:
        """For good: whoever asks or waits gets KvspError (503)."""
        self._closed = True
        for link in self._links.values():
            link.close()

    def _link(self, member: str) -> Link:
        if member not in self._links:
            self._links[member] = Link(self._stubs[member], self._name, self._metadata)
        return self._links[member]
