"""One thread that computes for all sessions: continuous batching with chunked prefill.

Sessions join and leave between turns. A turn samples for every session that is ready, computes one token of each,
and then one chunk of one prompt: decoding never waits for a whole prefill. A session whose prefix is still
arriving is computed layer by layer as it comes, if there is nothing else to do; once there is, its wait moves off
the thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic

import structlog

from kvsp.connectors.prefix import Arrival, Interrupted, PrefixShortened
from kvsp.protocol.errors import bad_request
from kvsp.rpc.interceptors import frames
from services.instance.engine import (
    KV_OCTETS,
    BlockDone,
    Engine,
    Event,
    Finished,
    PrefixLost,
    S,
    Sampled,
    Started,
    Stats,
    TokensUnknown,
    Work,
    end_reason,
)
from services.instance.memory import Key, Memory, positions_in

EXPORTS_A_TURN: Final = 4
"""Blocks of a session that are exported between two tokens, so that a long prompt's do not hold up the others."""

SMOOTHING: Final = 0.2
"""Weight of the newest measurement in the moving average of a rate."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Entry(Generic[S]):
    """A session between its submission and its end."""

    work: Work
    sequence: S
    positions: int
    """The most tokens that it may have."""
    cancelled: bool = False
    overlap: bool = True
    """May be computed while its prefix is arriving."""
    asked: bool = False
    """Waits for tokens."""
    provided: Sequence[int] | None = field(default=None, repr=False)
    exported: int | None = None
    """Blocks up to here need no export (any more); None before the first token was sampled."""

    @property
    def key(self) -> Key:
        """Session and epoch."""
        return self.work.session, self.work.epoch

    @property
    def arrival(self) -> Arrival:
        """Of its prefix."""
        return self.sequence.cache.arrival

    @property
    def settled(self) -> bool:
        """Computing would not wait for layers."""
        return self.arrival.settled(len(self.sequence.cache.layers))

    @property
    def actionable(self) -> bool:
        """There is something to do for it that needs no waiting."""
        return self.cancelled or self.provided is not None or (self.settled and not self.asked)


class Scheduler(Generic[S]):
    """Runs sessions on `engine` and tells what happens to `on_event`, on the event loop it was made on.

    At most `batch_size` sessions run at a time; others wait in the order of their submission. Those that run or
    have a prefix take at most `kv_octets` of KV memory, which is kept for all their tokens from the start: ask for
    `room` before a prefix is made. Methods may be called on any thread, but for `room`, and do not wait for
    compute, but for `close`.
    """

    def __init__(
        self,
        engine: Engine[S],
        on_event: Callable[[Event], None],
        *,
        batch_size: int = 16,
        kv_octets: int = KV_OCTETS,
    ) -> None:
        self._engine = engine
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._batch_size = batch_size
        self._memory = Memory(positions_in(kv_octets, engine.descriptor))
        self._prefill_rate, self._decode_rate = engine.rates
        self._changed = threading.Condition()
        self._entries: dict[Key, Entry[S]] = {}
        self._queue: deque[Entry[S]] = deque()
        self._running: list[Entry[S]] = []
        self._overlapping: Entry[S] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvsp-compute", daemon=True)
        self._thread.start()

    async def room(self, session: str, epoch: int, prompt_tokens: int, max_tokens: int) -> None:
        """Return when memory is kept for a session, until its end or `cancel`.

        Who gives up waiting must call `cancel`.
        Raises KvspError (400) when there never is as much, ValueError when the session is there already.
        """
        positions, granted = self._positions_of(prompt_tokens, max_tokens), self._loop.create_future()
        with self._changed:
            self._memory.ask((session, epoch), positions, lambda: self._loop.call_soon_threadsafe(_grant, granted))
        await granted

    def submit(self, work: Work) -> None:
        """Take a session; one that has no `room` waits for it.

        Raises KvspError (400) when it cannot be run, ValueError when it is there already.
        """
        positions = self._positions_of(work.prompt_tokens, work.max_tokens)
        entry = Entry(work, self._engine.begin(work), positions)
        with self._changed:
            if entry.key in self._entries:
                raise ValueError("session is there already")
            if entry.key not in self._memory:
                self._memory.ask(entry.key, positions, self._changed.notify_all)
            self._entries[entry.key] = entry
            self._queue.append(entry)
        entry.arrival.watch(self._wake)
        self._wake()

    def cancel(self, session: str, epoch: int) -> None:
        """Forget a session, if it is there; on the event loop: none of its events follow."""
        with self._changed:
            entry = self._entries.pop((session, epoch), None)
            if entry is not None:
                entry.cancelled = True
                if entry in self._queue:
                    self._queue.remove(entry)
            self._memory.free((session, epoch))
        self._wake()

    def provide_tokens(self, session: str, epoch: int, tokens: Sequence[int]) -> None:
        """The tokens of a session's first positions, at least up to `known_from`; at any time, once is enough."""
        with self._changed:
            entry = self._entries.get((session, epoch))
            if entry is None or entry.work.known_from == 0:
                return
            entry.provided = list(tokens)
        self._wake()

    def stats(self) -> Stats:
        """The state of things."""
        with self._changed:
            return Stats(
                running=len(self._running),
                queued=len({*self._memory.waiting, *(entry.key for entry in self._queue)}),
                kv_utilization=self._memory.taken / self._memory.positions,
                prefill_tokens_per_s=self._prefill_rate,
                decode_tokens_per_s=self._decode_rate,
            )

    def close(self) -> None:
        """End the thread; waits for the forward pass under way. No event follows."""
        with self._changed:
            self._closing = True
            self._entries.clear()
        self._wake()
        self._thread.join()

    # --- what to do next; under the lock ---

    def _wake(self) -> None:
        """Something has changed: the compute thread looks again, also when it waits for layers inside a pass."""
        with self._changed:
            self._changed.notify_all()
            waiting = self._overlapping
            if waiting is not None and self._due(besides=waiting):
                waiting.arrival.interrupt()

    def _due(self, besides: Entry[S] | None = None) -> bool:
        """There is something to do that needs no waiting; `besides` is being computed already."""
        if self._closing or (besides is not None and besides.cancelled):
            return True
        admissible = self._admissible()
        if admissible is not None and (besides is None or admissible.settled):
            return True
        return any(entry.actionable for entry in self._running if entry is not besides)

    def _admissible(self) -> Entry[S] | None:
        """The next of the queue, if there is a place for it."""
        if len(self._running) >= self._batch_size:
            return None
        return next((entry for entry in self._queue if self._memory.has(entry.key)), None)

    def _positions_of(self, prompt_tokens: int, max_tokens: int) -> int:
        """What is kept for a session. Raises KvspError (400) when its prompt needs more than there is."""
        if prompt_tokens >= self._memory.positions:
            raise bad_request("prompt needs more memory than there is")
        return min(prompt_tokens + max_tokens, self._engine.positions_max, self._memory.positions)

    def _overlapped(self) -> Entry[S] | None:
        """A session that may begin before its prefix is there."""
        return next((entry for entry in self._running if entry.overlap and not entry.asked), None)

    def _next(self) -> list[Entry[S]] | None:
        """Wait until there is something to do; the sessions of the turn, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._due() or self._overlapped() is not None)
            if self._closing:
                return None
            for entry in [entry for entry in self._running if entry.cancelled]:
                self._leave(entry)
            while (admitted := self._admissible()) is not None:
                self._queue.remove(admitted)
                self._running.append(admitted)
            return list(self._running)

    # --- on the compute thread ---

    def _run(self) -> None:
        while (entries := self._next()) is not None:
            for entry in entries:
                if entry.provided is not None:
                    self._guarded(entry, self._provide)
            self._decode([entry for entry in entries if entry.sequence.ready])
            for entry in self._alive(entries):
                self._guarded(entry, self._export)
            waiting = [entry for entry in self._alive(entries) if not entry.sequence.ready and not entry.asked]
            chosen = next((entry for entry in waiting if entry.settled), None)
            if chosen is not None:
                self._guarded(chosen, self._prefill)
            elif not any(entry.sequence.ready for entry in self._alive(entries)):
                self._overlap()

    def _alive(self, entries: Sequence[Entry[S]]) -> list[Entry[S]]:
        return [entry for entry in entries if entry in self._running and not entry.cancelled]

    def _decode(self, ready: Sequence[Entry[S]]) -> None:
        """Sample for each, tell it, then compute one token of each that goes on."""
        if not ready:
            return
        started = time.perf_counter()
        for entry in ready:
            self._guarded(entry, self._sample)
        going_on = self._alive(ready)
        if not going_on:
            return
        failed = self._engine.step([entry.sequence for entry in going_on])
        for at, error in failed.items():
            self._fail(going_on[at], error)
        rate = len(going_on) / (time.perf_counter() - started)
        self._decode_rate += SMOOTHING * (rate - self._decode_rate)

    def _sample(self, entry: Entry[S]) -> None:
        sequence, work = entry.sequence, entry.work
        if entry.exported is None:
            entry.exported = sequence.loaded // self._engine.descriptor.block_tokens
            self._tell(Started(*entry.key, min(sequence.loaded, work.prompt_tokens)))
        token = self._engine.sample(sequence)
        self._tell(Sampled(*entry.key, sequence.length - 1 - work.prompt_tokens, token))
        reason = end_reason(work, sequence.length, entry.positions, token)
        if reason is not None:
            self._export(entry, everything=True)
            self._finish(entry, Finished(*entry.key, reason))

    def _export(self, entry: Entry[S], *, everything: bool = False) -> None:
        if entry.exported is None:
            return
        complete = entry.sequence.done // self._engine.descriptor.block_tokens
        end = complete if everything else min(complete, entry.exported + EXPORTS_A_TURN)
        for block in range(entry.exported, end):
            self._tell(BlockDone(*entry.key, block, self._engine.export(entry.sequence, block)))
            entry.exported = block + 1

    def _prefill(self, entry: Entry[S]) -> None:
        """One chunk, or what stands in its way."""
        sequence, work = entry.sequence, entry.work
        if sequence.length > work.prompt_tokens and entry.exported is None:
            # A checkpoint may have been made of a session's last token.
            reason = end_reason(work, sequence.length, entry.positions, work.tokens[-1])
            if reason is not None:
                self._finish(entry, Finished(*entry.key, reason))
                return
        try:
            started, waited = time.perf_counter(), not entry.settled
            tokens = self._engine.prefill(sequence)
            if tokens == self._engine.chunk_tokens and not waited:
                rate = tokens / (time.perf_counter() - started)
                self._prefill_rate += SMOOTHING * (rate - self._prefill_rate)
        except PrefixShortened:
            self._engine.rewind(sequence)
        except Interrupted:
            entry.overlap = False
        except TokensUnknown:
            entry.asked = True
            self._tell(PrefixLost(*entry.key, sequence.loaded // self._engine.descriptor.block_tokens))

    def _overlap(self) -> None:
        """Compute a session on layers as they come."""
        with self._changed:
            if self._due() or (entry := self._overlapped()) is None:
                return
            self._overlapping = entry
        self._guarded(entry, self._prefill)
        with self._changed:
            self._overlapping = None

    def _provide(self, entry: Entry[S]) -> None:
        with self._changed:
            tokens, entry.provided = entry.provided, None
        if tokens is not None:
            self._engine.provide(entry.sequence, tokens)
        entry.asked = False

    def _guarded(self, entry: Entry[S], action: Callable[[Entry[S]], None]) -> None:
        """An error of one session ends that session alone."""
        try:
            action(entry)
        except Exception as error:
            self._fail(entry, error)

    def _fail(self, entry: Entry[S], error: Exception) -> None:
        if not entry.cancelled:
            # Where, not what: messages of a model's code may hold what it computed with.
            _log.error("session failed in the engine", kind=type(error).__name__, where=frames(error))
        self._finish(entry, Finished(*entry.key, "failed", type(error).__name__))

    def _finish(self, entry: Entry[S], last: Finished) -> None:
        with self._changed:
            self._leave(entry)
        self._tell(last)

    def _leave(self, entry: Entry[S]) -> None:
        self._running.remove(entry)
        if not entry.cancelled:  # `cancel` has done so, and the key may be another's by now
            self._memory.free(entry.key)

    def _tell(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._deliver, event)

    # --- on the event loop ---

    def _deliver(self, event: Event) -> None:
        """Pass an event on, unless its session was cancelled meanwhile."""
        with self._changed:
            key = event.session, event.epoch
            if key not in self._entries:
                return
            if isinstance(event, Finished):
                del self._entries[key]
        self._on_event(event)


def _grant(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)
