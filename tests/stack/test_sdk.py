"""The SDK and the `kvsp` tool against the real stack: Envoy, gateway, index, holder."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvsp.cli.main import app
from kvsp.client import AsyncClient, BlockUnavailable, Client, Options, Stack, load_stack
from kvsp.protocol import container, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import block_keys
from kvsp.protocol.records import LookupReply
from tests.stack.harness import LARGE, SMALL, RunningStack

QUICKSTART = Path(__file__).parents[2] / "docs/quickstart.md"
pytestmark = pytest.mark.stack


@pytest.fixture
def demo(stack: RunningStack) -> Stack:
    return load_stack(stack.layout.endpoints, "client-demo")


@pytest.fixture
def client(demo: Stack) -> Iterator[Client]:
    with Client(demo.credentials, demo.endpoints, Options(total_s=30)) as one:
        yield one


def fresh_keys(stack: RunningStack, descriptor: Descriptor, blocks: int) -> list[str]:
    """Keys of a prompt that no other test has."""
    tokens = [secrets.randbelow(2**32) for _ in range(blocks * descriptor.block_tokens)]
    compat = bytes.fromhex(stack.compat_id(descriptor))
    return [key.hex() for key in block_keys(stack.scope_key(), compat, tokens, descriptor.block_tokens)]


def block_of(descriptor: Descriptor) -> bytes:
    sections = [secrets.token_bytes(2 * descriptor.section_octets) for _ in range(descriptor.layers)]
    half = descriptor.section_octets
    return container.build(0, descriptor.block_tokens, [(each[:half], each[half:]) for each in sections])


def published(client: Client, scope: str, compat: str, keys: list[str]) -> LookupReply:
    """The lookup once the holder's publication has reached the index."""
    end = time.monotonic() + 20
    while (reply := client.lookup(scope, compat, keys)).matched < len(keys):
        assert time.monotonic() < end, "not published"
    return reply


@pytest.mark.parametrize("descriptor", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.spec("R-155", "R-157", "R-090", "R-092", "R-151", "U-32", "U-54")
def test_what_was_put_is_found_and_fetched_whole_and_by_layers(
    stack: RunningStack, client: Client, descriptor: Descriptor
) -> None:
    scope, compat = stack.scope_id(), stack.compat_id(descriptor)
    keys = fresh_keys(stack, descriptor, 3)
    blocks = [block_of(descriptor) for _ in keys]
    for key, octets in zip(keys, blocks, strict=True):
        assert client.put(stack.holder, compat, scope, key, octets)
    assert not client.put(stack.holder, compat, scope, keys[0], blocks[1])
    found = published(client, scope, compat, keys)
    for octets, replicas in zip(blocks, found.replicas, strict=True):
        header = container.parse_header(octets)
        assert [record.holder for record in replicas] == [stack.holder]
        assert client.get(replicas).payload == octets[header.header_octets :]
        room = bytearray(header.payload_octets)
        part = client.get(replicas, layers=(1, 2), into=room)
        start, _ = header.layer_span(1)
        assert part.payload == octets[header.header_octets + start :][: len(part.payload)]
        given = b"".join(bytes(layer.k) + bytes(layer.v) for layer in client.get_layers(replicas))
        assert given == octets[header.header_octets :]
        info = client.head(stack.holder, compat, scope, replicas[0].block_key)
        assert info.octets == len(octets)


@pytest.mark.spec("R-063")
def test_http2_is_negotiated(stack: RunningStack, client: Client) -> None:
    def connections() -> int:
        url = f"{stack.endpoints['envoy_admin']}/stats?filter=downstream_cx_http2_total&format=json"
        with urllib.request.urlopen(url) as reply:
            rows = json.load(reply)["stats"]
        return sum(row["value"] for row in rows if "admin" not in row["name"])

    before = connections()
    for _ in range(3):
        client.lookup(stack.scope_id(), stack.compat_id(SMALL), [])
    assert connections() == before + 1


@pytest.mark.spec("R-088", "R-150", "R-200")
def test_a_miss_is_not_found_and_a_foreign_scope_is_denied(stack: RunningStack, client: Client) -> None:
    compat, key = stack.compat_id(SMALL), fresh_keys(stack, SMALL, 1)[0]
    assert client.lookup(stack.scope_id(), compat, [key]).matched == 0
    with pytest.raises(BlockUnavailable) as missed:
        client.get_from(stack.holder, compat, stack.scope_id(), key)
    assert missed.value.problem == registry.NOT_FOUND
    with pytest.raises(KvspError) as denied:
        client.lookup(stack.scope_id("other"), compat, [key])
    assert denied.value.problem == registry.SCOPE_DENIED


@pytest.mark.spec("R-033", "U-25", "R-160")
def test_an_unfit_or_misdigested_put_stores_nothing(stack: RunningStack, client: Client) -> None:
    scope, compat = stack.scope_id(), stack.compat_id(SMALL)
    key = fresh_keys(stack, SMALL, 1)[0]
    with pytest.raises(KvspError) as unfit:
        client.put(stack.holder, compat, scope, key, container.build(0, 4, [(b"k", b"v")]))
    assert unfit.value.problem == registry.INCOMPATIBLE
    with pytest.raises(KvspError) as bad:
        client.put(stack.holder, compat, scope, key, block_of(SMALL), sha256=bytes(32))
    assert bad.value.problem == registry.DIGEST_MISMATCH
    with pytest.raises(KvspError) as none:
        client.head(stack.holder, compat, scope, key)
    assert none.value.status == 404


@pytest.mark.spec("R-140", "R-142")
def test_a_lease_is_renewed_and_an_unknown_block_is_not_leased(stack: RunningStack, client: Client) -> None:
    scope, compat = stack.scope_id(), stack.compat_id(SMALL)
    keys = fresh_keys(stack, SMALL, 2)
    for key in keys:
        client.put(stack.holder, compat, scope, key, block_of(SMALL))
    with client.lease(stack.holder, keys, 600, scope_id=scope, compat_id=compat) as lease:
        assert lease.wait_renewed(2, 30)
        lease.check()
    with (
        pytest.raises(KvspError) as unknown,
        client.lease(stack.holder, fresh_keys(stack, SMALL, 1), 600, scope_id=scope),
    ):
        pytest.fail("leased what is not there")
    assert unknown.value.status == 404


async def test_the_asynchronous_client_fetches_what_it_put(stack: RunningStack, demo: Stack) -> None:
    scope, compat = stack.scope_id(), stack.compat_id(SMALL)
    key, octets = fresh_keys(stack, SMALL, 1)[0], block_of(SMALL)
    async with AsyncClient(demo.credentials, demo.endpoints) as client:
        assert await client.put(stack.holder, compat, scope, key, octets)
        block = await client.get_from(stack.holder, compat, scope, key)
        assert block.payload == octets[block.header.header_octets :]


def test_the_shell_commands_of_the_quickstart_run_as_printed(stack: RunningStack, tmp_path: Path) -> None:
    example = re.search(
        r"<!-- tests/stack/test_sdk.py runs this -->\n```sh\n(.*?)```", QUICKSTART.read_text(), re.DOTALL
    )
    assert example is not None
    home = tmp_path / ".kvsp"
    home.mkdir()
    (home / "scopes").symlink_to(stack.layout.home / "scopes")
    (home / "descriptor.json").symlink_to(stack.endpoints["descriptor"])
    script = example[1].replace("seq 64", f"seq {secrets.randbelow(2**31)} 9999999999 | head -n 64")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "KVSP_HOME": str(stack.layout.home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^stored +True$", done.stdout, re.MULTILINE)
    assert "matched 1 of 16" in done.stdout
    assert re.search(r"^whole_block +True$", done.stdout, re.MULTILINE)


def test_the_tool_moves_a_block_there_and_back(stack: RunningStack, client: Client, tmp_path: Path) -> None:
    scope, compat = stack.scope_id(), stack.compat_id(SMALL)
    key, octets = fresh_keys(stack, SMALL, 1)[0], block_of(SMALL)
    (tmp_path / "block").write_bytes(octets)
    common = ["--compat", compat, "--endpoints", str(stack.layout.endpoints), "--as", "client-demo", "--json"]

    def run(*arguments: str) -> object:
        result = CliRunner().invoke(app, [*arguments, *common])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert run("put", str(tmp_path / "block"), key, "--holder", "h1")
    published(client, scope, compat, [key])
    assert run("lookup", key)
    assert run("get", key, str(tmp_path / "copy"), "--layers", "0-3")
    assert (tmp_path / "copy").read_bytes() == octets
    other = ["--endpoints", str(stack.layout.endpoints), "--as", "client-other", "--compat", compat]
    assert CliRunner().invoke(app, ["lookup", key, *other]).exit_code == 3
