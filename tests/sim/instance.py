"""An inference instance's shell on the virtual clock, around its real state and a model of compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import CheckpointReply, Link, PrefetchDirective, ResumeReply, ResumeRequest
from services.instance import engine
from services.instance import instructions as rules
from services.instance.settings import Settings
from services.instance.state import InstanceState
from tests.sim.checker import Checker, Request
from tests.sim.engine import BATCH, EngineModel, Job, prompt_name
from tests.sim.grouped import GroupPart
from tests.sim.kernel import Future, Kernel, Node
from tests.sim.network import Network, Stream, UnreachableError
from tests.sim.storage import BLOCK_TOKENS, COMPAT, SCOPE, SCOPE_KEY, HolderNode, digested_of, identity

if TYPE_CHECKING:
    from tests.sim.placement import PlacementNode

STATUS_TTL_MS: Final = 1_500
LEASE_MS: Final = 2_000
PATIENCE_MS: Final = 13_000
"""How long output is kept and a prompt waited for: longer than all faults of a run together."""


@dataclass(frozen=True)
class Event:
    """What a front end reads: tokens from `first_index` on, or the end after `first_index` tokens."""

    epoch: int
    first_index: int
    tokens: Sequence[int] | None = None
    reason: str | None = None


@dataclass
class _Reader:
    """A front end attached to a session under an epoch."""

    session: str
    epoch: int
    stream: Stream[Event]
    over: Future[None]


class InstanceNode(Node):
    """One instance. Its holder is a process of its own and outlives it."""

    def __init__(
        self, kernel: Kernel, network: Network, checker: Checker, name: str, base_uri: str, own: HolderNode,
        placement: PlacementNode,
    ) -> None:  # fmt: skip
        super().__init__(kernel, name)
        self.network = network
        self.checker = checker
        self.base_uri = base_uri
        self.identity = identity(base_uri)
        self.own = own
        self.durable = own
        self.placement = placement
        self.holders: Mapping[str, HolderNode] = {}
        self.sleep_after_ms = kernel.random.choice((0, 0, 2_500))
        self.wall_ms = 1_700_000_000_000 + kernel.random.randrange(10**6)  # clock minus virtual time
        self.counter_on_disk = 0
        self._timer = 0

    # --- life ---

    def set_clock_back(self, by_ms: int) -> None:
        self.wall_ms -= by_ms

    def boot(self) -> None:
        # Start time in Unix ms, or the counter on disk where the clock has gone back.
        self.counter_on_disk = max(self.wall_ms + self.kernel.now_ms, self.counter_on_disk + 1)
        self.checker.boot(self.base_uri, self.counter_on_disk)
        settings = Settings(
            base_uri=self.base_uri, epoch=self.counter_on_disk, compat_id=COMPAT.hex(), block_tokens=BLOCK_TOKENS,
            positions_max=10_000, batch_size=BATCH, status_ttl_ms=STATUS_TTL_MS,
            sleep_after_ms=self.sleep_after_ms, keep_output_ms=PATIENCE_MS,
            prompt_wait_ms=PATIENCE_MS,
        )  # fmt: skip
        self.state = InstanceState(settings, {SCOPE.hex(): SCOPE_KEY}, lambda _: self.holders, self.now_ms)
        self.groups = GroupPart(self)
        self.engine = EngineModel(
            self, self._event, lambda job, proceed: self.spawn(self.groups.attend_all(job, proceed))
        )
        self._readers: list[_Reader] = []
        self._prompts: dict[tuple[str, int], Future[list[int]]] = {}
        self._stopped: set[object] = set()
        self._loading: set[str] = set()
        self._tick()

    def left_over(self) -> list[str]:
        if not self.up:
            return [f"{self.name}: down"]
        left = [f"{self.name}: {len(self.state.sessions)} sessions"] if len(self.state.sessions) else []
        left += [f"{self.name}: directive {each}" for each in self._loading]
        if self.engine.running or self.engine.queued:
            left.append(f"{self.name}: engine at work")
        return left

    def _tick(self) -> None:
        stats = engine.Stats(self.engine.running, self.engine.queued, 0.1, 1000.0, 50.0)
        self.state.measure(stats, [Link(uri, 1000.0, 100.0) for uri in self.holders if uri != self.base_uri])
        self.state.tick(self.now_ms)
        self._act()

    def _arm(self) -> None:
        """One timer, for what is due first."""
        self._timer += 1
        mine, delay_ms = self._timer, self.state.next_deadline() - self.now_ms
        self.after(max(1, delay_ms), lambda: self._tick() if mine == self._timer else None)

    # --- what others call ---

    async def prefetch(self, directive: PrefetchDirective) -> None:
        self.state.prefetch(self.now_ms, directive)
        self._act()

    async def resume_session(self, request: ResumeRequest) -> ResumeReply:
        reply = self.state.sessions.resume(self.now_ms, request)
        self._act()
        return reply

    async def put_state(self, wanted: str) -> str:
        effective = self.state.put_state(self.now_ms, wanted)
        self._act()
        return effective

    async def end_generation(self, session: str) -> None:
        self.state.sessions.end(self.now_ms, session, {SCOPE.hex()})
        self._act()

    async def generate(self, request: Request, epoch: int, from_index: int, stream: Stream[Event]) -> None:
        session = request.session
        try:
            self.state.sessions.generate(
                self.now_ms, session=session, epoch=epoch, from_index=from_index, scope_id=SCOPE.hex(),
                compat_id=COMPAT.hex(), prompt=request.prompt, sampler=request.sampler,
            )  # fmt: skip
        finally:
            self._act()
        output = self.state.sessions.output(session, epoch, from_index)
        if output.tokens:
            self.checker.release(self, session, epoch, from_index, output.tokens)
            stream.send(Event(epoch, from_index, output.tokens))
        if output.ended is not None:
            stream.send(Event(epoch, output.ended.output_tokens, reason=output.ended.reason))
            return
        reader = _Reader(session, epoch, stream, Future())
        self._readers.append(reader)
        await reader.over

    # --- what the state wants done ---

    def fenced(self, session: str, epoch: int) -> None:
        """The controller has given the session another epoch."""
        self.state.sessions.checkpoint_refused(self.now_ms, session, epoch)
        self._act()

    def _act(self) -> None:
        for instruction in self.state.instructions():
            self._carry_out(instruction)
        self._arm()

    def _carry_out(self, instruction: rules.Instruction) -> None:
        match instruction:
            case rules.StartSession():
                self._need_active("session")
                self.checker.run(self.base_uri, instruction.session, instruction.epoch)
                self.log("run", instruction.session[-2:], instruction.epoch, "from", instruction.sampler.step)
                self.kernel.count("sessions started")
                self.spawn(self._begin(instruction))
            case rules.ProvidePrompt():
                self._prompt_of(instruction.session, instruction.epoch).set(instruction.prompt)
            case rules.StopSession():
                self._stopped.add((instruction.session, instruction.epoch))
                self.engine.cancel(instruction.session, instruction.epoch)
            case rules.SendCheckpoint():
                self.spawn(self._checkpoint(instruction))
            case rules.Release() | rules.Ended() | rules.Fenced():
                self._publish(instruction)
            case rules.BeginDirective():
                self._need_active("directive")
                self.spawn(self._prefetch(instruction))
            case rules.StopDirective():
                self._stopped.add(instruction.directive)
            case rules.SendStatus():
                self.spawn(self._status(instruction))
            case rules.EmptyDevice() | rules.UseDevice():
                pass

    def _need_active(self, what: str) -> None:
        self.checker.need(self.state.state == "active", self, "takes a new", what, "while", self.state.state)

    def _publish(self, instruction: rules.Release | rules.Ended | rules.Fenced) -> None:
        session, epoch = instruction.session, instruction.epoch
        event: Event | None = None
        match instruction:
            case rules.Release():
                self.checker.release(self, session, epoch, instruction.first_index, instruction.tokens)
                event = Event(epoch, instruction.first_index, instruction.tokens)
            case rules.Ended():
                event = Event(epoch, instruction.output_tokens, reason=instruction.reason)
            case rules.Fenced():
                self.kernel.count("fenced")
        for reader in [each for each in self._readers if (each.session, each.epoch) == (session, epoch)]:
            if event is not None:
                reader.stream.send(event)
            if not isinstance(instruction, rules.Release) or reader.stream.broken:
                self._readers.remove(reader)
                reader.over.set(None)

    async def _status(self, instruction: rules.SendStatus) -> None:
        status = instruction.status
        try:
            view = await self.network.call(self, self.placement, lambda: self.placement.put_status(status))
        except KvspError as error:
            self.state.status_refused(self.now_ms, error.problem)
        except UnreachableError:
            return
        else:
            self.state.status_answered(self.now_ms, status, view)
        self._act()

    async def _checkpoint(self, instruction: rules.SendCheckpoint) -> None:
        checkpoint = instruction.checkpoint
        session, epoch = checkpoint.session, checkpoint.epoch
        self.kernel.count("checkpoints")
        try:
            reply: CheckpointReply = await self.network.call(
                self, self.placement, lambda: self.placement.put_checkpoint(self.base_uri, checkpoint)
            )
        except KvspError as error:
            if error.status >= 500 or error.problem is registry.TOO_MANY_REQUESTS:
                self.state.sessions.unanswered(self.now_ms, session, epoch)
            else:
                self.log("refused", session[-2:], epoch, checkpoint.output_offset, error.problem.title)
                self.state.sessions.checkpoint_refused(self.now_ms, session, epoch)
        except UnreachableError:
            self.state.sessions.unanswered(self.now_ms, session, epoch)
        else:
            self.state.sessions.acknowledged(self.now_ms, session, reply)
        self._act()

    # --- compute ---

    async def _begin(self, start: rules.StartSession) -> None:
        """Load what can be had, wait for the prompt where it is needed, and compute."""
        name = (start.session, start.epoch)
        group = start.session if self.groups.member.at_home(start.session) else ""
        cached = 0 if group else await self._load_prefix(start)
        if name not in self._stopped and cached * BLOCK_TOKENS < start.known_from:
            self.kernel.count("prompt needed")
            waiting = self._prompt_of(*name)
            self.state.sessions.prefix_lost(self.now_ms, *name)
            self._act()
            await waiting
        if name not in self._stopped:
            job = self._job(start, cached)
            job.group = group
            self.engine.submit(job)

    def _job(self, start: rules.StartSession, cached: int) -> Job:
        blocks = start.prompt_tokens // BLOCK_TOKENS
        end = start.prompt_tokens - start.known_from
        tail, output = start.tokens[blocks * BLOCK_TOKENS - start.known_from : end], start.tokens[end:]
        return Job(
            start.session, start.epoch, prompt_name(start.block_keys[:blocks], tail), start.prompt_tokens,
            start.sampler, start.max_tokens, start.stop_tokens, output, cached,
        )  # fmt: skip

    async def _load_prefix(self, start: rules.StartSession) -> int:
        """How many leading blocks are here, after what is elsewhere has been fetched."""
        index, keys = self.placement.index, start.block_keys
        try:
            found = await self.network.call(self, index, lambda: index.lookup(keys))
            sources = [[record.holder for record in records] for records in found.replicas]
        except (KvspError, UnreachableError):
            sources = []
        for number, key in enumerate(start.block_keys):
            if (start.session, start.epoch) in self._stopped:
                return number
            where = sources[number] if number < len(sources) else []
            if not await self._have(key, where, LEASE_MS):
                return number
        return len(start.block_keys)

    def _prompt_of(self, session: str, epoch: int) -> Future[list[int]]:
        return self._prompts.setdefault((session, epoch), Future())

    def _event(self, event: engine.Event) -> None:
        """The engine reports."""
        name = event.session, event.epoch
        match event:
            case engine.Started():
                self.state.sessions.started(*name, event.cached_tokens)
            case engine.Sampled():
                self.state.sessions.sampled(self.now_ms, *name, event.index, event.token)
            case engine.BlockDone():
                found = self.state.sessions.block_key(*name, event.block)
                if found is not None:
                    self.spawn(self._keep(found[1]))
            case engine.Finished():
                self.state.sessions.finished(self.now_ms, *name, event.reason)
        self._act()

    async def _keep(self, key: bytes) -> None:
        """Blocks go to the own holder and, so that they survive it, to a durable one (R-171)."""
        for holder in (self.own, self.durable):
            with suppress(KvspError, UnreachableError):  # it has it already, or has to do without
                await self.network.call(self, holder, partial(holder.put, self.identity, key))

    # --- blocks from elsewhere ---

    async def _prefetch(self, directive: rules.BeginDirective) -> None:
        self._loading.add(directive.directive)
        for key, sources in directive.blocks:
            if directive.directive in self._stopped:
                break
            loaded = await self._have(key, sources, directive.lease_ms)
            self.state.block_outcome(self.now_ms, directive.directive, key, loaded=loaded)
            self._act()
        self._loading.discard(directive.directive)
        left = self.state.directive(directive.directive).state
        self.checker.need(left != "pending", self, "has nothing more to load and a directive", left)

    async def _have(self, key: bytes, sources: Sequence[str], lease_ms: int) -> bool:
        """Is the block in the own holder, after it was fetched from one of the sources if need be?"""
        if self.own.holds(key):
            return True
        for uri in sources:
            if (
                uri != self.base_uri
                and uri in self.holders
                and await self._fetch(key, self.holders[uri], lease_ms)
            ):
                return True
        return False

    async def _fetch(self, key: bytes, source: HolderNode, lease_ms: int) -> bool:
        """Lease, read, verify, keep, release (R-128)."""
        network, me = self.network, self.identity
        try:
            lease = await network.call(self, source, lambda: source.lease(me, [key], lease_ms))
        except (KvspError, UnreachableError):
            return False
        try:
            sha256 = await network.call(self, source, lambda: source.get(me, key))
            self.checker.need(sha256 == digested_of(key).sha256, "octets of another block")
            await network.call(self, self.own, lambda: self.own.put(me, key))
            self.kernel.count("blocks fetched")
        except (KvspError, UnreachableError):
            pass  # another may have stored it meanwhile
        with suppress(KvspError, UnreachableError):  # it runs out
            await network.call(self, source, lambda: source.release(me, lease))
        return self.own.holds(key)
