"""UCX on an asyncio event loop: one worker, everything that hangs on it, and their end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvsp.protocol.errors import KvspError
from ucx_transport import library
from ucx_transport.errors import lost
from ucx_transport.memory import Octets

STALL_S: Final = 10.0
"""Nothing is awaited from a peer for longer."""
ROUNDS_MAX: Final = 16
"""Rounds of progress before other tasks of the loop have their turn."""
SPIN_S: Final = 50e-6
"""While one transfer moves, and so long after, more is looked for before the loop waits: to be woken takes longer.
Measured on two cores: 64 KiB take half of the time then, 512 KiB two thirds, with less CPU on either side. Where
several transfers move, what is woken up for one finds work for others, and nothing is won."""
TURN_S: Final = 500e-6
"""But other tasks of the loop have their turn by then."""
THREADS_MAX: Final = 4
STRAYS_MAX: Final = 10_000
TICK_S: Final = 0.5
"""UCX does not announce everything on its descriptor: keepalive and timers need a look now and then."""


@dataclass(slots=True, eq=False)
class Request:
    """What UCX was asked to do. It uses `buffer` until it completes, whatever became of who waits.

    To be awaited, at once or later. Raises KvspError (503), past `until` too, in seconds of the loop's clock.
    `frame`: octets of a block, not a few words.
    """

    engine: Engine
    connection: Connection | None
    request: Any
    buffer: Any
    until: float
    frame: bool
    failure: KvspError | None = None
    waiter: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, None]:
        if not self._over:
            self.engine.kick()
            self.waiter = self.engine.loop.create_future()
            yield from self.waiter
        if self.failure is not None:
            raise self.failure
        self.engine.check(self.request)

    @property
    def _over(self) -> bool:
        return self.failure is not None or bool(self.request.completed)

    def end(self, failure: KvspError | None = None) -> None:
        """Wake who waits."""
        self.failure = failure
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Engine:
    """Owns worker, endpoints and listener of a context, on the running loop. No threads.

    The worker's descriptor wakes the loop; requests are futures. Buffers of requests in flight are
    kept alive here until UCX is done with them, whatever became of those who waited.
    """

    def __init__(self, context: Any) -> None:
        self._bindings = library.load()
        self._loop = asyncio.get_running_loop()
        self._worker = self._bindings.UCXWorker(context)
        self.threads = ThreadPoolExecutor(THREADS_MAX, "ucx-seal")
        self._worker.init_blocking_progress_mode()
        self._fd: int = self._worker.epoll_file_descriptor
        self._waiting: list[Request] = []
        self._connections: set[Connection] = set()
        self.expected: set[range] = set()
        """Tags of the messages that transfers are to receive."""
        self._listener: Any = None
        self._pumping = False
        self._spin_until = 0.0
        self._closed = False
        self._loop.add_reader(self._fd, self._pump)
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.kick()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it runs on."""
        return self._loop

    @property
    def closed(self) -> bool:
        """True after `close`, and when its loop is gone."""
        return self._closed or self._loop.is_closed()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def listen(self, port: int, accepted: Callable[[Connection], None]) -> int:
        """Listen on all addresses and return the port. Raises OSError."""

        def deliver(request: int) -> None:
            # A peer that is gone again by now is none of our business.
            with suppress(self._bindings.UCXError):
                accepted(self._adopt(self._listener.create_endpoint_from_conn_request(request, True)))

        try:
            self._listener = self._bindings.UCXListener.create(self._worker, port, deliver)
        except self._bindings.UCXError as error:
            raise OSError(str(error)) from error
        self.kick()
        return int(self._listener.port)

    def connect(self, host: str, port: int) -> Connection:
        """A connection that is being made; what is asked of it first waits for it. Raises KvspError (503)."""
        try:
            endpoint = self._bindings.UCXEndpoint.create(self._worker, host, port, True)
        except self._bindings.UCXError as error:
            raise lost(str(error)) from error
        return self._adopt(endpoint)

    def posted(
        self,
        connection: Connection | None,
        request: Any,
        buffer: Any,
        within_s: float | None = None,
        *,
        frame: bool = False,
    ) -> Request:
        """Keep what UCX was asked to do with `buffer` until it is done, at most `within_s` (STALL_S)."""
        until = self._loop.time() + (STALL_S if within_s is None else within_s)
        made = Request(self, connection, request, buffer, until, frame)
        if not request.completed:
            self._waiting.append(made)
        return made

    def check(self, request: Any) -> None:
        """Raises KvspError (503) unless a request that is complete has succeeded."""
        try:
            request.check_error()
        except self._bindings.UCXError as error:
            raise lost(str(error)) from error

    def kick(self) -> None:
        """Have UCX do what there is to do, soon: something was posted."""
        if not self._pumping and not self._closed:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def close(self) -> None:
        """End all connections and the listener. Idempotent; returns when UCX has let go of all buffers."""
        if self._closed:
            return
        self._closed = True
        self._listener = None
        for connection in list(self._connections):
            connection.close()
        for _ in range(ROUNDS_MAX):
            self._worker.progress()  # what was cancelled holds on to the worker until it has been seen
        self._settle()
        for each in self._waiting:
            each.end(lost("closed"))
        self._waiting.clear()
        self._timer.cancel()
        self.threads.shutdown()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._worker = None

    def end(self, endpoint: Any, connection: Connection) -> None:
        """Close an endpoint by force: when this returns, its requests are over."""
        self._connections.discard(connection)
        with suppress(self._bindings.UCXError):
            # By force: it waits for UCX, not for the peer (`close` of ucxx 0.52 does not set the flag).
            endpoint.close_blocking()
        self._worker.progress()
        self._settle()
        # ucxx forgets to complete some; UCX itself is done with all of an endpoint that is closed.
        for each in self._waiting:
            if each.connection is connection:
                each.end(lost("the connection was closed"))
        self._waiting = [each for each in self._waiting if each.connection is not connection]

    def busy(self, connection: Connection) -> bool:
        """Whether UCX is still at work on something for it."""
        self._worker.progress()
        self._settle()
        return any(each.connection is connection for each in self._waiting)

    def tag(self, value: int) -> Any:
        """A message tag of 64 bits."""
        return self._bindings.UCXXTag(value)

    def _adopt(self, endpoint: Any) -> Connection:
        connection = Connection(self, endpoint)
        self._connections.add(connection)
        return connection

    def _pump(self) -> None:
        self._pumping = False
        if self._closed:
            return
        self._progress()
        self._settle()
        # Only an armed worker announces what comes next; it refuses while there is something to do.
        if not self._worker.arm():
            self.kick()

    def _progress(self) -> None:
        """Have UCX do what there is to do, and while a transfer moves, what comes within a moment."""
        moving = len({each.connection for each in self._waiting if each.frame}) == 1
        now = time.perf_counter()
        stop = now + TURN_S
        if moving:
            self._spin_until = now + SPIN_S
        for _ in range(ROUNDS_MAX):
            while not self._worker.progress_once():
                now = time.perf_counter()
                if now >= min(self._spin_until, stop) or any(each.request.completed for each in self._waiting):
                    self._worker.progress()  # cancels what hangs on endpoints that were lost, too
                    return
            if moving:
                self._spin_until = time.perf_counter() + SPIN_S

    def _settle(self) -> None:
        still = []
        for each in self._waiting:
            if each.request.completed:
                each.end(each.failure)
            else:
                still.append(each)
        self._waiting = still

    def _tick(self) -> None:
        now = self._loop.time()
        for each in self._waiting:
            if each.until <= now:
                each.end(lost("the peer does not move"))
        self._drop_strays()
        self.kick()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _drop_strays(self) -> None:
        """UCX would keep messages that nobody waits for until the memory is full."""
        for _ in range(STRAYS_MAX):
            found = self._worker.tag_probe(self.tag(0), self._bindings.UCXXTagMask(0))
            if not found.matched or any(found.sender_tag.value in tags for tags in self.expected):
                return
            stray = self._worker.tag_probe(self.tag(0), self._bindings.UCXXTagMask(0), remove=True)
            buffer = library.array(bytearray(1))
            self.posted(None, self._worker.tag_recv_with_handle(buffer, stray), buffer, math.inf)


class Connection:
    """One endpoint: words are said on it, and blocks move as tagged messages."""

    def __init__(self, engine: Engine, endpoint: Any) -> None:
        self.engine = engine
        self._endpoint = endpoint
        self._said: int | None = None
        self._heard: range | None = None

    @property
    def alive(self) -> bool:
        """False once closed here or lost."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return self.alive and self.engine.busy(self)

    def agree(self, to_send: int, to_receive: int) -> None:
        """From now on what is said are messages of these tags, which belong to this connection alone.

        The stream does for the first words, when neither side knows which peer is which. But a receive that
        waits on it cannot be cancelled, and one that waits when its endpoint is closed is never freed by ucxx.
        """
        self._said = to_send
        self._heard = range(to_receive, to_receive + 1)
        self.engine.expected.add(self._heard)

    async def say(self, octets: bytes) -> None:
        """Send a few words. Raises KvspError (503)."""
        if self._said is not None:
            await self.send(memoryview(octets), self._said)
            return
        buffer = library.array(octets)
        await self.engine.posted(self, self._open().stream_send(buffer), buffer)

    async def hear(self, octets: int, within_s: float | None = None) -> bytes:
        """So many octets of what the peer says. Raises KvspError (503)."""
        heard = bytearray(octets)
        buffer = library.array(heard)
        endpoint = self._open()
        if self._heard is None:
            request = endpoint.stream_recv(buffer)
        else:
            request = endpoint.tag_recv(buffer, self.engine.tag(self._heard.start))
        await self.engine.posted(self, request, buffer, within_s)
        return bytes(heard)

    def send(self, view: memoryview, tag: int) -> Request:
        """Begin to send one message; `view` must not change before that is done. Raises KvspError (503)."""
        buffer = library.array(view)
        request = self._open().tag_send(buffer, self.engine.tag(tag))
        return self.engine.posted(self, request, buffer, frame=True)

    def receive(self, view: Octets, tag: int) -> Request:
        """Begin to receive one message of at most so many octets; a longer one fails. Raises KvspError (503)."""
        buffer = library.array(view)
        request = self._open().tag_recv(buffer, self.engine.tag(tag))
        return self.engine.posted(self, request, buffer, frame=True)

    def close(self) -> None:
        """Idempotent. When it returns, UCX touches none of the buffers any more."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            if self._heard is not None:
                self.engine.expected.discard(self._heard)
            self.engine.end(endpoint, self)

    def _open(self) -> Any:
        if self._endpoint is None:
            raise lost("closed")
        return self._endpoint
