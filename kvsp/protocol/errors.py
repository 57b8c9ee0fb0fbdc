"""The one error that crosses rooms.

Raised by rules, carried through gRPC by `kvsp/rpc/errors.py` and rendered as Problem Details by
the gateway. Its text reaches clients: never put tokens, keys or internals in it (R-201, R-215).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvsp.protocol import registry
from kvsp.protocol.registry import ProblemType

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class KvspError(Exception):
    """A failure with a registered problem type (RFC 9457).

    `detail` is for humans and never parsed; `extensions` become members of the problem object;
    `retry_after_s` becomes `Retry-After`.
    """

    def __init__(
        self,
        problem: ProblemType,
        detail: str = "",
        extensions: Mapping[str, Any] = _EMPTY,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail or problem.title)
        self.problem = problem
        self.detail = detail
        self.extensions = extensions
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status

    def to_problem(self) -> dict[str, Any]:
        """The Problem Details object."""
        body: dict[str, Any] = dict(self.extensions)
        body |= {"type": self.problem.uri, "title": self.problem.title, "status": self.problem.status}
        if self.detail:
            body["detail"] = self.detail
        return body

    @classmethod
    def from_problem(cls, status: int, body: Mapping[str, Any], retry_after_s: int | None = None) -> KvspError:
        """Rebuild the error from a peer's problem object.

        An unknown type or status keeps the peer's status and is handled by class (R-066).
        """
        suffix = str(body.get("type", "")).removeprefix(registry.PROBLEM_URI_BASE)
        problem = registry.PROBLEMS.get(suffix) or registry.PLAIN_PROBLEMS.get(status)
        if problem is None or problem.status != status:
            problem = ProblemType("", f"HTTP status {status}", status, "UNKNOWN")
        known = {"type", "title", "status", "detail"}
        extensions = {name: value for name, value in body.items() if name not in known}
        detail = body.get("detail")
        return cls(problem, detail if isinstance(detail, str) else "", extensions, retry_after_s)


RETRY_AFTER_UNAVAILABLE_S: Final = 1


def unavailable(detail: str) -> KvspError:
    """A plain 503 that may pass within a second."""
    return KvspError(registry.UNAVAILABLE, detail, retry_after_s=RETRY_AFTER_UNAVAILABLE_S)


def bad_request(detail: str) -> KvspError:
    """A plain 400: syntax or validation (U-02)."""
    return KvspError(registry.BAD_REQUEST, detail)
