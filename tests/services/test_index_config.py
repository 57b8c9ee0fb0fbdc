"""What the index starts with, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvsp.protocol import descriptor, limits
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import ConfigError, load_descriptors
from kvsp.v1 import index_pb2
from services.index import server
from services.index.config import load_config

BASE = 'listen = "unix:/run/is.sock"\npolicy = "policy.toml"\nprincipal = "spiffe://t/is"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.toml"


def test_bounds_default_to_the_protocols(path: Path) -> None:
    path.write_text(BASE)
    config = load_config(path)
    assert config.replica_ttl_ms_max == limits.REPLICA_TTL_MS_MAX
    assert config.lookup_keys_max == limits.LOOKUP_KEYS_MAX


@pytest.mark.spec("R-025", "U-40")
@pytest.mark.parametrize(
    "line",
    [
        'scope_key = "x"',
        'scope_keys = ["x"]',
        'key_file = "demo.key"',
        '[tls]\nScope-Key = "x"',
        "[[scopes]]\nkey_file = 'a'",
    ],
)
def test_a_scope_key_is_refused(path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(f"{BASE}{line}\n")
    assert server.run(path) == 2
    error = capsys.readouterr().err
    assert "must never hold a scope key" in error
    assert error.count("\n") == 1


@pytest.mark.spec("R-025")
def test_no_internal_message_can_carry_a_scope_key() -> None:
    for message in index_pb2.DESCRIPTOR.message_types_by_name.values():
        assert not [field.name for field in message.fields if "scope_key" in field.name or "token" in field.name]


@pytest.mark.spec("R-214")
@pytest.mark.parametrize(
    "line",
    [
        "lookup_keys_max = 8193",
        "lookup_keys_max = 0",
        "lookup_targets_max = 257",
        "replica_ttl_ms_max = 3600001",
        "records_per_holder_max = 2000001",
        "unknown = 1",
        'log_level = "loud"',
        "not toml",
    ],
)
def test_bad_configs_are_one_line(path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(f"{BASE}{line}\n")
    assert server.run(path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ")
    assert error.count("\n") == 1


def test_a_missing_config_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.run(path) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.spec("U-41", "R-018")
def test_descriptors_are_found_by_the_id_that_they_compute_to(tmp_path: Path) -> None:
    vectors = json.loads((Path(__file__).parents[1] / "protocol/vectors.json").read_text())
    text = vectors["jcs_descriptor"]["text"]
    (tmp_path / "d.json").write_text(text)
    loaded = descriptor.load(text.encode())
    assert load_descriptors([str(tmp_path / "d.json")]) == {descriptor.compat_id(loaded): loaded}
    (tmp_path / "bad.json").write_text("{}")
    for bad in ("bad.json", "none.json"):
        with pytest.raises(ConfigError, match=bad):
            load_descriptors([str(tmp_path / bad)])


async def _started(path: Path) -> asyncio.subprocess.Process:
    code = "import sys, pathlib, services.index.server as s; sys.exit(s.run(pathlib.Path(sys.argv[1])))"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(path), stderr=asyncio.subprocess.PIPE
    )


async def test_the_process_serves_and_stops_on_sigterm(path: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[identities."spiffe://t/is"]\nroles = ["index"]\n')
    address = f"unix:{tmp_path}/is.sock"
    path.write_text(f'listen = "{address}"\npolicy = "{tmp_path}/policy.toml"\nprincipal = "spiffe://t/is"\n')
    process = await _started(path)
    async with open_channel(address) as opened:
        check = health_pb2_grpc.HealthStub(opened).Check
        reply = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert (tmp_path / "is.sock").stat().st_mode & 0o077 == 0
    process.send_signal(signal.SIGTERM)
    _, log = await process.communicate()
    assert process.returncode == 0, log


@pytest.mark.spec("U-39")
async def test_the_principal_must_be_an_index(path: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[identities."spiffe://t/is"]\nroles = ["holder"]\n')
    path.write_text(
        f'listen = "unix:{tmp_path}/is.sock"\npolicy = "{tmp_path}/policy.toml"\nprincipal = "spiffe://t/is"\n'
    )
    process = await _started(path)
    _, log = await process.communicate()
    assert process.returncode == 2
    assert b"not an index" in log
