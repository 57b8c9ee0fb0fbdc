"""The running fleet: loads that overlap compute, what a miss costs, what a crash costs, what checkpoints cost.

The dev stack runs with the demo model; this process takes the place of the instance ii2, with the same code, the
same configuration and the holder beside it, so that the parts of a request can be timed apart: loading alone,
computing the tail alone, both at once, and the prompt from scratch. Runs of all kinds take turns, medians are
compared. The crash is one of a whole instance, timed by a client of the OpenAI API.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import Row, Timing
from benchmarks.peers import free_port
from deploy.local import acts, prompts
from deploy.local.acts import Loss
from deploy.local.configs import STATUS_TTL_MS, Settings
from deploy.local.fleet import Fleet, place
from deploy.local.layout import Layout
from deploy.local.model import ensure_model
from deploy.local.stack import ENGINE_ENVIRONMENT, Background, prepare, running
from kvsp.protocol import keys
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import CheckpointReply, InstanceStatus, Sampler, SessionCheckpoint
from kvsp.rpc.config import load, load_policy
from kvsp.rpc.convert import block_name
from services.instance.config import InstanceConfig
from services.instance.engine import Event, Sampled, Work
from services.instance.tiers import TierNews

if TYPE_CHECKING:
    from services.instance.host import Host
    from services.instance.loading import Loading
    from services.instance.scheduler import Scheduler

PLACE: Final = "ii2"
"""Whose place this process takes."""
BLOCK: Final = 32
TOKENS: Final = 2_000
ROUNDS: Final = 7
DECODED: Final = 256
KILLS: Final = 3
STATUS_TTL_S: Final = STATUS_TTL_MS / 1000
SCOPE: Final = "demo"
KINDS: Final = {True: "deterministic: released at once", False: "released when acknowledged"}


@contextmanager
def stack(*, metrics: bool = False) -> Iterator[Background]:
    """A fleet of its own on free ports, removed at the end."""
    os.environ.update(ENGINE_ENVIRONMENT)  # before torch is loaded, as for every engine
    home = Path(tempfile.mkdtemp(prefix="kvsp-bench-"))
    try:
        layout = Layout(home / ".kvsp", free_port(), free_port())
        layout.make_directories()
        directory = ensure_model(layout.home)[0]
        settings = Settings([layout.descriptor], model=directory, metrics=metrics)
        with running(prepare(layout, settings, lambda _: None, restart=False)) as background:
            yield background
    finally:
        shutil.rmtree(home, ignore_errors=True)


# --- an instance in this process ------------------------------------------------------


class Deaf:
    """A controller that has all checkpoints recorded at once, by doing nothing."""

    async def put_status(self, status: InstanceStatus) -> str:
        """As reported."""
        return status.state

    async def put_checkpoint(self, checkpoint: SessionCheckpoint) -> CheckpointReply:
        """Recorded."""
        return CheckpointReply(checkpoint.epoch, checkpoint.output_offset)


@dataclass
class Instance:
    """The host at work, and what its parts are. `watch` hears the engine's events of sessions, by id."""

    host: Host
    engine: Any
    scope_key: keys.ScopeKey
    vocabulary: int
    watch: dict[str, Callable[[Event], None]] = field(default_factory=dict)
    draw: random.Random = field(default_factory=lambda: random.Random(3))

    @property
    def scheduler(self) -> Scheduler[Any]:
        """That of the host."""
        return self.host._scheduler  # type: ignore[return-value]

    @property
    def loading(self) -> Loading:
        """What moves blocks."""
        return self.host._loading

    @property
    def scope_id(self) -> str:
        """In hex."""
        return keys.scope_id(self.scope_key).hex()

    def prompt(self, tokens: int = TOKENS) -> list[int]:
        """Tokens that nobody has seen."""
        return [self.draw.randrange(2, self.vocabulary) for _ in range(tokens)]

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the complete blocks but the one that the last token ends: that token is computed in any case."""
        return keys.block_keys(self.scope_key, self.engine.compat_id, tokens[: len(tokens) - 1], BLOCK)

    # --- what is timed ---

    async def load_alone(self, prompt: Sequence[int]) -> tuple[float, Any]:
        """Lookup and loading into a cache, nothing computed."""
        began = time.perf_counter()
        self.loading.lull.begin(prompt[0])  # as when a session waits: what is loaded is stored afterwards
        plan = await self.loading.prefixes.find(self.scope_id, self.keys(prompt))
        cache = self.engine.prefix(len(plan.blocks), len(prompt) + 8 - len(plan.blocks) * BLOCK)
        await self.loading.prefixes.fill(plan, cache, self.loading.holders.links())
        took = time.perf_counter() - began
        self.loading.lull.end(prompt[0])
        require(cache.prefix_tokens == len(self.keys(prompt)) * BLOCK, "not all of the prefix was loaded")
        return took, cache

    async def compute(self, tokens: Sequence[int], cache: Any = None, *, output: int = 0, until: int = 0) -> float:
        """The engine alone, until it has sampled output token `until`; the last `output` tokens are output."""
        done, session = asyncio.get_running_loop().create_future(), str(uuid.uuid4())
        began = time.perf_counter()

        def hear(event: Event) -> None:
            if isinstance(event, Sampled) and event.index == until and not done.done():
                done.set_result(time.perf_counter() - began)

        self.watch[session] = hear
        sampler = Sampler("greedy", {}, 0, output, deterministic=True)
        self.scheduler.submit(Work(session, 1, len(tokens) - output, 0, tokens, sampler, until + 1, prefix=cache))
        took: float = await done
        self.scheduler.cancel(session, 1)
        del self.watch[session]
        return took

    async def serve(self, prompt: Sequence[int], output: int = 1, *, deterministic: bool = True) -> list[float]:
        """A whole session as the front end has it: when its first and its last token could leave."""
        session = str(uuid.uuid4())
        sampler = Sampler("greedy", {"max_tokens": output}, 0, 0, deterministic=deterministic)
        began = time.perf_counter()
        self.host.generate(
            session=session, epoch=1, from_index=0, scope_id=self.scope_id, compat_id=self.engine.compat_id.hex(),
            prompt=list(prompt), sampler=sampler,
        )  # fmt: skip
        pieces = self.host.outputs(session, 1, 0)
        times = [time.perf_counter() - began async for piece in pieces if piece.tokens]
        await self.host.end(session, {self.scope_id})
        return [times[0], times[-1]]

    # --- in between ---

    async def resume(self, prompt: int, generated: int) -> float:
        """What an instance computes that goes on with a session of so many prompt tokens, at the next token.

        Its checkpoint is that of the last block end, all blocks before it are loaded already.
        """
        covered = max(0, (prompt + generated) // BLOCK * BLOCK - prompt)
        tokens = self.prompt(prompt + covered)
        await self.serve(tokens)
        await self.settle()
        _, cache = await self.load_alone(tokens)
        return await self.compute(tokens, cache, output=covered, until=generated)

    async def settle(self) -> None:
        """Until every block is stored where it should be."""
        store = self.loading.store
        while store._waiting or store._active or len(self.loading._loads):
            await asyncio.sleep(0.01)

    async def forget(self, prompt: Sequence[int]) -> None:
        """Have the holder beside this instance drop a prompt's blocks; h1 keeps them."""
        await self.settle()
        compat = self.engine.compat_id.hex()
        for key in self.keys(prompt):
            with contextlib.suppress(KvspError):  # it had it not
                await self.loading.holders.own.purge(block_name(compat, self.scope_id, key.hex()))


def require(good: bool, complaint: str) -> None:
    """What is measured must be what it is called."""
    if not good:
        raise AssertionError(complaint)


@asynccontextmanager
async def instance(background: Background, place: str = PLACE) -> AsyncIterator[Instance]:
    """An instance in this process."""
    from services.instance.scheduler import Scheduler
    from services.instance.server import hosted
    from services.instance.torch_engine import load_engine

    layout = background.stack.layout
    config = load(layout.config(place), InstanceConfig)
    engine = await asyncio.to_thread(
        partial(load_engine, Path(config.model), block_tokens=config.block_tokens, threads=config.threads)
    )
    scope_key = keys.ScopeKey.parse(layout.scope_key(SCOPE).read_bytes())
    watch: dict[str, Callable[[Event], None]] = {}

    def schedule(on_event: Callable[[Event], None]) -> Scheduler[Any]:
        def hear(event: Event) -> None:
            if (mine := watch.get(event.session)) is not None:
                mine(event)
            else:
                on_event(event)

        return Scheduler(engine, hear, batch_size=config.batch_size)

    async with hosted(config, load_policy(config.policy), engine, schedule, TierNews()) as host:
        while not host.state.is_known:  # by the controller: until then it admits nothing
            await asyncio.sleep(0.01)
        yield Instance(host, engine, scope_key, engine._vocabulary, watch)


# --- time to first token --------------------------------------------------------------


@dataclass
class Samples:
    """Seconds by what was timed."""

    of: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """One more."""
        self.of.setdefault(name, []).append(seconds)

    def timing(self, name: str) -> Timing:
        """Median and spread."""
        low, median, high = statistics.quantiles(self.of[name], n=4)
        return Timing(median, (high - low) / median)


async def first_tokens(here: Instance, samples: Samples) -> None:
    """One turn of everything about the time to first token."""
    prompt = here.prompt()
    samples.add("scratch", (await here.serve(prompt))[0])
    await here.settle()
    for source in ("own holder", "other holder"):
        forget = partial(here.forget, prompt) if source == "other holder" else here.settle
        await forget()
        took, cache = await here.load_alone(prompt)
        samples.add(f"load, {source}", took)
        samples.add("tail", await here.compute(prompt, cache))
        await forget()
        samples.add(f"both, {source}", (await here.serve(prompt))[0])
    await here.settle()
    samples.add("engine alone", await here.compute(here.prompt()))
    samples.add("miss", (await here.serve(here.prompt()))[0])
    await here.settle()


async def decoding(here: Instance, samples: Samples) -> None:
    """One turn of decoding, with checkpoints and without."""
    checkpoints = here.host._checkpoints
    controllers: dict[str, Any] = {"with": checkpoints._controller, "without": Deaf()}
    for deterministic, kind in KINDS.items():
        for name, controller in controllers.items():
            checkpoints._controller = controller
            first, last = await here.serve(here.prompt(64), DECODED, deterministic=deterministic)
            samples.add(f"{name}, {kind}", (last - first) / (DECODED - 1))
    checkpoints._controller = controllers["with"]


async def in_process(background: Background, losses: Sequence[Loss], samples: Samples) -> None:
    """All that needs no client, and what each of the crashed sessions took to compute."""
    async with instance(background) as here:
        await here.serve(here.prompt())  # warm
        await here.settle()
        for _ in range(ROUNDS):
            await first_tokens(here, samples)
        for _ in range(ROUNDS):
            await decoding(here, samples)
        for loss in losses:
            samples.add("resumed", await here.resume(loss.disturbed.prompt_tokens, loss.tokens_before))


# --- as clients see it ----------------------------------------------------------------


def requests(fleet: Fleet, copy: int, samples: Samples) -> None:
    """One turn of requests about one document: where it is held, where it has to be fetched, and from scratch."""
    computed = fleet.ask(prompts.prompt(copy, 0), 1)
    fleet.wait_published(prompts.shared(copy))
    samples.add("client: own holder", fleet.ask(prompts.prompt(copy, 1), 1).first_token_s)
    with fleet.drained(place(computed)):
        samples.add("client: other holder", fleet.ask(prompts.prompt(copy, 1), 1).first_token_s)
    samples.add("client: scratch", fleet.ask(prompts.prompt(copy, 1), 1, scope=acts.OTHER_SCOPE).first_token_s)


def crashes(fleet: Fleet, samples: Samples) -> list[Loss]:
    """kill -9 of the serving instance and the holder beside it, KILLS times greedy and KILLS times seeded."""
    losses: list[Loss] = []
    for _ in range(KILLS):
        act = acts.crash(fleet)
        require(not act.failures, "; ".join(act.failures))
        losses += act.losses
    for loss in losses:
        samples.add("kill to next token", loss.next_token_s)
    return losses


# --- the table ------------------------------------------------------------------------


def run() -> list[Row]:
    """Rows of the table; prints all medians."""
    samples = Samples()
    with stack() as background:
        with Fleet(background) as fleet:
            for copy in range(ROUNDS):
                requests(fleet, 100 + copy, samples)
            losses = crashes(fleet, samples)
        background.kill(PLACE)
        asyncio.run(in_process(background, losses, samples))
    for name in samples.of:
        timing = samples.timing(name)
        print(f"{name}: {1000 * timing.seconds:.1f} ms, spread {timing.spread:.0%}", flush=True)
    return [*_first_tokens(samples), *_costs(samples)]


def timed(what: str, ours: str, our: Timing, peer: str, their: Timing) -> Row:
    """Times in milliseconds."""
    figures = [f"{1000 * timing.seconds:.0f} ms" for timing in (our, their)]
    ratio = their.seconds / our.seconds
    return Row(what, ours, figures[0], peer, figures[1], ratio, max(our.spread, their.spread))


def _first_tokens(samples: Samples) -> list[Row]:
    rows = []
    for source in ("own holder", "other holder"):
        what, both = f"first token of {TOKENS} cached, {source}", samples.timing(f"both, {source}")
        alone = max(samples.timing(f"load, {source}"), samples.timing("tail"), key=lambda timing: timing.seconds)
        rows.append(timed(what, "load and compute overlapped", both, "the longer of both alone", alone))
        rows.append(timed(what, "load and compute overlapped", both, "from scratch", samples.timing("scratch")))
    for source in ("own holder", "other holder"):
        seen = samples.timing(f"client: {source}")
        rows.append(
            timed(
                f"first token at a client, {source}",
                "OpenAI API",
                seen,
                "scratch",
                samples.timing("client: scratch"),
            )
        )
    return rows


def _costs(samples: Samples) -> list[Row]:
    rows = [
        timed("first token on a miss", "with lookup, publication", samples.timing("miss"), "engine without kvsp",
              samples.timing("engine alone"))
    ]  # fmt: skip
    for kind in KINDS.values():
        ours, theirs = samples.timing(f"with, {kind}"), samples.timing(f"without, {kind}")
        rows.append(Row.of(f"decoding, {kind}", "with checkpoints", ours, "without", theirs, 1, "tokens/s"))
    resumed = samples.timing("resumed")
    bound = Timing(STATUS_TTL_S + 1.5 * resumed.seconds, resumed.spread)
    kill = samples.timing("kill to next token")
    rows.append(
        timed("kill -9 to next token", "at the client", kill, "a status TTL + 1.5 x resume compute", bound)
    )
    return rows
