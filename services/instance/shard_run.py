"""What an instance computes for one parallel group, on a thread of its own.

Two instances may wait for each other's partials, of different groups: so no run shares a thread with another one,
or with the sessions of the scheduler.

A run tells, on the event loop that it was made on:

* at a member (`MemberRun`): Computed;
* at home (`HomeRun`): what the scheduler tells of a session (engine.py): Started, Sampled, ..., Finished, with
  BlockDone for what is completed after Started.

Blocks of what is computed in one piece, before Computed or Started, are many: the shell takes them from the store
as fast as it can get rid of them.

In place of anything that is still to come there may be one GroupGone, or one Finished with "failed", as the last.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from kvsp.protocol.errors import bad_request
from kvsp.protocol.reshard import Range, without
from kvsp.rpc.interceptors import frames
from services.instance.engine import BlockDone, Engine, Event, Finished, Sampled, Started, Work, end_reason
from services.instance.shard_store import NotHeld, ShardStore
from services.instance.sharded import GroupLost, Halt, Halted, Remote, Sharded

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Computed:
    """All layers of a member's range are computed."""

    session: str
    epoch: int


@dataclass(frozen=True)
class GroupGone:
    """The context is not whole any more (GroupLost): placement is to be told. No output is lost or in doubt."""

    session: str
    epoch: int


ShardEvent = Event | Computed | GroupGone


class ShardRun(ABC):
    """A run for (session, epoch), which begins at once. To be made and cancelled on the event loop."""

    def __init__(
        self,
        engine: Engine[Any],
        store: ShardStore,
        remote: Remote,
        on_event: Callable[[ShardEvent], None],
        key: tuple[str, int],
    ) -> None:
        self.key = key
        self._engine = engine
        self._store = store
        self._remote = remote
        self._on_event = on_event
        self._halt = Halt()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="kvsp-shard", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End it; none of its events follow. The thread ends within a layer, also when it waits for others."""
        self._halt.set()

    def join(self) -> None:
        """Wait for the thread to end, after `cancel` or the last event."""
        self._thread.join()

    @abstractmethod
    def _compute(self) -> None:
        """The work of the thread."""

    def _forward(self, tokens: Range, ids: Sequence[int]) -> torch.Tensor:
        """Compute these positions, for which room is reserved here where it is not yet; logits of the last."""
        self._halt.check()
        for missing in without([tokens], self._store.ranges()):
            self._store.reserve(missing)
        return self._engine.forward_shard(Sharded(self._store, tokens, self._remote, self._halt), ids)

    def _export(self, block: int) -> None:
        """Tell of a block, unless it has been given to another member, and so stored, already."""
        self._halt.check()
        with suppress(NotHeld):
            self._tell(BlockDone(*self.key, block, self._store.export(block)))

    def _run(self) -> None:
        try:
            self._compute()
        except Halted:
            pass
        except GroupLost:
            self._tell(GroupGone(*self.key))
        except Exception as error:
            # Where, not what: messages of a model's code may hold what it computed with.
            _log.error("a shard failed in the engine", kind=type(error).__name__, where=frames(error))
            self._tell(Finished(*self.key, "failed", type(error).__name__))

    def _tell(self, event: ShardEvent) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._deliver, event)

    def _deliver(self, event: ShardEvent) -> None:
        if not self._halt.halted:
            self._on_event(event)


class MemberRun(ShardRun):
    """A member's part of the prefill: one pass over its range."""

    def __init__(
        self,
        engine: Engine[Any],
        store: ShardStore,
        remote: Remote,
        on_event: Callable[[ShardEvent], None],
        key: tuple[str, int],
        *,
        tokens: Range,
        ids: Sequence[int],
    ) -> None:
        """`tokens`, whole blocks, have the ids `ids`. Raises KvspError (400) when they cannot be computed."""
        size = engine.descriptor.block_tokens
        first, end = tokens
        if not 0 <= first < end <= engine.positions_max or end - first != len(ids) or first % size or end % size:
            raise bad_request("range and tokens do not fit together")
        engine.check_tokens(ids)
        self._tokens, self._ids = tokens, list(ids)
        super().__init__(engine, store, remote, on_event, key)

    def _compute(self) -> None:
        self._forward(self._tokens, self._ids)
        self._tell(Computed(*self.key))


class HomeRun(ShardRun):
    """A session at home: prefill of the last range and what follows it in one pass, then token by token."""

    def __init__(
        self,
        engine: Engine[Any],
        store: ShardStore,
        remote: Remote,
        on_event: Callable[[ShardEvent], None],
        work: Work,
        *,
        first: int,
    ) -> None:
        """Compute from position `first` on, where home's range begins. `work.prefix` is not used.

        Raises KvspError (400) when the work cannot be done here.
        """
        self._choice = engine.check(work)
        length = work.known_from + len(work.tokens)
        if not work.known_from <= first < length or first % engine.descriptor.block_tokens:
            raise bad_request("home's range does not fit the tokens that are known")
        self._work = work
        self._first = first
        self._length = length
        self._exported = length // engine.descriptor.block_tokens
        self._positions = min(work.prompt_tokens + work.max_tokens, engine.positions_max)
        super().__init__(engine, store, remote, on_event, (work.session, work.epoch))

    def _compute(self) -> None:
        work = self._work
        logits = self._forward((self._first, self._length), work.tokens[self._first - work.known_from :])
        self._tell(Started(*self.key, 0))
        while True:
            index = self._length - work.prompt_tokens
            row: Any = logits
            token = self._choice.pick(row.float().numpy(), index)
            self._tell(Sampled(*self.key, index, token))
            self._length += 1
            reason = end_reason(work, self._length, self._positions, token)
            if reason is not None:
                break
            self._export_complete()
            logits = self._forward((self._length - 1, self._length), [token])
        self._export_complete()
        self._tell(Finished(*self.key, reason))

    def _export_complete(self) -> None:
        """Tell of new complete blocks: all but the last token are computed."""
        complete = (self._length - 1) // self._engine.descriptor.block_tokens
        for block in range(self._exported, complete):
            self._export(block)
        self._exported = complete
