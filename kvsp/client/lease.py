"""Leases that stay alive while they are needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from kvsp.client import wire
from kvsp.client.errors import unavailable
from kvsp.client.transport import Deadline, Transport
from kvsp.protocol import access, jsonio, registry, routes
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import LeaseRenewal, LeaseReply, LeaseRequest

_LEASE: Final = access.find("PUT", "leases/{lease}").path
RETRY_S: Final = 0.25
log = logging.getLogger("kvsp.client")


@dataclass(frozen=True, slots=True)
class HolderLeases:
    """The lease resources of one holder, for one list of blocks."""

    transport: Transport
    deadline: Callable[[], Deadline]
    holder: str
    request: LeaseRequest

    def create(self) -> LeaseReply:
        """POST leases."""
        return self._send("POST", access.CREATE_LEASE.path, self.request)

    def renew(self, lease: str) -> LeaseReply:
        """PUT leases/{lease}."""
        return self._send("PUT", routes.path(_LEASE, lease=lease), LeaseRenewal(self.request.ttl_ms))

    def release(self, lease: str) -> None:
        """DELETE leases/{lease}."""
        self.transport.json("DELETE", self.holder + routes.path(_LEASE, lease=lease), self.deadline())

    def _send(self, method: str, path: str, body: LeaseRequest | LeaseRenewal) -> LeaseReply:
        reply = self.transport.json(method, self.holder + path, self.deadline(), jsonio.encode(body))
        return wire.decode(reply.body, LeaseReply)


class Lease:
    """A context manager: creates the lease, renews it at a third of its time, releases it at exit.

    `ttl_ms` is what the holder granted last. `check` tells whether it still holds; `wait_renewed`
    follows the renewals. Entering raises KvspError (404: unknown block, 429: quota).
    """

    def __init__(self, calls: HolderLeases, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = calls
        self._clock = clock
        self._changed = threading.Condition()
        self._ending = self._hurry = False
        self._lost: KvspError | None = None
        self._thread = threading.Thread(target=self._renew, name="kvsp-lease", daemon=True)
        self._expires = 0.0
        self.id = ""
        self.ttl_ms = 0
        self.renewals = 0

    def __enter__(self) -> Lease:
        asked_at = self._clock()
        granted = self._calls.create()
        with self._changed:
            self.id = granted.lease
            self._grant(granted, asked_at)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if not self.id:  # entering failed
            return
        self._thread.join()
        try:
            self._calls.release(self.id)
        except KvspError as failure:  # it lapses by itself
            log.info("lease not released, it will expire: %s", failure)

    def check(self) -> None:
        """Raises KvspError when the lease was lost: its blocks may be evicted."""
        if self._lost is not None:
            raise self._lost
        # A renewal may be under way for as long as its deadline; the holder counts on meanwhile.
        if self._clock() >= self._expires:
            raise unavailable("the granted time is over and no renewal was answered")

    def wait_renewed(self, times: int, timeout_s: float | None = None) -> bool:
        """Wait until it was renewed that often. False: it was lost, released, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.renewals >= times or self._ending or self._lost is not None, timeout_s
            )
            return self.renewals >= times

    def renew_now(self) -> None:
        """Renew without waiting for a third of the time to pass."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def _grant(self, granted: LeaseReply, asked_at: float) -> None:
        self.ttl_ms = granted.ttl_ms
        # "counted from receipt" (U-14): the holder received it after we asked.
        self._expires = asked_at + granted.ttl_ms / 1000

    def _renew(self) -> None:
        pause = self.ttl_ms / 3000
        while not self._wait_ending(pause) and self._lost is None:
            asked_at = self._clock()
            try:
                granted = self._calls.renew(self.id)
            except KvspError as error:
                pause = min(RETRY_S, self.ttl_ms / 6000)
                if error.problem == registry.NOT_FOUND or self._clock() >= self._expires:
                    self._lose(error)
            else:
                pause = granted.ttl_ms / 3000
                with self._changed:
                    self._grant(granted, asked_at)
                    self.renewals += 1
                    self._changed.notify_all()

    def _wait_ending(self, pause_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._hurry, pause_s)
            self._hurry = False
            return self._ending

    def _lose(self, error: KvspError) -> None:
        log.warning("lease lost: %s", error)
        with self._changed:
            self._lost = error
            self._changed.notify_all()
