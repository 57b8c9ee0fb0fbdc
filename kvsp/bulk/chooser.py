"""Which source carries a transfer; a fallback is always visible (metric and log), never silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog
from prometheus_client import Counter

from kvsp.bulk.rates import LinkRate, Rates
from kvsp.bulk.source import BlockSource, SourceUnavailableError, load_source

RETRY_S: Final = 30.0
"""A source that failed is left out this long, so that a broken one does not cost every transfer."""
SLOWER: Final = 1.5
"""A scheme that another outruns by this factor has lost its place. Noise alone does not reach it."""
PROBE_EVERY: Final = 32
"""One transfer of so many goes another way first, to know how fast that is by now."""

FALLBACKS: Final = Counter("kvsp_bulk_fallbacks_total", "Transfers that could not use this source", ["scheme"])

log = structlog.get_logger()


class Chooser:
    """Ranks the usable sources for one peer: by what they are able to do, then by what was measured.

    No copy comes before RDMA, that before other ways that spare the control channel, and these before the rest.
    What copies nothing keeps its place; of the others, one that is clearly slower than another goes behind it.
    """

    def __init__(
        self, schemes: Sequence[str], *, same_host: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rates = Rates()
        self._clock = clock
        self._sources: dict[str, BlockSource] = {}
        self._failed_until: dict[str, float] = {}
        self._offers = 0
        for scheme in schemes:
            try:
                source = load_source(scheme)
            except SourceUnavailableError as error:
                report_fallback(scheme, error)
                continue
            if same_host or not source.capabilities.same_host_only:
                self._sources[scheme] = source
        self._by_ability = sorted(self._sources, key=self._ability)

    def offer(self, without: Collection[str] = ()) -> list[str]:
        """Schemes to offer for the next transfer, best first, now and then with another one in front."""
        ranked = [scheme for scheme in self.ranked() if scheme not in without]
        self._offers += 1
        if self._offers % PROBE_EVERY == 0 and len(ranked) > 1 and not self._zero_copy(ranked[0]):
            ranked.sort(key=self.rates.age)
        return ranked

    def ranked(self) -> list[str]:
        """Usable schemes, best first. Empty only when no source is left at all."""
        now = self._clock()
        usable = [scheme for scheme in self._by_ability if self._failed_until.get(scheme, 0.0) <= now]
        rates = {
            scheme: rate
            for scheme in usable
            if not self._zero_copy(scheme) and (rate := self.rates.rate(scheme)) is not None
        }
        best = max(rates.values(), default=0.0)
        slow = [scheme for scheme, rate in rates.items() if rate * SLOWER < best]
        return [scheme for scheme in usable if scheme not in slow] + sorted(
            slow, key=rates.__getitem__, reverse=True
        )

    def source(self, scheme: str) -> BlockSource:
        """A source that was offered. Raises SourceUnavailableError for any other."""
        source = self._sources.get(scheme)
        if source is None:
            raise SourceUnavailableError(f"{scheme}: was not offered")
        return source

    def failed(self, scheme: str, error: Exception, octets: int = 0) -> None:
        """A transfer could not use this source, or not beyond `octets`: say so, and leave it out for RETRY_S."""
        self._failed_until[scheme] = self._clock() + RETRY_S
        report_fallback(scheme, error, octets)

    def link(self) -> LinkRate | None:
        """The best way to the peer as measured; None before that."""
        known = (self.rates.rate(scheme) for scheme in self.ranked())
        rate = next((each for each in known if each is not None), None)
        rtt_s = self.rates.rtt_s
        return None if rate is None or rtt_s is None else LinkRate(rate * 8 / 1e6, rtt_s * 1e6)

    def close(self) -> None:
        """End what the sources keep between transfers. Idempotent; a later transfer makes it anew."""
        for source in self._sources.values():
            source.close()

    def _zero_copy(self, scheme: str) -> bool:
        return self._sources[scheme].capabilities.zero_copy

    def _ability(self, scheme: str) -> tuple[bool, bool, bool]:
        able = self._sources[scheme].capabilities
        return not able.zero_copy, not able.rdma, not able.direct


def report_fallback(scheme: str, reason: object, octets: int = 0) -> None:
    """Count and log that a faster way could not be taken, or not beyond the first `octets`."""
    FALLBACKS.labels(scheme).inc()
    log.warning("bulk fallback", scheme=scheme, reason=str(reason), octets=octets)
