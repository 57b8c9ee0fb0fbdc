"""The holder's side: one-time tickets, and the listener where they are presented."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import structlog

from kvsp.bulk.source import Ticket
from kvsp.protocol.errors import KvspError
from kvsp.rpc.config import ConfigError
from ucx_transport import library, session
from ucx_transport.config import UcxConfig
from ucx_transport.engine import Connection, Engine
from ucx_transport.errors import lost
from ucx_transport.frames import Movement, cut
from ucx_transport.memory import Buffers

TICKET_S: Final = 10.0
"""A ticket that is not presented by then is void."""
HANDSHAKE_S: Final = 5.0
IDLE_S: Final = 60.0
"""A connection without a transfer is kept this long: longer than any client keeps it."""
CONNECTIONS_MAX: Final = 1024

log = structlog.get_logger()


@dataclass(slots=True)
class _Offer:
    ticket: Ticket
    view: memoryview
    wrote: Callable[[int], None] | None
    present_by: float
    lapse: asyncio.TimerHandle
    movement: Movement | None = None


class UcxServer:
    """Offers views of the holder's memory. Built from `[bulk.ucx]`; raises ConfigError, `start` too."""

    scheme: ClassVar[str] = "ucx"

    def __init__(self, table: Any) -> None:
        self._config = UcxConfig.of(table)
        self._offers: dict[bytes, _Offer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._buffers = Buffers()
        self._engine: Engine | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """`host:port` of the listener, once started."""
        return self._address

    @property
    def offers(self) -> int:
        """Tickets that are neither used up nor void."""
        return len(self._offers)

    @property
    def connections(self) -> int:
        """Peers that are connected."""
        return 0 if self._engine is None else self._engine.connections

    async def start(self) -> None:
        """Listen. Raises ConfigError when the port is not to be had, SourceUnavailableError when UCX is not."""
        host, port = self._config.address
        self._engine = Engine(library.open_context(self._config.options))
        try:
            self._address = f"{host}:{self._engine.listen(port, self._accepted)}"
        except OSError as error:
            self._engine.close()
            raise ConfigError(f"bulk.ucx: cannot listen on port {port}: {error}") from None

    async def close(self) -> None:
        """Void all tickets and end all transfers. Idempotent."""
        for offer in list(self._offers.values()):
            self.revoke(offer.ticket)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engine is not None:
            self._engine.close()

    def offer_read(self, view: memoryview, spans: Sequence[tuple[int, int]], lifetime_s: float) -> Ticket:
        """A ticket to read `view` once, whose layers are `spans` (offset, length), ascending and gap-free.

        The offer ends by itself after `lifetime_s`, whatever has been read.
        """
        return self._offer(view, cut(length for _, length in spans), None, lifetime_s)

    def offer_write(self, view: memoryview, wrote: Callable[[int], None], lifetime_s: float) -> Ticket:
        """A ticket to fill `view` once; `wrote(n)` is called when octets 0...n are in place."""
        return self._offer(view, cut([len(view)]), wrote, lifetime_s)

    def revoke(self, ticket: Ticket) -> None:
        """End an offer, finished or not; idempotent. When it returns, its memory is not touched any more."""
        offer = self._offers.pop(_index(ticket.token), None)
        if offer is not None:
            offer.lapse.cancel()
            if offer.movement is not None:
                offer.movement.leave()

    def _offer(
        self, view: memoryview, frames: tuple[int, ...], wrote: Callable[[int], None] | None, lifetime_s: float
    ) -> Ticket:
        loop = asyncio.get_running_loop()
        if sum(frames) != len(view):
            raise ValueError("spans must cover the view")
        ticket = Ticket(
            self._address,
            secrets.token_bytes(session.TOKEN_OCTETS),
            secrets.token_bytes(session.KEY_OCTETS),
            self._config.fabric == "sealed",
            frames,
        )
        lapse = loop.call_later(lifetime_s, self.revoke, ticket)
        present_by = loop.time() + min(TICKET_S, lifetime_s)
        self._offers[_index(ticket.token)] = _Offer(ticket, view, wrote, present_by, lapse)
        return ticket

    def _accepted(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: Connection) -> None:
        """All transfers of one connection, one after another. Whatever is wrong ends it without a word."""
        try:
            if connection.engine.connections > CONNECTIONS_MAX:
                raise lost("too many connections")
            said = session.hello()
            async with asyncio.timeout(HANDSHAKE_S):
                heard = await connection.hear(session.HELLO_OCTETS)
                session.check_hello(heard)
                await connection.say(said)
                client, server = session.control_tags(heard + said)
                connection.agree(server, client)
            number = 0
            while connection.alive:
                # Who has shown no ticket yet gets no more patience than for the handshake.
                patience_s = IDLE_S if number else HANDSHAKE_S
                request = await connection.hear(session.REQUEST_OCTETS, patience_s)
                await self._transfer(connection, request, heard + said, number)
                number += 1
        except (KvspError, TimeoutError) as error:
            log.info("ucx connection ended", reason=str(error))
        finally:
            connection.close()

    async def _transfer(self, connection: Connection, request: bytes, hellos: bytes, number: int) -> None:
        offer = self._take(request[: session.TOKEN_OCTETS])
        try:
            keys = session.Keys(offer.ticket, hellos, number, write=offer.wrote is not None)
            session.check_mac(keys.proof(session.REQUEST), request[session.TOKEN_OCTETS :])
            movement = Movement(connection, keys, offer.ticket.frames, offer.view, self._buffers)
            offer.movement = movement
            if offer.wrote is None:
                await movement.send()
            else:
                await connection.say(keys.proof(session.ACCEPT))
                await movement.receive(offer.wrote)
                await connection.say(keys.proof(session.DONE))
            movement.done()
            offer.movement = None  # the connection lives on, and is no longer this offer's to close
        finally:
            self.revoke(offer.ticket)

    def _take(self, token: bytes) -> _Offer:
        """The offer of a token, which is void from now on. Raises KvspError (503)."""
        offer = self._offers.get(_index(token))
        now = asyncio.get_running_loop().time()
        if offer is None or offer.movement is not None or now >= offer.present_by:
            raise lost("no such ticket")
        offer.present_by = 0.0
        return offer


def _index(token: bytes) -> bytes:
    """Offers are found by a hash: how long the search takes tells nothing of tokens (D14)."""
    return hashlib.sha256(token).digest()
