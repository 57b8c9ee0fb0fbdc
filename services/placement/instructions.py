"""What the controller's rules hand out: rows to persist, and what is to be done once they are on disk. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvsp.protocol.records import InstanceStatus, PrefetchDirective, ResumeRequest, SessionCheckpoint

NOBODY: Final = ""
"""Stands for an instance that is not chosen yet, and for the owner of a session that began with a checkpoint."""


# --- rows -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """The highest epoch seen of an instance (R-103), and the TTL of its last status."""

    instance: str
    epoch: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session; replaces the row of the same session.

    `instance` runs it under `epoch` once `bound`; before that it was at most asked to, in its own epoch
    `instance_epoch`. `owner` is the identity that assigned it. Without a `checkpoint` the session has ended, and
    the row keeps its epoch from coming back.
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


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove the row of a session."""

    session: str


Row = InstanceRow | SessionRow | Forget


def key_of(row: Row) -> tuple[str, str]:
    """What a row replaces: of several rows of one key the last one counts."""
    return ("instance", row.instance) if isinstance(row, InstanceRow) else ("session", row.session)


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
    """Ask an instance to continue a session. Answer with `resumed` or `resume_failed`."""

    instance: str
    request: ResumeRequest


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
    """The session is over: nobody follows it any more."""

    session: str


@dataclass(frozen=True, slots=True)
class WantInstance:
    """No active instance is acceptable: one more would be (R-119)."""

    compat_id: str
    scope_id: str


Instruction = Persist | Feed | SendPrefetch | Survey | SendResume | SendState | Bind | Ended | WantInstance
