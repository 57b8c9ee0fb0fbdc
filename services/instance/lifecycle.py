"""The lifecycle of an instance as a table (R-105 ... R-110, U-36). Pure."""

from __future__ import annotations

from typing import Final, Literal

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError

State = Literal["active", "draining", "sleeping", "failed"]

# What a PUT of the column's state makes of the row's. "sleeping while sessions run becomes draining": every way
# to sleep leads through draining, which ends by itself when no session is left. `failed` is neither asked for nor
# left: both are missing here, and so 409.
_CHANGES: Final[dict[tuple[str, str], State]] = {
    ("active", "active"): "active",
    ("active", "draining"): "draining",
    ("active", "sleeping"): "draining",
    ("draining", "active"): "active",
    ("draining", "draining"): "draining",
    ("draining", "sleeping"): "draining",
    ("sleeping", "active"): "active",
    ("sleeping", "draining"): "sleeping",
    ("sleeping", "sleeping"): "sleeping",
}


def changed(state: State, wanted: str) -> State:
    """The state after the placement controller asked for `wanted`. Raises KvspError (kvsp-invalid-state)."""
    found = _CHANGES.get((state, wanted))
    if found is None:
        raise KvspError(registry.INVALID_STATE, f"no way from {state} to {wanted}")
    return found


def drained(state: State, sessions: int) -> State:
    """A draining instance: "when it has none left it enters sleeping" (R-109)."""
    return "sleeping" if state == "draining" and not sessions else state


def require_active(state: State) -> None:
    """New sessions and directives are for active instances. Raises KvspError (kvsp-invalid-state)."""
    if state != "active":
        raise KvspError(registry.INVALID_STATE, f"the instance is {state}")
