"""Parallel groups: the versions of shard maps, and the two phases from one to the next (A15, U-38). Pure.

The decision between commit and abort is one row, written before anybody hears of it: a commit is never lost, an
abort never follows a commit, and who restarts without a decision on disk has decided to abort ("presumed abort").
One step of a map is under way at a time, and ends when every member has answered the decision. After an abort the
next step has the same version number, "to" being "from" + 1; and who leaves is told so without a version, and may
join again. Hence the next step begins when no message of the last one can be on its way any more: the shell gives
a message up after LIFETIME_MS, and says who has `left` before that.

`SendReshard` is answered with `answered(map, step, instance, ok, now_ms)`, `step` being the instruction's: for a
plan `ok` means that all ranges are loaded (200), and no answer is a refusal; a decision is sent again at
`next_deadline()` while there is no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvsp.protocol import registry, reshard
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReshardRequest, Shard, ShardMap

RETRY_MS: Final = 500
LIFETIME_MS: Final = 2_000
_LATE: Final = 1  # what is sent after a step's end
Decision = Literal["", "commit", "abort"]


@dataclass(frozen=True, slots=True)
class MapRow:
    """A map at rest; replaces the row of the same map. `map` is the authoritative version.

    `next` is the version that is being prepared, or the one of which `members` have yet to be told the decision.
    `fixed`: an operator has said how many members there are to be.
    """

    map: ShardMap
    next: ShardMap | None = None
    decision: Decision = ""
    members: tuple[str, ...] = ()
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class ForgetMap:
    """Remove the row of a map."""

    map: str


@dataclass(frozen=True, slots=True)
class PersistMap:
    """Write the row before anything that follows is done or answered."""

    row: MapRow | ForgetMap


@dataclass(frozen=True, slots=True)
class SendReshard:
    """A plan, a commit or an abort. `step` tells apart what is answered: even for plans, odd for decisions."""

    instance: str
    step: int
    request: ReshardRequest


@dataclass(frozen=True, slots=True)
class Settled:
    """The step to `new` is over: `committed` says whether that is now the authoritative version.

    Every member has been told, also those that have `left` or never came in.
    """

    map: ShardMap
    committed: bool
    new: ShardMap
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Broken:
    """A member has lost its ranges of the authoritative version: the context is whole no more."""

    map: ShardMap


Instruction = PersistMap | SendReshard | Settled | Broken


@dataclass(slots=True)
class _Step:
    number: int
    new: ShardMap
    members: tuple[str, ...]  # of either version
    deadline_ms: int
    waiting: set[str]
    fixes: bool = False  # an operator wants it
    decision: Decision = ""


@dataclass(slots=True)
class _Group:
    current: ShardMap
    fixed: bool = False
    step: _Step | None = None
    quiet_ms: int = 0  # when all messages of an aborted step are gone
    leaving: set[str] = field(default_factory=set)  # have not said that they were told to leave
    leave_ms: int = 0  # when nothing tells them so any more
    lost: set[str] = field(default_factory=set)


class Groups:
    """All maps of one controller; `rows` are those that an earlier process has left."""

    def __init__(self, rows: Iterable[MapRow] = (), now_ms: int = 0) -> None:
        self._groups: dict[str, _Group] = {}
        self._instructions: list[Instruction] = []
        self._steps = 0
        for row in rows:
            group = self._groups[row.map.map] = _Group(row.map, row.fixed, quiet_ms=now_ms + LIFETIME_MS)
            if row.next is not None:
                self._recover(group, row, row.next, now_ms)

    def instructions(self) -> list[Instruction]:
        """What is to be done since the last call, in order."""
        taken, self._instructions = self._instructions, []
        return taken

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[ShardMap]:
        """The authoritative versions."""
        return iter([group.current for group in self._groups.values()])

    def get(self, name: str) -> ShardMap:
        """The authoritative version (R-193). Raises KvspError (kvsp-plan-conflict) when there is no such map."""
        return self._group(name).current

    def next(self, name: str) -> ShardMap | None:
        """The version that a step under way prepares, or has decided about."""
        step = self._group(name).step
        return None if step is None else step.new

    def members(self, name: str) -> set[str]:
        """The instances of the authoritative version and of a step under way."""
        group = self._group(name)
        return {*reshard.held(group.current), *(group.step.members if group.step else ())}

    def may_begin(self, name: str, now_ms: int) -> bool:
        """Is no step of the map under way, and no message of the last one?"""
        return self._group(name).step is None and not self.pause_ms(name, now_ms)

    def pause_ms(self, name: str, now_ms: int) -> int:
        """How long a message of the last step may still be on its way."""
        group = self._group(name)
        return max(0, group.quiet_ms - now_ms, group.leave_ms - now_ms if group.leaving else 0)

    def left(self, name: str, instance: str) -> None:
        """An instance that is no member any more was told so."""
        if name in self._groups:
            self._groups[name].leaving.discard(instance)

    def is_waited_for(self, name: str, step: int) -> bool:
        """Is what was sent under this number still to be answered?"""
        group = self._groups.get(name)
        return group is not None and group.step is not None and group.step.number == step

    def is_fixed(self, name: str) -> bool:
        """Has an operator said how many members there are to be?"""
        return self._group(name).fixed

    def fix(self, name: str) -> None:
        """An operator says that there are to be as many members as there are."""
        group = self._group(name)
        group.fixed = True
        self._save(group)

    def adopt(self, shard_map: ShardMap) -> None:
        """A new map, whose members hold their ranges already. Raises KvspError (409) when there is one."""
        if shard_map.map in self._groups:
            raise KvspError(registry.PLAN_CONFLICT, "the map exists")
        group = self._groups[shard_map.map] = _Group(shard_map)
        self._save(group)

    def grown(self, name: str, end: int) -> None:
        """The last member has appended tokens up to `end`; ignored while a step is under way."""
        group = self._group(name)
        if group.step is None and end > reshard.covered(group.current)[1]:
            group.current = reshard.grown(group.current, end)
            self._save(group)

    def begin(
        self, name: str, shards: Sequence[Shard], deadline_ms: int, now_ms: int, *, fixes: bool = False
    ) -> ShardMap:
        """Prepare the next version: a plan goes "to each instance in either version" (R-190).

        `fixes`: an operator wants so many members, and has them if it is committed. Raises KvspError
        (kvsp-plan-conflict) unless it `may_begin`; ValueError for shards of other tokens.
        """
        group = self._group(name)
        if not self.may_begin(name, now_ms):
            raise KvspError(registry.PLAN_CONFLICT, "a step of this map is under way")
        new = ShardMap(name, group.current.version + 1, list(shards))
        plans = reshard.plans(group.current, new, deadline_ms)
        group.step = self._step(new, plans, now_ms + deadline_ms)
        group.step.fixes = fixes
        self._save(group)
        for instance, plan in plans.items():
            self._send(group.step, instance, plan)
        return new

    def answered(self, name: str, step: int, instance: str, *, ok: bool, now_ms: int) -> None:
        """A member has answered."""
        group = self._groups.get(name)
        if group is None:
            return
        if group.step is None or group.step.number != step:
            if ok and step % 2 == 0 and (group.step is None or group.step.decision == "abort"):
                # A plan that came later than its abort was prepared after all; nobody else would undo it.
                group.quiet_ms = now_ms + LIFETIME_MS
                version = group.step.new.version if group.step else group.current.version + 1
                late = ReshardRequest(map=name, abort=version)
                self._instructions.append(SendReshard(instance, _LATE, late))
            return
        if group.step.decision:
            if not ok and group.step.decision == "commit" and instance in reshard.held(group.current):
                self._lose(group, instance)  # it does not know what it has acknowledged
            self._told(group, instance, now_ms)
        elif not ok:
            self._decide(group, "abort", now_ms)
        else:
            group.step.waiting.discard(instance)
            if not group.step.waiting:
                self._decide(group, "commit", now_ms)

    def restarted(self, instance: str, now_ms: int) -> None:
        """An instance has failed or begun anew: it holds nothing any more, and will answer nothing."""
        for group in list(self._groups.values()):
            step = group.step
            if instance not in reshard.held(group.current) and (step is None or instance not in step.members):
                continue
            if step is not None and not step.decision:
                # "If any instance fails to acknowledge ... the PC sends ... abort"
                self._decide(group, "abort", now_ms)
            if group.step is not None:
                self._told(group, instance, now_ms)
            if instance in reshard.held(group.current):
                self._lose(group, instance)

    def forget(self, name: str) -> None:
        """The context is of no use any more."""
        group = self._groups.pop(name, None)
        if group is not None:
            self._instructions.append(PersistMap(ForgetMap(name)))
            if group.step is not None:
                self._instructions.append(Settled(group.current, committed=False, new=group.step.new))

    def next_deadline(self) -> int | None:
        """When `tick` has something to do."""
        return min((group.step.deadline_ms for group in self._groups.values() if group.step), default=None)

    def tick(self, now_ms: int) -> None:
        """Abort what was not acknowledged in time (R-194); tell decisions again to who has not answered."""
        for group in self._groups.values():
            step = group.step
            if step is None or step.deadline_ms > now_ms:
                continue
            if not step.decision:
                self._decide(group, "abort", now_ms)
            else:
                self._tell(step, now_ms)

    # --- the two phases ---

    def _recover(self, group: _Group, row: MapRow, new: ShardMap, now_ms: int) -> None:
        """After a restart: a commit on disk is told again, whatever else was under way is aborted."""
        group.step = self._step(new, row.members, now_ms)
        if row.decision == "commit":
            group.step.decision = "commit"
            group.step.number += 1
            self._tell(group.step, now_ms)
        else:
            self._decide(group, "abort", now_ms)

    def _step(self, new: ShardMap, members: Iterable[str], deadline_ms: int) -> _Step:
        self._steps += 2
        all_members = tuple(sorted(members))
        return _Step(self._steps, new, all_members, deadline_ms, set(all_members))

    def _decide(self, group: _Group, decision: Decision, now_ms: int) -> None:
        step = group.step
        if step is None or step.decision:
            return
        step.decision = decision
        step.number += 1
        step.waiting = set(step.members)
        if decision == "commit":
            group.current = step.new  # "Version v remains authoritative until all instances have acknowledged"
            group.fixed |= step.fixes
        self._save(group)
        self._tell(step, now_ms)

    def _tell(self, step: _Step, now_ms: int) -> None:
        step.deadline_ms = now_ms + RETRY_MS
        name, version = step.new.map, step.new.version
        told = ReshardRequest(map=name, commit=version) if step.decision == "commit" else None
        for instance in sorted(step.waiting):
            self._send(step, instance, told or ReshardRequest(map=name, abort=version))

    def _lose(self, group: _Group, instance: str) -> None:
        if instance not in group.lost:
            group.lost.add(instance)
            self._instructions.append(Broken(group.current))

    def _told(self, group: _Group, instance: str, now_ms: int) -> None:
        """A member knows the decision; when all do, the step is over."""
        step = group.step
        if step is None:
            return
        step.waiting.discard(instance)
        if not step.waiting:
            left = tuple(each for each in step.members if each not in reshard.held(group.current))
            group.leaving, group.leave_ms = set(left), now_ms + LIFETIME_MS
            if step.decision == "abort":
                group.quiet_ms = now_ms + LIFETIME_MS
            group.step = None
            self._save(group)
            self._instructions.append(Settled(group.current, step.decision == "commit", step.new, left))

    def _save(self, group: _Group) -> None:
        step = group.step
        row = MapRow(group.current, fixed=group.fixed)
        if step is not None:
            row = MapRow(group.current, step.new, step.decision, step.members, group.fixed)
        self._instructions.append(PersistMap(row))

    def _send(self, step: _Step, instance: str, request: ReshardRequest) -> None:
        self._instructions.append(SendReshard(instance, step.number, request))

    def _group(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            raise KvspError(registry.PLAN_CONFLICT, "no such map")
        return group
