"""`kvsp top`: what a placement controller sees, as a live table. Needs the `server` extra."""

from __future__ import annotations

import asyncio
import contextlib
import tomllib
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvsp.cli.controller import Controller, instance_name
from kvsp.v1 import common_pb2, placement_pb2

METRICS_TIMEOUT_S: Final = 0.5
"""A picture does not wait for one that is slow. Who adds up octets waits longer."""
METRICS_OCTETS_MAX: Final = 4 << 20
_STATE_STYLES: Final = {"active": "green", "draining": "yellow", "sleeping": "blue", "failed": "red"}


async def show(controller: Controller, config: Path, console: Console, *, once: bool) -> None:
    """Draw a frame for every overview; with `once` the first alone. Raises KvspError."""
    with contextlib.ExitStack() as stack:
        draw: Callable[[RenderableType], None] = console.print
        if console.is_terminal and not once:
            live = stack.enter_context(Live(console=console, auto_refresh=False, screen=True))
            draw = partial(live.update, refresh=True)
        async for overview in controller.watch():
            draw(frame(overview, await asyncio.to_thread(read_metrics, config.parent)))
            if once:
                return


def frame(overview: placement_pb2.Overview, metrics: Mapping[str, float]) -> RenderableType:
    """One picture. Lines whose metrics nobody shows are left out."""
    return Group(_instances(overview), Text(), _totals(overview, metrics))


def read_metrics(directory: Path, timeout_s: float = METRICS_TIMEOUT_S) -> dict[str, float]:
    """Samples of all processes configured in a directory, summed, by `name` or `name:label value`."""
    totals: dict[str, float] = defaultdict(float)
    for path in sorted(directory.glob("*.toml")):
        for name, value in process_metrics(path, timeout_s).items():
            totals[name] += value
    return dict(totals)


def process_metrics(config: Path, timeout_s: float = METRICS_TIMEOUT_S) -> dict[str, float]:
    """Samples of the process of a configuration file; none when it is away, too slow, or shows none."""
    totals: dict[str, float] = defaultdict(float)
    try:
        address = tomllib.loads(config.read_text(encoding="utf-8")).get("admin")
        if isinstance(address, str) and address:
            _add(totals, address, timeout_s)
    except (OSError, ValueError):
        pass  # what the caller sees besides does not depend on it
    return totals


def _add(totals: dict[str, float], address: str, timeout_s: float) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as reply:
        text = reply.read(METRICS_OCTETS_MAX).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[":".join((sample.name, *sample.labels.values()))] += sample.value


def _instances(overview: placement_pb2.Overview) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("instance")
    table.add_column("state")
    for heading in ("running", "queued", "batch", "KV used", "prefill tok/s", "decode tok/s", "links"):
        table.add_column(heading, justify="right")
    for status in sorted(overview.instances, key=lambda each: each.instance):
        table.add_row(*_row(status))
    if not overview.instances:
        table.add_row("none", *[""] * 8)
    return table


def _row(status: common_pb2.InstanceStatus) -> tuple[RenderableType, ...]:
    state = Text(status.state, style=_STATE_STYLES.get(status.state, ""))
    counts = (str(value) for value in (status.running, status.queued, status.batch_size))
    used = f"{status.kv_utilization:.0%}"
    rates = (f"{rate:,.0f}" for rate in (status.prefill_tokens_per_s, status.decode_tokens_per_s))
    return instance_name(status.instance), state, *counts, used, *rates, str(len(status.links))


def _totals(overview: placement_pb2.Overview, metrics: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    hit_ratio = overview.matched_tokens / overview.prompt_tokens if overview.prompt_tokens else 0.0
    table.add_row("sessions", f"{overview.sessions:,}", f"of {overview.assignments:,} assigned")
    table.add_row("hit ratio", f"{hit_ratio:.1%}", f"of {overview.prompt_tokens:,} prompt tokens")
    for name, role, metric in (
        ("fetched tokens", "instance", "kvsp_instance_prompt_tokens_total:loaded"),
        ("recomputed tokens", "instance", "kvsp_instance_prompt_tokens_total:computed"),
        ("leases", "holder", "kvsp_holder_leases"),
    ):
        # A counter has no sample before something was counted, but others of its process have.
        if any(each.startswith(f"kvsp_{role}_") for each in metrics):
            table.add_row(name, f"{metrics.get(metric, 0):,.0f}")
    if overview.groups:
        held = sum(len(each.shards) for each in overview.groups)
        table.add_row("groups", f"{len(overview.groups):,}", f"over {held:,} shards")
    table.add_row("migrations", f"{overview.migrations:,}", f"{overview.checkpoints:,} checkpoints")
    table.add_row("prefetches", f"{overview.directives:,}")
    return table
