"""A deterministic world of virtual milliseconds: one seed, one order of events.

Nodes run plain coroutines on a scheduler of their own (no asyncio: its loop has a real clock). Whatever a node
does, it does inside `Node.enter`: a crash throws its coroutines away, a pause (SIGSTOP) holds back timers and
messages alike until the node goes on.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Action = Callable[[], None]


class Crash(BaseException):
    """Unwinds the coroutine in which its node has just died."""


class Kernel:
    """Virtual time, the queue of events, the random numbers of the seed, and the trace of the run."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ms = 0
        self.events = 0
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._trace = trace
        self._queue: list[tuple[int, int, Action]] = []
        self._serial = count()

    def log(self, *words: object) -> None:
        if self._trace is not None:
            self._trace(f"{self.now_ms:>7} " + " ".join(map(str, words)))

    def count(self, what: str) -> None:
        """Something noteworthy has happened: a fault, a migration."""
        self.counts[what] += 1

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def after(self, delay_ms: int, action: Action) -> None:
        heapq.heappush(self._queue, (self.now_ms + max(0, delay_ms), next(self._serial), action))

    def run_until(self, end_ms: int, done: Callable[[], bool] = lambda: False) -> None:
        """Run events until the clock shows `end_ms` or `done`. Raises what an event or a check raises."""
        while self._queue and self._queue[0][0] <= end_ms and not done():
            self.now_ms, _, action = heapq.heappop(self._queue)
            self.events += 1
            action()
            if self.failure is not None:
                raise self.failure
        if not done():
            self.now_ms = end_ms


class Future(Generic[T]):
    """A result to come; the first of `set` and `fail` counts, so that a duplicate reply changes nothing."""

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._waiting: list[Action] = []

    def set(self, value: T) -> None:
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        self._finish(None, error)

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        if not self.done:
            self.done, self._value, self._error = True, value, error
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()

    def when_done(self, wake: Action) -> None:
        if self.done:
            wake()
        else:
            self._waiting.append(wake)

    def __await__(self) -> Generator[Future[T], None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Node:
    """A process. `life` counts its starts; everything from an earlier life is void."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.life = 0
        self.up = False
        self.paused = False
        self.skew_ms = kernel.random.randrange(10_000)
        self.on_crash: list[Action] = []  # of this life: its connections are reset
        self._backlog: deque[Action] = deque()

    def __repr__(self) -> str:
        return self.name

    @property
    def now_ms(self) -> int:
        """The node's own monotonic clock: no two nodes agree ("no clock sync assumed", R-003)."""
        return self.kernel.now_ms + self.skew_ms

    def log(self, *words: object) -> None:
        self.kernel.log(f"{self.name:<4}", *words)

    # --- life and death ---

    def boot(self) -> None:
        """What the process does first; memory is empty."""

    def left_over(self) -> list[str]:
        """What is still there of sessions, directives and leases, in words."""
        return []

    def start(self) -> None:
        if not self.up:
            self.up, self.life, self.paused = True, self.life + 1, False
            self.log("start", self.life)
            self.enter(self.boot)

    def crash(self) -> None:
        """kill -9: memory and everything under way are gone."""
        if self.up:
            self.log("crash")
            self.up, self.paused = False, False
            self.life += 1
            self._backlog.clear()
            told, self.on_crash = self.on_crash, []
            for tell in told:
                tell()

    def pause(self) -> None:
        """SIGSTOP."""
        if self.up:
            self.log("pause")
            self.paused = True

    def resume(self) -> None:
        """SIGCONT: what has come in meanwhile is handled now, in its order."""
        if not (self.up and self.paused):
            return
        self.log("resume")
        self.paused = False
        backlog, self._backlog = self._backlog, deque()
        while backlog and not self.paused:
            self.enter(backlog.popleft())
        self._backlog.extendleft(reversed(backlog))

    # --- running code of the node ---

    def enter(self, action: Action) -> None:
        """Run a piece of the node's code; an error of it ends the whole run."""
        if not self.up:
            return
        if self.paused:
            self._backlog.append(action)
            return
        try:
            action()
        except Crash:
            pass
        except BaseException as error:
            self.kernel.failure = self.kernel.failure or error

    def die(self) -> None:
        """Crash here and now, in the middle of the node's own code."""
        self.crash()
        raise Crash

    def after(self, delay_ms: int, action: Action) -> None:
        """A timer of this life."""
        life = self.life

        def fire() -> None:
            if self.life == life:
                self.enter(action)

        self.kernel.after(delay_ms, fire)

    def sleep(self, delay_ms: int) -> Future[None]:
        future: Future[None] = Future()
        self.after(delay_ms, lambda: future.set(None))
        return future

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that belongs to this life."""
        life = self.life

        def step() -> None:
            if self.life != life:
                work.close()
                return
            try:
                future = work.send(None)
            except StopIteration:
                return
            future.when_done(lambda: self.kernel.after(0, wake))

        def wake() -> None:
            if self.life == life:
                self.enter(step)
            else:
                work.close()

        self.enter(step)
