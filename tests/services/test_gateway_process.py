"""Gateway, index and holder as real processes: the main flow, a drain, and what the logs hold."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import msgspec
import pytest

from gateway.config import load
from kvsp.rpc.config import ConfigError
from tests.services.gateway_harness import CLIENT, COMPAT, CONFIG, H1, POLICY, SCOPE, make_block

KEY = "cd" * 32

SERVICE = """
listen = "unix:{folder}/{name}.sock"
policy = "{folder}/policy.toml"
principal = "{principal}"
"""
HOLDER = """
base_uri = "{base_uri}"
arena_octets = 67108864
index.address = "unix:{folder}/index.sock"
state_dir = "{folder}"
"""


class UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


class Stack:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "policy.toml").write_text(POLICY)
        index = SERVICE.format(folder=folder, name="index", principal="spiffe://test/is")
        self.start("index", "services.index.server", index)
        holder = SERVICE.format(folder=folder, name="holder", principal="spiffe://test/h1")
        self.start("holder", "services.holder.server", holder + HOLDER.format(folder=folder, base_uri=H1))
        self.start("gateway", "gateway.server", CONFIG.format(folder=folder, holder=H1))
        self.wait("/is/lookup")
        self.wait(f"/h1/blocks/{COMPAT}/{SCOPE}/{KEY}?layers=x")

    def start(self, name: str, module: str, config: str) -> None:
        path = self.folder / f"{name}.toml"
        path.write_text(config)
        code = f"import sys, pathlib, {module} as m; sys.exit(m.run(pathlib.Path(sys.argv[1])))"
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=log)

    def wait(self, target: str) -> None:
        """Until the gateway and the service behind it answer."""
        while True:
            assert all(process.poll() is None for process in self.processes.values()), self.logs()
            try:
                if self.request("POST" if "lookup" in target else "GET", target)[0].status != 503:
                    return
            except OSError:
                pass

    def request(
        self, method: str, target: str, body: bytes | None = None, **headers: str
    ) -> tuple[HTTPResponse, bytes]:
        connection = UnixConnection(self.folder / "gateway.sock")
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, target, body, {"x-forwarded-client-cert": f"URI={CLIENT}"} | fields)
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def stop(self) -> dict[str, int]:
        codes = {}
        for name in reversed(self.processes):
            self.processes[name].send_signal(signal.SIGTERM)
            codes[name] = self.processes[name].wait(30)
        return codes


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    for process in reversed(stack.processes.values()):
        if process.poll() is None:
            process.terminate()  # not kill: a holder that is killed leaves its arena to its successor
            process.wait(30)


@pytest.mark.spec("R-074", "R-090", "R-157", "R-153", "R-160", "R-215", "R-140")
def test_put_find_lease_get_and_stop(stack: Stack) -> None:
    block = make_block(2 << 20, layers=4)
    target = f"/h1/blocks/{COMPAT}/{SCOPE}/{KEY}"
    put = {"content_type": "application/kvsp-block", "if_none_match": "*"}
    assert stack.request("PUT", target, block, **put)[0].status == 201
    assert stack.request("PUT", target, block, **put)[0].status == 412
    digest = {"repr_digest": "sha-256=:" + "A" * 43 + "=:"}
    assert stack.request("PUT", target[:-2] + "00", block, **put, **digest)[0].status == 422
    response, body = stack.request("GET", target)
    assert (response.status, body) == (200, block)
    json = {"content_type": "application/kvsp+json"}
    wanted = msgspec.json.encode({"scope_id": SCOPE, "compat_id": COMPAT, "block_keys": [KEY]})
    for _ in range(2000):  # the holder publishes by itself
        found = msgspec.json.decode(stack.request("POST", "/is/lookup", wanted, **json)[1])
        if found["matched"]:
            break
    assert found["matched"] == 1, stack.logs()
    assert found["replicas"][0][0]["holder"] == H1
    lease = msgspec.json.encode({"block_keys": [KEY], "ttl_ms": 5000})
    response, body = stack.request("POST", "/h1/leases", lease, **json)
    assert response.status == 201
    assert stack.request("DELETE", "/h1/" + response.headers["location"])[0].status == 204
    assert stack.stop() == {"gateway": 0, "holder": 0, "index": 0}
    assert KEY not in stack.logs()


@pytest.mark.spec("D2", "D4")
def test_a_transfer_in_progress_is_finished_before_the_gateway_stops(stack: Stack) -> None:
    block = make_block(8 << 20)
    target = f"/h1/blocks/{COMPAT}/{SCOPE}/{KEY}"
    put = {"content_type": "application/kvsp-block", "if_none_match": "*"}
    assert stack.request("PUT", target, block, **put)[0].status == 201
    connection = UnixConnection(stack.folder / "gateway.sock")
    connection.request("GET", target, headers={"x-forwarded-client-cert": f"URI={CLIENT}"})
    response = connection.getresponse()
    os.kill(stack.processes["gateway"].pid, signal.SIGTERM)
    assert response.read() == block
    assert stack.processes["gateway"].wait(30) == 0
    connection.close()


@pytest.mark.spec("D2")
def test_unusable_config_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text('listen = "0.0.0.0:80"\nprincipal = "x"\nroles = []\n')
    code = "import sys, pathlib, gateway.server as m; sys.exit(m.run(pathlib.Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "without Envoy" in done.stderr


def test_an_unknown_log_level_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text('listen = "unix:/x"\nprincipal = "x"\nroles = []\nlog_level = "loud"\n')
    with pytest.raises(ConfigError, match="loud"):
        load(path, frozenset())
