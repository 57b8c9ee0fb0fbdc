"""A UCX server and a source on loopback, and peers that misbehave."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

pytest.importorskip("ucxx", reason="the ucx extra is not installed")

from kvsp.bulk.source import Ticket, Transfer
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from ucx_transport import library, session
from ucx_transport.engine import Connection, Engine
from ucx_transport.server import UcxServer
from ucx_transport.source import UcxReader, UcxSource

LIFETIME_S = 60.0
FABRICS = ["sealed", "trusted"]


@dataclass
class Rig:
    server: UcxServer
    source: UcxSource

    def offer(self, octets: bytes | memoryview) -> Ticket:
        view = memoryview(octets)
        return self.server.offer_read(view, [(0, len(view))], LIFETIME_S)

    def reader(self, ticket: Ticket, length: int | None = None) -> UcxReader:
        return self.source.reader(Transfer(1, sum(ticket.frames) if length is None else length, ticket=ticket))

    async def read(self, ticket: Ticket) -> bytes:
        reader = self.reader(ticket)
        try:
            async with asyncio.timeout(30):
                return b"".join([bytes(piece) async for piece in reader.pieces()])
        finally:
            reader.close()

    async def write(self, ticket: Ticket, octets: bytes, cut: int = 1 << 20) -> None:
        writer = self.source.writer(Transfer(1, len(octets), ticket=ticket))
        try:
            async with asyncio.timeout(30):
                for at in range(0, len(octets), cut):
                    await writer.write(memoryview(octets)[at : at + cut])
                await writer.finish()
        finally:
            writer.close()

    async def gone(self) -> None:
        """Wait until the server holds nothing any more."""
        await until(lambda: not self.server.offers)


@asynccontextmanager
async def rig(fabric: str = "sealed") -> AsyncIterator[Rig]:
    server = UcxServer({"listen": "127.0.0.1:0", "fabric": fabric})
    await server.start()
    source = UcxSource()
    try:
        yield Rig(server, source)
    finally:
        source.close()
        await server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def refused(call: Awaitable[object]) -> KvspError:
    with pytest.raises(KvspError) as caught:
        await call
    assert caught.value.problem is registry.UNAVAILABLE
    return caught.value


Rogue = Callable[[Connection, session.Keys], Awaitable[None]]


@asynccontextmanager
async def rogue_holder(sealed: bool, frames: tuple[int, ...], behave: Rogue) -> AsyncIterator[Ticket]:
    """A holder that knows the ticket but then does as `behave` says."""
    engine = Engine(library.open_context({}))
    tasks = set()

    async def serve(connection: Connection) -> None:
        said = session.hello()
        heard = await connection.hear(session.HELLO_OCTETS)
        await connection.say(said)
        client, server = session.control_tags(heard + said)
        connection.agree(server, client)
        await connection.hear(session.REQUEST_OCTETS)
        await behave(connection, session.Keys(ticket, heard + said, 0, write=False))

    def accepted(connection: Connection) -> None:
        tasks.add(asyncio.ensure_future(serve(connection)))

    port = engine.listen(0, accepted)
    ticket = Ticket(f"127.0.0.1:{port}", os.urandom(16), os.urandom(32), sealed, frames)
    try:
        yield ticket
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.close()
