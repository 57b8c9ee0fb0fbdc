"""A public trace through the rules of placement and index, with simulated engines.

`python -m benchmarks.replay [TRACE]`. The rules are those of the services (`PlacementState`, `IndexState`), in
process, on a virtual clock; the engines are `benchmarks.simulated`. The same engines with the same tiers are also
given the same requests by turns (round-robin) and to whoever has the fewest (least-queue), with what each has
itself, and with fetching from others by the same index and the same estimates.

The trace is one JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one id
per 512 tokens of the prompt; equal leading ids are an equal prefix). It is no part of the project.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.measure import Row
from benchmarks.simulated import Clock, Engine, Hardware, Job, Wanted
from kvsp.protocol import estimate, limits
from kvsp.protocol.names import party_id
from kvsp.protocol.records import Link, ReplicaRecord, Residency, Sampler, SessionCheckpoint
from services.index.state import IndexState
from services.placement.cost import Offer, Request, blocks_to_load, rank
from services.placement.instructions import Feed, SendPrefetch
from services.placement.settings import Settings
from services.placement.state import PlacementState

TRACE: Final = Path(__file__).resolve().parents[2] / "shared/data/mooncake_conversation_trace.jsonl"
FLEETS: Final = ((8, 1.0), (8, 1.5), (8, 2.0), (16, 3.0))
"""Instances, and how many times as fast as recorded the requests come."""
SCOPE, COMPAT = "5c" * 16, "c0" * 32
OWNER: Final = "spiffe://bench/fe"
STATUS_TTL_MS: Final = 1_500
STATUS_US: Final = 500_000
GREEDY: Final = Sampler("greedy", {}, 0, 0, deterministic=True)
SAMPLED_ONE: Final = Sampler("greedy", {}, 0, 1, deterministic=True)


class Line(msgspec.Struct):
    """A request of the trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path) -> list[Line]:
    """The requests in the order in which they come. Raises OSError, msgspec.DecodeError."""
    return sorted(msgspec.json.Decoder(Line).decode_lines(path.read_bytes()), key=lambda line: line.timestamp)


def jobs(lines: Iterable[Line], speed: float, hardware: Hardware) -> list[Job]:
    """The trace as jobs; only complete blocks have keys."""
    made = []
    for number, line in enumerate(lines):
        blocks = line.hash_ids[: line.input_length // hardware.block_tokens]
        keys = [each.to_bytes(32, "big") for each in blocks]
        names = [key.hex() for key in keys]
        arrives_us, output = int(1000 * line.timestamp / speed), max(1, line.output_length)
        made.append(Job(number, arrives_us, line.input_length, output, blocks, keys, names))
    return made


class Router(ABC):
    """Who gives a request to an engine."""

    decided = 0
    deciding_s = 0.0

    def __init__(self, engines: Sequence[Engine], clock: Clock) -> None:
        self.engines = engines
        self.clock = clock

    @abstractmethod
    def route(self, job: Job) -> tuple[Engine, Wanted]:
        """The engine, and what it is to load before the prefill."""

    def report(self, engine: Engine) -> None:
        """An engine reports, twice a second. Most do not listen."""
        del engine


class RoundRobin(Router):
    """By turns."""

    def route(self, job: Job) -> tuple[Engine, Wanted]:
        return self.engines[job.number % len(self.engines)], ()


class LeastQueue(Router):
    """To the one with the fewest requests before their first token, then the fewest at all; equal ones take turns.

    It knows both without delay.
    """

    def route(self, job: Job) -> tuple[Engine, Wanted]:
        turn = job.number % len(self.engines)
        order = [*self.engines[turn:], *self.engines[:turn]]
        return min(order, key=lambda engine: (engine.unanswered, engine.running)), ()


class Directory:
    """The index, and who is behind the base URIs in it."""

    def __init__(self, engines: Sequence[Engine], clock: Clock, hardware: Hardware) -> None:
        self.state = IndexState(block_tokens={bytes.fromhex(COMPAT): hardware.block_tokens})
        self.engines = {engine.uri: engine for engine in engines}
        self.links = {
            engine.uri: [
                Link(uri, hardware.link_mbit_per_s, hardware.rtt_us) for uri in self.engines if uri != engine.uri
            ]
            for engine in engines
        }
        self._clock = clock
        self._size = hardware.block_octets
        self._residency = [Residency("host", (0, hardware.layers - 1))]
        self._ids = {uri: party_id(uri) for uri in self.engines}
        for engine in engines:
            engine.on_change = self._changed

    def survey(self, job: Job) -> list[estimate.Run]:
        """Who has how much of the prompt."""
        return self.state.survey(bytes.fromhex(SCOPE), bytes.fromhex(COMPAT), job.keys, self._clock.now_ms)

    def wanted(self, blocks: Iterable[tuple[int, Sequence[str]]]) -> Wanted:
        """Blocks with the engines behind their sources."""
        return [(block, [self.engines[uri] for uri in sources]) for block, sources in blocks]

    def _changed(self, engine: Engine, block: int, held: bool) -> None:
        if not held:
            self.state.withdraw(self._ids[engine.uri], block.to_bytes(32, "big"), self._clock.now_ms)
            return
        record = ReplicaRecord(
            block_key=f"{block:064x}", compat_id=COMPAT, scope_id=SCOPE, holder=engine.uri, codec=1,
            size=self._size, digest="sha-256:" + "00" * 32, residency=self._residency,
            ttl_ms=limits.REPLICA_TTL_MS_MAX,
        )  # fmt: skip
        self.state.publish(record, limits.RECORDS_PER_HOLDER_MAX, self._clock.now_ms)


class Fetching(Router):
    """Another router's choice; the engine then loads from others what is cheaper to load than to compute."""

    def __init__(self, inner: Router, directory: Directory) -> None:
        super().__init__(inner.engines, inner.clock)
        self._inner = inner
        self._directory = directory

    def route(self, job: Job) -> tuple[Engine, Wanted]:
        engine, _ = self._inner.route(job)
        links = {link.holder: link for link in self._directory.links[engine.uri]}
        request = Request(self._directory.survey(job), job.prompt_tokens, engine.hardware.block_tokens)
        best = rank(request, [Offer(engine.uri, 0, 0, engine.hardware.prefill_tokens_per_s, links)])[0]
        if not best.fetches:
            return engine, ()
        blocks = blocks_to_load(job.names, request, best.usable, engine.uri, links)
        return engine, self._directory.wanted((int(each.block_key, 16), each.sources) for each in blocks)


class Kvsp(Router):
    """The placement controller."""

    def __init__(self, engines: Sequence[Engine], clock: Clock, directory: Directory) -> None:
        super().__init__(engines, clock)
        self._directory = directory
        serial = itertools.count()
        self._state = PlacementState(Settings(sessions_max=1 << 30), new_id=lambda: _uuid(next(serial)))
        for engine in engines:
            engine.on_first_token = self._began
            engine.on_end = self._ended

    def route(self, job: Job) -> tuple[Engine, Wanted]:
        start = _checkpoint(job, epoch=0, generated=[], sampler=GREEDY)
        began = time.perf_counter()
        runs = self._directory.survey(job)
        assigned = self._state.assign(OWNER, start, job.prompt_tokens, runs, self.clock.now_ms)
        todo = self._state.instructions()
        self.deciding_s += time.perf_counter() - began
        self.decided += 1
        directed = [each.directive for each in todo if isinstance(each, SendPrefetch)]
        blocks = [(int(each.block_key, 16), each.sources) for directive in directed for each in directive.blocks]
        return self._directory.engines[assigned.binding.instance], self._directory.wanted(blocks)

    def report(self, engine: Engine) -> None:
        status = engine.status(self._directory.links[engine.uri], STATUS_TTL_MS)
        self._state.status(status, self.clock.now_ms)
        for each in self._state.instructions():
            if isinstance(each, Feed):
                self._directory.state.observe(each.status, self.clock.now_ms)

    def _began(self, engine: Engine, job: Job) -> None:
        made = _checkpoint(job, epoch=1, generated=[0], sampler=SAMPLED_ONE)
        self._state.checkpoint([engine.uri], made, self.clock.now_ms)
        self._state.instructions()

    def _ended(self, engine: Engine, job: Job) -> None:
        self._state.end(OWNER, _uuid(job.number), self.clock.now_ms)
        self._state.instructions()


def _uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def _checkpoint(job: Job, epoch: int, generated: list[int], sampler: Sampler) -> SessionCheckpoint:
    tail = [0] * (job.prompt_tokens % 512)
    return SessionCheckpoint(
        _uuid(job.number), epoch, COMPAT, SCOPE, list(job.names), tail, generated, len(generated), sampler
    )


# --- running --------------------------------------------------------------------------


def _fetching(router: type[Router]) -> Callable[[Sequence[Engine], Clock, Hardware], Router]:
    return lambda engines, clock, hardware: Fetching(router(engines, clock), Directory(engines, clock, hardware))


ROUTERS: Final[Mapping[str, Callable[[Sequence[Engine], Clock, Hardware], Router]]] = {
    "kvsp": lambda engines, clock, hardware: Kvsp(engines, clock, Directory(engines, clock, hardware)),
    "round-robin": lambda engines, clock, _: RoundRobin(engines, clock),
    "least-queue": lambda engines, clock, _: LeastQueue(engines, clock),
    "round-robin, fetching": _fetching(RoundRobin),
    "least-queue, fetching": _fetching(LeastQueue),
}


@dataclass(frozen=True)
class Outcome:
    """What became of all requests. Times are seconds."""

    hit_ratio: float
    mean_s: float
    p50_s: float
    p99_s: float
    fetched_blocks: int
    decisions_per_s: float


def replay(lines: Sequence[Line], name: str, count: int, speed: float, hardware: Hardware) -> Outcome:
    """Give every request of the trace to one of `count` engines."""
    clock = Clock()
    engines = [Engine(f"https://ii{number:02}.example/", hardware, clock) for number in range(count)]
    router = ROUTERS[name](engines, clock, hardware)
    todo = jobs(lines, speed, hardware)

    def arrive(job: Job) -> None:
        engine, wanted = router.route(job)
        engine.load(job, wanted)
        engine.submit(job)

    def report() -> None:
        for engine in engines:
            router.report(engine)
        if sum(engine.ended for engine in engines) < len(todo):
            clock.at(clock.now_us + STATUS_US, report)

    report()
    for job in todo:
        clock.at(job.arrived_us, lambda job=job: arrive(job))  # type: ignore[misc]
    clock.run()
    return _outcome(todo, engines, router)


def _outcome(done: Sequence[Job], engines: Sequence[Engine], router: Router) -> Outcome:
    times = sorted((job.first_token_us - job.arrived_us) / 1e6 for job in done)
    return Outcome(
        sum(job.cached_tokens for job in done) / sum(job.prompt_tokens for job in done),
        statistics.fmean(times),
        times[len(times) // 2],
        times[len(times) * 99 // 100],
        sum(engine.fetched for engine in engines),
        router.decided / router.deciding_s if router.decided else 0.0,
    )


# --- the table ------------------------------------------------------------------------


def compare(path: Path, fleets: Iterable[tuple[int, float]]) -> list[Row]:
    """Replay on every fleet with every router; prints each outcome. Raises OSError, msgspec.DecodeError."""
    lines, hardware, rows = read(path), Hardware(), []
    print(f"{len(lines):,} requests of {lines[-1].timestamp / 1000:,.0f} s\n\n{_HEAD}", flush=True)
    for count, speed in fleets:
        outcomes = {}
        for name in ROUTERS:
            outcomes[name] = replay(lines, name, count, speed, hardware)
            print(_line(count, speed, name, outcomes[name]), flush=True)
        ours = outcomes.pop("kvsp")
        print(f"{ours.decisions_per_s:,.0f} decisions/s, lookup included", file=sys.stderr)
        for name, theirs in outcomes.items():
            rows += _rows(f"{count} instances, x{speed:g}", ours, name, theirs)
    print(flush=True)
    return rows


_HEAD: Final = (
    "| instances | speed | placement | hit ratio | mean TTFT | p50 | p99 | blocks moved |\n"
    "|---|---|---|---|---|---|---|---|"
)


def _line(count: int, speed: float, name: str, found: Outcome) -> str:
    return (
        f"| {count} | x{speed:g} | {name} | {found.hit_ratio:.1%} | {found.mean_s:.2f} s | {found.p50_s:.2f} s "
        f"| {found.p99_s:.1f} s | {found.fetched_blocks:,} |"
    )


def _rows(fleet: str, ours: Outcome, name: str, theirs: Outcome) -> list[Row]:
    """Simulated times are the same in every run: nothing spreads."""
    figures = {"mean": (ours.mean_s, theirs.mean_s), "p99": (ours.p99_s, theirs.p99_s)}
    return [
        Row(f"TTFT, {what}: {fleet}", "kvsp", f"{our:.2f} s", name, f"{their:.2f} s", their / our, 0.0)
        for what, (our, their) in figures.items()
    ]


def run() -> list[Row]:
    """Rows of the table; none without the trace."""
    if not TRACE.is_file():
        print(
            f"replay: there is no {TRACE}; give a trace with `python -m benchmarks.replay TRACE`", file=sys.stderr
        )
        return []
    return compare(TRACE, FLEETS)


def main() -> int:
    """One trace, by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE)
    parser.add_argument("--fleet", action="append", metavar="INSTANCES,SPEED", help="may be given several times")
    given = parser.parse_args()
    if not given.trace.is_file():
        print(f"replay: there is no {given.trace}")
        return 0
    fleets = [
        (int(count), float(speed)) for count, _, speed in (each.partition(",") for each in given.fleet or ())
    ]
    compare(given.trace, fleets or FLEETS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
