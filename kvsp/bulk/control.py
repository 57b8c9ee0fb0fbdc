"""One kept `Holder.Transfer` stream: requests answered by id, breaks turned into 503."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any, Final

import grpc

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.errors import RETRY_AFTER_UNAVAILABLE_S, from_message, from_rpc_error
from kvsp.rpc.identity import speak_for
from kvsp.v1 import holder_pb2, holder_pb2_grpc

CLOSE_S: Final = 1.0


class ControlStream:
    """The stream of one principal. Opened at once; after a break it is dead and `alive` is False.

    Writes are queued and sent in the order of the calls. `users` counts transfers that still need
    the stream; `on_end` is called once when it is over.
    """

    def __init__(
        self, channel: grpc.aio.Channel, principal: str, idle_s: float, on_end: Callable[[ControlStream], None]
    ) -> None:
        self.principal = principal
        self.alive = True
        self.users = 0
        self._on_end = on_end
        self._ids = count(1)
        self._pending: dict[int, asyncio.Future[holder_pb2.TransferReply]] = {}
        self._queue: asyncio.Queue[holder_pb2.TransferRequest | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._last_used = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._check_idle)
        self._call = holder_pb2_grpc.HolderStub(channel).Transfer(self._requests(), metadata=speak_for(principal))
        self._reader = asyncio.create_task(self._read())

    @property
    def idle(self) -> bool:
        """True when nothing waits for a reply and no transfer is open."""
        return not self._pending and not self.users

    async def ask(self, timeout_s: float | None, **request: Any) -> holder_pb2.TransferReply:
        """Send one request and wait for its reply. Raises KvspError.

        When the caller is cancelled, a transfer that the holder grants all the same is given back.
        """
        if not self.alive:
            raise _broken()
        request_id = next(self._ids)
        future: asyncio.Future[holder_pb2.TransferReply] = self._loop.create_future()
        self._pending[request_id] = future
        self._last_used = self._loop.time()
        self._queue.put_nowait(holder_pb2.TransferRequest(id=request_id, **request))
        try:
            async with asyncio.timeout(timeout_s):
                reply = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            raise
        except TimeoutError:
            raise KvspError(registry.GATEWAY_TIMEOUT, "the holder did not answer in time") from None
        if reply.WhichOneof("reply") == "problem":
            raise from_message(reply.problem)
        return reply

    def tell(self, **request: Any) -> None:
        """Send one request that has no reply. A broken stream has dropped everything already."""
        if self.alive:
            self._queue.put_nowait(holder_pb2.TransferRequest(id=next(self._ids), **request))

    def close(self) -> None:
        """End the stream: the holder drops whatever is still open on it. Requests queued before still go."""
        self._queue.put_nowait(None)
        self._end(_broken())

    async def closed(self) -> None:
        """Wait until the call is over; a holder that does not end it is left."""
        if (await asyncio.wait([self._reader], timeout=CLOSE_S))[1]:
            self._call.cancel()
            await asyncio.wait([self._reader])

    async def _requests(self) -> AsyncIterator[holder_pb2.TransferRequest]:
        while (request := await self._queue.get()) is not None:
            yield request

    async def _read(self) -> None:
        error = _broken()
        try:
            async for reply in self._call:
                future = self._pending.pop(reply.id, None)
                if future is None or future.done():
                    self._give_back(reply)
                else:
                    future.set_result(reply)
        except grpc.aio.AioRpcError as failed:
            error = _reason(failed)
        except asyncio.CancelledError:
            if self._call.cancelled():  # the channel was closed under the stream
                return
            raise
        finally:
            self._queue.put_nowait(None)
            self._end(error)

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


def _reason(failed: grpc.aio.AioRpcError) -> KvspError:
    """Why the stream ended."""
    error = from_rpc_error(failed)
    # A call that ends while we write to it is INTERNAL to grpc.aio, whatever ended it: a break like any other.
    return _broken() if error.problem is registry.INTERNAL else error


def _broken() -> KvspError:
    return KvspError(
        registry.UNAVAILABLE, "the connection to the holder broke", retry_after_s=RETRY_AFTER_UNAVAILABLE_S
    )
