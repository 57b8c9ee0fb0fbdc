"""The control stream for peers on this host: the messages of `Holder.Transfer` over a Unix socket of their own.

The first message names the principal, as the metadata of the RPC does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from google.protobuf.message import DecodeError

from kvsp.bulk.control import refuse_all
from kvsp.protocol.errors import KvspError
from kvsp.rpc.framed import Connection, LocalListener
from kvsp.rpc.server import clear_stale_socket, run_until
from kvsp.v1 import holder_pb2
from services.holder.host import Host
from services.holder.stream import TransferStream


class LocalPeer:
    """One connection: becomes a TransferStream once it has said for whom it speaks."""

    def __init__(self, host: Host, connection: Connection) -> None:
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
            principal = holder_pb2.TransferHello.FromString(hello).principal
            try:
                identity = self._host.policy.identify(principal)
            except KvspError as error:
                await run_until(refuse_all(self._requests(), self._send, error), self._host.draining.wait())
            else:
                stream = TransferStream(self._host, identity, self._send, same_host=True)
                await stream.serve(self._requests())
        except DecodeError:
            pass  # no peer of ours; the connection ends
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
        lambda: Connection(lambda connection: LocalPeer(host, connection)), str(path)
    )
    listener = LocalListener(server, path)
    try:
        yield listener.close
    finally:
        listener.close()
