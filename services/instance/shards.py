"""Membership in parallel groups: which tokens of a map are held, and the two phases of a plan (A15, U-38). Pure.

A plan is accepted by `plan`, which says whether it is acknowledged already; otherwise the shell loads what `Fetch`
names, calls `loaded` when all is there and answers the plan then, or with 503 when it cannot be had in time.
"Version v remains authoritative" until `commit`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import UnsetType

from kvsp.protocol import registry, reshard
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.records import ReshardFetch, ReshardRequest
from kvsp.protocol.reshard import TRANSITIONS, Event, Phase, Range

LEFT_MAX: Final = 4096
"""Maps that were left by a commit, whose last version is remembered: the commit may be told again."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Load these ranges for a version that is not authoritative yet."""

    map: str
    version: int
    ranges: tuple[ReshardFetch, ...]
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    """Load nothing more of it (U-38: "Abort cancels in-flight fetch")."""

    map: str
    version: int


@dataclass(frozen=True, slots=True)
class Drop:
    """These ranges are not this instance's any more, or never came to be: give their memory back."""

    map: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """From now on this version is the authoritative one, with these ranges held here."""

    map: str
    version: int
    ranges: tuple[Range, ...]


class Plan(NamedTuple):
    """What a plan says."""

    old: int
    deadline_ms: int
    retain: list[Range]
    fetch: list[ReshardFetch]
    release: list[Range]


Instruction = Fetch | StopFetch | Drop | Serve


@dataclass(slots=True)
class _Member:
    version: int
    held: list[Range]
    phase: Phase = Phase.STEADY
    plan: ReshardRequest | None = None

    @property
    def fetched(self) -> list[Range]:
        """What the plan fetches."""
        if self.plan is None or isinstance(self.plan.fetch, UnsetType):
            return []
        return [entry.tokens for entry in self.plan.fetch]


class Shards:
    """The maps of one instance. `block_tokens` aligns the ranges of plans: blocks are what can be fetched."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._members: dict[str, _Member] = {}
        self._left: OrderedDict[str, int] = OrderedDict()
        """The versions by whose commit maps were left."""
        self._instructions: list[Instruction] = []

    def __len__(self) -> int:
        return len(self._members)

    def instructions(self) -> list[Instruction]:
        """What is to be done since the last call, in order."""
        taken, self._instructions = self._instructions, []
        return taken

    def adopt(self, name: str, version: int, ranges: Sequence[Range]) -> None:
        """A map as the placement controller describes it inside: its ranges are held here, or are being computed.

        Raises KvspError (kvsp-plan-conflict) when another version is known.
        """
        known = self._members.get(name)
        if known is not None and known.version != version:
            raise KvspError(registry.PLAN_CONFLICT, "another version of the map is known")
        if known is None:
            self._members[name] = _Member(version, reshard.merged(ranges))

    def grown(self, name: str, tokens: Range) -> None:
        """Tokens were appended here, behind all others of the map."""
        member = self._members[name]
        member.held = reshard.merged([*member.held, tokens])

    def held(self, name: str) -> list[Range]:
        """The ranges of the authoritative version. Raises KvspError (kvsp-plan-conflict) for an unknown map."""
        return list(self._member(name).held)

    def version(self, name: str) -> int:
        """The authoritative version. Raises KvspError (kvsp-plan-conflict) for an unknown map."""
        return self._member(name).version

    def serves(self, name: str, version: int) -> list[Range]:
        """The ranges that answer for a version: the authoritative one, or the next once it is prepared.

        By then some other member may have been told of the commit already. Raises KvspError (kvsp-plan-conflict).
        """
        member = self._member(name)
        if version == member.version:
            return list(member.held)
        if member.plan is None or member.phase is not Phase.PREPARED or version != member.version + 1:
            raise KvspError(registry.PLAN_CONFLICT, "another version is authoritative")
        return reshard.merged([*parts(member.plan).retain, *member.fetched])

    def knows(self, name: str) -> bool:
        """Is this instance a member, or becoming one?"""
        return name in self._members

    def under_way(self, name: str) -> ReshardRequest | None:
        """The plan that is neither committed nor aborted yet."""
        member = self._members.get(name)
        return None if member is None else member.plan

    def forget(self, name: str) -> None:
        """The context is of no use any more."""
        member = self._members.pop(name, None)
        if member is not None:
            if member.phase is Phase.LOADING and member.plan is not None:
                self._instructions.append(StopFetch(name, member.version + 1))
            self._drop(name, [*member.held, *member.fetched])

    def check(self, request: ReshardRequest) -> None:
        """Raises KvspError as `plan` does, which then takes the request."""
        old, _, retain, fetch, release = parts(request)
        self._check_aligned([*retain, *release, *(entry.tokens for entry in fetch)])
        member = self._members.get(request.map)
        if member is None:
            # "an unseen map adopts `from` when retain and release are empty" (U-38)
            if retain or release:
                raise KvspError(registry.PLAN_CONFLICT, "the map is not known here")
            return
        if member.plan is not None:
            if member.plan != request:
                raise KvspError(registry.PLAN_CONFLICT, "another plan is under way")
            return
        if old != member.version:
            raise KvspError(registry.PLAN_CONFLICT, "from is not the current version")
        # "held ranges must be ⊆ retain∪release, fetch disjoint from held" (U-38); and what it does not hold, an
        # instance can neither retain nor release.
        if reshard.merged([*retain, *release]) != member.held:
            raise KvspError(registry.PLAN_CONFLICT, "retain and release are not what is held")
        if reshard.common(sorted(entry.tokens for entry in fetch), member.held):
            raise KvspError(registry.PLAN_CONFLICT, "fetch names tokens that are held")

    def plan(self, request: ReshardRequest) -> bool:
        """A plan. True: acknowledged; False: not before `loaded` says so.

        Raises KvspError: 400 for unaligned ranges, kvsp-plan-conflict (R-195).
        """
        self.check(request)
        old, deadline_ms, _, fetch, _ = parts(request)
        member = self._members.setdefault(request.map, _Member(old, []))
        if member.plan is not None:
            return member.phase is Phase.PREPARED  # "Identical plan repeat -> joins the first" (U-38)
        member.plan = request
        self._move(member, Event.PLAN)
        if not fetch:
            self._move(member, Event.LOADED)
            return True
        self._instructions.append(Fetch(request.map, old + 1, tuple(fetch), deadline_ms))
        return False

    def loaded(self, name: str, version: int) -> bool:
        """Every range of a plan is there and verified. True: it is to be acknowledged."""
        member = self._members.get(name)
        if member is None or member.plan is None or member.version + 1 != version:
            return False
        if member.phase is Phase.LOADING:
            self._move(member, Event.LOADED)
        return True

    def failed(self, name: str, version: int) -> None:
        """Some range of a plan could not be had: it is not acknowledged, and waits for its abort."""
        member = self._members.get(name)
        if member is not None and member.phase is Phase.LOADING and member.version + 1 == version:
            self._move(member, Event.FAILED)

    def commit(self, name: str, version: int) -> int:
        """The version in effect. Raises KvspError (kvsp-plan-conflict) for one that was not acknowledged."""
        member = self._members.get(name)
        if version == (self._left.get(name) if member is None else member.version):
            return version  # "commit repeat at that version -> 200" (U-38), also by who has left with it
        if member is None:
            raise _unknown()
        if member.plan is None or version != member.version + 1 or member.phase is not Phase.PREPARED:
            raise KvspError(registry.PLAN_CONFLICT, "the version is not prepared")
        _, _, retain, fetch, release = parts(member.plan)
        self._move(member, Event.COMMIT)
        member.plan = None
        member.version = version
        member.held = reshard.merged([*retain, *(entry.tokens for entry in fetch)])
        self._instructions.append(Serve(name, version, tuple(member.held)))
        self._drop(name, release)  # "after which instances release the ranges listed in release"
        if not member.held:
            self._leave(name, version)
        return version

    def abort(self, name: str, version: int) -> int:
        """The version that stays in effect. Raises KvspError (kvsp-plan-conflict) after a commit (U-38)."""
        member = self._members.get(name)
        committed = self._left.get(name, 0) if member is None else member.version
        if version <= committed:
            raise KvspError(registry.PLAN_CONFLICT, "the version is committed")
        # "abort of nothing prepared -> 200" (U-38), also where the plan never came or was aborted before
        if member is None:
            return version - 1
        if member.plan is None or version != member.version + 1:
            return member.version
        fetched = member.fetched
        if member.phase is Phase.LOADING:
            self._instructions.append(StopFetch(name, version))
        self._move(member, Event.ABORT)
        member.plan = None
        self._drop(name, fetched)  # "the members discard the ranges they fetched for version v+1"
        if not member.held:
            del self._members[name]
        return version - 1

    def _move(self, member: _Member, event: Event) -> None:
        member.phase = TRANSITIONS[member.phase, event]

    def _leave(self, name: str, version: int) -> None:
        del self._members[name]
        self._left[name] = version
        self._left.move_to_end(name)
        if len(self._left) > LEFT_MAX:
            self._left.popitem(last=False)

    def _drop(self, name: str, ranges: Sequence[Range]) -> None:
        if ranges:
            self._instructions.append(Drop(name, tuple(ranges)))

    def _member(self, name: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            raise _unknown()
        return member

    def _check_aligned(self, ranges: Sequence[Range]) -> None:
        if any(first % self._block_tokens or end % self._block_tokens for first, end in ranges):
            raise bad_request("a range does not begin and end with a block")


def _unknown() -> KvspError:
    return KvspError(registry.PLAN_CONFLICT, "the map is not known here")


def parts(request: ReshardRequest) -> Plan:
    """The members of what is known to be a plan."""
    old, deadline_ms = request.old, request.deadline_ms
    retain, fetch, release = request.retain, request.fetch, request.release
    if (
        isinstance(old, UnsetType)
        or isinstance(deadline_ms, UnsetType)
        or isinstance(retain, UnsetType)
        or isinstance(fetch, UnsetType)
        or isinstance(release, UnsetType)
    ):
        raise TypeError("not a plan")
    return Plan(old, deadline_ms, retain, fetch, release)
