"""KvspError <-> gRPC status: the only place where one becomes the other (U-52).

gRPC codes alone are too coarse (five different 409s), so the whole problem travels in a binary
trailer; the code is set for tools that look at nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import msgspec

from kvsp.protocol import registry
from kvsp.protocol.errors import RETRY_AFTER_UNAVAILABLE_S, KvspError
from kvsp.v1 import common_pb2

PROBLEM_TRAILER = "kvsp-problem-bin"

# Statuses that gRPC itself makes, without our trailer.
_BARE_CODES = {
    grpc.StatusCode.UNAVAILABLE: registry.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: registry.GATEWAY_TIMEOUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: registry.CONTENT_TOO_LARGE,
}


def to_message(error: KvspError) -> common_pb2.Problem:
    """The error as a message, for trailers and for replies inside streams."""
    problem = common_pb2.Problem(suffix=error.problem.suffix, status=error.problem.status, detail=error.detail)
    if error.extensions:
        problem.extensions_json = msgspec.json.encode(dict(error.extensions)).decode()
    if error.retry_after_s is not None:
        problem.retry_after_s = error.retry_after_s
    return problem


def from_message(message: common_pb2.Problem) -> KvspError:
    """The error that a message carries; an unregistered or malformed one becomes a bare 500."""
    table: Any = registry.PROBLEMS if message.suffix else registry.PLAIN_PROBLEMS
    problem = table.get(message.suffix or message.status)
    if problem is None:
        return KvspError(registry.INTERNAL)
    try:
        extensions = msgspec.json.decode(message.extensions_json or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return KvspError(registry.INTERNAL)
    retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else None
    return KvspError(problem, message.detail, extensions, retry_after_s)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvspError) -> NoReturn:
    """End the call with the error."""
    trailer = (PROBLEM_TRAILER, to_message(error).SerializeToString())
    await context.abort(grpc.StatusCode[error.problem.grpc_code], error.problem.title, (trailer,))


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvspError:
    """The KvspError behind a failed call. Failures of the transport itself become 503, 504 or 500."""
    trailers: Any = error.trailing_metadata() or ()
    for name, value in trailers:
        if name == PROBLEM_TRAILER and isinstance(value, bytes):
            return from_message(common_pb2.Problem.FromString(value))
    problem = _BARE_CODES.get(error.code(), registry.INTERNAL)
    retry = RETRY_AFTER_UNAVAILABLE_S if problem is registry.UNAVAILABLE else None
    return KvspError(problem, retry_after_s=retry)


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Raise KvspError where a call inside raises AioRpcError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
