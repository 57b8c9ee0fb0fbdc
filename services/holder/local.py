"""The control stream for peers on this host: the messages of `Holder.Transfer` over a Unix socket of their own.

The first message names the principal, as the metadata of the RPC does; or it asks for the arena's descriptors, and
the connection ends with the answer. Who may open the socket may have them: it could name any principal, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from google.protobuf.message import DecodeError

from kvsp.bulk import descriptors
from kvsp.bulk.control import refuse_all
from kvsp.protocol.errors import KvspError
from kvsp.rpc.framed import Connection, LocalListener
from kvsp.rpc.server import clear_stale_socket, run_until
from kvsp.v1 import holder_pb2
from services.holder.host import Host
from services.holder.stream import TransferStream


class _LocalConnection(Connection):
    """One that can pass descriptors, which event loops cannot."""

    def give(self, files: descriptors.ArenaFiles) -> None:
        """Answer a first message. Raises OSError."""
        fd = self._transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(fd)) as own:
            descriptors.give(own, files)


class LocalPeer:
    """One connection: becomes a TransferStream once it has said for whom it speaks."""

    def __init__(self, host: Host, connection: _LocalConnection) -> None:
        self._host = host
        self._connection = connection
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._serving = asyncio.create_task(self._serve())

    def receive(self, message: bytes) -> None:
        """The next message."""
        self._messages.put_nowait(message)

    def lost(self) -> None:
        """The peer is gone: everything it had open is dropped."""
        self._messages.put_nowait(None)

    async def _send(self, reply: holder_pb2.TransferReply) -> None:
        self._connection.send(reply.SerializeToString())

    async def _requests(self) -> AsyncIterator[holder_pb2.TransferRequest]:
        while (message := await self._messages.get()) is not None:
            yield holder_pb2.TransferRequest.FromString(message)

    async def _serve(self) -> None:
        try:
            hello = await self._messages.get()
            if hello is None:
                return
            if hello == descriptors.WANTED:
                self._connection.give(self._host.arena.files)
                return
            principal = holder_pb2.TransferHello.FromString(hello).principal
            try:
                identity = self._host.policy.identify(principal)
            except KvspError as error:
                await run_until(refuse_all(self._requests(), self._send, error), self._host.draining.wait())
            else:
                stream = TransferStream(self._host, identity, self._send, same_host=True, has_descriptors=True)
                await stream.serve(self._requests())
        except (DecodeError, OSError):
            pass  # no peer of ours, or gone again; the connection ends
        finally:
            self._connection.close()


@asynccontextmanager
async def local_peers(host: Host, path: Path | None) -> AsyncIterator[Callable[[], None]]:
    """Serve local peers on `path`; None: there are none. Yields what stops new ones from coming.

    Raises ConfigError when another process listens there.
    """
    if path is None:
        yield lambda: None
        return
    clear_stale_socket(path)
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: _LocalConnection(lambda connection: LocalPeer(host, cast(_LocalConnection, connection))), str(path)
    )
    listener = LocalListener(server, path)
    try:
        yield listener.close
    finally:
        listener.close()
