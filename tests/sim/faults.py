"""What goes wrong in a run, and when: drawn from the seed, over at `END_MS`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.sim.instance import InstanceNode
from tests.sim.kernel import Node
from tests.sim.network import Weather

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

END_MS: Final = 12_000
"""From here on nothing new goes wrong, and what is broken is mended."""


CRASH: Final = 0.15
"""At each boundary of a controller that is doomed."""


@dataclass(frozen=True)
class Profile:
    """How much of what: `faults` are drawn from `kinds`; the weather lasts as long as they do."""

    name: str
    weather: Weather
    faults: int
    kinds: Sequence[str]


KINDS: Final = (
    "crash instance", "restart instance", "pause instance", "crash placement", "crash in persist",
    "pause placement", "crash index", "crash holder", "crash frontend", "pause frontend",
    "partition", "partition one way", "isolate", "operator",
)  # fmt: skip

PROFILES: Final = (
    Profile("calm", Weather(), 0, ()),
    Profile("rain", Weather(loss=0.03, duplicate=0.05, slow=0.1), 0, ()),
    Profile("instances", Weather(), 6, ("crash instance", "pause instance", "operator")),
    Profile("restarts", Weather(loss=0.05, slow=0.2, slow_ms=600), 16, ("restart instance",)),
    Profile("zombies", Weather(slow=0.05, slow_ms=3000), 6, ("pause instance", "isolate", "partition one way")),
    Profile(
        "placement", Weather(), 8, ("crash placement", "crash in persist", "pause placement", "crash instance")
    ),
    Profile("partitions", Weather(loss=0.01), 8, ("partition", "partition one way", "isolate")),
    Profile("storage", Weather(), 6, ("crash holder", "crash index", "crash instance")),
    Profile("storm", Weather(loss=0.02, duplicate=0.05, slow=0.1), 14, KINDS),
)


def plan(cluster: Cluster, profile: Profile) -> None:
    """Schedule every fault of a run, and its mending."""
    kernel = cluster.kernel
    for _ in range(profile.faults):
        at_ms = kernel.random.randint(300, END_MS - 500)
        kind = kernel.random.choice(list(profile.kinds))
        lasts_ms = min(kernel.random.choice((50, 400, 1200, 3000)), END_MS - at_ms)
        kernel.after(at_ms, lambda kind=kind, lasts_ms=lasts_ms: inject(cluster, kind, lasts_ms))  # type: ignore[misc]
    kernel.after(END_MS, cluster.mend)


def inject(cluster: Cluster, kind: str, lasts_ms: int) -> None:
    cluster.kernel.count(kind)
    cluster.kernel.log("*", kind, lasts_ms)
    what, _, whom = kind.partition(" ")
    after = cluster.kernel.after
    if what == "restart":
        lasts_ms = cluster.kernel.random.randint(1, 100)  # before anybody has noticed
    if kind == "crash in persist":
        cluster.placement.doom = lambda: cluster.kernel.chance(CRASH)
        after(lasts_ms, lambda: _doomed(cluster))
    elif what in ("crash", "restart"):
        node = _one(cluster, whom)
        node.crash()
        if isinstance(node, InstanceNode) and cluster.kernel.chance(0.3):
            cluster.kernel.count("clock set back")
            node.set_clock_back(3_600_000)
        after(lasts_ms, node.start)
    elif what == "pause":
        node = _one(cluster, whom)
        node.pause()
        after(lasts_ms, node.resume)
    elif kind == "operator":
        cluster.operate()
    else:
        _cut(cluster, kind)
        after(lasts_ms, cluster.network.heal)


def _one(cluster: Cluster, kind: str) -> Node:
    nodes: dict[str, Sequence[Node]] = {
        "instance": cluster.instances,
        "placement": [cluster.placement],
        "index": [cluster.index],
        "holder": cluster.holders,
        "frontend": [cluster.frontend],
    }
    return cluster.kernel.random.choice(list(nodes[kind]))


def _doomed(cluster: Cluster) -> None:
    """The crash may have come already; in any case the controller is to run again."""
    cluster.placement.doom = None
    cluster.placement.start()


def _cut(cluster: Cluster, kind: str) -> None:
    random, network = cluster.kernel.random, cluster.network
    names = [node.name for node in cluster.nodes]
    if kind == "isolate":
        alone = random.choice([node.name for node in cluster.instances])
        for other in names:
            if other != alone:
                network.cut(alone, other)
    else:
        for _ in range(3):
            left, right = random.sample(names, 2)
            if kind == "partition":
                network.cut(left, right)
            else:
                network.cut_one_way(left, right)
