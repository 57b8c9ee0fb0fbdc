"""Room for a block at a holder, to be filled by whichever transport was agreed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

from kvsp.bulk.chooser import Chooser
from kvsp.bulk.control import ControlStream
from kvsp.bulk.reading import TRANSPORT_FAILED, lapsed
from kvsp.bulk.source import BlockWriter, Piece, SharingWriter
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.v1 import holder_pb2

COMMIT_TIMEOUT_S: Final = 60.0
REPORT_OCTETS: Final = 256 << 10
"""A writer to shared memory says this often how far it is: seldom enough for the message to cost little."""


class ReservedTransfer:
    """Room for one container, to be filled from its first octet to its last and committed, or aborted.

    `put` is `write` for callers that must not wait; None: this transport has to. The room is lost at
    `deadline`, in seconds of the event loop's clock. A transport that fails midway ends the transfer (503): what
    was written is the caller's to write again, and goes another way then.
    """

    def __init__(
        self,
        stream: ControlStream,
        reserved: holder_pb2.ReservedBlock,
        length: int,
        writer: BlockWriter,
        chooser: Chooser,
    ) -> None:
        able = chooser.source(reserved.location.scheme).capabilities
        self.length = length
        self.written = 0
        self.scheme = reserved.location.scheme
        # What comes in messages the holder counts itself; of its own memory it must be told.
        self._report_at = REPORT_OCTETS if able.zero_copy else length + 1
        self._id = reserved.transfer
        self._stream = stream
        self._writer = writer
        self._connects = able.direct and not able.zero_copy
        self._chooser = chooser
        self.put: Callable[[Piece], None] | None = self._put if able.zero_copy else None
        self.deadline = asyncio.get_running_loop().time() + reserved.deadline_ms / 1000
        self._open = True
        stream.users += 1

    async def write(self, piece: Piece) -> None:
        """Append; the holder hashes what has arrived meanwhile. Raises KvspError: 400 too many octets, 503."""
        octets = self._check(piece)
        try:
            await self._writer.write(piece)
        except KvspError as error:
            self._note_failure(error)
            raise
        self._advance(octets)

    def _put(self, piece: Piece) -> None:
        octets = self._check(piece)
        cast(SharingWriter, self._writer).put(piece)
        self._advance(octets)

    def _check(self, piece: Piece) -> int:
        # Past its deadline the room may be given to another block: never touch it again.
        if not self._held:
            raise lapsed()
        if not self._open:
            raise ValueError("the transfer is over")
        octets = memoryview(piece).nbytes
        if self.written + octets > self.length:
            raise bad_request("more octets than announced")
        return octets

    def _advance(self, octets: int) -> None:
        self.written += octets
        if self.written >= self._report_at:
            self._report_at = self.written + REPORT_OCTETS
            self._stream.tell(wrote=holder_pb2.WroteOctets(transfer=self._id, octets=self.written))

    async def commit(self, digests: Mapping[str, bytes] | Iterable[tuple[str, bytes]] = ()) -> bytes:
        """Make the block visible and return its SHA-256, comparing `digests` (by RFC 9530 algorithm name).

        Raises KvspError: 400, 404, 409, 422, 503, 504. Whatever is raised, the transfer is over, and nothing is
        stored; but after 503 and 504, when the holder's answer is missing, the block may be there all the same.
        """
        pairs = digests.items() if isinstance(digests, Mapping) else digests
        fields = [holder_pb2.FieldDigest(algorithm=name, value=value) for name, value in pairs]
        try:
            if self.written < self.length:
                raise bad_request("fewer octets than announced")
            await self._finish()
            commit = holder_pb2.CommitBlock(transfer=self._id, digests=fields)
            reply = await self._stream.ask(COMMIT_TIMEOUT_S, commit=commit)
        except BaseException:
            self.abort()
            raise
        self._end()
        return reply.committed.sha256

    async def _finish(self) -> None:
        try:
            await self._writer.finish()
        except KvspError as error:
            self._note_failure(error)
            raise

    def _note_failure(self, error: KvspError) -> None:
        """A way of its own that failed while the control channel and the room were there is to blame itself."""
        if self._connects and error.problem in TRANSPORT_FAILED and self._held:
            self._chooser.failed(self.scheme, error, self.written)

    def abort(self) -> None:
        """Give the room back; nothing is stored. Idempotent, does not wait, nothing after `commit`."""
        if self._open:
            self._end()
            self._stream.tell(abort=holder_pb2.AbortBlock(transfer=self._id))

    @property
    def _held(self) -> bool:
        return self._stream.alive and asyncio.get_running_loop().time() < self.deadline

    def _end(self) -> None:
        self._open = False
        self._writer.close()
        self._stream.users -= 1
