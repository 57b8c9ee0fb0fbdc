"""What an operator does to a fleet: look, drain, wake, kill and start again."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from deploy.local.fleet import Fleet
from tests.stack.harness import RunningStack

pytestmark = pytest.mark.stack

MODEL = "kvsp-tiny-llama-1"


def kvsp(fleet: RunningStack, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "kvsp.cli.main", *arguments, "--config", str(fleet.layout.config("placement"))]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def ask(fleet: RunningStack, prompt: str, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "kvsp_explain": True, **options}
    url = f"{fleet.frontend}v1/completions"
    reply = fleet.request("POST", url, body, {"content-type": "application/json"})
    assert reply.status == 200, reply.body
    return dict(reply.json())


def wait_active(fleet: RunningStack, *names: str) -> dict[str, int]:
    """Epochs of these instances once they are active."""
    return fleet.background.call(fleet.background.stack.wait_active(*names))


@pytest.mark.spec("R-217")
def test_top_shows_the_fleet(fleet: RunningStack) -> None:
    wait_active(fleet, "ii1", "ii2")
    ask(fleet, "x" * 100)
    shown = kvsp(fleet, "top", "--once")
    assert shown.returncode == 0, shown.stderr
    heading, *lines = shown.stdout.splitlines()
    assert heading.split()[:2] == ["instance", "state"]
    assert [line.split()[:2] for line in lines[:2]] == [["ii1", "active"], ["ii2", "active"]]
    below = lines[lines.index("") :]  # the third instance is listed once it was started
    totals = dict(re.findall(r"^(\w[\w ]*?) {2,}(\S+)", "\n".join(below), re.MULTILINE))
    assert set(totals) == {
        "sessions", "hit ratio", "fetched tokens", "recomputed tokens", "leases", "migrations", "prefetches",
    }  # fmt: skip
    assert totals["hit ratio"].endswith("%")
    assert int(totals["recomputed tokens"].replace(",", "")) >= 4  # 100 tokens are three blocks, and four more


@pytest.mark.spec("R-107", "R-108", "R-109", "R-110", "U-36")
def test_a_drained_instance_gets_no_requests_until_it_is_woken(fleet: RunningStack) -> None:
    prompt = f"{uuid.uuid4()} " * 4
    first = ask(fleet, prompt)["kvsp"][0]["instance"]
    with Fleet(fleet.background) as opened:
        opened.wait_published(prompt)
    name, other = ("ii1", "ii2") if first == fleet.instances["ii1"] else ("ii2", "ii1")
    drained = kvsp(fleet, "instance", "drain", name)
    try:
        assert drained.returncode == 0, drained.stderr
        assert drained.stdout in {f"{name}: draining\n", f"{name}: sleeping\n"}  # it has no session
        # its blocks are still served, by the holder beside it
        again = ask(fleet, prompt)
        assert again["kvsp"][0]["instance"] == fleet.instances[other]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert [each["instance"] for each in again["kvsp"][0]["candidates"]] == [fleet.instances[other]]
    finally:
        woken = kvsp(fleet, "instance", "wake", fleet.instances[name])
    assert (woken.returncode, woken.stdout) == (0, f"{fleet.instances[name]}: active\n"), woken.stderr
    wait_active(fleet, name)
    explained = ask(fleet, prompt)["kvsp"][0]
    running = {fleet.instances["ii1"], fleet.instances["ii2"]}
    assert {each["instance"] for each in explained["candidates"]} == running


def test_an_unknown_instance_is_named_with_those_that_are_known(fleet: RunningStack) -> None:
    refused = kvsp(fleet, "instance", "drain", "ii9")
    assert refused.returncode == 2
    assert refused.stderr == "error: unknown instance 'ii9'; known are ii1, ii2, ii3\n"


def test_without_a_controller_it_is_unavailable(fleet: RunningStack) -> None:
    fleet.stop("placement")
    try:
        refused = kvsp(fleet, "top", "--once")
        assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)
    finally:
        fleet.start("placement")
        wait_active(fleet, "ii1", "ii2")


@pytest.mark.parametrize("missing", ["nothing.toml", "."])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "kvsp.cli.main", "top", "--config", str(tmp_path / missing)]
    refused = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "no such file; name the controller's with --config" in refused.stderr


def test_without_the_server_extra_it_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "placement.toml"
    file.write_text("")
    code = "import sys; sys.modules['grpc'] = None; from kvsp.cli.main import main; main()"
    argv = [sys.executable, "-c", code, "top", "--config", str(file)]
    refused = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "error: grpc is not installed: pip install 'kvsp[server]'\n"


@pytest.mark.spec("R-102")
def test_a_killed_instance_comes_back_with_a_higher_epoch(fleet: RunningStack) -> None:
    before = wait_active(fleet, "ii1", "ii2")
    fleet.background.kill("ii1", "ii1-blocks")
    fleet.background.start_again("ii1-blocks", "ii1")
    after = wait_active(fleet, "ii1", "ii2")
    assert after["ii1"] > before["ii1"]
    assert after["ii2"] == before["ii2"]


@pytest.mark.parametrize("name", ["placement", "ii2", "ii2-blocks", "frontend"])
def test_each_process_of_a_fleet_can_be_killed_and_started_again(fleet: RunningStack, name: str) -> None:
    pid = fleet.pid(name)
    fleet.restart(name)
    assert fleet.pid(name) != pid
    wait_active(fleet, "ii1", "ii2")
    assert ask(fleet, "x" * 40)["usage"]["completion_tokens"] == 4
