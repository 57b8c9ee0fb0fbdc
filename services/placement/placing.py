"""Choosing an instance, and having it load what it lacks (A10). Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvsp.protocol.records import PrefetchDirective, SessionCheckpoint
from services.placement.cost import Candidate, Offer, Request, blocks_to_load, rank
from services.placement.fleet import Fleet, Instance
from services.placement.instructions import SendPrefetch, WantInstance
from services.placement.outbox import Outbox
from services.placement.settings import Settings, Totals

WANT_MS: Final = 5_000
"""One more instance is asked for at most so often."""
UNPLACED_MAX: Final = 16
UNPLACED_MS: Final = 60_000

Serves = Callable[[str, str], Collection[str] | None]
"""(scope_id, compat_id) -> base URIs of the instances that may be given such a session; None: all."""


class Choice(NamedTuple):
    """All candidates, the cheapest first, and the instance that it is; None: none is eligible."""

    candidates: list[Candidate]
    instance: Instance | None


@dataclass(frozen=True, slots=True)
class _Unplaced:
    """A request that no instance was good enough for."""

    start: SessionCheckpoint
    request: Request
    until_ms: int


class Placer:
    """Chooses among the active instances."""

    def __init__(
        self,
        settings: Settings,
        totals: Totals,
        fleet: Fleet,
        outbox: Outbox,
        *,
        new_id: Callable[[], str],
        serves: Serves,
    ) -> None:
        self._settings = settings
        self._totals = totals
        self._fleet = fleet
        self._outbox = outbox
        self._new_id = new_id
        self._serves = serves
        self._want_ms: int | None = None
        self._unplaced: dict[str, _Unplaced] = {}

    def choose(self, request: Request, of: SessionCheckpoint, refused: Collection[str] = ()) -> Choice:
        """ "The PC SHOULD assign the request to an active instance with the lowest cost." (R-119)"""
        candidates = rank(request, self.offers(of, refused))
        if not candidates or candidates[0].cost_us is None:
            return Choice(candidates, None)
        return Choice(candidates, self._fleet[candidates[0].instance])

    def offers(self, of: SessionCheckpoint, refused: Collection[str] = ()) -> list[Offer]:
        """The terms of all active instances that may be given such a session."""
        served = self._serves(of.scope_id, of.compat_id)
        offers: list[Offer] = []
        for instance in self._fleet:
            if instance.uri not in refused and (served is None or instance.uri in served):
                offer = instance.offer()
                if offer is not None:
                    offers.append(offer)
        return offers

    def is_too_dear(self, candidate: Candidate) -> bool:
        """Is its cost above what is acceptable?"""
        most_ms = self._settings.acceptable_cost_ms
        return most_ms is not None and (candidate.cost_us or 0) > 1000 * most_ms

    def prefetch(self, instance: Instance, start: SessionCheckpoint, request: Request, usable: int) -> str:
        """Direct the instance to load what of the usable blocks it lacks: the directive's id, "" for nothing."""
        blocks = blocks_to_load(start.prompt_blocks, request, usable, instance.uri, instance.links)
        if not blocks:
            return ""
        directive = PrefetchDirective(
            directive=self._new_id(),
            scope_id=start.scope_id,
            compat_id=start.compat_id,
            blocks=blocks,
            deadline_ms=self._settings.prefetch_deadline_ms,
            lease_ms=self._settings.prefetch_lease_ms,
            request_ref=start.session,
        )
        self._totals.directives += 1
        self._outbox.do(SendPrefetch(instance.uri, directive))
        return directive.directive

    def want(self, of: SessionCheckpoint, now_ms: int) -> None:
        """None is acceptable: wake one that sleeps, or else ask for a new one."""
        if self._fleet.wake(self._serves(of.scope_id, of.compat_id)):
            return
        if self._want_ms is None or now_ms >= self._want_ms:
            self._want_ms = now_ms + WANT_MS
            self._outbox.do(WantInstance(of.compat_id, of.scope_id))

    def keep_unplaced(self, start: SessionCheckpoint, request: Request, now_ms: int) -> None:
        """Whoever comes next loads its blocks "at once, so that cache loading overlaps the instance start"."""
        self._unplaced = {name: each for name, each in self._unplaced.items() if each.until_ms > now_ms}
        if request.runs:
            self._unplaced[start.session] = _Unplaced(start, request, now_ms + UNPLACED_MS)
            while len(self._unplaced) > UNPLACED_MAX:
                del self._unplaced[next(iter(self._unplaced))]

    def became_active(self, instance: Instance, now_ms: int) -> None:
        """It has come: let it load what was waiting for it (R-119)."""
        offer = instance.offer()
        for name, each in list(self._unplaced.items()):
            served = self._serves(each.start.scope_id, each.start.compat_id)
            if offer is not None and each.until_ms > now_ms and (served is None or instance.uri in served):
                candidate = rank(each.request, [offer])[0]
                self.prefetch(instance, each.start, each.request, candidate.usable)
                del self._unplaced[name]
