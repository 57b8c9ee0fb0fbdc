"""Holder and reader on two networks of one machine: octets really cross a link, which can be slow, or gone."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from kvsp.rpc.config import Tls
from tests.services.holder_harness import BASE_URI, HOLDER, POLICY_TEXT
from tests.services.test_rpc_identity import Pki
from tests.ucx.test_holder import GATEWAY, RUN

pytest.importorskip("ucxx", reason="the ucx extra is not installed")

ROOT = Path(__file__).parents[2]
HOLDER_IP, READER_IP, NOBODY_IP = "10.77.0.1", "10.77.0.2", "10.77.0.99"
PORT = 7443
CONFIG = """
listen = "{ip}:{port}"
policy = "{folder}/policy.toml"
principal = "{holder}"
base_uri = "{base_uri}"
arena_octets = 33554432
arena_dir = "{folder}"
index = {{address = "unix:{folder}/none.sock"}}
tls = {{ca = "{tls.ca}", cert = "{tls.cert}", key = "{tls.key}"}}
log_level = "error"
[bulk.ucx]
listen = "{ucx}:0"
"""


def run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Network:
    """Two namespaces, each with an end of one link."""

    holder: str
    reader: str

    def on_holder(self, *command: str) -> str:
        return run("ip", "netns", "exec", self.holder, *command)

    def shape(self, *queue: str) -> None:
        """What leaves the holder; skips where the kernel has no such queue."""
        try:
            self.on_holder("tc", "qdisc", "add", "dev", "data", "root", *queue)
        except OSError as error:
            pytest.skip(str(error))

    @property
    def sent_octets(self) -> int:
        """What has left the holder on the link."""
        links = json.loads(self.on_holder("ip", "-s", "-j", "link", "show", "data"))
        return int(links[0]["stats64"]["tx"]["bytes"])


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(f"kvsp-h-{os.getpid()}", f"kvsp-r-{os.getpid()}")
    ends = ((made.holder, HOLDER_IP), (made.reader, READER_IP))
    try:
        for name, _ in ends:
            run("ip", "netns", "add", name)
        run(
            "ip", "link", "add", "data", "netns", made.holder, "type", "veth", "peer", "data", "netns", made.reader
        )
        for name, ip in ends:
            run("ip", "-n", name, "address", "add", f"{ip}/24", "dev", "data")
            for device in ("lo", "data"):
                run("ip", "-n", name, "link", "set", device, "up")
    except OSError as error:
        _remove(made)
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    _remove(made)


def _remove(network: Network) -> None:
    for name in (network.holder, network.reader):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@dataclass
class Hosts:
    network: Network
    calling: Tls

    @asynccontextmanager
    async def reader(self, command: str, schemes: str) -> AsyncIterator[asyncio.subprocess.Process]:
        tls = self.calling
        words = (f"{HOLDER_IP}:{PORT}", tls.ca, tls.cert, tls.key, command, schemes)
        made = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", self.network.reader, sys.executable, "-m", "tests.ucx.remote_client", *words,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        try:
            yield made
        finally:
            if made.returncode is None:
                made.kill()
            await made.wait()

    async def ask(self, command: str, schemes: str) -> list[dict[str, Any]]:
        """What a reader says until it ends."""
        async with self.reader(command, schemes) as made, asyncio.timeout(60):
            out, err = await made.communicate()
        assert made.returncode == 0, err.decode()
        return said(out)


def said(out: bytes) -> list[dict[str, Any]]:
    """Its own lines: UCX writes to stdout as well."""
    return [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]


@asynccontextmanager
async def hosts(network: Network, folder: Path, ucx: str = HOLDER_IP) -> AsyncIterator[Hosts]:
    pki = Pki(folder)
    address = x509.IPAddress(ipaddress.ip_address(HOLDER_IP))
    serving = pki.issue("h1", x509.UniformResourceIdentifier(HOLDER), address)
    calling = pki.issue("gateway", x509.UniformResourceIdentifier(GATEWAY))
    (folder / "policy.toml").write_text(POLICY_TEXT + f'\n[identities."{GATEWAY}"]\nroles = ["gateway"]\n')
    text = CONFIG.format(
        folder=folder, ip=HOLDER_IP, port=PORT, holder=HOLDER, base_uri=BASE_URI, tls=serving, ucx=ucx
    )
    (folder / "holder.toml").write_text(text)
    command = ["ip", "netns", "exec", network.holder, sys.executable, "-c", RUN, str(folder / "holder.toml")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            async with asyncio.timeout(20):
                while not network.on_holder("ss", "-Hltn", f"sport = :{PORT}"):
                    await asyncio.sleep(0.1)
            yield Hosts(network, calling)
        finally:
            process.kill()


@pytest.mark.parametrize("scheme", ["ucx", "grpc"])
async def test_blocks_cross_the_network(network: Network, tmp_path: Path, scheme: str) -> None:
    async with hosts(network, tmp_path) as made:
        assert await made.ask("put", scheme) == [{"put": scheme}]
        before = network.sent_octets
        *reads, link = await made.ask("get", scheme)
        assert reads == [{"chosen": scheme, "came": scheme, "same": True}] * 5
        assert network.sent_octets - before > 5 * (4 << 20)
        assert link["mbit_per_s"] > 0


@pytest.mark.parametrize("scheme", ["ucx", "grpc"])
async def test_a_slow_link_is_measured_as_one(network: Network, tmp_path: Path, scheme: str) -> None:
    async with hosts(network, tmp_path) as made:
        await made.ask("put", scheme)
        network.shape("tbf", "rate", "200mbit", "burst", "32kb", "latency", "100ms")
        *reads, link = await made.ask("get", scheme)
        assert all(each["same"] for each in reads)
        assert link["mbit_per_s"] <= 210


@pytest.mark.parametrize("scheme", ["ucx", "grpc"])
async def test_a_long_way_is_measured_as_one(network: Network, tmp_path: Path, scheme: str) -> None:
    async with hosts(network, tmp_path) as made:
        await made.ask("put", scheme)
        network.shape("netem", "delay", "20ms")
        *reads, link = await made.ask("get", scheme)
        assert all(each["same"] for each in reads)
        assert link["rtt_us"] >= 20_000


async def test_an_address_that_nobody_answers_is_a_fallback(network: Network, tmp_path: Path) -> None:
    """As behind a filter: the control channel works, and the port that tickets name does not."""
    async with hosts(network, tmp_path, ucx=NOBODY_IP) as made:
        assert await made.ask("put", "ucx,grpc") == [{"put": "grpc"}]
        first, *rest, _ = await made.ask("get", "ucx,grpc")
        assert first == {"chosen": "ucx", "came": "grpc", "same": True}
        assert rest == [{"chosen": "grpc", "came": "grpc", "same": True}] * 4


@pytest.mark.parametrize("schemes", ["ucx", "ucx,grpc"])
async def test_a_network_that_goes_away_ends_the_read(network: Network, tmp_path: Path, schemes: str) -> None:
    async with hosts(network, tmp_path) as made:
        await made.ask("put", "grpc")
        network.shape("tbf", "rate", "20mbit", "burst", "32kb", "latency", "100ms")  # time to go away in
        async with made.reader("stall", schemes) as reader, asyncio.timeout(60):
            assert reader.stdout is not None
            while b"moving" not in await reader.stdout.readline():
                pass
            run("ip", "-n", network.holder, "link", "set", "data", "down")
            out, err = await reader.communicate()
        assert reader.returncode == 0, err.decode()
        assert said(out)[-1] == {"failed": 503, "short": True}
