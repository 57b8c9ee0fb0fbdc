"""What a holder refuses to start with, and what it leaves behind."""

from __future__ import annotations

import contextlib
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvsp.bulk.shm import Layout
from kvsp.protocol.policy import Policy
from kvsp.rpc.config import ConfigError, load, load_descriptors
from services.holder.arena import Arena
from services.holder.config import HolderConfig, check_identity
from services.holder.server import run
from tests.services.holder_harness import BASE_URI, HOLDER, POLICY, POLICY_TEXT

CONFIG = f"""
listen = "unix:{{folder}}/h1.sock"
policy = "{{folder}}/policy.toml"
principal = "{HOLDER}"
base_uri = "{BASE_URI}"
arena_octets = 1048576
arena_dir = "{{folder}}"
index = {{{{address = "unix:{{folder}}/is.sock"}}}}
"""


def config(folder: Path, **changes: Any) -> HolderConfig:
    path = folder / "holder.toml"
    lines = [line for line in CONFIG.format(folder=folder).splitlines() if line.split(" ")[0] not in changes]
    path.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in changes.items())]))
    return load(path, HolderConfig)


def test_defaults(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    assert loaded.schemes == ("shm", "grpc")
    assert loaded.publish_ttl_ms == 600_000
    assert check_identity(loaded, POLICY).uri == HOLDER


@pytest.mark.spec("R-074")
@pytest.mark.parametrize(("role", "may"), [("holder", True), ("instance", True), ("client", False)])
def test_an_instance_may_have_a_holder_beside_it(tmp_path: Path, role: str, may: bool) -> None:
    policy = Policy.load(f'[identities."{HOLDER}"]\nroles = ["{role}"]\nbase_uris = ["{BASE_URI}"]\n')
    with contextlib.nullcontext() if may else pytest.raises(ConfigError):
        assert check_identity(config(tmp_path), policy).roles == {role}


@pytest.mark.parametrize(
    "changes",
    [
        {"base_uri": '"https://h2.example/kvsp/"'},
        {"principal": '"spiffe://t/client"'},
        {"principal": '"spiffe://t/nobody"'},
        {"schemes": '["ucx"]'},
        {"schemes": "[]"},
    ],
)
def test_a_holder_that_the_policy_does_not_know_is_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        check_identity(config(tmp_path, **changes), POLICY)


@pytest.mark.parametrize(
    "changes",
    [{"arena_octets": "0"}, {"publish_ttl_ms": "0"}, {"unknown": "1"}, {"arena_octets": str(1 << 60)}],
)
def test_an_unusable_configuration_is_one_line(
    tmp_path: Path, changes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.toml").write_text(POLICY_TEXT)
    with contextlib.suppress(ConfigError):
        config(tmp_path, **changes)
    assert run(tmp_path / "holder.toml") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("kvsp-*"))
    structlog.reset_defaults()  # a role that starts sets up logging


def test_a_descriptor_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"d\.json"):
        load_descriptors([str(path)])


@pytest.mark.spec("D14", "R-215")
def test_the_arena_is_private_and_removed(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, BASE_URI, 8192)
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    assert arena.path.stat().st_size == Layout(8192).octets
    arena.view[:4] = b"data"
    assert arena.path.read_bytes()[:4] == b"data"
    arena.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_crashed_holder_left_is_removed_and_what_a_live_one_uses_is_not(tmp_path: Path) -> None:
    live = Arena.create(tmp_path, BASE_URI, 8192)
    other = Arena.create(tmp_path, "https://h2.example/kvsp/", 8192)
    with pytest.raises(ConfigError, match="running"):
        Arena.create(tmp_path, BASE_URI, 8192)
    live.close()
    crash = "import os, pathlib, sys; from services.holder.arena import Arena; "
    crash += "Arena.create(pathlib.Path(sys.argv[1]), sys.argv[2], 8192); os._exit(9)"
    command = [sys.executable, "-c", crash, str(tmp_path), BASE_URI]
    assert subprocess.run(command, check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    fresh = Arena.create(tmp_path, BASE_URI, 8192)
    assert {path.name for path in tmp_path.iterdir()} == {fresh.path.name, other.path.name}
    fresh.close()
    other.close()


@pytest.mark.spec("D14")
def test_a_name_that_another_user_took_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squatter = Arena.create(tmp_path, BASE_URI, 8192)
    with monkeypatch.context() as patched:
        patched.setattr("os.geteuid", lambda: squatter.path.stat().st_uid + 1)
        Arena.create(tmp_path, BASE_URI, 8192).close()
    assert squatter.path.exists()
    squatter.close()


def test_an_arena_that_does_not_fit_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="octets free"):
        Arena.create(tmp_path, BASE_URI, 1 << 60)
    with pytest.raises(ConfigError, match="No such file"):
        Arena.create(tmp_path / "missing", BASE_URI, 8192)
