"""The placement controller and the instances as the front end sees them, and the sessions it has there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import structlog

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.rpc.errors import PROBLEM_TRAILER, from_rpc_error
from kvsp.rpc.identity import speak_for
from kvsp.v1 import instance_pb2, instance_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.frontend.metrics import LEFT

T = TypeVar("T")

CALL_S: Final = 10.0
ASSIGN_S: Final = 10.0
"""How long a request waits for a placement controller that cannot be reached."""

ENDING_S: Final = 60.0
"""How long the fleet is told that a session is over."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: pauses between attempts, doubling from the first to the longest; and how long in vain."""

    pause_s: float = 0.05
    pause_max_s: float = 1.0
    patience_s: float = 30.0


class Pauses:
    """Pauses between attempts, until patience is at its end. Progress begins them anew."""

    def __init__(self, timing: Timing, patience_s: float) -> None:
        self._timing = timing
        self._patience_s = patience_s
        self.reset()

    def reset(self) -> None:
        """There was progress."""
        self._pause_s = self._timing.pause_s
        self._until: float | None = None

    async def wait(self, cut: asyncio.Future[Any] | None = None) -> None:
        """Pause; `cut` ends it early. Raises KvspError (503) when patience is at its end."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._patience_s
        if now >= self._until:
            raise unavailable("the fleet could not be reached for too long")
        pause_s = min(self._pause_s, self._until - now)
        self._pause_s = min(2 * self._pause_s, self._timing.pause_max_s)
        if cut is None:
            await asyncio.sleep(pause_s)
        else:
            await asyncio.wait({cut}, timeout=pause_s)


class Fleet:
    """Channels to the placement controller and to the configured instances: it talks to no others (D10)."""

    def __init__(
        self,
        principal: str,
        placement: grpc.aio.Channel,
        instances: Mapping[str, grpc.aio.Channel],
        timing: Timing,
    ) -> None:
        self.timing = timing
        self.metadata = speak_for(principal)
        self.placement = placement_pb2_grpc.PlacementStub(placement)
        self._instances = {uri: instance_pb2_grpc.InstanceStub(channel) for uri, channel in instances.items()}
        self._endings: set[asyncio.Task[None]] = set()
        self._sessions = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def instance(self, base_uri: str) -> instance_pb2_grpc.InstanceStub:
        """A configured instance. Raises KvspError (503) for any other."""
        stub = self._instances.get(base_uri)
        if stub is None:
            log.error("bound to an instance that is not configured", instance=base_uri)
            raise unavailable("the assigned instance is not known here")
        return stub

    async def assign(self, request: placement_pb2.AssignRequest) -> placement_pb2.AssignReply | None:
        """Bind a session; again, if the connection broke. Raises KvspError.

        None: an attempt that broke had succeeded, and `Follow` tells the binding.
        """
        pauses = Pauses(self.timing, min(ASSIGN_S, self.timing.patience_s))
        broken = False
        while True:
            try:
                return await self.placement.Assign(request, metadata=self.metadata, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                refused = refusal(error)
                if refused is None:
                    broken = True
                elif broken and refused.problem is registry.CONFLICT:
                    return None
                else:
                    raise refused from None
            await pauses.wait()

    def begin(self) -> None:
        """A session is under way, of which `end` will be called."""
        self._sessions += 1
        self._idle.clear()

    def end(self, session: str, instance: str | None) -> None:
        """Tell placement controller and instance, in the background, that nobody waits for a session.

        `instance`: where it may still be running, None for nowhere.
        """
        name = placement_pb2.SessionName(session=session)
        self._spawn(self._insist(lambda: self._call(self.placement.EndSession, name)))
        stub = self._instances.get(instance) if instance is not None else None
        if stub is not None:
            ended = instance_pb2.EndGenerationRequest(session=session)
            self._spawn(self._insist(lambda: self._call(stub.EndGeneration, ended)))
        self._sessions -= 1
        if not self._sessions:
            self._idle.set()

    async def close(self, grace_s: float) -> None:
        """Give sessions that are being cut, and the endings under way, some time, and no more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
                if self._endings:
                    await asyncio.wait(self._endings)
        left = list(self._endings)
        for task in left:
            LEFT.inc()
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _spawn(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        return await method(request, metadata=self.metadata, timeout=CALL_S)

    async def _insist(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Until it was answered; whatever the answer is, there is no more to say."""
        pauses = Pauses(self.timing, ENDING_S)
        while True:
            try:
                await call()
                return
            except grpc.aio.AioRpcError as error:
                refused = refusal(error)
                if refused is not None and refused.problem is not registry.UNAVAILABLE:
                    return  # above all 404: it is known
            try:
                await pauses.wait()
            except KvspError:
                LEFT.inc()
                return


def refusal(error: grpc.aio.AioRpcError) -> KvspError | None:
    """What the peer said; None when it said nothing, as the connection broke or time was up."""
    trailers: Any = error.trailing_metadata() or ()
    if all(name != PROBLEM_TRAILER for name, _ in trailers):
        return None
    return from_rpc_error(error)
