"""The groups of sessions: when a context is sharded, resized, given up (A15). Pure.

A map has the id of its session. The session's instance, the home, holds the last range and generates; when the
context is not whole any more, or the home is another, the map is forgotten and the session goes on as any other.

    Form     -> formed(map, ok, now_ms)        ok: all members have joined; if not, all are told to leave
    Reshard  -> answered(map, step, instance, ok, now_ms), see groups.py

    SendLeave -> left(map, instance)           or nothing, when it did not answer in time

Settled wants no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import UnsetType

from kvsp.protocol import registry, reshard
from kvsp.protocol.errors import KvspError, bad_request, unavailable
from kvsp.protocol.records import SessionCheckpoint, ShardMap
from kvsp.protocol.reshard import GroupContext
from services.placement.cost import Candidate, Request
from services.placement.fleet import Fleet
from services.placement.groups import Broken, Groups, MapRow, PersistMap, SendReshard, Settled
from services.placement.instructions import Form, Reshard, SendLeave
from services.placement.outbox import Outbox
from services.placement.placing import Placer
from services.placement.resizing import first_shards, resized
from services.placement.sessions import Session, Sessions
from services.placement.settings import GroupSettings, Totals
from services.placement.widths import ByTokens, GroupPolicy, View

ABORTED_MS: Final = 20_000
"""How long after an aborted step the policy begins no other: what was in the way is there for a while, and what
was fetched was fetched for nothing. An operator may try at once."""


@dataclass(slots=True)
class _Forming:
    """A group that is being made. `load`: what the home is to load of the prompt if there is none after all."""

    map: ShardMap
    load: tuple[Request, Candidate]
    is_whole: bool = True  # no member has begun anew


class Grouping:
    """All groups of a controller; `migrate` gives a session to another instance."""

    def __init__(
        self,
        settings: GroupSettings,
        *,
        totals: Totals,
        fleet: Fleet,
        sessions: Sessions,
        placer: Placer,
        outbox: Outbox,
        policy: GroupPolicy | None = None,
        migrate: Callable[[Session, int], None],
    ) -> None:
        self._settings = settings
        self._totals = totals
        self._fleet = fleet
        self._sessions = sessions
        self._placer = placer
        self._outbox = outbox
        self._policy = policy or ByTokens(settings)
        self._migrate = migrate
        self._groups = Groups()
        self._forming: dict[str, _Forming] = {}
        self._aborted_ms: dict[str, int] = {}

    def restore(self, rows: Iterable[MapRow], now_ms: int) -> list[str]:
        """The maps that an earlier process has left; the instances that must report."""
        self._groups = Groups(rows, now_ms)
        self._pass_on(now_ms)
        return [instance for shard_map in self._groups for instance in self._groups.members(shard_map.map)]

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[ShardMap]:
        """The authoritative version of each map."""
        return iter(self._groups)

    # --- begin and end ---

    def offer(self, session: Session, request: Request, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """The members of a group for a session just bound to the first of `candidates`, if there is to be one.

        All are asked to join. A group loads nothing: what the home could have loaded for the request, it is
        directed to when there will be no group after all.
        """
        start = session.checkpoint
        if start is None or not session.block_tokens or session.instance not in self._settings.instances:
            return ()
        if len(self._groups) + len(self._forming) >= self._settings.groups_max:
            return ()
        able = self._able(session, start)
        home = candidates[0]
        cached = home.usable * session.block_tokens if home.fetches else 0
        width = self._width(session, able | {session.instance}, cached=cached)
        others = [each.instance for each in candidates if each.instance in able][: width - 1]
        if not others:
            return ()
        members = (*others, session.instance)
        end = session.prompt_tokens // session.block_tokens * session.block_tokens
        shard_map = ShardMap(session.id, 1, first_shards(end, members, session.block_tokens))
        self._forming[session.id] = _Forming(shard_map, (request, home))
        self._outbox.do(Form(GroupContext(shard_map, start, session.prompt_tokens, session.block_tokens)))
        return members

    def formed(self, shard_map: ShardMap, now_ms: int, *, ok: bool) -> tuple[str, ...]:
        """All members have joined; or not all, and none is left: the members of the group, or none without one."""
        forming = self._taken(shard_map)
        if ok and forming is not None and forming.is_whole:
            self._groups.adopt(shard_map)
            self._totals.groups_formed += 1
            self._pass_on(now_ms)
            return tuple(shard.instance for shard in shard_map.shards)
        if ok:
            self._leave(shard_map.map, reshard.held(shard_map))
        if forming is not None:
            self._load(shard_map.map, *forming.load)
        return ()

    def drop(self, session: str, now_ms: int) -> None:
        """The session has ended, or loses its instance: nobody needs the context as it is."""
        forming = self._forming.pop(session, None)
        if forming is not None:
            self._leave(session, reshard.held(forming.map))
        if session in self._groups:
            members = self._groups.members(session)
            self._groups.forget(session)
            self._pass_on(now_ms)
            self._aborted_ms.pop(session, None)
            self._leave(session, members)

    # --- resize ---

    def checkpointed(self, session: Session, now_ms: int) -> None:
        """It has generated more: the policy may want another width."""
        recorded = session.checkpoint
        if session.id not in self._groups or recorded is None or not recorded.output_offset:
            return
        if self._groups.is_fixed(session.id) or now_ms < self._aborted_ms.get(session.id, 0):
            return
        if self._groups.may_begin(session.id, now_ms):
            members = self._groups.members(session.id)
            width = self._width(session, self._able(session, recorded) | members, len(members))
            if width != len(members):
                self._begin(session, recorded, width, now_ms)

    def resize(self, name: str, members: int, now_ms: int) -> ShardMap:
        """An operator wants so many members from now on: the version that has them; Settled names it as `new`.

        Raises KvspError: kvsp-not-found, 400, kvsp-plan-conflict, 503.
        """
        session = self._sessions.get(name)
        if name not in self._groups or session is None or session.checkpoint is None:
            raise KvspError(registry.NOT_FOUND, "no such group")
        if not 0 < members <= reshard.covered(self._grown(session))[1] // session.block_tokens:
            raise bad_request("a member needs a block at least")
        if not session.checkpoint.output_offset:
            raise KvspError(registry.PLAN_CONFLICT, "the prompt is still being computed")
        if not self._groups.may_begin(name, now_ms):
            raise KvspError(registry.PLAN_CONFLICT, "a step of this map is under way")
        if members > len(self._groups.members(name) | self._able(session, session.checkpoint)):
            raise unavailable("not enough active instances")
        self._begin(session, session.checkpoint, members, now_ms, fixes=True)
        self._pass_on(now_ms)
        return self._groups.next(name) or self._groups.get(name)

    def pause_ms(self, name: str, now_ms: int) -> int:
        """How long `resize` is still refused because of a step that is over."""
        return self._groups.pause_ms(name, now_ms) if name in self._groups else 0

    def answered(self, name: str, step: int, instance: str, now_ms: int, *, ok: bool) -> None:
        """A member has answered a plan or a decision, or did not."""
        if name in self._groups:
            self._groups.answered(name, step, instance, ok=ok, now_ms=now_ms)
            self._pass_on(now_ms)
        elif ok:
            self._leave(name, [instance])  # it took a plan that came later than the end

    def left(self, name: str, instance: str) -> None:
        """An instance has answered SendLeave; who does not might still be told."""
        self._groups.left(name, instance)

    def is_settled(self, shard_map: ShardMap) -> bool:
        """Is this version authoritative, and no step under way?"""
        name = shard_map.map
        return self._groups.get(name) is shard_map and self._groups.next(name) is None

    def is_waited_for(self, name: str, step: int) -> bool:
        """Is what was sent under this number still to be answered?"""
        return self._groups.is_waited_for(name, step)

    # --- loss ---

    def lost(self, callers: Collection[str], name: str, now_ms: int) -> None:
        """A member says that the context is not whole. Raises KvspError (kvsp-not-found): not a member's (D8)."""
        session = self._sessions.get(name)
        if session is None or name not in self._groups or self._groups.members(name).isdisjoint(callers):
            raise KvspError(registry.NOT_FOUND, "no such group")
        self._migrate(session, now_ms)

    def restarted(self, instance: str, now_ms: int) -> None:
        """An instance has failed or begun anew: it holds nothing any more."""
        for forming in self._forming.values():
            if instance in reshard.held(forming.map):
                forming.is_whole = False  # `formed` has the others leave
        self._groups.restarted(instance, now_ms)
        self._pass_on(now_ms)

    # --- time ---

    def next_deadline(self) -> int | None:
        """When `tick` has something to do."""
        return self._groups.next_deadline()

    def tick(self, now_ms: int) -> None:
        """Abort what is late, tell decisions again."""
        self._groups.tick(now_ms)
        self._pass_on(now_ms)

    # --- inside ---

    def _able(self, session: Session, of: SessionCheckpoint) -> set[str]:
        """The instances that might be members beside the home."""
        able = {offer.instance for offer in self._placer.offers(of) if offer.prefill_tokens_per_s > 0}
        return able & self._settings.instances - {session.instance}

    def _width(self, session: Session, possible: Collection[str], members: int = 1, cached: int = 0) -> int:
        """What the policy says, cut to what there can be: one block for each member at least."""
        home = self._fleet.get(session.instance)
        status = None if home is None else home.status
        view = View(
            session.prompt_tokens,
            session.tokens,
            session.tokens > session.prompt_tokens,
            members,
            0.0 if status is None else status.kv_utilization,
            cached,
        )
        blocks = session.prompt_tokens // session.block_tokens
        return max(1, min(self._policy.width(view), self._settings.members_max, len(possible), blocks))

    def _begin(
        self, session: Session, of: SessionCheckpoint, width: int, now_ms: int, *, fixes: bool = False
    ) -> None:
        """A step to that width, over all complete blocks whose KV the home has; none if the members stay.

        `fixes`: an operator wants it; a step that is aborted fixes nothing.
        """
        grown = self._grown(session)
        ranked, _ = self._placer.choose(Request((), session.tokens, session.block_tokens), of)
        able = self._able(session, of)
        others = [each.instance for each in ranked if each.instance in able]
        shards = resized(grown, width, others, session.block_tokens)
        if len(shards) != len(grown.shards):
            self._groups.grown(session.id, reshard.covered(grown)[1])
            self._groups.begin(session.id, shards, self._settings.deadline_ms, now_ms, fixes=fixes)
            self._pass_on(now_ms)
        elif fixes:
            self._groups.fix(session.id)

    def _grown(self, session: Session) -> ShardMap:
        """The map over all complete blocks by now: the KV of the newest token is computed with the next one."""
        current = self._groups.get(session.id)
        blocks = (session.tokens - 1) // session.block_tokens
        return reshard.grown(current, max(reshard.covered(current)[1], blocks * session.block_tokens))

    def _pass_on(self, now_ms: int) -> None:
        """What the rules of the versions want done."""
        broken: list[str] = []
        for each in self._groups.instructions():
            match each:
                case PersistMap():
                    self._outbox.save(each.row)
                case SendReshard():
                    self._outbox.do(Reshard(each.instance, each.step, each.request, self._context(each)))
                case Settled():
                    self._totals.reshards += each.committed
                    self._totals.reshards_aborted += not each.committed
                    if not each.committed:
                        self._aborted_ms[each.map.map] = now_ms + ABORTED_MS
                    self._leave(each.map.map, each.left)
                    self._outbox.do(each)
                case Broken():
                    broken.append(each.map.map)
        for name in broken:
            session = self._sessions.get(name)
            if name in self._groups and session is not None:
                self._migrate(session, now_ms)

    def _context(self, send: SendReshard) -> GroupContext | None:
        """What a member has to know before a plan: the names of all blocks, and who holds what then."""
        session = self._sessions.get(send.request.map)
        if isinstance(send.request.new, UnsetType) or session is None or session.checkpoint is None:
            return None
        new = self._groups.next(session.id)
        return GroupContext(
            self._groups.get(session.id),
            session.checkpoint,
            session.prompt_tokens,
            session.block_tokens,
            () if new is None else tuple(new.shards),
        )

    def _taken(self, shard_map: ShardMap) -> _Forming | None:
        """A group that is made no more; None: it was dropped before all had joined."""
        forming = self._forming.get(shard_map.map)
        if forming is None or forming.map is not shard_map:
            return None
        return self._forming.pop(shard_map.map)

    def _load(self, name: str, request: Request, home: Candidate) -> None:
        session, instance = self._sessions.get(name), self._fleet.get(home.instance)
        if home.fetches and session is not None and session.checkpoint is not None and instance is not None:
            self._placer.prefetch(instance, session.checkpoint, request, home.usable)

    def _leave(self, name: str, members: Iterable[str]) -> None:
        for instance in sorted(members):
            self._outbox.do(SendLeave(instance, name))
