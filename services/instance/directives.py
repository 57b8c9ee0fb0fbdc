"""Prefetch directives and what came of them (R-129 ... R-132, U-18 ... U-20). Pure."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal

from kvsp.protocol import jsonio, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import DirectiveStatus, PrefetchDirective

KEEP_MS: Final = 120_000
"""How long a terminal state can be read; "at least 60 s" (U-18)."""

KEPT_MAX: Final = 8192
"""Terminal ones remembered: beyond it the oldest are forgotten, at above 68 a second before their time."""

KEPT_KEYS_MAX: Final = limits.DIRECTIVES_PENDING_MAX * limits.DIRECTIVE_BLOCKS_MAX
"""Keys of terminal ones remembered: as many as pending ones may have."""

DEADLINE_MS_MAX: Final = limits.LEASE_TTL_MS_MAX
"""A later deadline is no use, and would hold its place among the pending ones."""


def check_size(directive: PrefetchDirective) -> None:
    """Bounds that are no part of the record (U-10). Raises KvspError (413)."""
    if len(directive.blocks) > limits.DIRECTIVE_BLOCKS_MAX:
        raise KvspError(registry.CONTENT_TOO_LARGE, "too many blocks in one directive")
    if any(len(block.sources) > limits.DIRECTIVE_SOURCES_MAX for block in directive.blocks):
        raise KvspError(registry.CONTENT_TOO_LARGE, "too many sources for one block")


@dataclass
class Directive:
    """One directive: `waiting` are the keys without an outcome yet, `loaded` those that are there."""

    id: str
    fingerprint: bytes
    keys: tuple[str, ...]
    ends_ms: int
    """Its deadline while pending; afterwards when it is forgotten."""
    state: Literal["pending", "partial", "complete", "failed"] = "pending"
    waiting: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)

    def status(self) -> DirectiveStatus:
        """As it is read; keys in the directive's order (U-18)."""
        return DirectiveStatus(self.id, self.state, [key for key in self.keys if key in self.loaded])

    def settle(self, now_ms: int, *, deadline: bool) -> None:
        """No block is loaded for it any more. "deadline -> partial (even with 0 loaded)"."""
        if not self.waiting and len(self.loaded) == len(self.keys):
            self.state = "complete"
        else:
            self.state = "partial" if deadline or self.loaded else "failed"
        self.waiting.clear()
        self.ends_ms = now_ms + KEEP_MS


class Directives:
    """Pending ones, and terminal ones for minutes. Times are milliseconds of the caller's clock."""

    def __init__(self, pending_max: int) -> None:
        self._pending_max = pending_max
        self._pending: dict[str, Directive] = {}
        self._settled: dict[str, Directive] = {}
        """In the order in which they became terminal."""
        self._settled_keys = 0

    @property
    def pending(self) -> list[Directive]:
        """Those that are loading."""
        return list(self._pending.values())

    def repeated(self, body: PrefetchDirective) -> Directive | None:
        """The directive when it is known already (U-19). Raises KvspError (409) when its body was another."""
        known = self._find(body.directive)
        if known is not None and not hmac.compare_digest(known.fingerprint, _fingerprint(body)):
            raise KvspError(registry.CONFLICT, "the directive id was used for another directive")
        return known

    def add(self, now_ms: int, body: PrefetchDirective) -> Directive:
        """Accept a new one. Raises KvspError (429 with Retry-After) when too many are pending (R-131)."""
        if len(self._pending) >= self._pending_max:
            free_ms = min((each.ends_ms for each in self._pending.values()), default=now_ms) - now_ms
            raise KvspError(
                registry.TOO_MANY_REQUESTS, "too many directives", retry_after_s=max(1, math.ceil(free_ms / 1000))
            )
        keys = tuple(dict.fromkeys(block.block_key for block in body.blocks))
        ends_ms = now_ms + min(body.deadline_ms, DEADLINE_MS_MAX)
        made = Directive(body.directive, _fingerprint(body), keys, ends_ms, waiting=set(keys))
        self._pending[made.id] = made
        return made

    def get(self, directive: str) -> Directive:
        """Raises KvspError (kvsp-not-found) (R-129)."""
        found = self._find(directive)
        if found is None:
            raise KvspError(registry.NOT_FOUND, "no such directive")
        return found

    def outcome(self, now_ms: int, directive: str, block_key: str, *, loaded: bool) -> None:
        """A block is there, or cannot be had. After the deadline nothing changes any more."""
        found = self._pending.get(directive)
        if found is None or block_key not in found.waiting:
            return
        found.waiting.discard(block_key)
        if loaded:
            found.loaded.add(block_key)
        if not found.waiting:
            self._settle(now_ms, found, deadline=False)

    def due(self, now_ms: int) -> list[str]:
        """End those whose deadline has come, and forget old ones. Returns the ids of the former."""
        stopped = [each for each in self._pending.values() if each.ends_ms <= now_ms]
        for each in stopped:
            self._settle(now_ms, each, deadline=True)
        while self._settled and next(iter(self._settled.values())).ends_ms <= now_ms:
            self._forget_oldest()
        return [each.id for each in stopped]

    def stop_all(self, now_ms: int) -> list[str]:
        """The instance takes no new requests: what would be loaded is of no use. Returns the ids stopped."""
        stopped = self.pending
        for each in stopped:
            self._settle(now_ms, each, deadline=False)
        return [each.id for each in stopped]

    def deadlines(self) -> Iterable[int]:
        """When `due` has something to do."""
        return (each.ends_ms for each in (*self._pending.values(), *islice(self._settled.values(), 1)))

    def _find(self, directive: str) -> Directive | None:
        return self._pending.get(directive) or self._settled.get(directive)

    def _settle(self, now_ms: int, directive: Directive, *, deadline: bool) -> None:
        directive.settle(now_ms, deadline=deadline)
        self._settled[directive.id] = self._pending.pop(directive.id)
        self._settled_keys += len(directive.keys)
        while len(self._settled) > KEPT_MAX or self._settled_keys > KEPT_KEYS_MAX:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._settled.pop(next(iter(self._settled)))
        self._settled_keys -= len(oldest.keys)


def _fingerprint(body: PrefetchDirective) -> bytes:
    """Tells "same id, other body" (U-19) without keeping bodies."""
    return hashlib.sha256(jsonio.encode(body)).digest()
