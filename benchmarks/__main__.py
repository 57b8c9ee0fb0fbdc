"""`python -m benchmarks [NAME ...]`: run benchmarks and print their table (Markdown with --markdown)."""

from __future__ import annotations

import importlib
import platform
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Row

NAMES = ("blocks", "lookup", "memory", "placement", "replay", "fleet", "groups")
COLUMNS = ("what", "ours", "figure", "peer", "peer's figure", "ratio", "spread")


def cells(row: Row) -> tuple[str, ...]:
    """The row as text."""
    return (
        row.what, row.ours, row.our_figure, row.peer, row.peer_figure, f"{row.ratio:.2f}", f"{row.spread:.0%}"
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the named benchmarks, or all."""
    names = [name for name in arguments if not name.startswith("-")] or list(NAMES)
    rows = [row for name in names for row in importlib.import_module(f"benchmarks.{name}").run()]
    if "--markdown" in arguments:
        print(f"Python {platform.python_version()}, `python -m benchmarks {' '.join(names)}`\n")
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
        for row in rows:
            print("| " + " | ".join(cells(row)) + " |")
        return 0
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
