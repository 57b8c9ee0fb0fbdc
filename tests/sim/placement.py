"""The placement controller's shell on the virtual clock, around its real state: it persists before it acts.

Asked at each boundary between two instructions, and before and after each write, `doom` says whether it crashes
there, once. Only `disk` survives.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvsp.protocol import estimate, registry, reshard
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.records import CheckpointReply, InstanceStatus, SessionCheckpoint
from kvsp.protocol.reshard import GroupContext
from services.placement import instructions as todo
from services.placement.cost import checkpoint_keys
from services.placement.groups import LIFETIME_MS, ForgetMap, MapRow, Settled
from services.placement.instructions import Binding, Forget, InstanceRow, Row, SessionRow
from services.placement.settings import GroupSettings, Settings
from services.placement.state import PlacementState
from tests.sim.checker import Checker
from tests.sim.kernel import Future, Kernel, Node
from tests.sim.network import Network, Stream, UnreachableError
from tests.sim.storage import BLOCK_TOKENS, COMPAT, SCOPE_KEY, IndexNode

if TYPE_CHECKING:
    from tests.sim.grouped import GroupPart
    from tests.sim.instance import InstanceNode

OWNER: Final = "spiffe://sim/fe"
WRITE_MS: Final = 3
INSIST_MS: Final = 1_000


class _Batch:
    """Rows of one transaction, and what follows it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.then: list[Callable[[], None]] = []
        self.done: Future[None] = Future()


class PlacementNode(Node):
    """One controller."""

    def __init__(self, kernel: Kernel, network: Network, checker: Checker, index: IndexNode) -> None:
        super().__init__(kernel, "pc")
        self.network = network
        self.checker = checker
        self.index = index
        self.instances: dict[str, InstanceNode] = {}
        self.disk: dict[tuple[str, str], Row] = {}
        self.doom: Callable[[], bool] | None = None
        self.groups = GroupSettings()
        self._timer = 0

    def boot(self) -> None:
        settings = Settings(
            sleep_allowed=True, prefetch_deadline_ms=2_000, prefetch_lease_ms=2_000, retry_ms=500,
            session_idle_ms=20_000, unfollowed_ms=15_000, ended_ms=10_000, groups=self.groups,
        )  # fmt: skip
        self._followers: dict[str, list[tuple[Stream[Binding], Future[None]]]] = {}
        self.state = PlacementState(
            settings,
            new_id=lambda: str(uuid.UUID(int=self.kernel.random.getrandbits(128))),
            block_tokens={COMPAT.hex(): BLOCK_TOKENS},
            is_followed=lambda session: any(stream.is_open for stream, _ in self._followers.get(session, ())),
            rows=list(self.disk.values()),
            now_ms=self.now_ms,
        )
        self._open: _Batch | None = None
        self._writing: _Batch | None = None
        self._forming: dict[str, Future[None]] = {}
        self.spawn(self._act())

    def left_over(self) -> list[str]:
        if not self.up:
            return ["pc: down"]
        left = [f"pc: {row.session}" for row in self.disk.values() if isinstance(row, SessionRow)]
        return left + [f"pc: follower of {session}" for session in self._followers]

    def _tick(self) -> None:
        self.state.tick(self.now_ms)
        self.spawn(self._act())

    # --- what others call ---

    async def put_status(self, status: InstanceStatus) -> str:
        try:
            view = self.state.status(status, self.now_ms)
        except KvspError:
            await self._act()
            raise
        self.checker.status_accepted(self, status, view)
        await self._act()
        self.checker.status_answered(status)
        return view

    async def put_checkpoint(self, sender: str, checkpoint: SessionCheckpoint) -> CheckpointReply:
        try:
            _, reply = self.state.checkpoint([sender], checkpoint, self.now_ms)
        except KvspError:
            await self._act()
            raise
        await self._act()
        self.checker.acknowledged(checkpoint, sender, reply)
        return reply

    async def assign(self, start: SessionCheckpoint, prompt_tokens: int) -> Binding:
        runs = await self._survey(start.prompt_blocks)
        try:
            made = self.state.assign(OWNER, start, prompt_tokens, runs, self.now_ms)
        except KvspError:
            await self._act()
            raise
        binding = made.binding
        self.checker.chosen(self, binding.instance, "a request")
        await self._act()
        await self._formed(binding.session)
        self.checker.told(binding.session, binding.epoch, binding.instance)
        self.log("assign", binding.session[-2:], "to", binding.instance)
        return binding

    async def follow(self, session: str, stream: Stream[Binding]) -> None:
        self.state.binding(OWNER, session)
        over: Future[None] = Future()
        follower = (stream, over)
        self._followers.setdefault(session, []).append(follower)
        await self._act()
        await self._formed(session)
        if not over.done:
            binding = self.state.binding(OWNER, session)
            if binding is not None:
                self._tell(stream, binding)
        await over

    async def end_session(self, session: str) -> None:
        try:
            self.state.end(OWNER, session, self.now_ms)
        finally:
            await self._act()

    async def lost_group(self, sender: str, name: str) -> None:
        try:
            self.state.groups.lost([sender], name, self.now_ms)
        finally:
            await self._act()

    def resize(self, session: str, members: int) -> None:
        """An operator's command."""

        def begin() -> None:
            with suppress(KvspError):
                self.state.groups.resize(session, members, self.now_ms)
                self.kernel.count("resizes")
            self.spawn(self._act())

        self.enter(begin)

    def operate(self, uri: str, wanted: str, *, insist: bool = False) -> None:
        """An operator's command; insisting, it is given until the instance is in that state."""
        self.enter(lambda: self._order(uri, wanted))
        if insist:
            again = not self.up or not self.state.is_active(uri)
            if again:
                self.kernel.after(INSIST_MS, lambda: self.operate(uri, wanted, insist=True))

    def _order(self, uri: str, wanted: str) -> None:
        try:
            self.state.order(uri, wanted, self.now_ms)
        except KvspError as error:
            self.log("order", uri, wanted, error)
        else:
            self.checker.state_changed(uri, wanted)
        self.spawn(self._act())

    # --- what the state wants done ---

    async def _act(self) -> None:
        """What an event has caused: first the rows, and those of earlier events, then the rest."""
        wanted = self.state.instructions()
        self._check_choices(wanted)
        self._arm()
        rows: Sequence[Row] = ()
        if wanted and isinstance(wanted[0], todo.Persist):
            rows, wanted = wanted[0].rows, wanted[1:]
        if rows and self._open is None:
            self._open = _Batch()
            if self._writing is None:
                self.spawn(self._write())
        batch = self._open or self._writing
        if batch is None:
            self._carry_out(wanted)
            return
        batch.rows |= {todo.key_of(row): row for row in rows}
        batch.then.append(lambda: self._carry_out(wanted))
        await batch.done

    async def _write(self) -> None:
        """Group commit: at most one transaction is under way, all rows or none; the next one collects."""
        while self._open is not None:
            batch = self._writing = self._open
            self._open = None
            self._boundary()
            await self.sleep(self.kernel.random.randint(0, WRITE_MS))
            for key, row in batch.rows.items():
                if isinstance(row, Forget | ForgetMap):
                    self.disk.pop(todo.key_of(row), None)
                else:
                    self.disk[key] = row
            self.checker.persisted(*_seen(self.disk))
            self.checker.maps({row.map.map: row.map for row in self.disk.values() if isinstance(row, MapRow)})
            self._boundary()
            self._writing = None
            for call in batch.then:
                call()
            batch.done.set(None)

    def _boundary(self) -> None:
        if self.doom is not None and self.doom():
            self.doom = None
            self.kernel.count("crashed between instructions")
            self.die()

    def _arm(self) -> None:
        self._timer += 1
        mine, delay_ms = self._timer, self.state.next_deadline() - self.now_ms
        self.after(max(1, delay_ms), lambda: self._tick() if mine == self._timer else None)

    def row(self, session: str) -> SessionRow | None:
        """A session on disk."""
        rows = (row for row in self.disk.values() if isinstance(row, SessionRow))
        return next((row for row in rows if row.session == session), None)

    def _check_choices(self, wanted: Sequence[todo.Instruction]) -> None:
        for send in wanted:
            if isinstance(send, todo.SendResume):
                row = self.row(send.request.checkpoint.session)
                if row is None or (row.epoch, row.instance) != (send.request.epoch, send.instance):
                    self.checker.chosen(self, send.instance, "a session")

    def _carry_out(self, wanted: Sequence[todo.Instruction]) -> None:
        for instruction in wanted:
            self._boundary()
            self._do(instruction)
        self._boundary()

    def _do(self, instruction: todo.Instruction) -> None:
        match instruction:
            case todo.Feed():
                self.spawn(
                    self._try(self.network.call(self, self.index, lambda: self.index.feed(instruction.status)))
                )
            case todo.SendPrefetch():
                if not self.state.is_active(instruction.instance):
                    return  # it was, when it was chosen
                self.checker.chosen(self, instruction.instance, "a directive")
                instance, directive = self.instances[instruction.instance], instruction.directive
                self.kernel.count("directives sent")
                self.spawn(self._try(self.network.call(self, instance, lambda: instance.prefetch(directive))))
            case todo.Survey():
                self.spawn(self._survey_session(instruction))
            case todo.SendResume():
                self.spawn(self._resume(instruction))
            case todo.SendState():
                self.spawn(self._send_state(instruction))
            case todo.Bind():
                self.log("bind", instruction.binding.session[-2:], instruction.binding.epoch)
                for stream, _ in self._followers.get(instruction.binding.session, []):
                    self._tell(stream, instruction.binding)
            case todo.Ended():
                problem = instruction.problem
                for stream, over in self._followers.pop(instruction.session, []):
                    stream.close(None if problem is None else KvspError(problem))
                    over.set(None)
            case todo.WantInstance():
                self.kernel.count("instances wanted")
            case todo.Form():
                self._forming[instruction.context.map.map] = Future()
                self.spawn(self._form(instruction.context))
            case todo.Reshard():
                self.checker.sends(instruction.request)
                self.spawn(self._reshard(instruction))
            case todo.SendLeave():
                self.spawn(self._leave(instruction.instance, instruction.map))
            case Settled():
                self.kernel.count("reshards committed" if instruction.committed else "reshards aborted")

    # --- groups ---

    async def _formed(self, session: str) -> None:
        if session in self._forming:
            await self._forming[session]

    async def _form(self, context: GroupContext) -> None:
        name, members = context.map.map, sorted(reshard.held(context.map))
        joined = [await self._join(uri, context) for uri in members]
        if not all(joined):
            for uri in members:
                await self._leave(uri, name)
        self.kernel.count("groups formed" if all(joined) else "groups not formed")
        self.state.groups.formed(context.map, self.now_ms, ok=all(joined))
        await self._act()
        self._forming.pop(name).set(None)

    async def _join(self, uri: str, context: GroupContext) -> bool:
        try:
            await self._member(uri, lambda groups: groups.join(context))
        except (KvspError, UnreachableError):
            return False
        return True

    async def _leave(self, uri: str, name: str) -> None:
        with suppress(KvspError, UnreachableError):
            await self._member(uri, lambda groups: groups.leave(name))
            self.state.groups.left(name, uri)

    async def _reshard(self, send: todo.Reshard) -> None:
        name, is_plan = send.request.map, send.context is not None
        try:
            if send.context is not None:
                await self._member(send.instance, lambda groups: groups.join(send.context))
                if not self.state.groups.is_waited_for(name, send.step):
                    return
            timeout_ms = self.groups.deadline_ms if is_plan else LIFETIME_MS
            await self._member(send.instance, lambda groups: groups.reshard(send.request), timeout_ms)
        except UnreachableError:
            if not is_plan:
                return  # it is told again
            ok = False
        except KvspError as error:
            self.log("not resharded", name[-2:], send.instance, error)
            ok = False
        else:
            ok = True
        self.state.groups.answered(name, send.step, send.instance, self.now_ms, ok=ok)
        await self._act()

    async def _member(
        self, uri: str, handle: Callable[[GroupPart], Coroutine[Any, Any, None]], timeout_ms: int = LIFETIME_MS
    ) -> None:
        """A call that arrives before it is given up, or not at all: its deadline travels with it."""
        instance, until_ms = self.instances[uri], self.kernel.now_ms + timeout_ms

        async def arrive() -> None:
            if self.kernel.now_ms > until_ms:
                raise unavailable("too late")
            await handle(instance.groups)

        await self.network.call(self, instance, arrive, timeout_ms)

    def _tell(self, stream: Stream[Binding], binding: Binding) -> None:
        self.checker.told(binding.session, binding.epoch, binding.instance)
        stream.send(binding)

    async def _try(self, call: Coroutine[Any, Any, None]) -> None:
        with suppress(KvspError, UnreachableError):
            await call

    async def _survey(self, keys: Sequence[str]) -> Sequence[estimate.Run]:
        """Who holds the leading blocks; nothing when the index does not answer."""
        named = [bytes.fromhex(key) for key in keys]
        try:
            found = await self.network.call(self, self.index, lambda: self.index.lookup(named))
        except (KvspError, UnreachableError):
            return []
        return estimate.survey(found.replicas)

    async def _survey_session(self, survey: todo.Survey) -> None:
        runs = await self._survey(checkpoint_keys(survey.checkpoint, survey.block_tokens, SCOPE_KEY))
        self.state.surveyed(survey.session, survey.epoch, runs, self.now_ms)
        await self._act()

    async def _resume(self, send: todo.SendResume) -> None:
        instance, request = self.instances[send.instance], send.request
        session, epoch = request.checkpoint.session, request.epoch
        self.checker.told(session, epoch, send.instance)
        self.log("resume", session[-2:], epoch, "at", send.instance, "from", request.checkpoint.output_offset)
        try:
            await self.network.call(self, instance, lambda: instance.resume_session(request))
        except (KvspError, UnreachableError) as error:
            self.log("not resumed", session[-2:], epoch, error)
            problem = error.problem if isinstance(error, KvspError) else registry.UNAVAILABLE
            self.state.resume_failed(session, epoch, problem, self.now_ms)
        else:
            self.kernel.count("migrations")
            self.state.resumed(session, epoch, self.now_ms)
        await self._act()

    async def _send_state(self, send: todo.SendState) -> None:
        instance = self.instances[send.instance]
        try:
            effective = await self.network.call(self, instance, lambda: instance.put_state(send.state))
        except KvspError as error:
            self.state.order_failed(send.instance, refused=error.problem is registry.INVALID_STATE)
        except UnreachableError:
            self.state.order_failed(send.instance, refused=False)
        else:
            self.state.ordered(send.instance, effective, self.now_ms)
            self.checker.state_changed(send.instance, effective)
        await self._act()


def _seen(disk: Mapping[tuple[str, str], Row]) -> tuple[dict[str, SessionRow], dict[str, int]]:
    """The disk as the checker reads it."""
    sessions = {row.session: row for row in disk.values() if isinstance(row, SessionRow)}
    epochs = {row.instance: row.epoch for row in disk.values() if isinstance(row, InstanceRow)}
    return sessions, epochs
