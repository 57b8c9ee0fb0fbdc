"""What the controller's rules hand out: rows to persist, and what is to be done once they are on disk. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvsp.protocol.records import (
    InstanceStatus,
    PrefetchDirective,
    ReshardRequest,
    ResumeRequest,
    SessionCheckpoint,
)
from kvsp.protocol.registry import ProblemType
from kvsp.protocol.reshard import GroupContext
from services.placement.groups import ForgetMap, MapRow, Settled

NOBODY: Final = ""
"""Stands for an instance that is not chosen yet, and for the owner of a session that began with a checkpoint."""


# --- rows -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """The highest epoch seen of an instance (R-103), and the TTL of its last status.

    `wanted` is the state it was ordered into and has not reported yet, "": none. `resets` counts how often an
    operator has had its epochs begin anew.
    """

    instance: str
    epoch: int
    ttl_ms: int
    wanted: str = ""
    resets: int = 0


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session; replaces the row of the same session.

    `instance` runs it under `epoch` once `bound`; before that it was at most asked to, in its own epoch
    `instance_epoch`. `owner` is the identity that assigned it. Without a `checkpoint` the session has ended, and
    the row keeps its epoch from coming back, and its `scope_id` ("": not known) from being told to others.
    """

    session: str
    epoch: int
    instance: str
    instance_epoch: int
    bound: bool
    owner: str
    prompt_tokens: int
    block_tokens: int
    checkpoint: SessionCheckpoint | None
    scope_id: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove the row of a session."""

    session: str


Row = InstanceRow | SessionRow | Forget | MapRow | ForgetMap


def key_of(row: Row) -> tuple[str, str]:
    """What a row replaces: of several rows of one key the last one counts."""
    match row:
        case InstanceRow():
            return "instance", row.instance
        case MapRow():
            return "map", row.map.map
        case ForgetMap():
            return "map", row.map
    return "session", row.session


# --- instructions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Binding:
    """Which instance runs a session under which epoch."""

    session: str
    epoch: int
    instance: str


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the rows, in order and all or none, before anything that follows is done or answered."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """Tell the index (U-41)."""

    status: InstanceStatus


@dataclass(frozen=True, slots=True)
class SendPrefetch:
    """Direct an instance to load blocks; nothing waits for it. Answer with `directed`."""

    instance: str
    directive: PrefetchDirective


@dataclass(frozen=True, slots=True)
class Survey:
    """Find out who holds the prompt's blocks and the generated ones. Answer with `surveyed`."""

    epoch: int
    checkpoint: SessionCheckpoint
    block_tokens: int

    @property
    def session(self) -> str:
        """Of which session."""
        return self.checkpoint.session


@dataclass(frozen=True, slots=True)
class SendResume:
    """Ask an instance to continue a session. Answer with `resumed` or `resume_failed`.

    `again`: it may have been asked before, and have the session.
    """

    instance: str
    request: ResumeRequest
    again: bool = False


@dataclass(frozen=True, slots=True)
class SendState:
    """Order an instance into a state. Answer with `ordered` or `order_failed`."""

    instance: str
    state: str


@dataclass(frozen=True, slots=True)
class Bind:
    """Tell who follows the session."""

    binding: Binding


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over: nobody follows it any more.

    `problem`: why no instance can continue it, None where it ended otherwise.
    """

    session: str
    problem: ProblemType | None = None


@dataclass(frozen=True, slots=True)
class WantInstance:
    """No active instance is acceptable: one more would be (R-119)."""

    compat_id: str
    scope_id: str


@dataclass(frozen=True, slots=True)
class Form:
    """Have all members of a map join; those that did leave again when one did not. Answer with `formed`."""

    context: GroupContext


@dataclass(frozen=True, slots=True)
class Reshard:
    """A plan, a commit or an abort of a map, for a plan after the context. Answer with `answered`."""

    instance: str
    step: int
    request: ReshardRequest
    context: GroupContext | None


@dataclass(frozen=True, slots=True)
class SendLeave:
    """An instance is no member of a group any more. Answer with `left` once it is told; if not, it finds out."""

    instance: str
    map: str


Instruction = (
    Persist | Feed | SendPrefetch | Survey | SendResume | SendState | Bind | Ended | WantInstance
    | Form | Reshard | SendLeave | Settled
)  # fmt: skip
