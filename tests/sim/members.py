"""A member of groups: the real rules of services/instance/shards.py over a memory of tokens.

A token lies in memory at an "address" that tells where it was put, so that one that moved shows. What the network
does to the calls is the caller's part; each method here is one message at its destination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import UnsetType

from kvsp.protocol import registry, reshard
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReshardRequest, Shard
from kvsp.protocol.reshard import GroupContext, Range
from services.instance import shards
from services.instance.shards import Shards

Need = Callable[..., None]


class Member:
    """One life of an instance. `need` raises what is wrong: need(condition, *words)."""

    def __init__(self, uri: str, block_tokens: int, need: Need) -> None:
        self.uri = uri
        self.rules = Shards(block_tokens)
        self.memory: dict[str, dict[int, int]] = {}
        self.fetching: list[shards.Fetch] = []
        self._need = need
        self._addresses = 0
        self._contexts: dict[str, GroupContext] = {}
        self._retained: dict[str, dict[int, int]] = {}
        self._views: dict[str, int] = {}  # the last version that was committed here, also of who has left by it

    def join(self, context: GroupContext) -> None:
        """The first version's ranges are computed at once. Raises KvspError (kvsp-plan-conflict)."""
        name, mine = context.map.map, reshard.held(context.map).get(self.uri, [])
        if not self.rules.knows(name):
            self._contexts.pop(name, None)  # of a version that it has left
        if name not in self._contexts and context.next and mine:
            raise KvspError(registry.PLAN_CONFLICT, "what is to be held here is not")
        if name not in self._contexts and not context.next:
            self.put(name, tokens(mine))
        self.rules.adopt(name, context.map.version, mine if name not in self._contexts else self.rules.held(name))
        self._contexts[name] = context

    def leave(self, name: str) -> None:
        """Everything of the map goes."""
        self.rules.forget(name)
        self._carry_out()
        self._contexts.pop(name, None)
        self._views.pop(name, None)
        self._retained.pop(name, None)
        self._need(not self.memory.pop(name, None), self.uri, "keeps tokens of a map that it has left")

    def plan(self, request: ReshardRequest) -> shards.Fetch | None:
        """What is to be fetched before it is acknowledged, if anything is. Raises KvspError."""
        name = request.map
        context = self._contexts.get(name)
        if context is None:
            raise KvspError(registry.PLAN_CONFLICT, "the names of its blocks are not known here")
        if context.map.shards[-1].instance == self.uri:
            self._grow(name, reshard.covered(context.map)[1])
        done = self.rules.plan(request)
        if not isinstance(request.retain, UnsetType):
            memory = self.memory.setdefault(name, {})
            self._retained[name] = {token: memory[token] for token in tokens(request.retain)}
        self._carry_out()
        return None if done else next(each for each in self.fetching if each.map == name)

    def fetched(self, wanted: shards.Fetch, held_by: Callable[[str, int], bool]) -> bool:
        """Take the ranges from who has them: is the plan to be acknowledged?"""
        if wanted not in self.fetching:  # another has fetched it, or it is wanted no more
            return self.rules.loaded(wanted.map, wanted.version)
        for entry in wanted.ranges:
            if not all(held_by(entry.source, token) for token in range(*entry.tokens)):
                return False
            self.put(wanted.map, range(*entry.tokens))
        self.fetching.remove(wanted)
        return self.rules.loaded(wanted.map, wanted.version)

    def decide(self, request: ReshardRequest) -> None:
        """A commit or an abort. Raises KvspError."""
        name = request.map
        if not isinstance(request.commit, UnsetType):
            before = self.rules.version(name)
            self._views[name] = self.rules.commit(name, request.commit)
            if before != request.commit:  # "retained ranges keep their memory in place"
                memory = self.memory[name]
                for token, address in self._retained.pop(name, {}).items():
                    self._need(memory.get(token) == address, self.uri, "has moved token", token)
        elif not isinstance(request.abort, UnsetType):
            self.rules.abort(name, request.abort)
        self._carry_out()

    def attend(self, name: str, version: int) -> list[Range]:
        """The ranges that answer for a version.

        Raises KvspError: kvsp-plan-conflict says that a later version is authoritative, and nothing else.
        """
        if version < self._views.get(name, 0):
            raise KvspError(registry.PLAN_CONFLICT, "a later version is authoritative")
        try:
            ranges = self.rules.serves(name, version)
        except KvspError:
            raise KvspError(registry.NOT_FOUND, "no member of that version") from None
        self._need(self.holds(name, ranges), self.uri, "answers for what it does not hold of", name, version)
        return ranges

    def shards(self, name: str, version: int) -> list[Shard]:
        """Who holds what of a version, as the home was told. Raises KvspError (kvsp-plan-conflict)."""
        context = self._contexts.get(name)
        if context is not None and version in (context.map.version, context.map.version + 1):
            return list(context.map.shards if version == context.map.version else context.next)
        raise KvspError(registry.PLAN_CONFLICT, "the map is not known here")

    def at_home(self, name: str) -> bool:
        """Does the session run here? A member may still know the map when the session has come to it instead."""
        context = self._contexts.get(name)
        return self.rules.knows(name) and context is not None and context.map.shards[-1].instance == self.uri

    def holds(self, name: str, ranges: Iterable[Range]) -> bool:
        """Are all these tokens in memory?"""
        memory = self.memory.get(name, {})
        return all(token in memory for token in tokens(ranges))

    def put(self, name: str, added: Iterable[int]) -> None:
        memory = self.memory.setdefault(name, {})
        for token in added:
            self._addresses += 1
            memory[token] = self._addresses

    def _grow(self, name: str, end: int) -> None:
        """The home has generated up to there."""
        held = self.rules.held(name)
        if held and held[-1][1] < end:
            more = (held[-1][1], end)
            self.put(name, range(*more))
            self.rules.grown(name, more)

    def _carry_out(self) -> None:
        for instruction in self.rules.instructions():
            match instruction:
                case shards.Fetch():
                    self.fetching.append(instruction)
                case shards.StopFetch(name, version):
                    self.fetching = [each for each in self.fetching if (each.map, each.version) != (name, version)]
                case shards.Drop(name, ranges):
                    for token in tokens(ranges):
                        self.memory.get(name, {}).pop(token, None)


def tokens(ranges: Iterable[Range]) -> list[int]:
    return [token for first, end in ranges for token in range(first, end)]
