"""Errors in the shape that OpenAI clients read: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, Struct, UnsetType

from kvsp.protocol import registry
from kvsp.protocol.errors import RETRY_AFTER_UNAVAILABLE_S, KvspError

UNAVAILABLE: Final = 503
RETRYABLE: Final = frozenset(
    {registry.UNAVAILABLE, registry.GATEWAY_TIMEOUT, registry.TOO_MANY_REQUESTS, registry.INVALID_STATE}
)
"""What the fleet may say that is over by itself after a while."""


class Detail(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The inner object; `retry_after_s` is ours, seconds as in the field of that name."""

    message: str
    type: str
    param: str | None
    code: str | None
    retry_after_s: int | UnsetType = UNSET


class ErrorBody(Struct, frozen=True):
    """The whole body."""

    error: Detail


class ApiError(Exception):
    """A refusal or a failure, with its HTTP status."""

    def __init__(self, status: int, detail: Detail) -> None:
        super().__init__(detail.message)
        self.status = status
        self.body = ErrorBody(detail)


def invalid(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> ApiError:
    """The request cannot be served as it is."""
    return ApiError(status, Detail(message=message, type="invalid_request_error", param=param, code=code))


def forbidden(message: str) -> ApiError:
    """The caller may not do that."""
    return ApiError(403, Detail(message=message, type="permission_error", param=None, code="permission_denied"))


def unavailable(message: str, retry_after_s: int = RETRY_AFTER_UNAVAILABLE_S) -> ApiError:
    """The fleet cannot serve the request now."""
    detail = Detail(
        message=message, type="server_error", param=None, code="unavailable", retry_after_s=retry_after_s
    )
    return ApiError(UNAVAILABLE, detail)


def too_many(message: str) -> ApiError:
    """The caller has too much under way."""
    detail = Detail(
        message=message,
        type="rate_limit_error",
        param=None,
        code="rate_limit_exceeded",
        retry_after_s=RETRY_AFTER_UNAVAILABLE_S,
    )
    return ApiError(429, detail)


def internal() -> ApiError:
    """Something is wrong here, and nobody else's business (R-201)."""
    detail = Detail(message="internal error", type="server_error", param=None, code="internal_error")
    return ApiError(500, detail)


def of_fleet(error: KvspError) -> ApiError:
    """What a client is told of a failure in the fleet."""
    if error.problem in RETRYABLE:
        message = error.detail or "no instance can serve the request now"
        return unavailable(message, error.retry_after_s or RETRY_AFTER_UNAVAILABLE_S)
    return internal()
