"""Which transport moved the blocks of a running stack, as its processes count them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from kvsp.cli.top import process_metrics
from kvsp.protocol import access

INSIDE: Final = "kvsp_holder_transfers_total:"
"""Then direction and scheme: blocks that left a holder, or came to one."""
OUTSIDE: Final = (
    ("kvsp_gateway_requests_total:GET:", f":{access.GET_BLOCK.path}:200"),
    ("kvsp_gateway_requests_total:PUT:", f":{access.PUT_BLOCK.path}:201"),
)
"""How the names of samples begin and end that count blocks over HTTPS; the role stands between."""
SCHEMES: Final = ("shm", "ucx", "grpc", "https")
PATIENCE_S: Final = 30.0
"""On a busy machine a process may not answer for a while, and counts all the same."""


class Moved:
    """Counts blocks, or ranges of their layers, by transport.

    One that went out by HTTPS had to come from a holder to the gateway before, so it counts there, too.
    """

    def __init__(self, configs: Path) -> None:
        self._configs = configs
        self._by_process: dict[tuple[str, float], Counter[str]] = {}
        self._told: Counter[str] = Counter()

    def look(self, *processes: str) -> None:
        """Read the counters of these processes, or of all. To be called before one is killed: they go with it."""
        for path in self._configs.glob("*.toml"):
            if processes and path.stem not in processes:
                continue
            samples = process_metrics(path, PATIENCE_S)
            # A process that was started anew counts from nothing.
            started = samples.get("process_start_time_seconds", 0.0)
            self._by_process[path.stem, started] = _by_scheme(samples)

    def since(self) -> dict[str, int]:
        """What has moved since this was asked before."""
        self.look()
        total = sum(self._by_process.values(), Counter())
        fresh = {scheme: total[scheme] - self._told[scheme] for scheme in SCHEMES}
        self._told = total
        return fresh


def _by_scheme(samples: dict[str, float]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, value in samples.items():
        if name.startswith(INSIDE):
            found[name.rpartition(":")[2]] += int(value)
        elif any(name.startswith(begin) and name.endswith(end) for begin, end in OUTSIDE):
            found["https"] += int(value)
    return found


def line(moved: dict[str, int]) -> str:
    """As the demo prints it."""
    return "Blocks moved: " + ", ".join(f"{scheme} {count}" for scheme, count in moved.items())
