"""The dev stack as one object: prepared files, processes, endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local import configs, endpoints, envoy, pki, policy
from deploy.local.configs import Settings
from deploy.local.layout import Layout, StackError, write_private
from deploy.local.supervisor import Program, Supervisor
from kvsp.rpc.channel import open_channel

T = TypeVar("T")
PROBE_TIMEOUT_S = 1.0


@dataclass(slots=True)
class Stack:
    """Index, holder h1, gateway and Envoy. `endpoints` is the content of endpoints.json."""

    layout: Layout
    endpoints: dict[str, Any]
    supervisor: Supervisor
    lock: int = -1

    async def start(self) -> None:
        """Start all of it. Raises StackError, also when a port is taken."""
        check_port_free(self.layout.port, "KVSP_PORT")
        check_port_free(self.layout.admin_port, "KVSP_ADMIN_PORT")
        await self.supervisor.start()
        endpoints.write_endpoints(self.layout, self.endpoints)

    async def stop(self) -> None:
        """Stop all of it; endpoints.json goes too, as it describes a running stack."""
        self.layout.endpoints.unlink(missing_ok=True)
        await self.supervisor.stop()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def prepare(
    layout: Layout,
    settings: Settings,
    report: Callable[[str], None],
    *,
    restart: bool = True,
) -> Stack:
    """Write every file that the processes read. Raises StackError."""
    layout.make_directories()
    lock = layout.lock()
    pki.ensure(layout)
    scopes = policy.ensure_scopes(layout)
    policy.write_policy(layout, scopes)
    configs.write_configs(layout, settings)
    write_private(layout.envoy, envoy.render(layout, configs.served_prefixes(), settings.tuning).encode())
    processes = programs(layout)
    for program in processes:
        if program.log.exists():
            program.log.replace(program.log.with_suffix(".old.log"))
    document = endpoints.describe(layout, scopes, settings.descriptors)
    return Stack(layout, document, Supervisor(processes, report, restart), lock)


def check_port_free(port: int, variable: str) -> None:
    """Raises StackError when somebody listens on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StackError(
                f"port {port} cannot be used ({error.strerror}); choose another with {variable}"
            ) from None


class Background:
    """A stack that runs in a thread of its own, for callers that are not asynchronous."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvsp-stack", daemon=True)

    def start(self) -> None:
        """Start the stack. Raises StackError."""
        self._thread.start()
        self.call(self.stack.start())

    def stop(self) -> None:
        """Stop the stack and the thread."""
        try:
            self.call(self.stack.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine in the stack's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[Background]:
    """The stack started, and stopped whatever happens. Raises StackError."""
    background = Background(stack)
    try:
        background.start()
        yield background
    finally:
        background.stop()


def programs(layout: Layout) -> list[Program]:
    """Every process of the stack, Envoy last."""

    def role(name: str, role: str, is_ready: Callable[[], Awaitable[bool]]) -> Program:
        argv = (sys.executable, "-m", "kvsp.cli.daemon", "serve", role, "--config", str(layout.config(name)))
        return Program(name, argv, layout.log(name), is_ready)

    # One connection is one worker's; clients and roles want the other cores (2 MiB GETs gain 6 % on two).
    workers = str(max(1, min((os.cpu_count() or 1) // 2, 4)))
    envoy_argv = (
        envoy.find_binary(), "-c", str(layout.envoy), "--concurrency", workers,
        "--disable-hot-restart", "--log-level", "warning",
    )  # fmt: skip
    return [
        role("index", "index", lambda: _is_healthy(layout.socket("index"))),
        role("h1", "holder", lambda: _is_healthy(layout.socket("h1"))),
        role("gateway", "gateway", lambda: _accepts(layout.socket("gateway"))),
        Program("envoy", envoy_argv, layout.log("envoy"), lambda: _is_envoy_ready(layout.admin_port)),
    ]


async def _is_healthy(path: Path) -> bool:
    if not await _accepts(path):
        return False
    async with open_channel(f"unix:{path}") as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def _accepts(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


async def _is_envoy_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        status = await asyncio.wait_for(reader.readline(), PROBE_TIMEOUT_S)
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
    return b" 200 " in status
