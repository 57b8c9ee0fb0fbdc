from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack.edge import Edge, start_edge
from tests.stack.harness import RunningStack, start_fleet, start_stack, temporary_layout


@pytest.fixture(scope="session")
def stack() -> Iterator[RunningStack]:
    """The real stack, one per test process. Whoever kills a process starts it again before returning."""
    with temporary_layout() as layout, start_stack(layout) as started:
        yield started


@pytest.fixture(scope="session")
def edge() -> Iterator[Edge]:
    """Envoy alone, with short timeouts, in front of an application that shows what reaches the gateway."""
    with temporary_layout() as layout, start_edge(layout) as started:
        yield started


@pytest.fixture(scope="session")
def fleet() -> Iterator[RunningStack]:
    """The whole fleet with a tiny model, one per test process. Whoever kills or drains something undoes it."""
    with temporary_layout() as layout, start_fleet(layout) as started:
        yield started
