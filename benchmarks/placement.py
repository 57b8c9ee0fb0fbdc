"""Placement decisions: 64 instances, a prompt of 512 blocks, the lookup included.

The choice alone, beside estimating every instance in full. Then the decision with its lookup at a real index over
gRPC. Then `Assign` at a real controller, which also directs the chosen instance to prefetch and writes every
session to disk before it answers. What counts are decisions per second of CPU time of all processes that take
part, the load excepted: a machine with one core would do as many.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.measure import Row, Timing, interleaved
from kvsp.protocol import digests, estimate
from kvsp.protocol.estimate import Run, Source
from kvsp.protocol.names import party_id
from kvsp.protocol.records import InstanceStatus, Link, Sampler, SessionCheckpoint
from kvsp.rpc.channel import open_channel
from kvsp.rpc.convert import checkpoint_to_message, join_keys, status_to_message, survey_from_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import (
    common_pb2,
    index_pb2,
    index_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from services.placement.cost import RUNS_MAX, Offer, Request, rank
from services.placement.settings import Settings
from services.placement.state import PlacementState

INSTANCES = 64
BLOCKS = 512
BLOCK_TOKENS = 16
TOKENS = BLOCKS * BLOCK_TOKENS
LAYERS = 32
SCOPE, COMPAT = "5c" * 16, "c0" * 32
H1 = "https://h1.example/"
URIS = [f"https://ii{n:02}.example/" for n in range(INSTANCES)]
DECISIONS = 2_000
IN_FLIGHT = 16
REPORT_S = 0.5
TARGET_PER_S = 300

Placed = Sequence[tuple[int, Sequence[str]]]
"""Runs of blocks and who holds them."""


def layouts() -> dict[str, Placed]:
    """Who holds how much of a prompt."""
    every = [[H1, URIS[n % INSTANCES]] for n in range(BLOCKS)]
    return {
        "a conversation": [(128, [H1, *URIS[:20]]), (256, [H1, *URIS[3:5]]), (96, [H1, URIS[4]])],
        "nobody has it": [],
        "one holder has it": [(BLOCKS, [H1])],
        "a holder and half the fleet": [(BLOCKS, [H1, *URIS[::2]])],
        "other sources each block": [(1, holders) for holders in every],
    }


def key(layout: int, block: int) -> bytes:
    return layout.to_bytes(16, "big") + block.to_bytes(16, "big")


def status(number: int, draw: random.Random) -> InstanceStatus:
    """An instance with links to every holder, of rates as they are measured: no two alike."""
    links = [Link(uri, 100_000 * draw.uniform(0.8, 1.2), draw.uniform(10, 40)) for uri in (H1, *URIS)]
    queued = draw.choice([0, 0, 1, 3])
    return InstanceStatus(
        URIS[number], 1, "active", draw.randint(0, 16), queued, 32, 0.5, 40_000 * draw.uniform(0.9, 1.1), 3_000,
        60_000, links,
    )  # fmt: skip


def session_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def start(layout: int, number: int) -> SessionCheckpoint:
    """A session with a prompt of this layout."""
    keys = [key(layout, block).hex() for block in range(BLOCKS)]
    sampler = Sampler("greedy", {}, 0, 0, deterministic=True)
    return SessionCheckpoint(session_id(number), 0, COMPAT, SCOPE, keys, [], [], 0, sampler)


# --- in process -----------------------------------------------------------------------


def _runs(placed: Placed) -> list[Run]:
    bits = 8 * (2 << 20) / LAYERS
    return [
        (tuple(sorted(Source(uri, LAYERS, bits, ((0, LAYERS, float("inf")),)) for uri in holders)), blocks)
        for blocks, holders in placed
    ]


def choices() -> list[Row]:
    """The decision alone."""
    rows = []
    for number, (name, placed) in enumerate(layouts().items()):
        draw, runs, serial = random.Random(1), _runs(placed), itertools.count()
        state = PlacementState(Settings(sessions_max=1 << 40), new_id=_ids(serial))
        reports = [status(each, draw) for each in range(INSTANCES)]
        for each in reports:
            state.status(each, 0)
        ours, theirs = _contenders(state, reports, runs, start(number, 0), serial)
        timings = interleaved({"ours": ours, "theirs": theirs}, rounds=15)
        rows.append(
            Row.of(
                f"choice among {INSTANCES}: {name}", "assign", timings["ours"],
                "every instance estimated", timings["theirs"], 1, "decisions/s",
            )
        )  # fmt: skip
    return rows


def _ids(serial: Iterator[int]) -> Callable[[], str]:
    return lambda: session_id(next(serial))


def _contenders(
    state: PlacementState,
    reports: Sequence[InstanceStatus],
    runs: Sequence[Run],
    made: SessionCheckpoint,
    serial: Iterator[int],
) -> tuple[Callable[[], object], Callable[[], object]]:
    offers = [
        Offer(
            each.instance, each.queued * 2_000_000, 0, each.prefill_tokens_per_s, {x.holder: x for x in each.links}
        )
        for each in reports
    ]
    request = Request(runs, TOKENS, BLOCK_TOKENS)

    def ours() -> object:
        session = SessionCheckpoint(
            session_id(next(serial)), 0, COMPAT, SCOPE, made.prompt_blocks, [], [], 0, made.sampler
        )
        assigned = state.assign("spiffe://bench/fe", session, TOKENS, runs, 0)
        state.instructions()
        return assigned

    def theirs() -> object:
        return min(
            (offer.wait_us + (estimate.Survey(runs).fetch_us(offer.instance, offer.links) or 0), offer.instance)
            for offer in offers
        )

    best = rank(request, offers)[0]
    full = [rank(request, [offer])[0] for offer in offers]
    least = min(each.cost_us or 0 for each in full)
    if len(runs) * INSTANCES > RUNS_MAX:
        print(f"{len(runs)} runs, not all planned: cost {(best.cost_us or 0) / max(1, least):.3f} of the least")
    elif best.cost_us != least:
        raise AssertionError("the choice is not that of a plain minimum")
    return ours, theirs


# --- through processes ----------------------------------------------------------------

_POLICY = """
[identities."spiffe://bench/is"]
roles = ["index"]
[identities."spiffe://bench/pc"]
roles = ["placement"]
scopes = ["{scope}"]
[identities."spiffe://bench/fe"]
roles = ["frontend"]
scopes = ["{scope}"]
[identities."spiffe://bench/all"]
roles = ["instance", "holder"]
base_uris = {uris}
scopes = ["{scope}"]
"""
_SERVICE = (
    'listen = "unix:{folder}/{name}.sock"\npolicy = "{folder}/policy.toml"\nprincipal = "spiffe://bench/{name}"\n'
)
_CODE = "import sys, pathlib, services.{role}.server as m; sys.exit(m.run(pathlib.Path(sys.argv[1])))"


@contextmanager
def _processes(folder: Path) -> Iterator[dict[str, psutil.Process]]:
    uris = "[" + ", ".join(f'"{uri}"' for uri in (H1, *URIS)) + "]"
    (folder / "policy.toml").write_text(_POLICY.format(scope=SCOPE, uris=uris))
    instances = "".join(f'[[instances]]\nbase_uri = "{uri}"\naddress = "unix:{folder}/ii.sock"\n' for uri in URIS)
    more = {
        "is": "",
        "pc": f'state_dir = "{folder}/state"\nindex.address = "unix:{folder}/is.sock"\n'
        f"sessions_max = 1000000\n{instances}",
    }
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, role in (("is", "index"), ("pc", "placement")):
            path = folder / f"{name}.toml"
            path.write_text(_SERVICE.format(folder=folder, name=name) + 'log_level = "critical"\n' + more[name])
            started[name] = subprocess.Popen([sys.executable, "-c", _CODE.format(role=role), str(path)])
        yield {name: psutil.Process(process.pid) for name, process in started.items()}
    finally:
        for process in started.values():
            process.terminate()
            process.wait()


async def _publish(folder: Path) -> None:
    digest = digests.replica_digest([bytes(32)] * LAYERS)

    async def items() -> AsyncIterator[index_pb2.PublishRequest]:
        seq = 0
        for number, placed in enumerate(layouts().values()):
            block = 0
            for blocks, holders in placed:
                for _ in range(blocks):
                    for holder in holders:
                        record = common_pb2.ReplicaRecord(
                            name=common_pb2.BlockName(
                                compat_id=bytes.fromhex(COMPAT), scope_id=bytes.fromhex(SCOPE),
                                block_key=key(number, block),
                            ),
                            holder=holder, codec=1, size=2 << 20, digest=digest, layer_digests=bytes(32 * LAYERS),
                            residency=[
                                common_pb2.Residency(
                                    tier="host", layers=common_pb2.LayerRange(first=0, last=LAYERS - 1)
                                )
                            ],
                            ttl_ms=3_600_000,
                        )  # fmt: skip
                        seq += 1
                        yield index_pb2.PublishRequest(seq=seq, put=record)
                    block += 1

    async with open_channel(f"unix:{folder}/is.sock") as channel, translated():
        stub = index_pb2_grpc.IndexStub(channel)
        metadata = speak_for("spiffe://bench/all")
        async for reply in stub.Publish(items(), metadata=metadata, wait_for_ready=True):
            if not reply.HasField("put"):
                raise RuntimeError(f"not published: {reply}")


class _Instances(instance_pb2_grpc.InstanceServicer):
    """All of them: they have every block before they are told to."""

    async def Prefetch(  # noqa: N802
        self, request: instance_pb2.PrefetchDirective, context: Any
    ) -> instance_pb2.DirectiveStatus:
        return instance_pb2.DirectiveStatus(directive=request.directive, state="complete")


@asynccontextmanager
async def _instances(folder: Path) -> AsyncIterator[None]:
    server = grpc.aio.server()
    instance_pb2_grpc.add_InstanceServicer_to_server(_Instances(), server)  # type: ignore[abstract]
    server.add_insecure_port(f"unix:{folder}/ii.sock")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


class _Load:
    """A front end, and what the instances report."""

    def __init__(self, stub: Any) -> None:
        self._stub: Any = stub
        self._serial = itertools.count(1)
        self._draw = random.Random(2)

    async def report(self) -> None:
        for number in range(INSTANCES):
            made = status(number, self._draw)
            request = placement_pb2.PutStatusRequest(
                instance_id=party_id(made.instance), status=status_to_message(made)
            )
            await self._stub.PutStatus(request, metadata=speak_for("spiffe://bench/all"), wait_for_ready=True)

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        async def keep_on() -> None:
            while True:
                await asyncio.sleep(REPORT_S)
                await self.report()

        task = asyncio.create_task(keep_on())
        try:
            yield
        finally:
            task.cancel()

    async def decide(self, layout: int, decisions: int) -> None:
        request = placement_pb2.AssignRequest(start=checkpoint_to_message(start(layout, 0)), prompt_tokens=TOKENS)

        async def one_after_another(count: int) -> None:
            mine = placement_pb2.AssignRequest()
            mine.CopyFrom(request)
            for _ in range(count):
                mine.start.session = session_id(next(self._serial))
                await self._stub.Assign(mine, metadata=speak_for("spiffe://bench/fe"))

        await asyncio.gather(*(one_after_another(decisions // IN_FLIGHT) for _ in range(IN_FLIGHT)))


class _Decisions:
    """A controller's state in this process, with the index in its own."""

    def __init__(self, index: Any) -> None:
        self._index: Any = index
        self._serial = itertools.count(1)
        self._state = PlacementState(Settings(sessions_max=1 << 40), new_id=lambda: session_id(next(self._serial)))
        self._draw = random.Random(2)

    def report(self) -> None:
        for number in range(INSTANCES):
            self._state.status(status(number, self._draw), 0)

    async def decide(self, layout: int, decisions: int) -> None:
        made = start(layout, 0)
        request = index_pb2.LookupRequest(
            scope_id=bytes.fromhex(SCOPE),
            compat_id=bytes.fromhex(COMPAT),
            block_keys=join_keys(made.prompt_blocks),
        )
        self.report()

        async def one_after_another(count: int) -> None:
            for _ in range(count):
                session = SessionCheckpoint(
                    session_id(next(self._serial)), 0, COMPAT, SCOPE, made.prompt_blocks, [], [], 0, made.sampler
                )
                reply = await self._index.Survey(request, metadata=speak_for("spiffe://bench/pc"))
                self._state.assign("spiffe://bench/fe", session, TOKENS, survey_from_message(reply), 0)
                self._state.instructions()

        await asyncio.gather(*(one_after_another(decisions // IN_FLIGHT) for _ in range(IN_FLIGHT)))


async def _measure(
    what: str, ours: str, processes: Sequence[psutil.Process], decide: Callable[[int, int], Awaitable[None]]
) -> list[Row]:
    """Decisions per CPU second of these processes, of each layout."""
    rows, each = [], DECISIONS // 5
    for layout, name in enumerate(layouts()):
        await decide(layout, 200)
        samples = []
        for _ in range(5):
            before = _cpu_s(processes)
            await decide(layout, each)
            samples.append((_cpu_s(processes) - before) / each)
        low, median, high = statistics.quantiles(samples, n=4)
        timing = Timing(median, (high - low) / median)
        asked = Timing(1 / TARGET_PER_S, 0)
        rows.append(Row.of(f"{what}: {name}", ours, timing, "asked for", asked, 1, "decisions/CPU s"))
    return rows


async def _through_processes(folder: Path, processes: dict[str, psutil.Process]) -> list[Row]:
    await _publish(folder)
    async with _instances(folder), AsyncExitStack() as stack, translated():
        index, controller = [
            await stack.enter_async_context(open_channel(f"unix:{folder}/{name}.sock")) for name in ("is", "pc")
        ]
        decisions = _Decisions(index_pb2_grpc.IndexStub(index))
        load = _Load(placement_pb2_grpc.PlacementStub(controller))
        await load.report()
        rows = await _measure(
            "decision with lookup at the index", "controller's state and index",
            [psutil.Process(), processes["is"]], decisions.decide,
        )  # fmt: skip
        async with load.reporting():
            rows += await _measure(
                "Assign, on disk and directed", "controller and index", list(processes.values()), load.decide
            )
    return rows


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (each.cpu_times() for each in processes))


def run() -> list[Row]:
    """Rows of the table."""
    with tempfile.TemporaryDirectory(prefix="kvsp-bench-") as name:
        folder = Path(name)
        with _processes(folder) as processes:
            through = asyncio.run(_through_processes(folder, processes))
    return [*choices(), *through]
