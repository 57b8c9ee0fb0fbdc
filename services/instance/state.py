"""The rules of an inference instance: lifecycle, status, directives, sessions (A9, A11, A14). Pure.

Events are methods and come with `now_ms`, milliseconds of a clock that never goes back; refusals are KvspError.
What is to be done is drained, in order, from `instructions()` after every event. The shell (host.py) carries it
out and reports what came of it; a simulation does the same on a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import DirectiveStatus, InstanceStatus, Link, PrefetchDirective
from services.instance import directives, lifecycle
from services.instance.directives import Directives
from services.instance.engine import Stats
from services.instance.instructions import (
    BeginDirective,
    EmptyDevice,
    Instruction,
    SendStatus,
    StopDirective,
    UseDevice,
)
from services.instance.lifecycle import State
from services.instance.sessions import Sessions
from services.instance.settings import Settings


class InstanceState:
    """One instance.

    `scopes` are the scope keys it holds by scope id (hex16); `sources(scope_id)` the base URIs of holders that are
    configured and trusted for the scope (U-20, R-211). `is_known`: the placement controller has answered a status
    of this start.
    """

    def __init__(
        self,
        settings: Settings,
        scopes: Mapping[str, ScopeKey],
        sources: Callable[[str], Collection[str]],
        now_ms: int,
    ) -> None:
        self.settings = settings
        self.state: State = "active"
        self._instructions: list[Instruction] = []
        self.sessions = Sessions(settings, scopes, self._instruct, self._admit, self._load_changed)
        self._directives = Directives(settings.directives_pending_max)
        self._sources = sources
        self._stats = Stats(0, 0, 0.0, 0.0, 0.0)
        self._links: list[Link] = []
        self._status_ms = now_ms
        self.is_known = False
        self._idle_since: int | None = now_ms
        self.memberships = 0
        """Groups whose sessions need what is held here, wherever they run; the shell counts them."""

    def instructions(self) -> list[Instruction]:
        """What is to be done since the last call, in order."""
        taken = self._instructions[:]
        self._instructions.clear()
        return taken

    # --- lifecycle ---

    def put_state(self, now_ms: int, wanted: str) -> State:
        """The placement controller asks for a state; the one in effect (U-36). Raises KvspError (409)."""
        self._enter(now_ms, lifecycle.changed(self.state, wanted))
        return self.state

    def fail(self, now_ms: int) -> None:
        """This instance can serve no more, or must not. Not to be undone: a restart begins a new one."""
        self.sessions.fence_all()
        self._enter(now_ms, "failed")

    def _enter(self, now_ms: int, state: State) -> None:
        """Enter a state, and the next when no session keeps it from that."""
        before = self.state
        self.state = lifecycle.drained(state, self._served)
        if self.state == before:
            return
        self._idle_since = None if self._served else now_ms
        if before == "active":
            self._stop(self._directives.stop_all(now_ms))
        if self.state in ("sleeping", "failed"):
            self._instruct(EmptyDevice())
        elif before == "sleeping":
            self._instruct(UseDevice())
        self._report(now_ms)  # "enters sleeping and reports it"

    @property
    def _served(self) -> int:
        return self.sessions.running + self.memberships

    def _load_changed(self, now_ms: int) -> None:
        """A session or a directive came or ended."""
        if self._served or self._directives.pending:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now_ms
        self._enter(now_ms, self.state)

    def _admit(self) -> None:
        """May a new session begin here? Raises KvspError: 409 kvsp-invalid-state, 404."""
        lifecycle.require_active(self.state)
        # What an earlier start of this instance was given gets a new epoch when the placement controller hears of
        # this one. Until then it would take a second run under the old epoch for the first, whose tokens it has
        # recorded and the client may have: "so that only one instance can extend a session".
        if not self.is_known:
            raise KvspError(registry.NOT_FOUND, "the placement controller has not heard of this start yet")

    # --- status ---

    def measure(self, stats: Stats, links: Sequence[Link]) -> None:
        """What the next status says of load and links."""
        self._stats, self._links = stats, list(links)

    def status_answered(self, now_ms: int, status: InstanceStatus, view: str) -> None:
        """The reply to a status. It accepts or refuses a request to sleep, if there was one (R-106)."""
        self.is_known = True
        if status.requested_state is None or self.state != "active":
            return
        if view in ("draining", "sleeping"):
            self._enter(now_ms, lifecycle.changed(self.state, "draining"))
        elif self._idle_since is not None:
            self._idle_since = now_ms  # refused: ask again after as long a time

    def status_refused(self, now_ms: int, problem: registry.ProblemType) -> None:
        """A stale epoch: the placement controller knows of a later life of this instance (R-103)."""
        if problem is registry.STALE_EPOCH:
            self.fail(now_ms)

    @property
    def status_interval_ms(self) -> int:
        """At the most "one third of its ttl_ms" (R-100), with room for a late timer."""
        return max(1, self.settings.status_ttl_ms // 4)

    def _report(self, now_ms: int) -> None:
        self._status_ms = now_ms + self.status_interval_ms
        status = InstanceStatus(
            instance=self.settings.base_uri,
            epoch=self.settings.epoch,
            state=self.state,
            running=self._stats.running,
            queued=self._stats.queued,
            batch_size=self.settings.batch_size,
            kv_utilization=self._stats.kv_utilization,
            prefill_tokens_per_s=self._stats.prefill_tokens_per_s,
            decode_tokens_per_s=self._stats.decode_tokens_per_s,
            ttl_ms=self.settings.status_ttl_ms,
            links=self._links,
            requested_state="sleeping" if self._may_sleep(now_ms) else None,
        )
        self._instruct(SendStatus(status))

    def _may_sleep(self, now_ms: int) -> bool:
        """Was there nothing to do for long enough to ask to sleep (R-105)?"""
        after_ms = self.settings.sleep_after_ms
        if self.state != "active" or not after_ms or self._idle_since is None:
            return False
        return now_ms - self._idle_since >= after_ms

    # --- directives ---

    def prefetch(self, now_ms: int, body: PrefetchDirective) -> DirectiveStatus:
        """Accept a directive (R-125), or join it to the one that it repeats (U-19).

        Raises KvspError: 413, 403 kvsp-scope-denied, 409 kvsp-incompatible, 409, 409 kvsp-invalid-state, 429.
        """
        directives.check_size(body)
        self.sessions.check(body.scope_id, body.compat_id)
        known = self._directives.repeated(body)
        if known is not None:
            return known.status()
        lifecycle.require_active(self.state)
        made = self._directives.add(now_ms, body)
        # "Sources must be configured/trusted holders for the scope; unknown -> skip" (U-20, D10); so is a moqt
        # source, for which there is no client.
        trusted = self._sources(body.scope_id)
        usable: dict[str, tuple[str, ...]] = {}
        for block in body.blocks:
            usable.setdefault(block.block_key, tuple(uri for uri in block.sources if uri in trusted))
        blocks = [(bytes.fromhex(key), sources) for key, sources in usable.items()]
        self._instruct(BeginDirective(made.id, body.scope_id, blocks, body.lease_ms))
        self._load_changed(now_ms)
        return made.status()

    def directive(self, directive: str) -> DirectiveStatus:
        """Raises KvspError (kvsp-not-found)."""
        return self._directives.get(directive).status()

    def block_outcome(self, now_ms: int, directive: str, block_key: bytes, *, loaded: bool) -> None:
        """A block of a directive is held here and verified, or cannot be had."""
        self._directives.outcome(now_ms, directive, block_key.hex(), loaded=loaded)
        self._load_changed(now_ms)

    def _stop(self, stopped: list[str]) -> None:
        for directive in stopped:
            self._instruct(StopDirective(directive))

    # --- time ---

    def next_deadline(self) -> int:
        """When `tick` has something to do, in the caller's milliseconds."""
        return min((self._status_ms, *self._directives.deadlines(), *self.sessions.deadlines()))

    def tick(self, now_ms: int) -> None:
        """Everything that depends on time alone."""
        self._stop(self._directives.due(now_ms))
        self.sessions.tick(now_ms)
        self._load_changed(now_ms)
        if self._status_ms <= now_ms:
            self._report(now_ms)

    def _instruct(self, instruction: Instruction) -> None:
        self._instructions.append(instruction)
