"""Prefetch directives and what came of them (R-129 ... R-132, U-18 ... U-20). Pure."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from kvsp.protocol import jsonio, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import DirectiveStatus, PrefetchDirective

KEEP_MS: Final = 120_000
"""How long a terminal state can be read; "at least 60 s" (U-18)."""

KEPT_MAX: Final = 1024
"""Directives remembered in all: beyond it new ones are refused, as with too many pending."""

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

    @property
    def pending(self) -> bool:
        """Still loading."""
        return self.state == "pending"

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
    """Every directive of the last minutes. Times are milliseconds of the caller's clock."""

    def __init__(self, pending_max: int) -> None:
        self._pending_max = pending_max
        self._all: dict[str, Directive] = {}

    @property
    def pending(self) -> list[Directive]:
        """Those that are loading."""
        return [each for each in self._all.values() if each.pending]

    def repeated(self, body: PrefetchDirective) -> Directive | None:
        """The directive when it is known already (U-19). Raises KvspError (409) when its body was another."""
        known = self._all.get(body.directive)
        if known is not None and not hmac.compare_digest(known.fingerprint, _fingerprint(body)):
            raise KvspError(registry.CONFLICT, "the directive id was used for another directive")
        return known

    def add(self, now_ms: int, body: PrefetchDirective) -> Directive:
        """Accept a new one. Raises KvspError (429 with Retry-After) when too many are pending (R-131)."""
        ends = [each.ends_ms for each in self.pending]
        if len(ends) >= self._pending_max or len(self._all) >= KEPT_MAX:
            free_ms = min(ends or (each.ends_ms for each in self._all.values())) - now_ms
            raise KvspError(
                registry.TOO_MANY_REQUESTS, "too many directives", retry_after_s=max(1, math.ceil(free_ms / 1000))
            )
        keys = tuple(dict.fromkeys(block.block_key for block in body.blocks))
        ends_ms = now_ms + min(body.deadline_ms, DEADLINE_MS_MAX)
        made = Directive(body.directive, _fingerprint(body), keys, ends_ms, waiting=set(keys))
        self._all[made.id] = made
        return made

    def get(self, directive: str) -> Directive:
        """Raises KvspError (kvsp-not-found) (R-129)."""
        found = self._all.get(directive)
        if found is None:
            raise KvspError(registry.NOT_FOUND, "no such directive")
        return found

    def outcome(self, now_ms: int, directive: str, block_key: str, *, loaded: bool) -> None:
        """A block is there, or cannot be had. After the deadline nothing changes any more."""
        found = self._all.get(directive)
        if found is None or block_key not in found.waiting:
            return
        found.waiting.discard(block_key)
        if loaded:
            found.loaded.add(block_key)
        if not found.waiting:
            found.settle(now_ms, deadline=False)

    def due(self, now_ms: int) -> list[str]:
        """End those whose deadline has come, and forget old ones. Returns the ids of the former."""
        ended = [each for each in self._all.values() if each.ends_ms <= now_ms]
        stopped = [each for each in ended if each.pending]
        for each in stopped:
            each.settle(now_ms, deadline=True)
        for each in ended:
            if each not in stopped:
                del self._all[each.id]
        return [each.id for each in stopped]

    def stop_all(self, now_ms: int) -> list[str]:
        """The instance takes no new requests: what would be loaded is of no use. Returns the ids stopped."""
        stopped = self.pending
        for each in stopped:
            each.settle(now_ms, deadline=False)
        return [each.id for each in stopped]

    def deadlines(self) -> Iterable[int]:
        """When `due` has something to do."""
        return (each.ends_ms for each in self._all.values())


def _fingerprint(body: PrefetchDirective) -> bytes:
    """Tells "same id, other body" (U-19) without keeping bodies."""
    return hashlib.sha256(jsonio.encode(body)).digest()
