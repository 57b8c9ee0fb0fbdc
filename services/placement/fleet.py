"""The instances as the controller sees them: epochs, lifecycle, load (A9). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from kvsp.protocol import estimate, limits, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.records import InstanceStatus, Link
from services.placement.cost import Candidate, Offer
from services.placement.instructions import InstanceRow, SendState
from services.placement.outbox import Outbox
from services.placement.settings import Settings

ACTIVE: Final = "active"
DRAINING: Final = "draining"
SLEEPING: Final = "sleeping"
FAILED: Final = "failed"

UNREPORTED: Final = -1
"""The epoch of an instance that has never reported."""

EWMA_WEIGHT: Final = 0.2
"""Of the newest observation: the last dozen or so sessions decide (U-45)."""


@dataclass(slots=True)
class Instance:
    """One instance.

    `epoch` is the highest ever seen; `status` the newest report, None since a failure; `expires_ms` when it is
    taken for failed, None: it is. `state` is the controller's view, `wanted` the state it was ordered into and has
    not reported yet. `assigned` and `assigned_us` count what it was given since its last report. `resets` is how
    often an operator has reset its epoch.
    """

    uri: str
    epoch: int
    ttl_ms: int
    service_us: float
    expires_ms: int | None = None
    status: InstanceStatus | None = None
    state: str = FAILED
    wanted: str = ""
    resets: int = 0
    ordering: bool = False  # an order is on its way
    assigned: int = 0
    assigned_us: int = 0
    links: Mapping[str, Link] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """May it be given requests, sessions and directives? (R-108)"""
        return self.state == ACTIVE

    def row(self) -> InstanceRow:
        """What must outlive this controller."""
        return InstanceRow(self.uri, self.epoch, self.ttl_ms, self.wanted, self.resets)

    def report(self, status: InstanceStatus, now_ms: int) -> None:
        """Take over a status of an epoch that is not stale."""
        if status.epoch > self.epoch:
            self.wanted = ""  # a new process, which knows of no orders
        self.status = status
        self.epoch = status.epoch
        self.ttl_ms = min(status.ttl_ms, limits.STATUS_TTL_MS_MAX)  # "Status TTL capped (60 s)" (U-37)
        self.expires_ms = now_ms + self.ttl_ms
        self.assigned = self.assigned_us = 0
        self.links = {link.holder: link for link in status.links}
        self.state = status.state
        if self.wanted == DRAINING and status.state == ACTIVE:
            self.state = DRAINING  # the order has not arrived, or the report was sent before it did
        elif self.wanted in (status.state, DRAINING) or status.state == FAILED:
            self.wanted = ""

    def fail(self) -> None:
        """ "The PC considers an instance failed when its record expires." (R-101)"""
        self.expires_ms = self.status = None
        self.state = FAILED
        self.wanted = ""
        self.assigned = self.assigned_us = 0

    def expect(self, now_ms: int) -> None:
        """It has sessions: it has as long to report as if it just had."""
        if self.expires_ms is None:
            self.expires_ms = now_ms + self.ttl_ms

    def reply(self) -> str:
        """The answer to a status: the controller's view (U-37), in registered names.

        An unregistered state counts as not active (U-08): it gets no work, as if it drained.
        """
        return self.state if self.state in registry.INSTANCE_STATES else DRAINING

    def offer(self) -> Offer | None:
        """Its terms for one more request; None: it takes none (R-108)."""
        status = self.status
        if not self.is_active or status is None:
            return None
        # What was assigned since the last report queues as soon as the batch is full, and has to be loaded or
        # prefilled first in any case: thus equal instances take turns.
        room = max(0, status.batch_size - status.running - status.queued)
        queued = status.queued + max(0, self.assigned - room)
        wait = estimate.wait_us(queued, self.service_us) if queued else 0
        wait_us = min(limits.INT_MAX, (limits.INT_MAX if wait is None else wait) + self.assigned_us)
        load = status.running + status.queued + self.assigned
        return Offer(self.uri, wait_us, load, status.prefill_tokens_per_s, self.links)

    def take(self, candidate: Candidate) -> None:
        """It was given what this estimate is of."""
        self.assigned += 1
        self.assigned_us += max(0, (candidate.cost_us or 0) - candidate.wait_us)

    def served(self, duration_ms: int) -> None:
        """A session took so long on it (U-45)."""
        self.service_us += EWMA_WEIGHT * (1000 * duration_ms - self.service_us)

    def overview(self) -> InstanceStatus:
        """Its last report with the controller's view; of one that does not report little is known."""
        if self.status is not None:
            return structs.replace(self.status, state=self.state)
        return InstanceStatus(self.uri, max(0, self.epoch), self.state, 0, 0, 0, 0.0, 0.0, 0.0, self.ttl_ms)


class Fleet:
    """All instances that ever reported."""

    def __init__(self, settings: Settings, outbox: Outbox) -> None:
        self._settings = settings
        self._outbox = outbox
        self._instances: dict[str, Instance] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def __getitem__(self, uri: str) -> Instance:
        return self._instances[uri]

    def get(self, uri: str) -> Instance | None:
        """The instance with this base URI."""
        return self._instances.get(uri)

    def add(self, uri: str) -> Instance:
        """One not known so far."""
        return self.restore(InstanceRow(uri, UNREPORTED, limits.STATUS_TTL_MS_MAX))

    def restore(self, row: InstanceRow) -> Instance:
        """One that an earlier controller knew; an order that it may not have got yet still holds."""
        service_us = 1000 * self._settings.service_ms
        instance = Instance(row.instance, row.epoch, row.ttl_ms, service_us, wanted=row.wanted, resets=row.resets)
        self._instances[row.instance] = instance
        return instance

    def report(self, instance: Instance, status: InstanceStatus, now_ms: int) -> None:
        """Take over a status of an epoch that is not stale."""
        before = instance.row()
        instance.report(status, now_ms)
        self._save_if_changed(instance, before)

    def fail(self, instance: Instance) -> None:
        """Its record has expired."""
        before = instance.row()
        instance.fail()
        self._save_if_changed(instance, before)

    def reset_epoch(self, uri: str) -> int:
        """An operator has the epochs of an instance begin anew: the highest so far, which counts no more (D12).

        Raises KvspError: kvsp-not-found for one that never reported, kvsp-invalid-state while its last one counts.
        """
        instance = self.get(uri)
        if instance is None or instance.epoch == UNREPORTED:
            raise KvspError(registry.NOT_FOUND, "no such instance")
        if instance.status is not None:
            raise KvspError(registry.INVALID_STATE, "the last report of the instance has not expired")
        epoch, instance.epoch = instance.epoch, UNREPORTED
        instance.resets += 1
        self._outbox.save(instance.row())
        return epoch

    def may_sleep(self, instance: Instance) -> bool:
        """The policy for requests to sleep (R-105, R-106)."""
        others = sum(other.is_active for other in self if other is not instance)
        return self._settings.sleep_allowed and others >= self._settings.active_min

    def order(self, uri: str, state: str) -> None:
        """An operator wants the instance "draining" or "active" (R-107).

        Raises KvspError: 400, kvsp-not-found for an unknown instance, kvsp-invalid-state for a failed one.
        """
        if state not in (DRAINING, ACTIVE):
            raise bad_request("an instance is drained or made active, nothing else")
        instance = self.get(uri)
        if instance is None:
            raise KvspError(registry.NOT_FOUND, "no such instance")
        if instance.state == FAILED:
            raise KvspError(registry.INVALID_STATE, "the instance has failed")
        if state == DRAINING and instance.is_active:
            instance.state = DRAINING  # no work from now on, whenever the order arrives
        self._order(instance, state)

    def order_again(self, instance: Instance) -> None:
        """It reports another state than it was ordered into."""
        if instance.wanted and not instance.ordering:
            self._order(instance, instance.wanted)

    def ordered(self, uri: str, state: str) -> Instance | None:
        """It carried out an order; `state` is in effect (U-36). The instance, when this made it active."""
        instance = self._instances[uri]
        instance.ordering = False
        if instance.status is None or instance.state == FAILED:
            return None
        was_active, instance.state = instance.is_active, state
        return instance if instance.is_active and not was_active else None

    def order_failed(self, uri: str, *, refused: bool) -> None:
        """Refused, it is not asked again; unreachable, it is with its next report."""
        instance = self._instances[uri]
        instance.ordering = False
        if refused:
            instance.wanted = ""
            self._outbox.save(instance.row())
            if instance.status is not None and instance.state != FAILED:
                instance.state = instance.status.state

    def wake(self, served: Collection[str] | None) -> bool:
        """Make one of these that sleeps active (R-110). False: none sleeps."""
        sleeping = [each for each in self if each.state == SLEEPING and (served is None or each.uri in served)]
        if sleeping and not any(each.wanted == ACTIVE for each in sleeping):
            self._order(sleeping[0], ACTIVE)
        return bool(sleeping)

    def _save_if_changed(self, instance: Instance, before: InstanceRow) -> None:
        if instance.row() != before:
            self._outbox.save(instance.row())

    def _order(self, instance: Instance, state: str) -> None:
        before, instance.wanted = instance.row(), state
        self._save_if_changed(instance, before)
        instance.ordering = True
        self._outbox.do(SendState(instance.uri, state))
