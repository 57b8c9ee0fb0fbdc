"""One kept control stream to a holder: requests answered by id, breaks turned into 503."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from kvsp.bulk.links import GrpcLink, Link, LocalLink, broken
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.errors import from_message, to_message
from kvsp.v1 import holder_pb2


class ControlStream:
    """The stream of one principal. Opened at once; after a break it is dead and `alive` is False.

    Writes are queued and sent in the order of the calls. `users` counts transfers that still need
    the stream; `on_end` is called once when it is over. `local` is the holder's control socket when it
    is on this host.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        principal: str,
        idle_s: float,
        on_end: Callable[[ControlStream], None],
        local: Path | None = None,
    ) -> None:
        self.principal = principal
        self.alive = True
        self.users = 0
        self._on_end = on_end
        self._ids = count(1)
        self._pending: dict[int, asyncio.Future[holder_pb2.TransferReply]] = {}
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._last_used = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._check_idle)
        self._link: Link = (
            GrpcLink(channel, principal, self._answered, self._end)
            if local is None
            else LocalLink(local, principal, self._answered, self._end)
        )

    @property
    def idle(self) -> bool:
        """True when nothing waits for a reply and no transfer is open."""
        return not self._pending and not self.users

    async def ask(self, timeout_s: float | None, **request: Any) -> holder_pb2.TransferReply:
        """Send one request and wait for its reply. Raises KvspError.

        When the caller is cancelled, a transfer that the holder grants all the same is given back.
        """
        if not self.alive:
            raise broken()
        request_id = next(self._ids)
        future: asyncio.Future[holder_pb2.TransferReply] = self._loop.create_future()
        self._pending[request_id] = future
        self._last_used = self._loop.time()
        self._link.send(holder_pb2.TransferRequest(id=request_id, **request))
        try:
            async with asyncio.timeout(timeout_s):
                reply = await future
        except (asyncio.CancelledError, TimeoutError) as ended:
            # The reply may have come in the same turn of the loop.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            if isinstance(ended, TimeoutError):
                raise KvspError(registry.GATEWAY_TIMEOUT, "the holder did not answer in time") from None
            raise
        finally:
            self._pending.pop(request_id, None)  # only now: until then the stream is in use
        if reply.WhichOneof("reply") == "problem":
            raise from_message(reply.problem)
        return reply

    def tell(self, **request: Any) -> None:
        """Send one request that has no reply. A broken stream has dropped everything already."""
        if self.alive:
            self._link.send(holder_pb2.TransferRequest(id=next(self._ids), **request))

    def close(self) -> None:
        """End the stream: the holder drops whatever is still open on it. Requests queued before still go."""
        self._link.close()
        self._end(broken())

    async def closed(self) -> None:
        """Wait until it is over."""
        await self._link.closed()

    def _answered(self, reply: holder_pb2.TransferReply) -> None:
        future = self._pending.get(reply.id)
        if future is None or future.done():
            self._give_back(reply)
        else:
            future.set_result(reply)

    def _give_back(self, reply: holder_pb2.TransferReply) -> None:
        if reply.opened.transfer:
            self.tell(close=holder_pb2.CloseBlock(transfer=reply.opened.transfer))
        elif reply.reserved.transfer:
            self.tell(abort=holder_pb2.AbortBlock(transfer=reply.reserved.transfer))

    def _end(self, error: KvspError) -> None:
        if not self.alive:
            return
        self.alive = False
        self._timer.cancel()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)
        self._pending.clear()
        self._on_end(self)

    def _check_idle(self) -> None:
        left = self._last_used + self._idle_s - self._loop.time()
        if self.idle and left <= 0:
            self.close()
        else:
            self._timer = self._loop.call_later(max(left, self._idle_s / 4), self._check_idle)


async def refuse_all(
    requests: AsyncIterator[holder_pb2.TransferRequest],
    send: Callable[[holder_pb2.TransferReply], Awaitable[None]],
    error: KvspError,
) -> None:
    """The holder's end for a caller that may do nothing: every request is answered with the same problem.

    Ending the stream at once would race with the caller's first request and reach it as a broken connection.
    """
    async for request in requests:
        await send(holder_pb2.TransferReply(id=request.id, problem=to_message(error)))
