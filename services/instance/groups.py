"""The parallel groups that this instance is a member of: who holds what, and plans that change it.

The rules are in shards.py; blocks move in group_blocks.py; what is computed is in group_runs.py and
group_serving.py. All methods belong to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from kvsp.protocol import registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError, bad_request, unavailable
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import ReshardReply, ReshardRequest
from kvsp.protocol.reshard import GroupContext, Range, merged
from kvsp.rpc.clock import now_ms
from kvsp.rpc.interceptors import frames
from services.instance import metrics
from services.instance.group import Context
from services.instance.group_blocks import Block, GroupBlocks, Rows
from services.instance.group_links import Links, Metadata, Stubs
from services.instance.group_member import Member, outcome, settle
from services.instance.lifecycle import require_active
from services.instance.session import bounds_of
from services.instance.shards import Drop, Fetch, Instruction, Serve, Shards, StopFetch, parts
from services.instance.state import InstanceState

if TYPE_CHECKING:  # torch takes seconds to import
    from services.instance.shard_store import ShardStore
    from services.instance.sharding import Sharding

FIRST_VERSION: Final = 1
"""Its ranges are computed; those of later ones are fetched."""

GROUPS_MAX: Final = 1024
IDLE_MS: Final = 600_000
PUBLISH_S: Final = 120.0
"""What is not stored by then can be computed again, if need be."""
LOOK_S: Final = 30.0

log = structlog.get_logger()


class Groups:
    """All groups here, with KV of at most `octets_max` octets, room for output included.

    `sharding` is None where the engine cannot share a context; then none is joined.
    """

    def __init__(
        self,
        state: InstanceState,
        scopes: Mapping[str, ScopeKey],
        sharding: Sharding | None,
        blocks: GroupBlocks,
        *,
        stubs: Stubs,
        metadata: Metadata,
        descriptor: Descriptor,
        octets_max: int,
    ) -> None:
        self.sharding = sharding
        self._state = state
        self._scopes = scopes
        self._blocks = blocks
        self.stubs = stubs
        self.metadata = metadata
        self._descriptor = descriptor
        self._octets_max = octets_max
        self._shards = Shards(state.settings.block_tokens)
        self._members: dict[str, Member] = {}
        self._unnamed: dict[str, int] = {}
        """Maps that nobody has told of, only planned for: when that was, in ms."""
        self._publishing: dict[asyncio.Task[None], ShardStore] = {}

    async def run(self) -> None:
        """Forget groups that nobody asks for any more, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.expire(now_ms())

    def expire(self, now: int) -> None:
        """Drop the groups that were idle for IDLE_MS, but for those whose session runs here."""
        for name, member in list(self._members.items()):
            is_running = member.at_home and member.run is not None
            if not is_running and now - member.used_ms >= IDLE_MS:
                self.leave(name)
        for name, planned_ms in list(self._unnamed.items()):
            if now - planned_ms >= IDLE_MS:
                self.leave(name)

    async def close(self) -> None:
        """Leave all; waits for what is being computed."""
        runs = [member.run for member in self._members.values() if member.run is not None]
        for name in list(self._members):
            self.leave(name)
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)
        for run in runs:
            await asyncio.to_thread(run.join)

    @property
    def utilization(self) -> float:
        """The part of `octets_max` that is taken, 0 ... 1."""
        return sum(store.octets_max for store in self._stores()) / self._octets_max

    # --- membership ---

    def find(self, name: str) -> Member:
        """Raises KvspError (404)."""
        member = self._members.get(name)
        if member is None:
            raise KvspError(registry.NOT_FOUND, "no such group")
        return member

    def serves(self, member: Member, version: int) -> list[Range]:
        """The ranges that answer for a version. Raises KvspError.

        kvsp-plan-conflict says that a later version is authoritative, and nothing else; 404, that this is no
        member of it, or not any more.
        """
        if version < member.view[0]:
            raise KvspError(registry.PLAN_CONFLICT, "a later version is authoritative")
        try:
            return self._shards.serves(member.name, version)
        except KvspError:
            raise KvspError(registry.NOT_FOUND, "no member of that version") from None

    def join(self, told: GroupContext) -> None:
        """Be a member, or learn more of a context.

        Raises KvspError: 403 kvsp-scope-denied, 409 kvsp-incompatible, 400, 409 kvsp-plan-conflict, 409
        kvsp-invalid-state, 503.
        """
        checkpoint, settings = told.checkpoint, self._state.settings
        self._state.sessions.check(checkpoint.scope_id, checkpoint.compat_id)
        if told.block_tokens != settings.block_tokens:
            raise KvspError(registry.INCOMPATIBLE, "blocks of another length")
        if not 0 < told.prompt_tokens + len(checkpoint.generated) <= settings.positions_max:
            raise bad_request("the context is empty or too long")
        context = Context(told, settings.base_uri, self._scopes[checkpoint.scope_id])
        if not context.instances <= {*self.stubs, context.own}:
            raise unavailable("a member has no address here")
        known = self._members.get(told.map.map)
        if known is not None and self._shards.knows(known.name):
            known.context.update(context, self._shards.version(known.name))
            known.used_ms = now_ms()
            return
        require_active(self._state.state)
        self.leave(told.map.map)  # what it has left of, what it has not come to hold, what it had no names for
        self._enter(context, bounds_of(checkpoint.sampler).max_tokens)

    def leave(self, name: str) -> None:
        """Forget a group, if it is known."""
        self._shards.forget(name)
        self._shards.instructions()  # all that it held goes with its store
        self._unnamed.pop(name, None)
        member = self._members.pop(name, None)
        if member is not None:
            member.stop()
        self._state.sessions.grouped.discard(name)
        self._count()

    def _enter(self, context: Context, max_tokens: int) -> None:
        if self.sharding is None or len(self._members) >= GROUPS_MAX:
            raise unavailable("no contexts, or no more, are shared here")
        held = context.held()
        if held and (context.next or context.map.version != FIRST_VERSION):
            # From before a restart: a plan must not be acknowledged for what is not there.
            raise KvspError(registry.PLAN_CONFLICT, "the ranges are not held here any more")
        if held and len(context.instances) < len(context.map.shards):
            raise bad_request("shards: an instance has two ranges")  # it computes one
        name, view = context.map.map, (context.map.version, tuple(held), context.end)
        store, links = self.sharding.store(0), Links(self.stubs, name, self.metadata)
        member = Member(context, store, links, view, now_ms())
        if member.at_home:
            room = self._state.settings.positions_max - context.prompt_tokens
            member.positions = context.prompt_tokens + min(max_tokens, room)
        self._reserve(member, held)
        member.watch()
        for tokens in held:
            store.reserve(tokens)
        self._members[name] = member
        if held:
            self._shards.adopt(name, context.map.version, held)
        if member.at_home:
            self._state.sessions.grouped.add(name)
        self._count()

    def _count(self) -> None:
        self._state.memberships = len(self._members)
        metrics.GROUPS.set(len(self._members))

    def _reserve(self, member: Member, ranges: Sequence[Range]) -> None:
        """Let a group have room for these ranges, and for what is generated. Raises KvspError (503)."""
        wanted = merged(ranges)
        if wanted and wanted[-1][1] < member.positions:
            wanted[-1] = wanted[-1][0], member.positions
        octets = sum(map(member.store.octets_of, wanted))
        others = sum(store.octets_max for store in self._stores() - {member.store})
        if others + octets > self._octets_max:
            raise unavailable("no room for the context")
        member.store.octets_max = octets

    def _stores(self) -> set[ShardStore]:
        """Of all groups, and of those that were left while their blocks are being stored."""
        return {*(member.store for member in self._members.values()), *self._publishing.values()}

    def publish(self, member: Member, tokens: Range) -> None:
        """Have the blocks of a range that was computed here stored, also when the group ends meanwhile."""
        task = asyncio.create_task(self._publish(member.store, member.context, tokens))
        self._publishing[task] = member.store
        task.add_done_callback(self._publishing.pop)

    async def _publish(self, store: ShardStore, context: Context, tokens: Range) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PUBLISH_S):
                await self._blocks.publish(context.scope_id, context.blocks(tokens), store.export)

    # --- plans ---

    async def reshard(self, request: ReshardRequest) -> ReshardReply:
        """A plan, which is answered when all is loaded, a commit or an abort (R-190 ... R-195, U-38).

        Raises KvspError: 400, 409 kvsp-plan-conflict, 503 what is to be fetched cannot be had, or not in time.
        """
        member = self._members.get(request.map)
        if member is not None:
            member.used_ms = now_ms()
        if isinstance(request.commit, int):
            version = self._commit(request.map, request.commit)
        elif isinstance(request.abort, int):
            version = self._abort(member, request.map, request.abort)
        else:
            await self._plan(member, request)
            return ReshardReply(request.map, to=request.new)
        if not self._shards.knows(request.map):
            self._unnamed.pop(request.map, None)
        return ReshardReply(request.map, version=version)

    def learned(self, member: Member, version: int) -> None:
        """Some member has been told to commit: so it is decided. Nothing happens unless it is prepared here."""
        if self._members.get(member.name) is member:
            with suppress(KvspError):
                self._commit(member.name, version)

    def _commit(self, name: str, version: int) -> int:
        plan = self._shards.under_way(name)
        version = self._shards.commit(name, version)
        if plan is not None and self._shards.under_way(name) is None:
            tokens = sum(end - first for first, end in parts(plan).retain)
            octets = tokens // self._descriptor.block_tokens * self._descriptor.payload_octets
            metrics.GROUP_OCTETS.labels("retained").inc(octets)
        self._carry_out()
        return version

    def _abort(self, member: Member | None, name: str, version: int) -> int:
        stays = self._shards.abort(name, version)
        if member is not None:
            member.context.abort(version)
        self._carry_out()
        return stays

    async def _plan(self, member: Member | None, request: ReshardRequest) -> None:
        old, _, retain, _, release = parts(request)
        if member is None:
            self._plan_unnamed(request)
            return
        if member.at_home and old == member.context.map.version:
            if not member.context.next:
                self._shards.check(request)
                raise unavailable("the members of the next version are not known")
            self._grow(member, [*retain, *release])
        is_new = self._shards.under_way(request.map) is None
        is_prepared = self._shards.plan(request)
        if is_new and release:
            member.spawn(self._keep(member, release))
        self._carry_out()
        if not is_prepared and member.loaded is not None:
            await asyncio.shield(member.loaded)

    def _plan_unnamed(self, request: ReshardRequest) -> None:
        """Of a map that nobody has told of: it "adopts `from`" (U-38), but what it would fetch has no names."""
        self._shards.check(request)
        if parts(request).fetch:
            raise unavailable("the context is not known here, and so not what its blocks are called")
        if not self._shards.knows(request.map) and len(self._shards) >= GROUPS_MAX:
            raise unavailable("no more maps are known here")
        self._shards.plan(request)
        self._unnamed[request.map] = now_ms()

    def _grow(self, member: Member, planned: Sequence[Range]) -> None:
        """What was generated belongs to home's last range, as far as the plan says and it is computed."""
        held = self._shards.held(member.name)
        grown = held[-1][1], max((end for _, end in planned), default=0)
        with suppress(LookupError):  # not computed: then the plan is in conflict with what is held
            if grown[0] < grown[1] and member.store.ready(self._descriptor.layers - 1, [grown]):
                self._shards.grown(member.name, grown)
                member.show(self._shards.version(member.name), self._shards.held(member.name))

    async def _keep(self, member: Member, ranges: Sequence[Range]) -> None:
        """Others may be about to fetch what is to be released here."""
        context = member.context
        with suppress(KvspError, LookupError):  # without a name, or released already
            blocks = [block for tokens in ranges for block in context.blocks(tokens)]
            await self._blocks.keep(context.scope_id, blocks, member.store.export)

    async def _load(self, member: Member, fetch: Fetch) -> None:
        """Everything that a plan fetches; then it is prepared. After a failure it waits for its abort."""
        try:
            async with asyncio.timeout(fetch.deadline_ms / 1000):
                await self._fetch(member, fetch)
        except (KvspError, TimeoutError) as error:
            status = error.status if isinstance(error, KvspError) else "timeout"
            log.warning("a plan's ranges could not be loaded", status=status)
            self._failed(member, fetch)
        except Exception as error:
            log.error("a plan failed", kind=type(error).__name__, where=frames(error))
            self._failed(member, fetch)
        else:
            self._shards.loaded(member.name, fetch.version)
            settle(member.loaded)

    def _failed(self, member: Member, fetch: Fetch) -> None:
        self._shards.failed(member.name, fetch.version)
        settle(member.loaded, unavailable(f"cannot load for map version {fetch.version}"))

    async def _fetch(self, member: Member, fetch: Fetch) -> None:
        context, store = member.context, member.store
        wanted: dict[str, list[Block]] = {}
        for entry in fetch.ranges:
            wanted.setdefault(entry.source, []).extend(context.blocks(entry.tokens))
        self._reserve(member, [*self._shards.held(member.name), *(entry.tokens for entry in fetch.ranges)])
        for entry in fetch.ranges:
            store.reserve(entry.tokens)

        def place(block: int, rows: Rows) -> None:
            for layer, sections in enumerate(rows):
                for into, octets in zip(store.rows(layer, block), sections, strict=True):
                    into[:] = octets

        await self._blocks.fetch(context.scope_id, wanted, place)
        for entry in fetch.ranges:
            store.advance(entry.tokens, self._descriptor.layers)

    def _carry_out(self) -> None:
        for instruction in self._shards.instructions():
            member = self._members.get(instruction.map)
            if member is not None:
                self._carry_out_one(member, instruction)

    def _carry_out_one(self, member: Member, instruction: Instruction) -> None:
        match instruction:
            case Fetch():
                member.loaded = outcome()
                member.spawn(self._load(member, instruction))
            case StopFetch():
                member.stop_plan()
            case Drop(_, ranges):
                for tokens in ranges:
                    member.store.release(tokens)
                self._reserve(member, member.view[1])
            case Serve(_, version, ranges):
                member.context.commit(version)
                member.show(version, list(ranges))
                member.advanced.set()
