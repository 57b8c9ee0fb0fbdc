"""The dev stack as one object: prepared files, processes, endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local import configs, endpoints, envoy, pki, policy
from deploy.local.configs import Process, Settings
from deploy.local.layout import Layout, StackError, write_private
from deploy.local.supervisor import Program, Supervisor
from kvsp.cli.controller import Controller, ControllerFile, instance_name, open_controller
from kvsp.protocol.errors import KvspError
from kvsp.rpc.channel import open_channel

T = TypeVar("T")
PROBE_TIMEOUT_S: Final = 1.0
ACTIVE_TIMEOUT_S: Final = 30.0

# Compute threads that spin while they wait take the cores from the processes that bring the KV: measured on
# 2 cores under load, prefill is three times as fast without.
ENGINE_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(slots=True)
class Stack:
    """Its processes and files. `endpoints` is the content of endpoints.json, `model` what its instances run."""

    layout: Layout
    endpoints: dict[str, Any]
    supervisor: Supervisor
    model: Path | None = None
    lock: int = -1

    async def start(self) -> None:
        """Start all of it. Raises StackError, also when a port is taken."""
        check_port_free(self.layout.port, "KVSP_PORT")
        check_port_free(self.layout.admin_port, "KVSP_ADMIN_PORT")
        await self.supervisor.start()
        if self.model is not None:
            try:
                await self.wait_active(*configs.INSTANCES)
            except BaseException:
                await self.supervisor.stop()
                raise
        endpoints.write_endpoints(self.layout, self.endpoints)

    async def wait_active(self, *instances: str) -> dict[str, int]:
        """Wait until the controller has these instances as active. Returns their epochs. Raises StackError."""
        missing = ", ".join(instances)
        try:
            async with asyncio.timeout(ACTIVE_TIMEOUT_S), self.controller() as controller:
                async for overview in controller.watch():
                    states = {instance_name(each.instance): each for each in overview.instances}
                    waiting = [name for name in instances if name not in states or states[name].state != "active"]
                    if not waiting:
                        return {name: states[name].epoch for name in instances}
                    missing = ", ".join(waiting)
        except (KvspError, TimeoutError) as error:
            raise StackError(f"{missing}: not active in {ACTIVE_TIMEOUT_S:.0f} s {error}".rstrip()) from None
        raise StackError("the placement controller has ended")

    def controller(self) -> AbstractAsyncContextManager[Controller]:
        """A connection to the placement controller, as its operator."""
        return open_controller(ControllerFile.read(self.layout.config("placement")))

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
    prefixes = configs.served_prefixes(settings.processes)
    write_private(layout.envoy, envoy.render(layout, prefixes, settings.tuning).encode())
    processes = programs(layout, settings)
    for program in processes:
        if program.log.exists():
            program.log.replace(program.log.with_suffix(".old.log"))
    document = endpoints.describe(layout, scopes, settings.descriptors)
    return Stack(layout, document, Supervisor(processes, report, restart), settings.model, lock)


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

    def kill(self, *names: str) -> None:
        """SIGKILL these processes at once; they stay down until `start_again`."""
        self.call(self.stack.supervisor.kill(*names))

    def start_again(self, *names: str) -> None:
        """Start these processes, anew where they run. Raises StackError."""
        self.call(self.stack.supervisor.start_again(*names))


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[Background]:
    """The stack started, and stopped whatever happens. Raises StackError."""
    background = Background(stack)
    try:
        background.start()
        yield background
    finally:
        background.stop()


def programs(layout: Layout, settings: Settings) -> list[Program]:
    """Every process of the stack, Envoy last."""
    envoy_argv = (
        envoy.find_binary(), "-c", str(layout.envoy), "--concurrency", str(envoy_workers()),
        "--disable-hot-restart", "--log-level", "warning",
    )  # fmt: skip
    roles = [_program(layout, process) for process in settings.processes]
    last = max(program.stage for program in roles) + 1
    is_ready = partial(_is_envoy_ready, layout.admin_port)
    return [*roles, Program("envoy", envoy_argv, layout.log("envoy"), is_ready, last)]


def envoy_workers() -> int:
    """One connection is one worker's; clients and roles want the other cores (2 MiB GETs gain 6 % on two)."""
    return max(1, min((os.cpu_count() or 1) // 2, 4))


def _program(layout: Layout, process: Process) -> Program:
    config, place = str(layout.config(process.name)), layout.socket(process.name)
    argv = (sys.executable, "-m", "kvsp.cli.daemon", "serve", process.role, "--config", config)
    # The gateway speaks HTTP there, without a health service.
    is_ready = partial(_accepts if process.role == "gateway" else _is_healthy, place)
    environment = ENGINE_ENVIRONMENT if process.role == "instance" else {}
    log = layout.log(process.name)
    return Program(process.name, argv, log, is_ready, process.stage, environment, process.on_demand)


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
