from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from deploy.local import pki
from deploy.local.configs import Settings
from deploy.local.layout import Layout, StackError
from deploy.local.stack import check_port_free, prepare
from deploy.local.supervisor import Program, Supervisor
from deploy.local.toml import dumps
from kvsp.protocol.policy import Policy
from tests.stack.harness import RunningStack, free_port, temporary_layout

SLEEPER = "import time; print('hello', flush=True); time.sleep(600)"


class Watched:
    """A supervisor over small Python programs, and what it reported."""

    def __init__(self, home: Path, scripts: dict[str, str], *, restart: bool) -> None:
        self.home = home
        self.reports: list[str] = []
        self.reported = asyncio.Event()
        programs = [self.program(name, (sys.executable, "-c", text)) for name, text in scripts.items()]
        self.supervisor = Supervisor(programs, self.report, restart)

    def report(self, line: str) -> None:
        self.reports.append(line)
        self.reported.set()

    def program(self, name: str, argv: Sequence[str]) -> Program:
        log = self.home / f"{name}.log"

        async def is_ready() -> bool:
            return log.exists() and b"hello" in log.read_bytes()

        return Program(name, argv, log, is_ready)


async def test_programs_start_and_stop(tmp_path: Path) -> None:
    watched = Watched(tmp_path, {"a": SLEEPER, "b": SLEEPER}, restart=True)
    await watched.supervisor.start()
    pids = [watched.supervisor.pid(name) for name in ("a", "b")]
    assert all(map(psutil.pid_exists, pids))
    await watched.supervisor.stop()
    assert not any(map(psutil.pid_exists, pids))
    assert watched.reports == []


async def test_a_program_that_fails_at_start_is_named_with_its_last_lines(tmp_path: Path) -> None:
    watched = Watched(tmp_path, {"a": SLEEPER, "b": "raise SystemExit('no such thing')"}, restart=False)
    with pytest.raises(StackError, match=r"b ended with exit code 1\n.*no such thing"):
        await watched.supervisor.start()
    with pytest.raises(KeyError):
        watched.supervisor.pid("a")  # nothing is left behind


async def test_a_program_that_cannot_start_is_named(tmp_path: Path) -> None:
    watched = Watched(tmp_path, {}, restart=False)
    watched.supervisor.programs = [watched.program("a", ("/nonexistent",))]
    with pytest.raises(StackError, match=r"a ended with exit code 127\n.*cannot start /nonexistent: No such file"):
        await watched.supervisor.start()


async def test_a_dead_program_is_reported_and_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, {"a": SLEEPER}, restart=True)
    await watched.supervisor.start()
    pid = watched.supervisor.pid("a")
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(watched.reported.wait(), 30)
    assert watched.reports[0].startswith("a was ended by SIGKILL, starts again in 0.5 s")
    assert "hello" in watched.reports[0]
    async with asyncio.timeout(30):
        while watched.supervisor.pid("a") == pid:
            await asyncio.sleep(0.01)
    again = watched.supervisor.pid("a")
    await watched.supervisor.stop()
    assert not psutil.pid_exists(again)


async def test_without_restart_a_killed_program_stays_down_until_started(tmp_path: Path) -> None:
    watched = Watched(tmp_path, {"a": SLEEPER}, restart=False)
    await watched.supervisor.start()
    pid = watched.supervisor.pid("a")
    await watched.supervisor.kill("a")
    assert not psutil.pid_exists(pid)
    await watched.supervisor.start_again("a")
    assert psutil.pid_exists(watched.supervisor.pid("a"))
    await watched.supervisor.stop()


def test_a_taken_port_names_the_variable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StackError, match="KVSP_PORT"):
            check_port_free(taken.getsockname()[1], "KVSP_PORT")


def test_a_home_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="too long"):
        Layout(tmp_path / ("x" * 100)).make_directories()


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "٣"])
def test_a_bad_port_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("KVSP_PORT", port)
    with pytest.raises(StackError, match="KVSP_PORT"):
        Layout.from_env()


def test_toml() -> None:
    import tomllib

    document = {"a": 'x"\\\n', "b": [1, True], "c": {"spiffe://x": {"d": "*"}}, "e": [{"f": {"g": 1}}, {"f": {}}]}
    assert tomllib.loads(dumps(document)) == document


# --- PKI -------------------------------------------------------------------------------


@pytest.fixture
def layout() -> Iterator[Layout]:
    with temporary_layout() as made:
        made.make_directories()
        yield made


def test_certificates_are_reused_and_private(layout: Layout) -> None:
    pki.ensure(layout)
    first = {path.name: path.read_bytes() for path in layout.pki.iterdir()}
    pki.ensure(layout)
    assert {path.name: path.read_bytes() for path in layout.pki.iterdir()} == first
    for path in layout.pki.glob("*-key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_missing_expired_or_foreign_is_issued_again(layout: Layout) -> None:
    from datetime import UTC, datetime, timedelta

    authority = pki.ensure(layout)
    (layout.pki / "h1.pem").unlink()
    soon = datetime.now(UTC) + timedelta(days=1)
    pki.issue(authority, "pc", uris=["spiffe://kvsp.local/pc"], not_after=soon).write(layout.pki, "pc")
    pki.issue_client(pki.make_authority(), "is", "spiffe://kvsp.local/is").write(layout.pki, "is")
    kept = (layout.pki / "ii1.pem").read_bytes()
    pki.ensure(layout)
    for name in ("h1", "pc", "is"):
        leaf = pki.Credential.read(layout.pki, name)
        assert leaf is not None
        leaf.certificate.verify_directly_issued_by(authority.certificate)
        assert leaf.certificate.not_valid_after_utc > soon
    assert (layout.pki / "ii1.pem").read_bytes() == kept


# --- the whole stack -------------------------------------------------------------------


@pytest.mark.stack
def test_endpoints_describe_the_stack(stack: RunningStack) -> None:
    document = json.loads(stack.layout.endpoints.read_text())
    assert set(document) == {"ca", "envoy_admin", "roles", "identities", "scopes", "descriptor"}
    assert set(document["roles"]) == {"index", "placement", "holders", "instances", "frontend"}
    assert set(document["roles"]["instances"]) == {"ii1", "ii2", "ii3"}
    policy = Policy.load(stack.layout.policy.read_text())
    known = {"is", "pc", "h1", "ii1", "ii2", "ii3", "fe", "gateway", "client-demo", "client-other"}
    assert set(document["identities"]) == known | {"outsider"}
    for name, each in document["identities"].items():
        assert Path(each["cert"]).is_file()
        assert Path(each["key"]).is_file()
        assert (each["uri"] in policy.identities) == (name in known)
    for each in document["scopes"].values():
        assert stat.S_IMODE(Path(each["key_file"]).stat().st_mode) == 0o600
        assert document["roles"]["holders"]["h1"] in policy.trusted_holders(each["scope_id"])


@pytest.mark.stack
@pytest.mark.parametrize("name", ["index", "placement", "h1", "gateway", "envoy"])
def test_each_process_can_be_killed_and_started_again(stack: RunningStack, name: str) -> None:
    pid = stack.pid(name)
    stack.restart(name)
    assert stack.pid(name) != pid
    body = {"scope_id": stack.scope_id(), "compat_id": stack.compat_id(), "block_keys": []}
    assert stack.request("POST", stack.index + "lookup", body).status == 200


def _kvspd(layout: Layout, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "KVSP_HOME": str(layout.home),
        "KVSP_PORT": str(layout.port),
        "KVSP_ADMIN_PORT": str(layout.admin_port),
    }
    argv = [sys.executable, "-m", "kvsp.cli.daemon", *arguments]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _up(layout: Layout) -> subprocess.Popen[str]:
    from kvsp.protocol.descriptor import canonical
    from tests.stack.harness import SMALL

    descriptor = layout.home / "small.json"
    descriptor.write_bytes(canonical(SMALL))
    process = _kvspd(layout, "up", "--no-engines", "--descriptor", str(descriptor))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("kvsp is up"), process.communicate()
    return process


@pytest.mark.stack
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_kvspd_up(layout: Layout, number: signal.Signals) -> None:
    process = _up(layout)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 5
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 0)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert layout.endpoints.exists() == (number == signal.SIGKILL)


@pytest.mark.stack
def test_a_second_stack_on_the_same_port_says_so(layout: Layout) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", layout.port))
        taken.listen()
        process = _kvspd(layout, "up", "--no-engines", "--descriptor", str(layout.policy.with_name("x.json")))
        assert "no such file" in process.communicate(timeout=30)[1]
        (layout.home / "x.json").write_text("{}")
        process = _kvspd(layout, "up", "--no-engines", "--descriptor", str(layout.home / "x.json"))
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert f"port {layout.port} cannot be used" in errors
    assert "KVSP_PORT" in errors


@pytest.mark.stack
def test_a_second_stack_in_the_same_home_says_so(stack: RunningStack) -> None:
    with pytest.raises(StackError, match="another stack is running in"):
        prepare(stack.layout, Settings(), print)


def test_serve_explains_what_is_wrong(layout: Layout) -> None:
    process = _kvspd(layout, "serve", "nothing", "--config", "/nonexistent")
    assert "unknown role 'nothing'" in process.communicate(timeout=30)[1]
    assert process.returncode == 2
    process = _kvspd(layout, "serve", "index", "--config", "/nonexistent")
    assert process.communicate(timeout=30)[1] == "error: /nonexistent: no such file\n"
    assert process.returncode == 2
    bad = layout.home / "index.toml"
    bad.write_text("lisen = 'x'")
    process = _kvspd(layout, "serve", "index", "--config", str(bad))
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_pki_issues_one_more_identity(layout: Layout) -> None:
    process = _kvspd(layout, "pki", "--issue", "alice")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "spiffe://kvsp.local/alice" in output
    assert (layout.pki / "alice.pem").is_file()
    process = _kvspd(layout, "pki", "--issue", "ca")
    assert process.communicate(timeout=30)[1].count("\n") == 1
    assert process.returncode == 1


def test_a_free_port_is_free() -> None:
    check_port_free(free_port(), "KVSP_PORT")
