"""One block from whichever replica delivers it, verified (R-088, R-155, R-161, R-162)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import dataclass, field

from kvsp.client.block import Block, Expectation, Layer
from kvsp.client.config import Options
from kvsp.client.download import Download, WritableBuffer
from kvsp.client.errors import BlockUnavailable, Cause
from kvsp.client.transport import CANCEL, Deadline, Progress, Transport
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError

log = logging.getLogger("kvsp.client")


@dataclass(frozen=True, slots=True)
class Source:
    """One place a block can be had from: its URL, and what must be true of it.

    `refused` says why it may not be asked at all.
    """

    holder: str
    block_key: str
    url: str = ""
    expect: Expectation = field(default_factory=Expectation)
    refused: KvspError | None = None


class Fetcher:
    """Tries sources in order. `report(holder, block_key)` tells the index of a digest mismatch."""

    def __init__(
        self,
        transport: Transport,
        options: Options,
        workers: Executor,
        report: Callable[[str, str], object] | None,
    ) -> None:
        self._transport = transport
        self._options = options
        self._workers = workers
        self._report = report

    def first(self, sources: Iterable[Source], into: WritableBuffer | None, progress: Progress | None) -> Block:
        """The block from the first source that delivers it. Raises BlockUnavailable."""
        causes: list[Cause] = []
        deadline = Deadline(self._options.total_s)
        for source in sources:
            try:
                return self._download(source, self._sink(source, into), deadline, progress)
            except KvspError as error:
                self._note(source, error, causes)
        raise BlockUnavailable(causes)

    def layers(self, sources: Iterable[Source], into: WritableBuffer | None) -> Generator[Layer, None, None]:
        """Layers as they are verified; fails over until the first was given out. Raises KvspError."""
        causes: list[Cause] = []
        deadline = Deadline(self._options.total_s)
        for source in sources:
            given = False
            try:
                for layer in self._follow(source, into, deadline):
                    given = True
                    yield layer
                return
            except KvspError as error:
                self._note(source, error, causes)
                if given:
                    raise
        raise BlockUnavailable(causes)

    def _sink(self, source: Source, into: WritableBuffer | None) -> Download:
        return Download(source.expect, self._workers, verify=self._options.verify, into=into)

    def _download(
        self, source: Source, sink: Download, deadline: Deadline, progress: Progress | None = None
    ) -> Block:
        try:
            if source.refused is not None:
                raise source.refused
            self._transport.exchange(
                "GET", source.url, deadline, sink=sink, progress=progress, block=True
            ).require_ok()
            return sink.finish(source.holder)
        finally:
            sink.close()

    def _follow(
        self, source: Source, into: WritableBuffer | None, deadline: Deadline
    ) -> Generator[Layer, None, None]:
        """Download on a thread of its own and give out each layer that matched."""
        sink, stop = self._sink(source, into), CANCEL.get() or threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            CANCEL.set(stop)
            try:
                self._download(source, sink, deadline)
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=copy_context().run, args=(run,), name="kvsp-get", daemon=True)
        thread.start()
        given = 0
        try:
            while sink.wait_layer(given):
                yield sink.layer(given)
                given += 1
            thread.join()
            if failure:
                raise failure[0]
            # Whatever could not be used early has been verified as a whole by now.
            for nth in range(given, sink.layer_count):
                yield sink.layer(nth)
        finally:
            if thread.is_alive():
                stop.set()
                thread.join()

    def _note(self, source: Source, error: KvspError, causes: list[Cause]) -> None:
        """Remember why a replica failed; report one that is not what was published."""
        causes.append((source.holder, error))
        log.info("replica at %s not usable: %s", source.holder, error)
        if error.problem != registry.DIGEST_MISMATCH or source.refused is not None or self._report is None:
            return
        try:
            # "SHOULD report it to the IS by withdrawing the replica on the holder's behalf if
            # authorized" (R-162); whether it is, is no concern of whoever waits for the block.
            self._report(source.holder, source.block_key)
        except KvspError as refusal:
            log.info("mismatch at %s not reported: %s", source.holder, refusal)
