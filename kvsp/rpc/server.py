"""Starts a role: logging, metrics, the gRPC server with health and reflection, and draining."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvsp.rpc.channel import OPTIONS
from kvsp.rpc.config import ConfigError, ServiceConfig
from kvsp.rpc.interceptors import Guard

DRAIN_S = 5.0

log = structlog.get_logger()


def run(main: Callable[[], Coroutine[Any, Any, None]], config: ServiceConfig) -> int:
    """Run a role until SIGTERM or SIGINT. Returns the exit code; an unusable config is one line on stderr."""
    configure_logs(config.log_level)
    os.umask(0o077)  # sockets and shared memory are this user's alone
    try:
        start_admin(config.admin)
        uvloop.run(main())
    except ConfigError as error:
        return refuse(error)
    return 0


def refuse(error: ConfigError) -> int:
    """Say in one line on stderr why a role does not start. Returns the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def configure_logs(level: str) -> None:
    """One JSON line per event on stderr."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
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


def make_server(config: ServiceConfig, services: Sequence[str]) -> grpc.aio.Server:
    """A gRPC server bound to `config.listen`, with health and reflection. Raises ConfigError."""
    server = grpc.aio.server(interceptors=(Guard(),), options=(*OPTIONS, ("grpc.so_reuseport", 0)))
    checks: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    _bind(server, config)
    server._kvsp_health = checks  # type: ignore[attr-defined]
    return server


def _bind(server: grpc.aio.Server, config: ServiceConfig) -> None:
    try:
        if config.listen.startswith("unix:"):
            _clear_stale_socket(Path(config.listen.removeprefix("unix:")))
            server.add_insecure_port(config.listen)
        elif config.tls is None:
            raise ConfigError(f"listen {config.listen}: needs [tls], or use unix:/path")
        else:
            key, cert, ca = (Path(p).read_bytes() for p in (config.tls.key, config.tls.cert, config.tls.ca))
            credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
            server.add_secure_port(config.listen, credentials)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"listen {config.listen}: {error}") from None


def _clear_stale_socket(path: Path) -> None:
    """Remove a socket file that nobody answers on; a live one is an error."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise ConfigError(f"{path}: another process is listening there")


async def serve(server: grpc.aio.Server) -> None:
    """Serve until a signal, then drain: health says NOT_SERVING, running calls get DRAIN_S seconds."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    checks: Any = getattr(server, "_kvsp_health")  # noqa: B009
    await server.start()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("serving")
    await stop.wait()
    await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    log.info("draining")
    await server.stop(DRAIN_S)
