"""Connections to holders: made when needed, used for one transfer at a time, kept for the next."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kvsp.bulk.source import Ticket
from ucx_transport import session
from ucx_transport.engine import Connection, Engine
from ucx_transport.errors import lost
from ucx_transport.frames import Movement
from ucx_transport.memory import Buffers, Octets

CONNECT_S: Final = 3.0
"""A port that is filtered gives no answer at all; a fall-back should not take much longer than a lost packet."""
IDLE_S: Final = 30.0
IDLE_MAX: Final = 32
"""Connections kept per holder."""
PORT_MAX: Final = 0xFFFF


class Link:
    """A greeted connection, and the keys of the transfer that has it."""

    def __init__(self, connection: Connection, address: str, hellos: bytes) -> None:
        self.connection = connection
        self.address = address
        self._hellos = hellos
        self._number = 0
        self._keys: session.Keys | None = None
        self.idle_until = 0.0

    async def present(self, ticket: Ticket, view: Octets, buffers: Buffers, *, write: bool = False) -> Movement:
        """Ask for the transfer of a ticket, proving that it is ours, and for a write, wait for the holder's proof.

        Returns the movement of its frames. Raises KvspError (503); the connection is closed then.
        """
        keys = self._keys = session.Keys(ticket, self._hellos, self._number, write=write)
        self._number += 1
        movement = Movement(self.connection, keys, ticket.frames, view, buffers)
        try:
            await self.connection.say(ticket.token + keys.proof(session.REQUEST))
            if write:  # nothing is given to who has not proved to be the holder
                await self._hear_proof(session.ACCEPT)
        except BaseException:
            movement.stop()
            raise
        return movement

    async def _hear_proof(self, word: bytes) -> None:
        assert self._keys is not None  # noqa: S101 - a ticket was presented
        session.check_mac(self._keys.proof(word), await self.connection.hear(session.MAC_OCTETS))

    async def finished(self) -> None:
        """The holder has everything that was written. Raises KvspError (503)."""
        await self._hear_proof(session.DONE)


class Dialer:
    """Owns the engine of the loop that uses it, and the idle links."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._engine: Engine | None = None
        self._idle: dict[str, list[Link]] = {}
        self._greeting: set[asyncio.Task[Link]] = set()

    async def link(self, address: str) -> Link:
        """A kept link to a holder, or a new one. Raises KvspError (503).

        Who is cancelled meanwhile leaves the link to the next: ending one that is half made costs memory for good.
        """
        kept = self._kept(address)
        if kept is not None:
            return kept
        greeting = asyncio.ensure_future(self._greet(address))
        self._greeting.add(greeting)
        greeting.add_done_callback(self._greeting.discard)
        try:
            return await asyncio.shield(greeting)
        except asyncio.CancelledError:
            greeting.add_done_callback(self._keep_greeted)
            raise

    def _keep_greeted(self, greeting: asyncio.Task[Link]) -> None:
        if not greeting.cancelled() and greeting.exception() is None:
            self.keep(greeting.result())

    def keep(self, link: Link) -> None:
        """A transfer is over and its link as good as new."""
        idle = self._idle.setdefault(link.address, [])
        if link.connection.engine is not self._engine or len(idle) >= IDLE_MAX:
            link.connection.close()
            return
        link.idle_until = asyncio.get_running_loop().time() + IDLE_S
        idle.append(link)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._idle.clear()
        for greeting in self._greeting:
            if not greeting.get_loop().is_closed():
                greeting.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _kept(self, address: str) -> Link | None:
        self._check_loop()
        idle = self._idle.get(address, [])
        now = asyncio.get_running_loop().time()
        while idle:
            link = idle.pop()
            if link.connection.alive and now < link.idle_until:
                return link
            link.connection.close()
        return None

    async def _greet(self, address: str) -> Link:
        host, _, port = address.rpartition(":")
        if self._engine is None:
            self._engine = Engine(self._context)
        connection = self._engine.connect(host, int(port))
        try:
            said = session.hello()
            async with asyncio.timeout(CONNECT_S):
                await connection.say(said)
                heard = await connection.hear(session.HELLO_OCTETS)
            session.check_hello(heard)
            connection.agree(*session.control_tags(said + heard))
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise lost("the holder does not answer") from None
            raise
        return Link(connection, address, said + heard)

    def _check_loop(self) -> None:
        """Engines belong to a loop; one whose loop is gone or another is of no use."""
        engine = self._engine
        if engine is not None and (engine.closed or engine.loop is not asyncio.get_running_loop()):
            self.close()
