"""A whole deployment in one process and one seed: placement, index, holders, instances, front end, clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvsp.protocol.records import Sampler
from services.placement.settings import GroupSettings
from tests.sim import faults
from tests.sim.checker import Checker, Request
from tests.sim.engine import STOP
from tests.sim.faults import PROFILES, Profile
from tests.sim.frontend import FrontendNode
from tests.sim.instance import InstanceNode
from tests.sim.kernel import Kernel, Node
from tests.sim.network import Network, Weather
from tests.sim.placement import PlacementNode
from tests.sim.storage import HolderNode, IndexNode

INSTANCES: Final = 3
REQUESTS: Final = 12
SETTLE_MS: Final = 60_000
"""Within this time after the last fault every session must have ended."""
RESIZES: Final = 20
GROUPS: Final = GroupSettings(tokens=8, prefill_tokens=8, decode_tokens=50, members_max=3, deadline_ms=800)
REST_MS: Final = 60_000
"""And within this time after that nothing may be left of any."""


@dataclass(frozen=True)
class Outcome:
    """A run that broke no invariant."""

    seed: int
    profile: str
    events: int
    counts: dict[str, int]


class Cluster:
    """The nodes of one run; `mend` ends all faults."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.kernel = kernel = Kernel(seed, trace)
        self.network = network = Network(kernel, Weather())
        self.checker = checker = Checker(kernel)
        self.index = index = IndexNode(kernel, "is")
        durable = HolderNode(kernel, network, "h1", "https://h1.sim/", index)
        self.holders = [durable]
        self.instances: list[InstanceNode] = []
        self.placement = PlacementNode(kernel, network, checker, index)
        for number in range(1, INSTANCES + 1):
            uri = f"https://ii{number}.sim/"
            own = HolderNode(kernel, network, f"b{number}", uri, index)
            instance = InstanceNode(kernel, network, checker, f"ii{number}", uri, own, self.placement)
            self.holders.append(own)
            self.instances.append(instance)
            self.placement.instances[uri] = instance
        for instance in self.instances:
            instance.holders = {holder.base_uri: holder for holder in self.holders}
            instance.durable = durable
        self.frontend = FrontendNode(kernel, network, checker, self.placement, self.placement.instances)

    @property
    def nodes(self) -> list[Node]:
        return [self.index, *self.holders, self.placement, *self.instances, self.frontend]

    def shard(self) -> None:
        """Contexts may be sharded, and an operator resizes them now and then."""
        self.placement.groups = replace(GROUPS, instances=frozenset(self.placement.instances))
        for _ in range(RESIZES):
            at_ms, members = (
                self.kernel.random.randint(500, faults.END_MS),
                self.kernel.random.randint(1, INSTANCES),
            )
            self.kernel.after(at_ms, lambda members=members: self._resize(members))  # type: ignore[misc]

    def _resize(self, members: int) -> None:
        running = [
            name for name, request in self.checker.requests.items() if request.tokens and not request.outcome
        ]
        if running:
            self.placement.resize(self.kernel.random.choice(running), members)

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def mend(self) -> None:
        """Everything works again: nodes run, messages arrive, instances are awake."""
        self.kernel.log("* mend")
        self.network.weather = Weather()
        self.network.heal()
        self.placement.doom = None
        for node in self.nodes:
            node.resume()
            node.start()
        for instance in self.instances:
            self.placement.operate(instance.base_uri, "active", insist=True)

    def operate(self) -> None:
        """An operator drains or wakes an instance."""
        uri = self.kernel.random.choice(self.instances).base_uri
        self.placement.operate(uri, self.kernel.random.choice(("draining", "active")))

    def request(self, at_ms: int, session: str, **options: object) -> Request:
        """A client asks at a time; `options` as in Request, with what is not given drawn from the seed."""
        random = self.kernel.random
        prefix = random.randrange(3)  # clients share prompts, so that there is something to fetch
        prompt = [prefix * 1000 + i for i in range(random.choice((2, 8, 13, 24)))]
        members: dict[str, object] = {
            "prompt": [*prompt, random.randrange(1 << 20)],
            "max_tokens": random.choice((1, 8, 40, 120, 300)),
            "deterministic": random.random() < 0.4,
            "patience_ms": random.choice((500, 2000, 10**9, 10**9, 10**9, 10**9)),
            "stop_tokens": [STOP],
        } | options
        max_tokens = members["max_tokens"]
        sampler = Sampler(
            method=random.choice(("greedy", "top-p")),
            params={"max_tokens": max_tokens, "stop_tokens": members["stop_tokens"]},
            seed=random.randrange(1 << 30),
            step=0,
            deterministic=bool(members["deterministic"]),
        )
        made = Request(session, members["prompt"], sampler, max_tokens)  # type: ignore[arg-type]
        self.checker.requests[session] = made
        self.kernel.after(at_ms, lambda: self.frontend.ask(made, int(str(members["patience_ms"]))))
        return made

    def run(self, profile: Profile) -> None:
        """Faults as the profile says, then peace; nothing may be left. Raises InvariantError."""
        random = self.kernel.random
        self.start()
        self.network.weather = profile.weather
        for number in range(REQUESTS):
            self.request(random.randint(400, faults.END_MS), f"00000000-0000-4000-8000-{number:012d}")
        faults.plan(self, profile)
        self.kernel.run_until(faults.END_MS)
        self.settle()

    def settle(self) -> None:
        """Nothing goes wrong any more: every session must end, and then nothing be left. Raises InvariantError."""
        self.kernel.run_until(self.kernel.now_ms + SETTLE_MS, self.checker.settled)
        self.checker.check_end()
        end_ms = self.kernel.now_ms + REST_MS
        while self.left_over() and self.kernel.now_ms < end_ms:
            self.kernel.run_until(self.kernel.now_ms + 500)
        left = self.left_over()
        self.checker.need(not left, "left over:", "; ".join(left))

    def left_over(self) -> list[str]:
        """What is still there of sessions, directives and leases."""
        return [what for node in self.nodes for what in node.left_over()]


def run(seed: int, trace: Callable[[str], None] | None = None, profile: Profile | None = None) -> Outcome:
    """One run of one seed. Raises InvariantError, or whatever a state raises that it should not."""
    cluster = Cluster(seed, trace)
    chosen = profile or PROFILES[seed % len(PROFILES)]
    if seed // len(PROFILES) % 2:
        cluster.shard()
    cluster.run(chosen)
    kernel = cluster.kernel
    return Outcome(seed, chosen.name, kernel.events, dict(kernel.counts))
