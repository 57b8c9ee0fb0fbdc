"""Real gRPC servers and channels for the tests of services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from kvsp.rpc import channel, server
from kvsp.rpc.config import ServiceConfig, Tls


@asynccontextmanager
async def served(
    listen: str, register: Callable[[grpc.aio.Server], None], tls: Tls | None = None
) -> AsyncIterator[grpc.aio.Server]:
    """A running server as `kvsp.rpc.server` makes it."""
    config = ServiceConfig(listen=listen, policy="", principal="", tls=tls)
    running = server.make_server(config, ()).grpc
    register(running)
    await running.start()
    try:
        yield running
    finally:
        await running.stop(0)


@asynccontextmanager
async def connected(folder: Path, register: Callable[[grpc.aio.Server], None]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server over a real Unix socket."""
    address = f"unix:{folder}/s.sock"
    async with served(address, register), channel.open_channel(address) as opened:
        yield opened


async def problem_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a unary call, or the first read of a stream, ends with."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
