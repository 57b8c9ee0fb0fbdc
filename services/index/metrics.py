"""Metrics of the index (R-217): read from the state when scraped, so that no request pays for them.

The only label is the scope id, a public hash; counters are per scope, not global, so that an operator
can show a tenant its own without telling it of others (D8). Scopes come from the policy, so they are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.index.table import Tally

_COUNTERS: Final = {
    "lookups": "Lookups answered",
    "looked_up_keys": "Block keys asked for",
    "matched_keys": "Block keys in the matched prefixes; over looked-up keys, the hit ratio",
    "created": "Replica records published for the first time",
    "refreshed": "Replica records published again",
    "withdrawn": "Replica records withdrawn",
    "expired": "Replica records that were not refreshed in time",
}


class TallyCollector(Collector):
    """Shows the tallies of a replica table."""

    def __init__(self, tallies: dict[bytes, Tally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[Metric]:
        """Every family, one sample a scope."""
        tallies = [(scope.hex(), tally) for scope, tally in list(self._tallies.items())]
        replicas = GaugeMetricFamily("kvsp_index_replicas", "Unexpired replica records", labels=["scope"])
        for scope, tally in tallies:
            replicas.add_metric([scope], tally.replicas)
        yield replicas
        for name, text in _COUNTERS.items():
            family = CounterMetricFamily(f"kvsp_index_{name}", text, labels=["scope"])
            for scope, tally in tallies:
                family.add_metric([scope], getattr(tally, name))
            yield family
