"""The simulated network: calls that get lost, doubled and overtaken, streams that break, partitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvsp.protocol.errors import KvspError
from tests.sim.kernel import Future, Kernel, Node

T = TypeVar("T")


class UnreachableError(Exception):
    """No answer in time: the call may or may not have been carried out."""


class EndOfStreamError(Exception):
    """A stream is over."""


@dataclass
class Weather:
    """How bad the network is. Probabilities per message; delays in ms."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0  # a message takes `slow_ms` at most, so that later ones overtake it
    delay_ms: int = 4
    slow_ms: int = 400


class Network:
    """Messages between nodes; a blocked pair of names is one direction of a partition."""

    def __init__(self, kernel: Kernel, weather: Weather) -> None:
        self.kernel = kernel
        self.weather = weather
        self.blocked: set[tuple[str, str]] = set()

    def cut(self, left: str, right: str) -> None:
        self.blocked |= {(left, right), (right, left)}

    def cut_one_way(self, source: str, target: str) -> None:
        self.blocked.add((source, target))

    def heal(self) -> None:
        self.blocked.clear()

    def delay_ms(self) -> int:
        kernel, weather = self.kernel, self.weather
        if kernel.chance(weather.slow):
            kernel.count("delayed")
            return kernel.random.randint(1, weather.slow_ms)
        return kernel.random.randint(0, weather.delay_ms)

    def passes(self, source: Node, target: Node) -> bool:
        if (source.name, target.name) in self.blocked:
            return False
        if self.kernel.chance(self.weather.loss):
            self.kernel.count("lost")
            return False
        return True

    def send(
        self, source: Node, target: Node, deliver: Callable[[], None], refused: Callable[[], None] | None = None
    ) -> None:
        """One message: lost, doubled or late, as the weather is. It reaches whatever life the target is in.

        `refused` is called, at once, where the target is not running.
        """
        if not self.passes(source, target):
            return
        copies = 1
        if self.kernel.chance(self.weather.duplicate):
            self.kernel.count("duplicated")
            copies = 2

        def arrive() -> None:
            if target.up:
                target.enter(deliver)
            elif refused is not None:
                refused()

        for _ in range(copies):
            self.kernel.after(self.delay_ms(), arrive)

    async def call(
        self, source: Node, target: Node, handle: Callable[[], Coroutine[Any, Any, T]], timeout_ms: int = 500
    ) -> T:
        """Run `handle` at `target` and return or raise its outcome (KvspError). Raises UnreachableError."""
        reply: Future[T] = Future()
        life = source.life

        def answer(deliver: Callable[[], None]) -> None:
            self.send(target, source, lambda: deliver() if source.life == life else None)

        async def serve() -> None:
            try:
                value = await handle()
            except KvspError as error:
                answer(lambda error=error: reply.fail(error))  # type: ignore[misc]
            else:
                answer(lambda: reply.set(value))

        def unreachable() -> None:
            reply.fail(UnreachableError(target.name))

        refused = lambda: answer(unreachable)  # noqa: E731
        self.send(source, target, lambda: target.spawn(serve()), refused)
        source.after(timeout_ms, unreachable)
        return await reply

    def open(
        self, reader: Node, server: Node, serve: Callable[[Stream[T]], Coroutine[Any, Any, None]]
    ) -> Stream[T]:
        """Open a stream that `serve` fills at `server`; a KvspError of it is the stream's end."""
        stream: Stream[T] = Stream(self, server, reader)

        async def filled() -> None:
            try:
                await serve(stream)
            except KvspError as error:
                stream.close(error)
            else:
                stream.close()

        if self.passes(reader, server):
            self.kernel.after(self.delay_ms(), lambda: stream.connect(lambda: server.spawn(filled())))
        reader.after(Stream.PROBE_MS, stream.probe)
        return stream


class Stream(Generic[T]):
    """Items in order, from a serving node to a reading one, until it ends or breaks."""

    BREAK_MS = 300  # until both ends have noticed that the connection is dead
    PROBE_MS = 500  # as often the transport makes sure that the other end is there

    def __init__(self, network: Network, server: Node, reader: Node) -> None:
        self.network = network
        self.server = server
        self.reader = reader
        self.broken = False  # as the server knows
        self._lives = [-1, reader.life]
        self._items: deque[T] = deque()
        self._waiting: Future[None] | None = None
        self._end: BaseException | None = None
        self._last_ms = 0
        self._dead = False

    @property
    def is_open(self) -> bool:
        """What the server's keepalive finds: its reader is there."""
        return not self._dead and self.reader.life == self._lives[1]

    def connect(self, serve: Callable[[], None]) -> None:
        """The connection is made, or refused; a crash of the server resets it."""
        if self.server.up:
            self._lives[0] = self.server.life
            self.server.on_crash.append(self._break)
            self.server.enter(serve)
        else:
            self._break()

    def send(self, item: T) -> None:
        self._carry(lambda: self._items.append(item))

    def close(self, error: KvspError | None = None) -> None:
        self._carry(lambda: self._finish(error or EndOfStreamError()))

    def drop(self) -> None:
        """The reader hangs up."""
        self._finish(UnreachableError("dropped"))
        self._break()

    def probe(self) -> None:
        """What the transport does by itself: a dead peer or a dead path ends the stream at either end."""
        gone = [self.server.life, self.reader.life] != self._lives
        blocked = {(self.server.name, self.reader.name), (self.reader.name, self.server.name)}
        if gone or blocked & self.network.blocked:
            self._break()
        if not self._dead and self._end is None:
            self.reader.after(self.PROBE_MS, self.probe)

    async def next(self) -> T:
        """The next item. Raises EndOfStreamError, KvspError, UnreachableError."""
        while not self._items:
            if self._end is not None:
                raise self._end
            self._waiting = Future()
            await self._waiting
        return self._items.popleft()

    def _carry(self, deliver: Callable[[], None]) -> None:
        if self._dead or self.broken:
            return
        if not self.network.passes(self.server, self.reader):
            self._break()
            return
        kernel = self.network.kernel
        at_ms = max(self._last_ms, kernel.now_ms + self.network.delay_ms())  # in order, as TCP is
        self._last_ms = at_ms

        def arrive() -> None:
            if not self._dead and self.reader.life == self._lives[1]:
                self.reader.enter(lambda: self._arrive(deliver))

        kernel.after(at_ms - kernel.now_ms, arrive)

    def _arrive(self, deliver: Callable[[], None]) -> None:
        deliver()
        self._wake()

    def _break(self) -> None:
        if self._dead:
            return
        self._dead = True
        self.network.kernel.after(self.network.kernel.random.randint(0, self.BREAK_MS), self._notice)

    def _notice(self) -> None:
        self.broken = True
        if self.reader.life == self._lives[1]:
            self.reader.enter(lambda: self._finish(UnreachableError(self.server.name)))

    def _finish(self, end: BaseException) -> None:
        if self._end is None:
            self._end = end
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set(None)
