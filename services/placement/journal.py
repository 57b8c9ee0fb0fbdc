"""Group commit: many events, one transaction, off the event loop; what depends on it happens after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvsp.protocol.errors import KvspError, unavailable
from services.placement.instructions import Row, key_of
from services.placement.store import Store

LOST: Final = "the controller cannot write its state"


class _Batch:
    """Rows of one transaction, and what follows it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.then: list[Callable[[], None]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.exception())  # nobody need be waiting


class Journal:
    """Writes rows in the order in which they come; at most one transaction is under way, the next one collects.

    `run` must be running. When a write fails it ends with StoreError and so must the process: what is in
    memory is then ahead of the disk, and nothing may be acknowledged any more.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "kvsp-journal")
        self._writing: _Batch | None = None
        self._open: _Batch | None = None
        self._wake = asyncio.Event()
        self._broken = False

    def enter(self, rows: Sequence[Row], then: Sequence[Callable[[], None]]) -> asyncio.Future[None] | None:
        """Write `rows`, then call each of `then`; only after that may the event be acknowledged; None: now.

        Without rows it is enough that everything entered so far is written. The future raises KvspError (503)
        when it could not be. Raises KvspError (503) after that.
        """
        if self._broken:
            raise unavailable(LOST)
        if rows and self._open is None:
            self._open = _Batch()
            self._wake.set()
        batch = self._open or self._writing
        if batch is None:
            for call in then:
                call()
            return None
        for row in rows:
            batch.rows[key_of(row)] = row
        batch.then.extend(then)
        return batch.done

    async def run(self) -> None:
        """Write what is entered, until a write fails. Raises StoreError."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._open is not None:
                batch = self._writing = self._open
                self._open = None
                try:
                    await loop.run_in_executor(self._thread, self._store.commit, list(batch.rows.values()))
                except BaseException:  # also when cancelled: whether it is on disk is not known
                    self._break()
                    raise
                self._writing = None
                for call in batch.then:
                    call()
                batch.done.set_result(None)

    def close(self) -> None:
        """Wait for the write under way, and close the store."""
        self._thread.shutdown()
        self._store.close()

    def _break(self) -> None:
        self._broken = True
        error: KvspError = unavailable(LOST)
        for batch in (self._writing, self._open):
            if batch is not None:
                batch.done.set_exception(error)
