"""Starts a role: logging, metrics, the gRPC server with health and reflection, and draining."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import prometheus_client
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvsp.rpc.channel import KEEPALIVE, OPTIONS
from kvsp.rpc.config import ConfigError, ProcessConfig, ServiceConfig
from kvsp.rpc.interceptors import Guard, frames

DRAIN_S = 5.0

_SERVER_KEEPALIVE: tuple[tuple[str, Any], ...] = (
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # what our channels send is no abuse
)

C = TypeVar("C", bound=ProcessConfig)

log = structlog.get_logger()


def run(path: Path, load: Callable[[Path], C], main: Callable[[C], Coroutine[Any, Any, None]]) -> int:
    """Run a process until SIGTERM or SIGINT. Returns the exit code; an unusable config is one line on stderr."""
    try:
        config = load(path)
        configure_logs(config.log_level)
        os.umask(0o077)  # sockets and shared memory are this user's alone
        start_admin(config.admin)
        uvloop.run(main(config))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def configure_logs(level: str) -> None:
    """One JSON line per event on stderr. No tracebacks: an exception's text may quote a key (R-215)."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def start_admin(address: str) -> None:
    """Serve /metrics on `host:port`; empty: none. Raises ConfigError when the port is taken."""
    if not address:
        return
    host, _, port = address.rpartition(":")
    try:
        prometheus_client.start_http_server(int(port), addr=host)
    except (OSError, ValueError) as error:
        raise ConfigError(f"admin address {address}: {error}") from None


@dataclass(frozen=True, slots=True)
class Server:
    """A gRPC server that is bound, and the health that it reports."""

    grpc: grpc.aio.Server
    _health: Any

    async def report(self, *, serving: bool) -> None:
        """What health checks say from now on."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)


def make_server(config: ServiceConfig, services: Sequence[str]) -> Server:
    """A gRPC server bound to `config.listen`, with health and reflection. Raises ConfigError."""
    options = (*OPTIONS, *_SERVER_KEEPALIVE, ("grpc.so_reuseport", 0))
    server = grpc.aio.server(interceptors=(Guard(),), options=options)
    checks: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    _bind(server, config)
    return Server(server, checks)


def _bind(server: grpc.aio.Server, config: ServiceConfig) -> None:
    try:
        if config.listen.startswith("unix:"):
            clear_stale_socket(Path(config.listen.removeprefix("unix:")))
            server.add_insecure_port(config.listen)
        elif config.tls is None:
            raise ConfigError(f"listen {config.listen}: needs [tls], or use unix:/path")
        else:
            key, cert, ca = (Path(p).read_bytes() for p in (config.tls.key, config.tls.cert, config.tls.ca))
            credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
            server.add_secure_port(config.listen, credentials)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"listen {config.listen}: {error}") from None


def stop_if_failed(task: asyncio.Task[Any]) -> None:
    """A role that has lost a background task only seems to work: stop, and be started again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("background task failed", kind=type(error).__name__, where=frames(error))
        signal.raise_signal(signal.SIGTERM)


def clear_stale_socket(path: Path) -> None:
    """Remove a socket file that nobody answers on. Raises ConfigError when somebody does."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path}: is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
    raise ConfigError(f"{path}: another process is listening there")


async def serve(server: Server, drain: Callable[[], Awaitable[None]]) -> None:
    """Serve until a signal, then drain: health says NOT_SERVING, and running calls get DRAIN_S seconds.

    `drain` sees to it that kept streams end, which otherwise never would.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.grpc.start()
    await server.report(serving=True)
    log.info("serving")
    await stop.wait()
    await server.report(serving=False)
    log.info("draining")
    await drain()
    await server.grpc.stop(DRAIN_S)


async def run_until(work: Coroutine[Any, Any, None], end: Coroutine[Any, Any, object]) -> None:
    """Run `work` until it is done, or until `end` is. Raises what `work` raises."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
