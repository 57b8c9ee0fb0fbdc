"""What a client raises beside KvspError itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError

Cause = tuple[str, KvspError]
"""A holder's base URI and why it did not deliver."""


class BlockUnavailable(KvspError):  # noqa: N818 - named for what the caller must do: recompute
    """No replica delivered the block: the caller recomputes it (R-088, R-161).

    `causes` lists every replica tried. `problem` is theirs when all agree (all 404: a cache miss),
    otherwise 503.
    """

    def __init__(self, causes: Sequence[Cause]) -> None:
        problems = {cause.problem for _, cause in causes}
        problem = problems.pop() if len(problems) == 1 else registry.UNAVAILABLE
        if not causes:
            problem = registry.NOT_FOUND
        detail = "; ".join(f"{holder}: {cause}" for holder, cause in causes) or "no replica given"
        super().__init__(problem, detail)
        self.causes = tuple(causes)


def mismatch(detail: str) -> KvspError:
    """What a holder sent is not what was published: "MUST discard it" (R-155)."""
    return KvspError(registry.DIGEST_MISMATCH, detail)


def unavailable(detail: str) -> KvspError:
    """The peer could not be reached, or what it said is no KVSP."""
    return KvspError(registry.UNAVAILABLE, detail)
