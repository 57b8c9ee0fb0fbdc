"""What every service method has around it: errors become problems, calls are counted and timed."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
from prometheus_client import Counter, Histogram

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc import errors

log = structlog.get_logger()

# Labels hold method names and statuses only: nothing confidential.
CALLS = Counter("kvsp_rpc_calls_total", "Internal calls by method and outcome", ["method", "status"])
SECONDS = Histogram("kvsp_rpc_seconds", "Internal call duration", ["method"])

Context = grpc.aio.ServicerContext[Any, Any]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable when run
    """Turns KvspError into its gRPC form, anything unexpected into a bare INTERNAL, and counts both."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.removeprefix("/")
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                wrap = getattr(grpc, f"{kind}_rpc_method_handler")
                return wrap(_guarded(behaviour, method), handler.request_deserializer, handler.response_serializer)
        return handler


def _guarded(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with _watched(method, context):
                async for reply in behaviour(request, context):
                    yield reply

        return stream

    async def call(request: Any, context: Context) -> Any:
        async with _watched(method, context):
            return await behaviour(request, context)

    return call


@asynccontextmanager
async def _watched(method: str, context: Context) -> AsyncIterator[None]:
    started = time.perf_counter()
    status = "200"
    try:
        yield
    except KvspError as error:
        status = str(error.status)
        await errors.abort(context, error)
    except (asyncio.CancelledError, GeneratorExit):
        status = "cancelled"
        raise
    except grpc.aio.AbortError:
        status = "aborted"
        raise
    except Exception as error:  # the boundary: nothing internal may leave
        status = "500"
        log.error("unexpected", method=method, kind=type(error).__name__, where=frames(error))
        await errors.abort(context, KvspError(registry.INTERNAL))
    finally:
        CALLS.labels(method, status).inc()
        SECONDS.labels(method).observe(time.perf_counter() - started)


def frames(error: BaseException) -> list[str]:
    """The frames of a traceback without the exception's own text, which may quote a key or a token (R-215)."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
