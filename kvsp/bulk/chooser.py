"""Which source carries a transfer; a fallback is always visible (metric and log), never silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from prometheus_client import Counter

from kvsp.bulk.source import BlockSource, SourceUnavailableError, load_source

RETRY_S: Final = 30.0
"""A source that failed is left out this long, so that a broken one does not cost every transfer."""

FALLBACKS: Final = Counter("kvsp_bulk_fallbacks_total", "Transfers that could not use this source", ["scheme"])

log = structlog.get_logger()


class Chooser:
    """Ranks the usable sources: no copy before RDMA before the rest, then as listed."""

    def __init__(
        self, schemes: Sequence[str], *, same_host: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._sources: dict[str, BlockSource] = {}
        self._failed_until: dict[str, float] = {}
        for scheme in schemes:
            try:
                source = load_source(scheme)
            except SourceUnavailableError as error:
                report_fallback(scheme, error)
                continue
            if same_host or not source.capabilities.same_host_only:
                self._sources[scheme] = source
        self._ranked = sorted(self._sources, key=self._rank)

    def ranked(self) -> list[str]:
        """Schemes to offer, best first. Empty only when no source is left at all."""
        now = self._clock()
        return [scheme for scheme in self._ranked if self._failed_until.get(scheme, 0.0) <= now]

    def source(self, scheme: str) -> BlockSource:
        """A source that was offered. Raises SourceUnavailableError for any other."""
        source = self._sources.get(scheme)
        if source is None:
            raise SourceUnavailableError(f"{scheme}: was not offered")
        return source

    def failed(self, scheme: str, error: SourceUnavailableError) -> None:
        """A transfer could not use this source: say so, and leave it out for RETRY_S."""
        self._failed_until[scheme] = self._clock() + RETRY_S
        report_fallback(scheme, error)

    def _rank(self, scheme: str) -> tuple[bool, bool]:
        able = self._sources[scheme].capabilities
        return not able.zero_copy, not able.rdma


def report_fallback(scheme: str, reason: object) -> None:
    """Count and log that a faster way could not be taken."""
    FALLBACKS.labels(scheme).inc()
    log.warning("bulk fallback", scheme=scheme, reason=str(reason))
