"""frontend.toml: what it must say, what is refused, and a process that runs with it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.toml import dumps
from kvsp.connectors.describe import describe, tokenizer_digest
from kvsp.protocol import descriptor
from kvsp.protocol.descriptor import Descriptor
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import ConfigError, load, load_policy
from services.frontend.config import FrontendConfig, check, load_served
from services.frontend.tokenizer import Tokenizer
from tests.services.frontend_harness import BASE, CONTEXT, II1, II2, SCOPES, World, asked, make_model, world

POLICY = f"""
[identities."spiffe://t/fe"]
roles = ["frontend"]
base_uris = ["{BASE}"]
scopes = ["{{demo}}", "{{other}}"]
[identities."spiffe://t/demo"]
roles = ["client"]
scopes = ["{{demo}}"]
[identities."spiffe://t/ii"]
roles = ["instance"]
base_uris = ["{II1}", "{II2}"]
[identities."spiffe://t/placement"]
roles = ["placement"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture
def document(tmp_path: Path, model: Path) -> dict[str, Any]:
    """A config that is in order, with all its files."""
    from tests.services.frontend_harness import IDS

    (tmp_path / "policy.toml").write_text(POLICY.format(**IDS))
    for name, key in SCOPES.items():
        (tmp_path / name).write_text(key.reveal().hex())
        (tmp_path / name).chmod(0o600)
    described = Descriptor(
        model="tiny-1", model_digest=f"sha-256:{'0' * 64}", tokenizer_digest=tokenizer_digest(model), layers=1,
        kv_heads=1, head_dim=8, kv_dtype="fp32", positional="rope", block_tokens=4, layout="kvsp-layout-1",
    )  # fmt: skip
    (tmp_path / "descriptor.json").write_bytes(descriptor.canonical(described))
    return {
        "listen": f"unix:{tmp_path}/fe-process.sock",
        "policy": f"{tmp_path}/policy.toml",
        "principal": "spiffe://t/fe",
        "base_uri": BASE,
        "model": str(model),
        "descriptor": f"{tmp_path}/descriptor.json",
        "placement": {"address": f"unix:{tmp_path}/placement.sock"},
        "instances": [
            {"base_uri": II1, "address": f"unix:{tmp_path}/ii1.sock"},
            {"base_uri": II2, "address": f"unix:{tmp_path}/ii2.sock"},
        ],
        "scopes": {name: f"{tmp_path}/{name}" for name in SCOPES},
    }


def config_of(folder: Path, document: dict[str, Any]) -> FrontendConfig:
    (folder / "fe.toml").write_text(dumps(document))
    return load(folder / "fe.toml", FrontendConfig)


def checked(folder: Path, document: dict[str, Any]) -> Any:
    config = config_of(folder, document)
    return check(config, load_policy(config.policy))


def test_what_is_served(tmp_path: Path, document: dict[str, Any], tokenizer: Tokenizer) -> None:
    scopes = checked(tmp_path, document)
    served = load_served(config_of(tmp_path, document), scopes, tokenizer)
    described = descriptor.load(Path(document["descriptor"]).read_bytes())
    assert served.scopes == SCOPES
    assert (served.model, served.block_tokens, served.context_tokens) == ("tiny-1", 4, CONTEXT)
    assert served.compat_id == descriptor.compat_id(described)
    assert (served.deterministic, served.deterministic_sampling) == (False, False)


def test_the_operator_may_name_the_model_and_lower_its_context(
    tmp_path: Path, document: dict[str, Any], tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path, {**document, "model_name": "ours", "context_tokens": 100})
    served = load_served(config, SCOPES, tokenizer)
    assert (served.model, served.context_tokens) == ("ours", 100)
    config = config_of(tmp_path, {**document, "context_tokens": 2 * CONTEXT})
    assert load_served(config, SCOPES, tokenizer).context_tokens == CONTEXT


@pytest.mark.spec("R-018")
def test_without_a_descriptor_it_is_computed(tmp_path: Path, document: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = make_model(tmp_path / "weighty")
    tiny = LlamaConfig(vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                       num_attention_heads=2, max_position_embeddings=64)  # fmt: skip
    LlamaForCausalLM(tiny).save_pretrained(model)
    del document["descriptor"]
    document |= {"model": str(model), "block_tokens": 8}
    served = load_served(config_of(tmp_path, document), SCOPES, Tokenizer(model))
    assert served.compat_id == descriptor.compat_id(describe(model, block_tokens=8))
    assert served.model == "weighty"
    del document["block_tokens"]
    with pytest.raises(ConfigError, match="block_tokens"):
        load_served(config_of(tmp_path, document), SCOPES, Tokenizer(model))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"principal": "spiffe://t/placement"}, "is not the front end"),
        ({"principal": "spiffe://t/unheard-of"}, "is not the front end"),
        ({"base_uri": "https://other.example/"}, "is not the front end"),
        ({"instances": []}, "instances: empty"),
        ({"instances": [{"base_uri": "http://x/", "address": "unix:/x"}]}, "instances: http://x/"),
        ({"instances": [{"base_uri": "https://x/", "address": "unix:/x"}]}, "instances: https://x/: nobody's"),
        ({"scopes": {}}, "scopes: empty"),
        ({"scopes": {"demo": "/no/such/file"}}, "scope demo"),
        ({"default_scope": "third"}, "default_scope"),
        ({"unknown": 1}, "unknown"),
        ({"patience_ms": 0}, "patience_ms"),
    ],
)
def test_bad_configs(tmp_path: Path, document: dict[str, Any], members: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        checked(tmp_path, {**document, **members})


@pytest.mark.spec("D15", "R-020")
def test_scope_keys_are_for_their_owner_alone(tmp_path: Path, document: dict[str, Any]) -> None:
    (tmp_path / "demo").chmod(0o640)
    with pytest.raises(ConfigError, match=r"scope demo.*0600"):
        checked(tmp_path, document)
    (tmp_path / "demo").chmod(0o600)
    (tmp_path / "demo").write_text("ab" * 31)
    with pytest.raises(ConfigError, match="at least 32 octets") as refused:
        checked(tmp_path, document)
    assert "abab" not in str(refused.value)


def test_a_scope_that_the_policy_does_not_give(tmp_path: Path, document: dict[str, Any]) -> None:
    (tmp_path / "demo").write_text("ab" * 32)
    with pytest.raises(ConfigError, match=r"scope demo.*does not give"):
        checked(tmp_path, document)


def test_the_descriptor_must_be_that_of_the_model(
    tmp_path: Path, document: dict[str, Any], tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="block_tokens: the descriptor says 4"):
        load_served(config_of(tmp_path, {**document, "block_tokens": 5}), SCOPES, tokenizer)
    other = json.loads(Path(document["descriptor"]).read_text())
    other["tokenizer_digest"] = f"sha-256:{'1' * 64}"
    Path(document["descriptor"]).write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="not of the tokenizer"):
        load_served(config_of(tmp_path, document), SCOPES, tokenizer)


async def _started(path: Path) -> asyncio.subprocess.Process:
    code = "import sys, pathlib, services.frontend.server as s; sys.exit(s.run(pathlib.Path(sys.argv[1])))"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(path), stderr=asyncio.subprocess.PIPE
    )


async def _answered(fe: World) -> None:
    answer = (await fe.ask({**asked(), "model": "tiny-1"})).json
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert fe.ii1.requests[0].prompt


async def test_the_process_serves_and_stops_on_sigterm(
    tmp_path: Path, document: dict[str, Any], tokenizer: Tokenizer
) -> None:
    config_of(tmp_path, document)
    async with world(tmp_path, tokenizer) as fe:
        process = await _started(tmp_path / "fe.toml")
        async with open_channel(document["listen"]) as fe.channel:
            check = health_pb2_grpc.HealthStub(fe.channel).Check
            reply = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            await _answered(fe)
            await fe.ended()
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
        assert process.returncode == 0, log


async def test_a_model_that_cannot_be_read_is_one_line(tmp_path: Path, document: dict[str, Any]) -> None:
    config_of(tmp_path, {**document, "model": f"{tmp_path}/none"})
    process = await _started(tmp_path / "fe.toml")
    _, log = await process.communicate()
    assert process.returncode == 2
    assert log.startswith(b"error: model ")
    assert log.count(b"\n") == 1
