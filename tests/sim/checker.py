"""What must hold, whatever happens.

The checker believes no node: it sees what a client is given, what leaves an instance, what is on the placement
controller's disk and what the controller tells others, and compares these with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from kvsp.protocol.records import (
    CheckpointReply,
    InstanceStatus,
    ReshardRequest,
    Sampler,
    SessionCheckpoint,
    ShardMap,
)
from tests.sim.engine import STOP, prompt_name, undisturbed
from tests.sim.kernel import Kernel, Node
from tests.sim.storage import BLOCK_TOKENS, keys_of


class InvariantError(AssertionError):
    """An invariant is broken."""


@dataclass
class Request:
    """A client's request and what the client has got."""

    session: str
    prompt: list[int]
    sampler: Sampler
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    outcome: str | None = None  # "stop", "length", "failed", "refused" or "gone" (the client itself)

    @cached_property
    def right(self) -> list[int]:
        """The output of an undisturbed run; means nothing for a sampler that is not deterministic."""
        keys = keys_of(self.prompt)
        name = prompt_name(keys, self.prompt[len(keys) * BLOCK_TOKENS :])
        return undisturbed(name, self.sampler, self.max_tokens)


class OnDisk(Protocol):
    """A session as the placement controller's disk has it."""

    @property
    def epoch(self) -> int: ...

    @property
    def instance(self) -> str:
        """Base URI; empty: nobody has it under this epoch."""

    @property
    def checkpoint(self) -> SessionCheckpoint | None:
        """None: the session has ended."""


@dataclass
class _View:
    """The newest status of an instance that the controller has accepted, by the controller's clock."""

    state: str
    expires_ms: int
    life: int


class Checker:
    """Invariants; each violation is raised where it happens."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.requests: dict[str, Request] = {}
        self._over: set[str] = set()  # sessions that have ended on disk: nobody takes their tokens any more
        self._released: dict[str, dict[int, int]] = {}
        self._running: dict[tuple[str, int], str] = {}  # session and epoch: which instance
        self._releasing: dict[tuple[str, int], tuple[str, int]] = {}  # session and epoch: which life of which
        self._covered: dict[str, list[int]] = {}  # the longest output ever on disk
        self._session_epochs: dict[str, int] = {}
        self._instance_epochs: dict[str, int] = {}
        self._sessions: Mapping[str, OnDisk] = {}
        self._views: dict[str, _View] = {}
        self._boots: dict[str, int] = {}
        self._maps: Mapping[str, ShardMap] = {}
        self._committed: dict[str, int] = {}  # of each map, as anybody was told

    def fail(self, *words: object) -> None:
        raise InvariantError(" ".join(map(str, words)))

    def need(self, condition: bool, *words: object) -> None:
        if not condition:
            self.fail(*words)

    # --- the client ---

    def deliver(self, session: str, index: int, token: int) -> None:
        """ "each output index delivered once and in order" (R-178, R-180)."""
        request = self.requests[session]
        self.need(request.outcome is None, session, "gets a token after its end")
        self.need(index == len(request.tokens), session, "is given index", index, "for", len(request.tokens))
        request.tokens.append(token)
        covered = self._covered.get(session, [])
        self.need(index >= len(covered) or covered[index] == token, session, index, "differs from its checkpoint")
        if request.sampler.deterministic:
            self.need(request.right[index : index + 1] == [token], session, "token", index, "is altered")

    def finish(self, session: str, outcome: str) -> None:
        request = self.requests[session]
        self.need(request.outcome is None, session, "ends twice")
        self.need(outcome != "failed", session, "fails, and no fault lasts that long")
        request.outcome = outcome
        self.kernel.count(f"sessions {outcome}")
        if outcome == "length":
            self.need(len(request.tokens) == request.max_tokens, session, "is cut short at", len(request.tokens))
        if outcome == "stop":
            self.need(request.tokens[-1:] == [STOP], session, "stops without a stop token")

    # --- instances ---

    def boot(self, instance: str, epoch: int) -> None:
        """ "MUST increase every time it restarts" (R-102)."""
        self.need(epoch > self._boots.get(instance, -1), instance, "restarts with epoch", epoch)
        self._boots[instance] = epoch

    def run(self, instance: str, session: str, epoch: int) -> None:
        """An instance starts a session: "only one instance can extend" it under an epoch."""
        other = self._running.setdefault((session, epoch), instance)
        self.need(other == instance, instance, "runs", session, "under epoch", epoch, "as does", other)

    def release(self, instance: Node, session: str, epoch: int, first: int, tokens: Sequence[int]) -> None:
        """Tokens leave an instance (R-175): whoever sends them, an index has one token."""
        released = self._released.setdefault(session, {})
        covered = self._covered.get(session, [])
        deterministic = self.requests[session].sampler.deterministic
        if not deterministic:
            me = instance.name, instance.life
            other = self._releasing.setdefault((session, epoch), me)
            self.need(
                other == me, instance, "extends", session, "under epoch", epoch, "that", other, "has extended"
            )
        for index, token in enumerate(tokens, first):
            known = released.setdefault(index, token)
            self.need(known == token, instance, "releases another token", index, "of", session)
            if not deterministic and session not in self._over:
                on_disk = index < len(covered) and covered[index] == token
                self.need(on_disk, instance, "releases token", index, "of", session, "before it is on disk")

    # --- the placement controller ---

    def persisted(self, sessions: Mapping[str, OnDisk], instances: Mapping[str, int]) -> None:
        """A transaction is on disk: nothing of it may go back or change."""
        for uri, epoch in instances.items():
            self.need(epoch >= self._instance_epochs.get(uri, -1), uri, "regresses to epoch", epoch)
            self._instance_epochs[uri] = epoch
        for name, row in sessions.items():
            if self._sessions.get(name) is not row:
                self._check_row(name, row)
        self._sessions = dict(sessions)

    def _check_row(self, name: str, row: OnDisk) -> None:
        before = self._sessions.get(name)
        self.need(row.epoch >= self._session_epochs.get(name, 0), name, "regresses to epoch", row.epoch)
        self._session_epochs[name] = row.epoch
        if row.checkpoint is None:
            self._over.add(name)
            return
        if before is not None and before.epoch == row.epoch and before.instance:
            self.need(before.instance == row.instance, name, "has two instances under epoch", row.epoch)
        covered, output = self._covered.get(name, []), row.checkpoint.generated
        self.need(output[: len(covered)] == covered, name, "has its checkpoint altered")
        given = self.requests[name].tokens if name in self.requests else []
        agree = min(len(given), len(output))
        self.need(given[:agree] == output[:agree], name, "has a checkpoint that its client did not get")
        self.need(row.checkpoint.sampler.step == len(output), name, "has a sampler step off its output")
        self._covered[name] = list(output)

    def acknowledged(self, sent: SessionCheckpoint, sender: str, reply: CheckpointReply) -> None:
        """A checkpoint is answered 2xx: it is the bound instance's and on disk (R-172, R-174)."""
        session, row = sent.session, self._sessions.get(sent.session)
        if row is None or row.checkpoint is None:
            return  # it has ended meanwhile
        self.need(sent.epoch <= row.epoch, session, "acknowledged under epoch", sent.epoch, "on disk", row.epoch)
        if sent.epoch == row.epoch:
            self.need(row.instance == sender, session, "takes a checkpoint of", sender, "bound to", row.instance)
        offset, on_disk = reply.output_offset, len(self._covered.get(session, []))
        self.need(offset <= on_disk, session, offset, "is acknowledged, on disk", on_disk)

    def told(self, session: str, epoch: int, instance: str) -> None:
        """The controller tells somebody of a binding: it must survive the controller."""
        on_disk = self._session_epochs.get(session, 0)
        self.need(epoch <= on_disk, session, "epoch", epoch, "is told before it is on disk:", on_disk)
        row = self._sessions.get(session)
        if row is not None and row.epoch == epoch and row.checkpoint is not None:
            self.need(row.instance == instance, session, "is told to be at", instance, "on disk", row.instance)

    # --- groups ---

    def maps(self, maps: Mapping[str, ShardMap]) -> None:
        """A transaction is on disk: an authoritative version never goes back, nor do its tokens become others."""
        for name, shard_map in maps.items():
            before = self._maps.get(name)
            if before is not None:
                self.need(shard_map.version >= before.version, name, "regresses to version", shard_map.version)
        self._maps = dict(maps)

    def sends(self, request: ReshardRequest) -> None:
        """The controller tells a member: a commit that is on disk, or an abort of what was never committed."""
        name, committed = request.map, self._committed.get(request.map, 1)
        if isinstance(request.commit, int):
            on_disk = self._maps.get(name)
            self.need(
                on_disk is None or on_disk.version >= request.commit, name, "is committed before it is on disk"
            )
            self._committed[name] = max(committed, request.commit)
        elif isinstance(request.abort, int):
            self.need(request.abort > committed, name, "aborts the committed version", request.abort)

    def commits(self, instance: Node, name: str, version: int) -> None:
        """ "Version v remains authoritative until" the controller has decided (R-193)."""
        self.need(
            version <= self._committed.get(name, 1), instance, "commits", name, version, "that nobody decided"
        )

    # --- instances' reports ---

    def status_accepted(self, controller: Node, status: InstanceStatus, state: str) -> None:
        """A status is taken over, though not on disk yet; `state` is the controller's answer (R-103)."""
        on_disk = self._instance_epochs.get(status.instance, -1)
        self.need(status.epoch >= on_disk, status.instance, "accepted with epoch", status.epoch, "below", on_disk)
        expires_ms = controller.now_ms + status.ttl_ms
        seen = status.state if status.state != "active" else state
        self._views[status.instance] = _View(seen, expires_ms, controller.life)

    def status_answered(self, status: InstanceStatus) -> None:
        """And now it must be."""
        on_disk = self._instance_epochs.get(status.instance, -1)
        self.need(status.epoch <= on_disk, status.instance, "is answered before its epoch is on disk")

    def state_changed(self, instance: str, state: str) -> None:
        """The controller has decided to change an instance's state."""
        if instance in self._views:
            self._views[instance].state = state

    def chosen(self, controller: Node, instance: str, what: str) -> None:
        """ "MUST NOT assign new requests or send prefetch directives to an instance that is not active"."""
        view = self._views.get(instance)
        if view is None or view.life != controller.life:
            self.fail(what, "to", instance, "of which the controller knows nothing")
            return
        self.need(view.state == "active", what, "to", instance, "which is", view.state)
        self.need(view.expires_ms > controller.now_ms, what, "to", instance, "whose status has expired")

    # --- the end ---

    def settled(self) -> bool:
        return all(request.outcome is not None for request in self.requests.values())

    def check_end(self) -> None:
        """Every session has ended, and given the right output."""
        for request in self.requests.values():
            self.need(request.outcome is not None, request.session, "never ends; has", len(request.tokens))
            if request.sampler.deterministic and request.outcome in ("stop", "length"):
                self.need(request.tokens == request.right, request.session, "has not the undisturbed output")
