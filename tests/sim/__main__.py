"""The long run, and the replay of one.

python -m tests.sim --seeds 10000
python -m tests.sim --seed 17 --trace
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.sim.cluster import Outcome, run
from tests.sim.faults import PROFILES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run one seed")
    which.add_argument("--seeds", type=int, help="run so many seeds, up to the first that fails")
    parser.add_argument("--first", type=int, default=0, help="the first of --seeds")
    parser.add_argument("--trace", action="store_true", help="print every event of --seed")
    chosen = parser.parse_args()
    if chosen.seed is not None:
        return _one(chosen.seed, trace=chosen.trace)
    return _many(range(chosen.first, chosen.first + chosen.seeds))


def _one(seed: int, *, trace: bool) -> int:
    outcome = _try(seed, trace=trace)
    if outcome is None:
        return 1
    print(f"seed {seed} ({outcome.profile}): {outcome.events} events")
    for what, count in sorted(outcome.counts.items()):
        print(f"  {count:>7} {what}")
    return 0


def _many(seeds: range) -> int:
    counts: Counter[str] = Counter()
    events, started = 0, time.monotonic()
    for done, seed in enumerate(seeds, 1):
        outcome = _try(seed, trace=False)
        if outcome is None:
            return 1
        counts.update(outcome.counts)
        events += outcome.events
        if done % 500 == 0 or done == len(seeds):
            print(f"{done} seeds, {events} events, {time.monotonic() - started:.0f} s", flush=True)
    print(f"profiles: {', '.join(profile.name for profile in PROFILES)}, in turn")
    for what, count in sorted(counts.items()):
        print(f"  {count:>9} {what}")
    return 0


def _try(seed: int, *, trace: bool) -> Outcome | None:
    try:
        return run(seed, print if trace else None)
    except Exception:
        traceback.print_exc()
        print(f"seed {seed} failed; replay: python -m tests.sim --seed {seed} --trace", flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
