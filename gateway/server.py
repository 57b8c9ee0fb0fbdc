"""Runs the gateway: uvicorn on a Unix socket that only Envoy opens, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog
import uvicorn

from gateway.app import SERVED, make_app
from gateway.backend import Backend
from gateway.config import GatewayConfig, load
from gateway.protocol import Protocol
from kvsp.rpc import server as process
from kvsp.rpc.config import ConfigError
from kvsp.rpc.server import DRAIN_S, clear_stale_socket

# Envoy pools connections and closes idle ones after an hour; closing first would race with its next request.
KEEP_ALIVE_S: Final = 7200
BACKLOG: Final = 1024

log = structlog.get_logger()


def run(config: Path) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; an unusable config is one line on stderr."""
    return process.run(config, lambda path: load(path, SERVED), _main)


async def _main(config: GatewayConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(config, stop)


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serve until `stop`, then drain: running requests get DRAIN_S seconds. Raises ConfigError."""
    listener = _listen(Path(config.listen.removeprefix("unix:")))
    backends = [Backend(entry, config.schemes) for entry in config.roles]
    server = _Server(
        uvicorn.Config(
            # Without FastAPI's middleware, which stands between every piece of a block and its socket, and does
            # nothing that `answer` does not do itself.
            make_app(backends).router,
            http=Protocol,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application reports what happens, without paths
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # Envoy sets both
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(DRAIN_S),
        )
    )
    stopper = asyncio.create_task(_stop(server, stop))
    try:
        log.info("serving")
        await server.serve([listener])
    finally:
        stopper.cancel()
        for backend in backends:
            await backend.close()


async def _stop(server: uvicorn.Server, stop: asyncio.Event) -> None:
    await stop.wait()
    log.info("draining")
    server.should_exit = True


def _listen(path: Path) -> socket.socket:
    """A listening socket for this user alone. Raises ConfigError."""
    clear_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"listen {path}: {error.strerror}") from None
    finally:
        os.umask(umask)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn whose signals are ours: its own handlers kill the process with the signal after draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield
