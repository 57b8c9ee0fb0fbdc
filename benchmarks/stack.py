"""The dev stack for benchmarks, and blocks to put into it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import Tls, free_port
from deploy.local import envoy
from deploy.local.configs import Settings
from deploy.local.envoy import Tuning
from deploy.local.layout import Layout
from deploy.local.stack import Background, envoy_workers, prepare, running
from kvsp.client import Client, Credentials, Endpoints, Options
from kvsp.client.config import load_stack
from kvsp.protocol import container

LAYERS = 32
TOKENS = 16
COMPAT = "c0" * 32  # of no known descriptor: only the container's structure is checked


@dataclass(frozen=True)
class Bench:
    """A running stack and who talks to it."""

    layout: Layout
    background: Background
    credentials: Credentials
    endpoints: Endpoints
    holder: str
    scope_id: str
    server_tls: Tls

    def client(
        self, extra_holders: frozenset[str] = frozenset(), *, verify: bool = True, http2_blocks: bool = False
    ) -> Client:
        """A client of the stack that also trusts `extra_holders`."""
        endpoints = Endpoints(self.endpoints.index, self.endpoints.holders | extra_holders)
        return Client(self.credentials, endpoints, Options(verify=verify, http2_blocks=http2_blocks))

    def pid(self, name: str) -> int:
        """Process id of index, h1, gateway or envoy."""
        return self.background.stack.supervisor.pid(name)


@contextmanager
def bench_stack(arena_octets: int = 1 << 30) -> Iterator[Bench]:
    """A stack of its own on free ports, removed at the end."""
    home = Path(tempfile.mkdtemp(prefix="kvsp-bench-"))
    try:
        layout = Layout(home / ".kvsp", free_port(), free_port())
        settings = Settings(overrides={"h1": {"arena_octets": arena_octets}})
        with running(prepare(layout, settings, print, restart=False)) as background:
            facts = load_stack(layout.endpoints, "client-demo")
            yield Bench(
                layout,
                background,
                facts.credentials,
                facts.endpoints,
                facts.holders["h1"],
                facts.scopes["demo"],
                Tls(layout.pki / "ca.pem", layout.pki / "envoy.pem", layout.pki / "envoy-key.pem"),
            )
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def behind_envoy(
    stack: Layout,
    folder: Path,
    prefix: str,
    command: Callable[[Path], list[str]],
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """What `command(socket)` starts, behind an Envoy of the same template and certificates; yields a base URI."""
    layout = Layout(folder / ".kvsp", free_port(), free_port())
    layout.make_directories()
    for name in ("ca.pem", "envoy.pem", "envoy-key.pem"):
        (layout.pki / name).write_bytes((stack.pki / name).read_bytes())
    layout.envoy.write_text(envoy.render(layout, {prefix: f"/{prefix}/"}, Tuning()))
    workers = str(envoy_workers())
    commands = [
        command(layout.socket("gateway")),
        [envoy.find_binary(), "-c", str(layout.envoy), "--concurrency", workers, "--disable-hot-restart",
         "--log-level", "error", "--base-id", "77"],
    ]  # fmt: skip
    processes = [subprocess.Popen(each, env={**os.environ, **(environment or {})}) for each in commands]
    try:
        time.sleep(3)  # a benchmark, not a test: both are up by then
        yield f"https://localhost:{layout.port}/{prefix}/"
    finally:
        for process in processes:
            process.terminate()
            process.wait(10)


def make_container(payload_octets: int) -> bytes:
    """A raw container of LAYERS layers with random sections."""
    section = payload_octets // LAYERS // 2
    layers = [(os.urandom(section), os.urandom(section)) for _ in range(LAYERS)]
    return container.build(0, TOKENS, layers)


def make_key(*parts: object) -> str:
    """A block key that is as good as random."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
