"""KvspError -> Problem Details (RFC 9457; R-065, R-067, R-200): the only place where one becomes the other."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.registry import MEDIA_PROBLEM

Fields = list[tuple[bytes, bytes]]
NO_STORE: Final = (b"cache-control", b"no-store")


class FieldError(KvspError):
    """A KvspError whose response needs a field of its own: `Allow`, `Accept-Encoding`."""

    def __init__(self, problem: registry.ProblemType, detail: str, field: tuple[bytes, bytes]) -> None:
        super().__init__(problem, detail)
        self.field = field


def render(error: KvspError) -> tuple[int, Fields, bytes]:
    """Status, fields and body of the response."""
    body = msgspec.json.encode(error.to_problem())
    fields = [(b"content-type", MEDIA_PROBLEM.encode()), (b"content-length", b"%d" % len(body)), NO_STORE]
    if error.retry_after_s is not None:
        fields.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, FieldError):
        fields.append(error.field)
    return error.status, fields, body


def install(app: FastAPI) -> None:
    """What FastAPI and Starlette would answer themselves looks like everything else (U-02, D9)."""
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(RequestValidationError, _framework)
    app.add_exception_handler(Exception, _framework)


async def _framework(_: Request, error: Exception) -> Response:
    status, fields, body = render(_from_framework(error))
    response = Response(body, status)
    response.raw_headers = fields
    return response


def _from_framework(error: Exception) -> KvspError:
    if isinstance(error, RequestValidationError):  # "all validation -> 400" (U-02)
        return bad_request("request is malformed")
    if not isinstance(error, HTTPException):
        return KvspError(registry.INTERNAL)
    problem = registry.PLAIN_PROBLEMS.get(error.status_code, registry.INTERNAL)
    allow = (error.headers or {}).get("Allow")
    if allow and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return FieldError(problem, "", (b"allow", allow.encode()))
    return KvspError(problem)
