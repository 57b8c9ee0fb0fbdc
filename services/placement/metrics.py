"""What a controller reports (R-217). Labels name no scope, key or session (R-215)."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.placement.state import PlacementState

DIRECTIVES: Final = Counter("kvsp_placement_directive_outcomes", "Prefetch directives by outcome", ["outcome"])
RESUMES: Final = Counter("kvsp_placement_resumes", "Answers to resume requests, by HTTP status", ["status"])
SURVEY_FAILURES: Final = Counter("kvsp_placement_survey_failures", "Lookups that the index did not answer")
WANTED: Final = Counter("kvsp_placement_instances_wanted", "Times that one more instance was asked for")
FAR_EPOCHS: Final = Counter("kvsp_placement_far_epochs", "Status records with an epoch far beyond now")
COST_SECONDS: Final = Histogram("kvsp_placement_cost_seconds", "Estimated cost of what was assigned")

_COUNTERS: Final = {
    "assignments": "Requests assigned",
    "refusals": "Requests for which there was no active instance",
    "migrations": "Sessions that another instance continued",
    "lost": "Sessions that every instance refused to continue",
    "failures": "Instances whose status expired",
    "prompt_tokens": "Prompt tokens of assigned requests",
    "matched_tokens": "Of these, tokens in blocks held somewhere; over prompt tokens, the hit ratio",
    "checkpoints": "Checkpoints recorded",
    "directives": "Prefetch directives",
    "groups_formed": "Sessions whose context was sharded over several instances",
    "reshards": "Steps of shard maps that were committed",
    "reshards_aborted": "Steps of shard maps that were aborted, or overtaken by the end of the session",
}


class StateCollector(Collector):
    """Shows the totals, the sessions and the instances of a controller."""

    def __init__(self, state: PlacementState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        yield GaugeMetricFamily("kvsp_placement_sessions", "Running sessions", value=self._state.sessions)
        yield GaugeMetricFamily("kvsp_placement_groups", "Sharded contexts", value=len(self._state.groups))
        instances = GaugeMetricFamily("kvsp_placement_instances", "Instances by state", labels=["state"])
        for state, count in sorted(Tally(each.state for each in self._state.overview()).items()):
            instances.add_metric([state], count)
        yield instances
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvsp_placement_{name}", text, value=getattr(self._state.totals, name))
