"""Transports that readers and writers connect to by themselves: what each may reach, and until when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from kvsp.bulk.source import BlockServer, SourceUnavailableError, Ticket, load_server
from services.holder.transfers import Pin, Reservation

MARGIN_MS: Final = 1000
"""An offer ends this long before its transfer's deadline, past which the room may be another block's."""

log = structlog.get_logger()


class Offers:
    """The configured servers by scheme, and the tickets of open transfers. Raises ConfigError, `start` too."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]], arena: memoryview) -> None:
        self._arena = arena
        self._servers: dict[str, BlockServer] = {}
        self._tickets: dict[int, tuple[BlockServer, Ticket]] = {}
        for scheme, table in tables.items():
            if scheme == "shm":  # needs no server; its table is the arena's
                continue
            try:
                self._servers[scheme] = load_server(scheme, table)
            except SourceUnavailableError as error:
                _report(scheme, error)

    def __contains__(self, scheme: str) -> bool:
        return scheme in self._servers

    async def start(self) -> None:
        """Start all servers; one that cannot be had on this machine is left out, and said so."""
        for scheme, server in list(self._servers.items()):
            try:
                await server.start()
            except SourceUnavailableError as error:
                _report(scheme, error)
                del self._servers[scheme]

    async def close(self) -> None:
        """End everything."""
        for server in self._servers.values():
            await server.close()

    def read(self, scheme: str, pin: Pin, now_ms: int) -> Ticket:
        """A ticket for the payload under a pin."""
        header = pin.header
        first, last = header.layers
        spans = [header.layer_span(layer) for layer in range(first, last + 1)]
        view = self._arena[pin.offset : pin.offset + header.payload_octets].toreadonly()
        server = self._servers[scheme]
        return self._keep(pin, server, server.offer_read(view, spans, _lifetime_s(pin, now_ms)))

    def write(self, scheme: str, reservation: Reservation, wrote: Callable[[int], None], now_ms: int) -> Ticket:
        """A ticket for reserved room."""
        view = self._arena[reservation.offset : reservation.offset + reservation.length]
        server = self._servers[scheme]
        ticket = server.offer_write(view, wrote, _lifetime_s(reservation, now_ms))
        return self._keep(reservation, server, ticket)

    def revoke(self, transfer: int) -> None:
        """Before a transfer ends: its octets are not touched any more. Idempotent."""
        found = self._tickets.pop(transfer, None)
        if found is not None:
            server, ticket = found
            server.revoke(ticket)

    def _keep(self, transfer: Pin | Reservation, server: BlockServer, ticket: Ticket) -> Ticket:
        self._tickets[transfer.id] = server, ticket
        return ticket


def _lifetime_s(transfer: Pin | Reservation, now_ms: int) -> float:
    return max(0, transfer.deadline_ms - MARGIN_MS - now_ms) / 1000


def _report(scheme: str, error: SourceUnavailableError) -> None:
    log.warning("bulk scheme not offered", scheme=scheme, reason=str(error))
