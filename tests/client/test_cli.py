from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvsp.cli import report
from kvsp.cli.main import app
from kvsp.client import Credentials
from kvsp.protocol import container, descriptor, digests, keys, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import LookupReply
from tests.client.peers import GEOMETRY, KEY, SCOPE, Peer, container_of, layer_digests_of, record_of, select

Serve = Callable[..., Peer]
Run = Callable[..., Result]
VECTORS = json.loads((Path(__file__).parent.parent / "protocol" / "vectors.json").read_bytes())
DESCRIPTOR: dict[str, Any] = json.loads(descriptor.canonical(GEOMETRY))
COMPAT = descriptor.compat_id(GEOMETRY).hex()


@pytest.fixture
def run(workdir: Path) -> Run:
    (workdir / "d.json").write_text(json.dumps(DESCRIPTOR))

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return invoke


@pytest.fixture
def stack(serve: Serve, run: Run, workdir: Path, credentials: Credentials, octets: bytes) -> dict[str, Peer]:
    """An index and two holders, and the endpoints.json that tells of them."""
    peers = {"is": serve(), "h1": serve(octets=octets), "h2": serve(octets=octets)}
    (workdir / ".kvsp").mkdir()
    identity = {"uri": "spiffe://kvsp.local/x", "cert": str(credentials.cert), "key": str(credentials.key)}
    body = {
        "ca": str(credentials.ca),
        "roles": {
            "index": peers["is"].base,
            "holders": {"h1": peers["h1"].base},
            "instances": {"ii1": peers["h2"].base},
        },
        "identities": {"client-demo": identity},
        "scopes": {"demo": {"scope_id": SCOPE, "key_file": "demo.key"}},
        "descriptor": "d.json",
    }
    (workdir / ".kvsp" / "endpoints.json").write_text(json.dumps(body))
    records = [[record_of(peers[name].base, octets, compat_id=COMPAT) for name in ("h1", "h2")]]
    peers["is"].replies["POST lookup"] = (200, json.loads(_encode(LookupReply(1, records))))
    peers["is"].replies["DELETE replicas"] = (204, None)
    return peers


def _encode(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def test_help_states_every_exit_code(run: Run) -> None:
    text = " ".join(run("--help").stdout.split())
    for code, meaning in report.EXIT_CODES.items():
        assert f"{code} {meaning}" in text


@pytest.mark.spec("R-066")
def test_a_failure_exits_by_its_class() -> None:
    rows = [
        (registry.NOT_FOUND, 1), (registry.LAYERS_UNAVAILABLE, 1), (registry.BAD_REQUEST, 2),
        (registry.CONTENT_TOO_LARGE, 2), (registry.FORBIDDEN, 3), (registry.SCOPE_DENIED, 3),
        (registry.UNAVAILABLE, 4), (registry.GATEWAY_TIMEOUT, 4), (registry.INTERNAL, 4),
        (registry.DIGEST_MISMATCH, 5), (registry.LEASE_QUOTA, 6), (registry.INCOMPATIBLE, 6),
    ]  # fmt: skip
    assert [report.exit_code(KvspError(problem)) for problem, _ in rows] == [code for _, code in rows]
    assert report.exit_code(KvspError.from_problem(471, {})) == 2
    assert report.exit_code(KvspError.from_problem(599, {})) == 4
    assert report.exit_code(KvspError.from_problem(307, {})) == 4


@pytest.mark.spec("R-035", "R-030")
def test_inspect_shows_the_header_and_every_digest(run: Run, workdir: Path, octets: bytes) -> None:
    (workdir / "block").write_bytes(octets)
    found = json.loads(run("inspect", "block", "--json", "--descriptor", "d.json").stdout)
    expected = layer_digests_of(octets)
    assert [row["digest"] for row in found["layers"]] == [digest.hex() for digest in expected]
    assert found["digest"] == digests.format_digest(digests.replica_digest(expected))
    assert (found["codec_name"], found["token_count"], found["total_octets"]) == ("raw", 16, len(octets))
    assert (found["whole_block"], found["compat_id"]) == (True, COMPAT)
    human = run("inspect", "block")
    assert human.exit_code == 0
    assert all(digest.hex() in human.stdout for digest in expected)
    (workdir / "part").write_bytes(select(octets, 1, 2))
    part = json.loads(run("inspect", "part", "--json", "--descriptor", "d.json").stdout)
    assert "digest" not in part
    assert ([row["layer"] for row in part["layers"]], part["whole_block"]) == ([1, 2], False)


@pytest.mark.spec("R-030", "R-033", "D5")
def test_inspect_tells_what_is_wrong_in_one_line(run: Run, workdir: Path, octets: bytes) -> None:
    cases = {
        "truncated": (octets[:-1], 2),
        "longer": (octets + b"\0", 2),
        "empty": (b"", 2),
        "other": (b"GIF89a" + bytes(50), 2),
        "unfit": (container_of(4, 100), 6),
    }
    for name, (content, code) in cases.items():
        (workdir / name).write_bytes(content)
        result = run("inspect", name, "--descriptor", "d.json")
        assert result.exit_code == code, name
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""
    assert run("inspect", "absent").exit_code == 2


@pytest.mark.spec("R-021", "R-022", "R-023", "R-015")
def test_keys_reproduce_the_vectors(run: Run, workdir: Path) -> None:
    text = json.dumps(DESCRIPTOR | {"block_tokens": 4})
    (workdir / "four.json").write_text(text)
    secret = bytes(range(32))
    (workdir / "scope.key").write_text(secret.hex() + "\n")
    tokens = [128000, 791, 6460, 374, 264, 1296, 315, 279, 5]
    compat = descriptor.compat_id(descriptor.load(text.encode()))
    expected = [key.hex() for key in keys.block_keys(keys.ScopeKey(secret), compat, tokens, 4)]
    arguments = ("keys", "--scope-key-file", "scope.key", "--descriptor", "four.json", "--tokens", "-")
    for stdin in (json.dumps(tokens), " ".join(map(str, tokens)), ",\n".join(map(str, tokens))):
        result = run(*arguments, "--json", stdin=stdin)
        found = json.loads(result.stdout)
        assert found["scope_id"] == "6d1c6481cd428737da312c089db3832a"
        assert (found["block_keys"], found["tail_tokens"]) == (expected, 1)
        assert secret.hex() not in result.output
    assert run(*arguments, stdin=json.dumps(tokens)).stdout.split() == expected
    assert json.loads(run(*arguments, "--json", stdin="[]").stdout)["block_keys"] == []
    for bad in ("[-1]", "4294967296", "1.5", "true", "1_0", "٣"):
        assert run(*arguments, stdin=bad).exit_code == 2, bad
    (workdir / "scope.key").write_text("00" * 31)
    assert run(*arguments, stdin="1").exit_code == 2


@pytest.mark.spec("R-015", "R-010", "R-013")
def test_compat_id_is_that_of_the_descriptor(run: Run, workdir: Path) -> None:
    assert run("compat-id", "d.json").stdout.strip() == COMPAT
    assert json.loads(run("compat-id", "d.json", "--json").stdout) == {
        "compat_id": COMPAT,
        "descriptor": DESCRIPTOR,
    }
    (workdir / "bad.json").write_text(json.dumps(DESCRIPTOR | {"adapters": []}))
    result = run("compat-id", "bad.json")
    assert result.exit_code == 2
    assert "bad.json" in result.stderr
    assert run("compat-id").exit_code == 2
    assert run("compat-id", "--model", "absent").exit_code == 2


@pytest.mark.spec("R-012")
def test_compat_id_covers_the_weights_of_a_model_directory(run: Run, workdir: Path) -> None:
    import hashlib

    transformers = pytest.importorskip("transformers")
    model = workdir / "tiny"
    transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2).save_pretrained(model)
    parts = {"b.safetensors": b"2", "B.safetensors": b"1", "a.safetensors": b"0"}
    for name, content in parts.items():
        (model / name).write_bytes(content)
    (model / "tokenizer.json").write_bytes(b"{}")
    result = run("compat-id", "--model", "tiny", "--block-tokens", "8", "--write", "out.json", "--json")
    found = json.loads(result.stdout)["descriptor"]
    assert found["model_digest"] == "sha-256:" + hashlib.sha256(b"102").hexdigest()
    assert (found["model"], found["layers"], found["block_tokens"]) == ("tiny", 2, 8)
    assert run("compat-id", "out.json").stdout.strip() == json.loads(result.stdout)["compat_id"]


def test_lookup_prints_every_replica_and_exits_by_outcome(run: Run, stack: dict[str, Peer]) -> None:
    found = json.loads(run("lookup", KEY, "--json").stdout)
    assert found["matched"] == 1
    assert [row["holder"] for row in found["replicas"][0]] == [stack["h1"].base, stack["h2"].base]
    human = run("lookup", "-", "--target", "ii1", stdin=f"{KEY}\n")
    assert "matched 1 of 1" in human.stdout
    assert stack["h1"].base in human.stdout
    assert json.loads(stack["is"].bodies[-1])["targets"] == [stack["h2"].base]
    stack["is"].replies["POST lookup"] = (200, {"matched": 0, "replicas": []})
    assert run("lookup", KEY).exit_code == 1
    denied = {"type": registry.SCOPE_DENIED.uri, "status": 403, "detail": "not\nyours"}
    stack["is"].replies["POST lookup"] = (403, denied)
    result = run("lookup", KEY)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert result.stderr == f"error: {registry.SCOPE_DENIED.title}: not yours\n"
    local = run("lookup", "zz")
    assert (local.exit_code, local.stderr.startswith("error: block_keys")) == (2, True)
    assert run("lookup", KEY, "--scope", "nobody").exit_code == 2
    assert run("lookup", KEY, "--as", "nobody").exit_code == 2
    assert run("lookup", KEY, "--endpoints", "absent.json").exit_code == 2


@pytest.mark.spec("R-155", "R-161", "R-162")
def test_get_writes_only_what_was_verified(run: Run, stack: dict[str, Peer], workdir: Path, octets: bytes) -> None:
    stack["h1"].mode = "corrupt"
    found = json.loads(run("get", KEY, "whole", "--json").stdout)
    assert (workdir / "whole").read_bytes() == octets
    assert found == {
        "holder": stack["h2"].base,
        "layers": [0, 3],
        "octets": len(octets),
        "verified": True,
    }
    assert stack["is"].count("DELETE") == 1
    assert run("get", KEY, "part", "--layers", "1-2", "--holder", "ii1").exit_code == 0
    assert (workdir / "part").read_bytes() == select(octets, 1, 2)
    piped = run("get", KEY, "-", "--holder", "ii1", "--json")
    assert (piped.stdout_bytes, json.loads(piped.stderr)["layers"]) == (octets, [0, 3])
    assert "verified" in run("get", KEY, "-", "--holder", "ii1").stderr
    bad = run("get", KEY, "bad", "--holder", "h1")
    assert bad.exit_code == 5
    assert not (workdir / "bad").exists()
    assert run("get", KEY, "bad", "--holder", "h1", "--no-verify").exit_code == 0
    assert container.parse_header((workdir / "bad").read_bytes()).layer_count == 4
    stack["h1"].mode = "shifted"
    assert run("get", KEY, "out", "--holder", "h1").exit_code == 5
    assert run("get", KEY, "out", "--holder", "h1", "--compat", COMPAT).exit_code == 0  # of no known geometry
    assert run("get", KEY, "out", "--compat", "00" * 32, "--descriptor", "d.json").exit_code == 6
    for layers in ("2-1", "x", "-1-2", "1"):
        assert run("get", KEY, "out", "--layers", layers).exit_code == 2
    stack["h2"].mode = "missing"
    assert run("get", KEY, "out", "--holder", "ii1").exit_code == 1
    assert run("get", KEY, "out", "--holder", "https://localhost:1/").exit_code == 3  # not registered
    stack["is"].replies["POST lookup"] = (200, {"matched": 0, "replicas": []})
    assert run("get", KEY, "out").exit_code == 1


@pytest.mark.spec("R-157")
def test_put_stores_a_block_once(run: Run, stack: dict[str, Peer], workdir: Path, octets: bytes) -> None:
    (workdir / "block").write_bytes(octets)
    assert json.loads(run("put", "block", KEY, "--holder", "h1", "--json").stdout)["stored"]
    assert not json.loads(run("put", "-", KEY, "--holder", "h1", "--json", stdin=octets).stdout)["stored"]
    assert list(stack["h1"].stored.items()) == [(f"/blocks/{COMPAT}/{SCOPE}/{KEY}", octets)]
    (workdir / "block").write_bytes(octets[:-1])
    assert run("put", "block", KEY, "--holder", "h1").exit_code == 2


def test_an_unreachable_peer_is_told_in_one_line(run: Run, stack: dict[str, Peer], workdir: Path) -> None:
    path = workdir / ".kvsp" / "endpoints.json"
    body = json.loads(path.read_text())
    body["roles"]["index"] = "https://localhost:1/is/"
    path.write_text(json.dumps(body))
    result = run("lookup", KEY)
    assert result.exit_code == 4
    assert result.stderr.startswith("error: localhost:1: ")
    assert result.stderr.count("\n") == 1
