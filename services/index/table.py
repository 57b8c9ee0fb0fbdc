"""The replica table: who holds which block, until when. Pure; times are `now_ms`.

A record is kept as its JSON octets up to the value of `ttl_ms`, so that a lookup copies and never
encodes. Everything that has expired is gone before a table is read, so reading needs no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import UnsetType

from kvsp.protocol import digests, estimate, jsonio, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import ReplicaRecord

QUOTA_RETRY_S: Final = 60
_SOURCES_MAX: Final = 256
_SLACK: Final = 1024  # stale deadlines that are not worth a sweep


@dataclass(slots=True)
class Tally:
    """What happened in one scope; only ever read by metrics."""

    lookups: int = 0
    looked_up_keys: int = 0
    matched_keys: int = 0
    replicas: int = 0
    created: int = 0
    refreshed: int = 0
    withdrawn: int = 0
    expired: int = 0


class Holder:
    """A publishing party and its records by block key."""

    __slots__ = ("_sources", "records", "uri")

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.records: dict[bytes, Replica] = {}
        self._sources: dict[estimate.Source, estimate.Source] = {}

    def shared(self, source: estimate.Source) -> estimate.Source:
        """An equal source that is already in memory: the blocks of a holder are of very few kinds."""
        if len(self._sources) >= _SOURCES_MAX:
            self._sources.clear()
        return self._sources.setdefault(source, source)


class Table:
    """The blocks of one scope and compat_id: key -> its replicas, of different holders."""

    __slots__ = ("blocks", "compat_id", "scope_id", "tally")

    def __init__(self, scope_id: bytes, compat_id: bytes, tally: Tally) -> None:
        self.scope_id = scope_id
        self.compat_id = compat_id
        self.tally = tally
        self.blocks: dict[bytes, tuple[Replica, ...]] = {}


class Replica:
    """A record at rest; `source` is what `kvsp.protocol.estimate` needs of it.

    `text` lacks the ttl value and the closing brace. `due_ms` is the time of its only valid entry
    among the deadlines, at or before `expires_ms`; 0 when the replica is gone.
    """

    __slots__ = ("due_ms", "expires_ms", "holder", "key", "owner", "source", "table", "text")

    source: estimate.Source
    expires_ms: int

    def __init__(self, key: bytes, owner: Holder, table: Table) -> None:
        self.key = key
        self.owner = owner
        self.holder = owner.uri
        self.table = table
        self.text = b""
        self.due_ms = 0

    def describe(self, record: ReplicaRecord, text: bytes) -> None:
        """Take over what the record says; `text` is its JSON, cut."""
        self.text = text
        self.source = self.owner.shared(estimate.source_of(record))


class ReplicaTable:
    """All replicas of all scopes. Nothing here knows who asks: callers authorize first."""

    def __init__(self, ttl_ms_max: int) -> None:
        self.tallies: dict[bytes, Tally] = {}
        self._ttl_ms_max = ttl_ms_max
        self._tables: dict[tuple[bytes, bytes], Table] = {}
        self._holders: dict[str, Holder] = {}
        self._deadlines: list[tuple[int, int, Replica]] = []
        self._serial = 0  # so that equal deadlines never compare replicas
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def publish(self, record: ReplicaRecord, records_max: int, now_ms: int) -> tuple[bool, int]:
        """Create or refresh a record: (created, granted ttl in ms).

        Raises KvspError: 409 for another scope, kvsp-incompatible for another compat_id than the
        holder's record of that key has (U-13), kvsp-digest-mismatch (U-24), 429 beyond `records_max`.
        """
        self.expire(now_ms)
        key = bytes.fromhex(record.block_key)
        name = bytes.fromhex(record.scope_id), bytes.fromhex(record.compat_id)
        holder = self._holders.setdefault(party_id(record.holder), Holder(record.holder))
        replica = holder.records.get(key)
        created = replica is None
        if replica is not None:
            _check_name(replica, *name)
        text = _cut(record)
        if replica is None or replica.text != text:
            _check_digest(record)
            replica = replica or self._create(holder, key, name, records_max)
            replica.describe(record, text)
        # "the IS caps ttl_ms at a configured maximum"
        ttl_ms = min(record.ttl_ms, self._ttl_ms_max)
        self._schedule(replica, now_ms + ttl_ms)
        replica.table.tally.created += created
        replica.table.tally.refreshed += not created
        return created, ttl_ms

    def find(self, holder_id: str, key: bytes, now_ms: int) -> Replica | None:
        """The unexpired record of a holder for a key."""
        self.expire(now_ms)
        holder = self._holders.get(holder_id)
        return holder.records.get(key) if holder else None

    def withdraw(self, replica: Replica) -> None:
        """Remove a record that `find` gave."""
        self._remove(replica)
        replica.table.tally.withdrawn += 1
        self._sweep()

    def longest_prefix(
        self, scope_id: bytes, compat_id: bytes, keys: Sequence[bytes], now_ms: int
    ) -> Sequence[tuple[Replica, ...]]:
        """The replicas of the leading keys that have any, aligned with `keys` (R-090 ... R-092)."""
        self.expire(now_ms)
        table = self._tables.get((scope_id, compat_id))
        found = _leading(table.blocks, keys) if table else ()
        tally = self._tally(scope_id)
        tally.lookups += 1
        tally.looked_up_keys += len(keys)
        tally.matched_keys += len(found)
        return found

    def expire(self, now_ms: int) -> None:
        """Drop every record whose time has come: once per record and TTL, however often it is called."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_ms:
            due_ms, serial, replica = deadlines[0]
            if due_ms == replica.due_ms and replica.expires_ms > now_ms:  # refreshed since
                replica.due_ms = replica.expires_ms
                heapq.heapreplace(deadlines, (replica.due_ms, serial, replica))
                continue
            heapq.heappop(deadlines)
            if due_ms == replica.due_ms:
                self._remove(replica)
                replica.table.tally.expired += 1

    def _create(self, holder: Holder, key: bytes, name: tuple[bytes, bytes], records_max: int) -> Replica:
        if len(holder.records) >= records_max:
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many records", retry_after_s=QUOTA_RETRY_S)
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = Table(*name, self._tally(name[0]))
        replica = holder.records[key] = Replica(key, holder, table)
        table.blocks[key] = (*table.blocks.get(key, ()), replica)
        table.tally.replicas += 1
        self._count += 1
        return replica

    def _schedule(self, replica: Replica, expires_ms: int) -> None:
        replica.expires_ms = expires_ms
        if 0 < replica.due_ms <= expires_ms:
            return  # its entry comes up first and is then moved
        replica.due_ms = expires_ms
        self._serial += 1
        heapq.heappush(self._deadlines, (expires_ms, self._serial, replica))
        self._sweep()

    def _remove(self, replica: Replica) -> None:
        replica.due_ms = 0
        replica.text = b""  # its deadline may stay for a while
        table = replica.table
        del replica.owner.records[replica.key]
        others = tuple(other for other in table.blocks[replica.key] if other is not replica)
        if others:
            table.blocks[replica.key] = others
        else:
            del table.blocks[replica.key]
            if not table.blocks:
                del self._tables[table.scope_id, table.compat_id]
        table.tally.replicas -= 1
        self._count -= 1

    def _sweep(self) -> None:
        """Publish-and-withdraw in a loop must not fill memory with entries of what is gone."""
        if len(self._deadlines) > 2 * self._count + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[0] == entry[2].due_ms]
            heapq.heapify(self._deadlines)

    def _tally(self, scope_id: bytes) -> Tally:
        return self.tallies.setdefault(scope_id, Tally())


def _leading(blocks: dict[bytes, tuple[Replica, ...]], keys: Sequence[bytes]) -> Sequence[tuple[Replica, ...]]:
    """The values of the keys before the first that is missing."""
    found = list(map(blocks.get, keys))
    if None in found:
        del found[found.index(None) :]
    return found  # type: ignore[return-value]


def _check_name(replica: Replica, scope_id: bytes, compat_id: bytes) -> None:
    """A key binds scope and descriptor, so a holder's record never changes either (U-13)."""
    if replica.table.scope_id != scope_id:
        raise KvspError(registry.CONFLICT)
    if replica.table.compat_id != compat_id:
        raise KvspError(registry.INCOMPATIBLE)


def _check_digest(record: ReplicaRecord) -> None:
    """The layer digests, when given, must be those of the replica digest (R-036, U-24)."""
    if isinstance(record.layer_digests, UnsetType):
        return
    joined = digests.replica_digest([bytes.fromhex(each) for each in record.layer_digests])
    if digests.format_digest(joined) != record.digest:
        raise KvspError(registry.DIGEST_MISMATCH, "digest is not that of layer_digests")


def _cut(record: ReplicaRecord) -> bytes:
    """The JSON octets up to the value of `ttl_ms`, the last member."""
    octets = jsonio.encode(record)
    return octets[: octets.rindex(b":") + 1]
