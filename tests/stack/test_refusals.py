"""Processes that cannot start say why in one line, and those that find leftovers start all the same."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.local.configs import Settings
from deploy.local.layout import Layout
from deploy.local.stack import prepare
from deploy.local.toml import dumps
from kvsp.protocol.names import party_id
from tests.stack.harness import temporary_layout

pytestmark = pytest.mark.stack


class Scene:
    """The files of a stack that does not run, and configurations of single processes made from them."""

    def __init__(self, layout: Layout, opened: contextlib.ExitStack) -> None:
        self.layout = layout
        self.home = layout.home
        self._opened = opened

    def config(self, name: str, **changes: Any) -> Path:
        """A configuration of `index`, `h1` or `gateway` of its own, with changes."""
        folder = Path(self.home / secrets.token_hex(4))
        folder.mkdir()
        document = tomllib.loads(self.layout.config(name).read_text())
        document["listen"] = f"unix:{folder}/s"
        if name == "h1":
            document |= {"arena_octets": 1 << 20, "arena_dir": str(folder), "state_dir": str(folder / "state")}
        path = folder / "config.toml"
        path.write_text(dumps(document | changes))
        return path

    def file(self, text: str) -> str:
        """A file with this text."""
        path = self.home / secrets.token_hex(4)
        path.write_text(text)
        return str(path)

    def listener(self) -> str:
        """A Unix socket on which somebody listens."""
        path = str(self.home / secrets.token_hex(4))
        taken = self._opened.enter_context(socket.socket(socket.AF_UNIX))
        taken.bind(path)
        taken.listen()
        return f"unix:{path}"

    def port(self) -> str:
        """A TCP address that is taken."""
        taken = self._opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        return f"127.0.0.1:{taken.getsockname()[1]}"


Case = Callable[[Scene], Path]

REFUSED: Final[dict[str, tuple[str, Case, str]]] = {
    "holder-arena-without-room": ("holder", lambda s: s.config("h1", arena_octets=1 << 50), "octets free"),
    "holder-arena-dir-missing": ("holder", lambda s: s.config("h1", arena_dir="/nonexistent"), "No such file"),
    "holder-state-dir-is-a-file": ("holder", lambda s: s.config("h1", state_dir=s.file("")), "state_dir"),
    "holder-policy-missing": ("holder", lambda s: s.config("h1", policy="/nonexistent"), "/nonexistent"),
    "holder-descriptor-broken": ("holder", lambda s: s.config("h1", descriptors=[s.file("{}")]), "`model`"),
    "holder-socket-in-use": ("holder", lambda s: s.config("h1", listen=s.listener()), "is listening there"),
    "holder-admin-port-taken": ("holder", lambda s: s.config("h1", admin=s.port()), "Address already in use"),
    "index-policy-broken": ("index", lambda s: s.config("index", policy=s.file("[x")), "policy"),
    "index-with-a-scope-key": ("index", lambda s: s.config("index", scope_key="secret" * 8), "scope_key"),
    "gateway-socket-in-use": ("gateway", lambda s: s.config("gateway", listen=s.listener()), "is listening there"),
}  # fmt: skip


def serve(role: str, config: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "kvsp.cli.daemon", "serve", role, "--config", str(config)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with temporary_layout() as layout, contextlib.ExitStack() as opened:
        stack = prepare(layout, Settings(), print)
        opened.callback(os.close, stack.lock)
        yield Scene(layout, opened)


@pytest.fixture(scope="module")
def refused(scene: Scene) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All that must fail, started at once: importing takes longest."""
    started = {name: serve(role, make(scene)) for name, (role, make, _) in REFUSED.items()}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.spec("R-025", "R-060", "D2", "U-39", "U-40")
@pytest.mark.parametrize("name", REFUSED)
def test_a_process_that_cannot_start_says_why(refused: dict[str, subprocess.Popen[str]], name: str) -> None:
    out, err = refused[name].communicate(timeout=60)
    assert refused[name].returncode == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert REFUSED[name][2] in err
    assert "secret" not in err


@contextlib.contextmanager
def serving(role: str, config: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that serves; it ends with SIGTERM, and well."""
    with serve(role, config) as process:
        try:
            assert process.stderr is not None
            assert any('"serving"' in line for line in process.stderr)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=60)
    assert process.returncode == 0, rest


@pytest.mark.spec("U-51")
@pytest.mark.parametrize(("role", "name"), [("holder", "h1"), ("gateway", "gateway"), ("index", "index")])
def test_what_a_killed_process_left_is_no_obstacle(scene: Scene, role: str, name: str) -> None:
    config = scene.config(name)
    folder = config.parent
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "s"))
    arena = folder / f"kvsp-{party_id(scene.layout.base_uri('h1'))[:16]}-leftover"
    if role == "holder":
        arena.write_bytes(bytes(4096))
        (folder / "state").mkdir()
        (folder / "state" / "published.sqlite").write_bytes(b"torn" * 100)
    with serving(role, config):
        assert (folder / "s").stat().st_mode & 0o077 == 0
        assert not arena.exists()
    assert not list(folder.glob("kvsp-*"))


def test_a_second_holder_of_the_same_name_is_refused(scene: Scene) -> None:
    config = scene.config("h1")
    other = scene.config("h1", arena_dir=str(config.parent))
    with serving("holder", config):
        _, err = serve("holder", other).communicate(timeout=60)
        assert "another holder with this base_uri is running" in err
        assert err.count("\n") == 1
