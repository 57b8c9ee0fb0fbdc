"""Many seeds: whatever goes wrong, no client gets a wrong token and nothing is left over.

Every run draws its faults from its seed (faults.py) and checks the invariants of checker.py at each step. A
failure names the seed; `python -m tests.sim --seed N --trace` shows all that happened.
"""

from __future__ import annotations

import pytest

from tests.sim.cluster import run
from tests.sim.faults import PROFILES

SEEDS = 300
BATCH = 10


@pytest.mark.spec(
    "R-102", "R-103", "R-108", "R-172", "R-173", "R-174", "R-175", "R-176", "R-177", "R-178", "R-179", "R-180",
    "R-181", "R-192", "R-193", "R-194", "R-196", "U-34", "U-35", "U-38", "D12",
)  # fmt: skip
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_no_fault_shows_in_what_clients_get(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            run(seed)
        except Exception as error:
            error.add_note(f"replay: python -m tests.sim --seed {seed} --trace")
            raise


def test_nothing_is_refused_where_nothing_goes_wrong() -> None:
    for seed in range(5):
        counts = run(seed, profile=PROFILES[0]).counts
        assert not counts.keys() & {"sessions failed", "sessions refused", "migrations"}


def test_one_seed_is_one_run() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        run(PROFILES.index(PROFILES[-1]), trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50


def test_contexts_are_sharded_and_resized_in_every_second_round_of_seeds() -> None:
    for seed in (0, len(PROFILES)):
        counts = run(seed).counts
        for what in ("groups formed", "reshards committed", "attended"):
            assert bool(counts.get(what)) == bool(seed)
