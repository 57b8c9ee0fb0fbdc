"""The controller as a process: what it starts with, what it refuses, and what kill -9 leaves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import structlog

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import ConfigError, load
from kvsp.rpc.convert import checkpoint_to_message, status_to_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import placement_pb2, placement_pb2_grpc
from services.placement import server
from services.placement.config import PlacementConfig, check_config
from services.placement.settings import Settings
from services.placement.store import SqliteStore
from tests.services.placement_records import PROMPT_TOKENS, A, checkpoint, status
from tests.services.placement_world import POLICY

BASE = """
listen = "unix:{folder}/pc.sock"
policy = "{folder}/policy.toml"
principal = "spiffe://t/pc"
state_dir = "{folder}/state"
index.address = "unix:{folder}/is.sock"
"""
INSTANCE = f'[[instances]]\nbase_uri = "{A}"\naddress = "unix:{{folder}}/ii1.sock"\n'


@pytest.fixture(autouse=True)
def process_wide() -> Iterator[None]:
    """A role that is run in this process sets these for all of it."""
    umask = os.umask(0o022)
    yield
    os.umask(umask)
    structlog.reset_defaults()


def write(folder: Path, more: str = "") -> Path:
    (folder / "policy.toml").write_text(POLICY)
    path = folder / "placement.toml"
    path.write_text(BASE.format(folder=folder) + more.format(folder=folder))
    return path


def test_defaults_are_those_of_the_rules(tmp_path: Path) -> None:
    assert load(write(tmp_path), PlacementConfig).settings() == Settings()


@pytest.mark.spec("R-018", "D10", "D15")
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("unknown = 1\n", "unknown"),
        ("sessions_max = 0\n", "sessions_max"),
        ('principal2 = ""\n', "principal2"),
        ('[[instances]]\nbase_uri = "http://plain.example/"\naddress = "unix:/x"\n', "normalised"),
        ('[[instances]]\nbase_uri = "https://stranger.example/"\naddress = "unix:/x"\n', "not in"),
        (f'[[instances]]\nbase_uri = "{A}"\n', "needs an address"),
        (f'[[instances]]\nbase_uri = "{A}"\naddress = "ii1:5000"\n', "needs \\[tls\\]"),
        ('descriptors = ["{folder}/none.json"]\n', "descriptor"),
        ('scopes.demo = "{folder}/none.key"\n', "scope demo"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.run(write(tmp_path, more)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(reason, error)


def test_another_role_is_refused(tmp_path: Path) -> None:
    config = load(write(tmp_path), PlacementConfig)
    with pytest.raises(ConfigError, match="not a placement controller"):
        check_config(config, Policy([]))


@pytest.mark.spec("R-103")
def test_state_that_another_controller_uses_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SqliteStore(tmp_path / "state" / server.STORE_NAME)
    assert server.run(write(tmp_path)) == 2
    assert "state_dir" in capsys.readouterr().err
    store.close()


@asynccontextmanager
async def running(
    path: Path,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, placement_pb2_grpc.PlacementStub]]:
    """The real process; kill -9 at the end, if it still runs."""
    code = "import sys, pathlib, services.placement.server as m; sys.exit(m.run(pathlib.Path(sys.argv[1])))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(path), env=os.environ)
    try:
        async with open_channel(f"unix:{path.parent}/pc.sock") as channel:
            yield process, placement_pb2_grpc.PlacementStub(channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def report(stub: placement_pb2_grpc.PlacementStub, epoch: int) -> str:
    made = status(A, epoch, ttl_ms=60_000)
    request = placement_pb2.PutStatusRequest(instance_id=party_id(A), status=status_to_message(made))
    async with translated():
        metadata = speak_for("spiffe://t/ii1")
        reply = await stub.PutStatus(request, metadata=metadata, wait_for_ready=True, timeout=30)
    return str(reply.state)


async def put(stub: placement_pb2_grpc.PlacementStub, offset: int) -> placement_pb2.PutCheckpointReply:
    made = checkpoint(1, 1, offset)
    request = placement_pb2.PutCheckpointRequest(session=made.session, checkpoint=checkpoint_to_message(made))
    async with translated():
        return await stub.PutCheckpoint(request, metadata=speak_for("spiffe://t/ii1"), timeout=30)


@pytest.mark.spec("D12", "R-103")
async def test_an_operator_takes_an_instance_back_with_a_command(tmp_path: Path) -> None:
    path = write(tmp_path, INSTANCE)
    async with running(path) as (_, stub):
        await report(stub, 2**53 - 1)
    async with running(path) as (_, stub):  # nobody has reported to this one, so nothing has to expire
        with pytest.raises(KvspError) as error:
            await report(stub, 12)
        assert error.value.problem == registry.STALE_EPOCH
        for name, told in (("ii9", "unknown instance"), (A, "")):
            made = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvsp.cli.main", "instance", "reset-epoch", name, "--config", str(path),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, errors = await made.communicate()
            assert (made.returncode == 0, told in errors.decode()) == (not told, True), errors
        assert out.decode() == f"{A}: epoch {2**53 - 1} forgotten\n"
        assert await report(stub, 12) == "active"


@pytest.mark.spec("R-103", "R-172", "R-173", "D12")
async def test_kill_9_loses_no_epoch_session_or_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, INSTANCE)
    acknowledged = 0
    async with running(path) as (process, stub):
        assert await report(stub, 12) == "active"
        start = checkpoint_to_message(checkpoint(1, 0))
        request = placement_pb2.AssignRequest(start=start, prompt_tokens=PROMPT_TOKENS)
        made = await stub.Assign(request, metadata=speak_for("spiffe://t/fe"), timeout=30)
        assert (made.binding.instance, made.binding.epoch) == (A, 1)

        async def keep_on() -> None:
            nonlocal acknowledged
            for offset in range(1, 100_000):
                acknowledged = (await put(stub, offset)).output_offset
                if offset == 40:
                    process.send_signal(signal.SIGKILL)

        with pytest.raises(KvspError) as error:
            await keep_on()
        assert error.value.problem == registry.UNAVAILABLE
    async with running(path) as (process, stub):
        with pytest.raises(KvspError) as error:
            await report(stub, 11)
        assert error.value.problem == registry.STALE_EPOCH
        assert await report(stub, 12) == "active"
        follower = stub.Follow(
            placement_pb2.SessionName(session=checkpoint(1).session),
            metadata=speak_for("spiffe://t/fe"),
            timeout=30,
        )
        binding = await follower.read()
        assert (binding.instance, binding.epoch) == (A, 1)
        reply = await put(stub, 1)
        assert (reply.created, reply.epoch) == (False, 1)
        assert reply.output_offset >= acknowledged >= 40
        # And it drains: kept streams end, the process stops by itself.
        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError):
            await follower.read()
        assert await process.wait() == 0
