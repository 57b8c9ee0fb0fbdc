"""One parallel group as a member knows it: who holds which tokens of a context, and what its blocks are called.

Pure, and without torch: what is computed over the ranges is in sharded.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsp.protocol import keys, registry, reshard
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import SessionCheckpoint, Shard, ShardMap
from kvsp.protocol.reshard import GroupContext, Range
from services.instance.session import naming


class Context:
    """What all members know of a map. `own` is this instance's base URI, `scope_key` names the blocks."""

    def __init__(self, told: GroupContext, own: str, scope_key: ScopeKey) -> None:
        self.map = told.map
        self.next: Sequence[Shard] = told.next
        self.own = own
        self.scope_id = told.checkpoint.scope_id
        self.compat_id = told.checkpoint.compat_id
        self.block_tokens = told.block_tokens
        self.prompt_tokens = told.prompt_tokens
        self._name = naming(scope_key, self.compat_id, self.block_tokens)
        self.names = self._names(told.checkpoint)
        ranges = [shard.tokens for shard in (*self.map.shards, *self.next)]
        aligned = all(end % self.block_tokens == 0 for _, end in ranges)
        if not aligned or self.end > len(self.names) * self.block_tokens:
            raise bad_request("shards: the ranges are not those of complete blocks")

    def update(self, told: Context, version: int) -> None:
        """The same context, later: names of blocks generated since, and the members of the version that follows.

        Raises KvspError (kvsp-plan-conflict) unless it is this context, with `version` as the authoritative one.
        """
        if told.map.version != version:
            raise KvspError(registry.PLAN_CONFLICT, "another version of the map is known")
        shorter = min(len(self.names), len(told.names))
        if told.scope_id != self.scope_id or told.names[:shorter] != self.names[:shorter]:
            raise KvspError(registry.PLAN_CONFLICT, "another context of that name is known")
        self.names = max(self.names, told.names, key=len)
        self.map, self.next = told.map, told.next

    def commit(self, version: int) -> None:
        """The version that follows is authoritative from now on."""
        if version == self.map.version + 1 and self.next:
            self.map = ShardMap(self.map.map, version, list(self.next))
            self.next = ()

    def abort(self, version: int) -> None:
        """This version does not follow: the next attempt names its members anew."""
        if version == self.map.version + 1:
            self.next = ()

    @property
    def home(self) -> str:
        """The instance that generates: it holds the last range."""
        return self.map.shards[-1].instance

    @property
    def end(self) -> int:
        """The tokens that the map covers."""
        return reshard.covered(self.map)[1]

    @property
    def complete(self) -> int:
        """The tokens of the prompt that are in complete blocks."""
        return self.prompt_tokens // self.block_tokens * self.block_tokens

    @property
    def instances(self) -> set[str]:
        """Whoever is a member, or will be of the version that follows."""
        return {shard.instance for shard in (*self.map.shards, *self.next)}

    def others(self, before: int) -> set[str]:
        """The other members that hold tokens older than `before`."""
        return {shard.instance for shard in self.map.shards if shard.tokens[0] < before} - {self.own}

    def held(self) -> list[Range]:
        """What this instance holds of the map as it was told."""
        return reshard.held(self.map).get(self.own, [])

    def blocks(self, tokens: Range) -> list[tuple[int, bytes]]:
        """The blocks of an aligned range, numbered from the start of the context, with their keys.

        Raises KvspError (503) when some of them have no known name.
        """
        first, end = tokens[0] // self.block_tokens, tokens[1] // self.block_tokens
        if end > len(self.names):
            raise KvspError(registry.UNAVAILABLE, "the names of some blocks are not known", retry_after_s=1)
        return list(enumerate(self.names[first:end], first))

    def check_ids(self, tokens: Range, ids: Sequence[int]) -> None:
        """Are these the tokens of an aligned range? Raises KvspError (400)."""
        named = [key for _, key in self.blocks(tokens)]
        first = tokens[0] // self.block_tokens
        parent = self.names[first - 1] if first else keys.ZERO
        if len(ids) != tokens[1] - tokens[0] or self._name(ids, parent) != named:
            raise bad_request("the tokens are not those of the context")

    def _names(self, checkpoint: SessionCheckpoint) -> list[bytes]:
        """The keys of all complete blocks, generated ones chained onto the prompt's (U-33)."""
        prompt = [bytes.fromhex(key) for key in checkpoint.prompt_blocks]
        parent = prompt[-1] if prompt else keys.ZERO
        return prompt + self._name([*checkpoint.prompt_tail, *checkpoint.generated], parent)
