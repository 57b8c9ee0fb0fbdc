"""What an instance is in its configuration, to its placement controller, and across restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec import structs

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Policy
from kvsp.rpc.config import ConfigError, load
from kvsp.v1 import placement_pb2_grpc
from services.instance.config import InstanceConfig, check_identity, check_parties
from services.instance.controller import Reporter
from services.instance.epoch import next_epoch
from services.instance.server import _load as load_engine_of
from services.instance.server import _settings as settings_of
from services.instance.server import run
from services.instance.settings import Settings
from services.instance.state import InstanceState
from services.instance.tiers import TierNews
from tests.services.instance_rig import II, URIS, Controller, policy_text, until
from tests.services.rpc import served

NOW_MS = 1_700_000_000_000

CONFIG = f"""
listen = "unix:{{folder}}/ii1.sock"
policy = "{{folder}}/policy.toml"
principal = "{II}"
base_uri = "{URIS["ii1"]}"
model = "{{folder}}/model"
block_tokens = 8
placement = {{{{base_uri = "{URIS["pc"]}", address = "unix:{{folder}}/pc.sock"}}}}
index = {{{{address = "unix:{{folder}}/is.sock"}}}}
holder = {{{{address = "unix:{{folder}}/blocks.sock"}}}}
holders = [{{{{base_uri = "{URIS["h1"]}", address = "unix:{{folder}}/h1.sock"}}}}]
durable = ["{URIS["h1"]}"]
scopes = {{{{one = "{{folder}}/scope.key"}}}}
state_dir = "{{folder}}/state"
status_ttl_ms = 600
"""


def write_config(folder: Path, **changes: str) -> Path:
    path = folder / "instance.toml"
    lines = [line for line in CONFIG.format(folder=folder).splitlines() if line.split(" ")[0] not in changes]
    path.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in changes.items())]))
    (folder / "policy.toml").write_text(policy_text())
    key_file = folder / "scope.key"
    key_file.write_bytes(b"s" * 32)
    key_file.chmod(0o600)
    return path


# --- epoch ----------------------------------------------------------------------------


@pytest.mark.spec("R-102")
def test_the_epoch_rises_at_every_start(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert next_epoch(state, NOW_MS) == NOW_MS
    assert next_epoch(state, NOW_MS) == NOW_MS + 1  # twice within a millisecond
    assert next_epoch(state, NOW_MS - 3_600_000) == NOW_MS + 2  # the clock was set back
    assert next_epoch(state, NOW_MS + 50) == NOW_MS + 50
    (state / "epoch.new").write_text("cut off")  # by a crash while writing
    assert next_epoch(state, NOW_MS) == NOW_MS + 51


@pytest.mark.parametrize("text", ["", "x", "9007199254740991", "-5"])
def test_an_epoch_that_cannot_be_continued_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "epoch").write_text(text)
    if text == "-5":
        assert next_epoch(tmp_path, NOW_MS) == NOW_MS
        return
    with pytest.raises(ConfigError, match="epoch"):
        next_epoch(tmp_path, NOW_MS)


# --- configuration --------------------------------------------------------------------


def test_a_full_configuration(tmp_path: Path) -> None:
    config = load(write_config(tmp_path), InstanceConfig)
    policy = Policy.load(policy_text())
    assert check_identity(config, policy).uri == II
    check_parties(config, policy)
    assert config.placement.peer is not None


async def test_the_engine_is_made_as_configured(tmp_path: Path) -> None:
    from deploy.local.model import TINY, ensure_model

    model, _ = ensure_model(tmp_path, TINY)
    made = {"model": f'"{model}"', "chunk_tokens": "24", "kv_octets": str(1 << 20), "batch_invariant": "false"}
    config = load(write_config(tmp_path, **made), InstanceConfig)
    engine = await asyncio.to_thread(load_engine_of, config, TierNews())
    assert engine.chunk_tokens == 24
    settings = settings_of(config, engine, 1)
    assert settings.positions_max == (1 << 20) * 8 // engine.descriptor.payload_octets
    assert not settings.batch_invariant


@pytest.mark.spec("D10", "R-211")
@pytest.mark.parametrize(
    "changes",
    [
        {"base_uri": f'"{URIS["h1"]}"'},
        {"principal": '"spiffe://t/h1"'},
        {"principal": '"spiffe://t/nobody"'},
        {"durable": f'["{URIS["h2"]}"]'},
        {"holders": '[{base_uri = "https://stranger.example/", address = "unix:/x"}]', "durable": "[]"},
        {"holders": f'[{{base_uri = "{URIS["h1"]}"}}]'},  # no address and no [https]
        {"holders": f'[{{base_uri = "{URIS["ii1"]}", address = "unix:/x"}}]', "durable": "[]"},
        {"placement": '{base_uri = "no uri", address = "unix:/x"}'},
        {"status_ttl_ms": "60001"},
        {"block_tokens": "0"},
        {"kv_octets": "0"},
        {"chunk_tokens": "0"},
        {"nonsense": "1"},
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    path = write_config(tmp_path, **changes)
    policy = Policy.load(policy_text())

    def check() -> None:
        config = load(path, InstanceConfig)
        check_identity(config, policy)
        check_parties(config, policy)

    with pytest.raises(ConfigError):
        check()


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert run(write_config(tmp_path)) == 2
    finally:
        structlog.reset_defaults()
    assert capsys.readouterr().err.startswith(f"error: model {tmp_path}/model: ")


# --- reporting ------------------------------------------------------------------------


class Slow:
    """A controller whose every reply is the test's."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.replies: asyncio.Queue[str | KvspError] = asyncio.Queue()

    async def put_status(self, status: Any) -> str:
        self.taken.append(status.running)
        reply = await self.replies.get()
        if isinstance(reply, KvspError):
            raise reply
        return reply

    async def put_checkpoint(self, checkpoint: Any) -> Any:
        raise AssertionError


@asynccontextmanager
async def reporter(controller: Slow) -> AsyncIterator[tuple[Reporter, list[Any]]]:
    told: list[Any] = []
    made = Reporter(controller, lambda status, view: told.append((status.running, view)), told.append)
    task = asyncio.create_task(made.run())
    yield made, told
    task.cancel()


async def test_no_status_overtakes_another() -> None:
    state = InstanceState(Settings(base_uri=URIS["ii1"], epoch=1, compat_id="11" * 32, block_tokens=8,
                                   positions_max=99), {}, lambda _: (), 0)  # fmt: skip
    state.tick(0)
    status = state.instructions()[0].status  # type: ignore[union-attr]
    controller = Slow()
    async with reporter(controller) as (made, told):
        made.report(structs.replace(status, running=1))
        await until(lambda: controller.taken == [1])
        for running in (2, 3, 4):
            made.report(structs.replace(status, running=running))
        controller.replies.put_nowait("active")
        await until(lambda: controller.taken == [1, 4])
        controller.replies.put_nowait(KvspError(registry.STALE_EPOCH))
        await made.sent()
        assert told == [(1, "active"), registry.STALE_EPOCH]


# --- as a process ---------------------------------------------------------------------


@asynccontextmanager
async def process(config: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    code = "from pathlib import Path; from services.instance.server import run; raise SystemExit(run(Path({!r})))"
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code.format(str(config)), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            os.kill(started.pid, signal.SIGKILL)
            await started.wait()


@pytest.mark.spec("R-102", "R-100", "U-37")
async def test_a_process_reports_until_it_is_told_to_stop(tmp_path: Path) -> None:
    from deploy.local.model import TINY, ensure_model

    model, _ = ensure_model(tmp_path, TINY)
    config = write_config(tmp_path, model=f'"{model}"')
    controller = Controller()

    def register(target: Any) -> None:
        placement_pb2_grpc.add_PlacementServicer_to_server(controller, target)

    # Its clock is far behind what is on disk: the counter goes on from there.
    before = 4_000_000_000_000
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "epoch").write_text(str(before))
    async with served(f"unix:{tmp_path}/pc.sock", register), process(config) as started:
        async with asyncio.timeout(90):
            while len(controller.statuses) < 3:
                await asyncio.sleep(0.01)
        started.send_signal(signal.SIGTERM)
        _, log = await started.communicate()
        assert started.returncode == 0
    assert controller.statuses[0].epoch == before + 1
    assert controller.statuses[-1].state == "failed"
    events = [json.loads(line)["event"] for line in log.decode().splitlines()]
    assert "serving" in events
    assert "unexpected" not in events
