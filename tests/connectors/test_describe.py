from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from msgspec import UNSET
from transformers import DeepseekV3Config, GPT2Config, LlamaConfig, MambaConfig, PretrainedConfig

from kvsp.connectors.describe import describe, model_digest, positional, tokenizer_digest
from kvsp.protocol.descriptor import compat_id
from tests.connectors.driver import small_llama


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    small_llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "tokenizer.json").write_bytes(b"{}")
    return tmp_path / "small"


@pytest.mark.spec("R-010", "R-012", "R-013")
def test_a_model_directory_is_described(model_dir: Path) -> None:
    descriptor = describe(model_dir, block_tokens=8)
    weights = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
    assert descriptor.model == "small"
    assert descriptor.model_digest == f"sha-256:{weights}"
    assert descriptor.tokenizer_digest == f"sha-256:{hashlib.sha256(b'{}').hexdigest()}"
    assert (descriptor.layers, descriptor.kv_heads, descriptor.head_dim, descriptor.block_tokens) == (4, 2, 16, 8)
    assert (descriptor.kv_dtype, descriptor.positional, descriptor.layout) == ("bf16", "rope", "kvsp-layout-1")
    assert compat_id(descriptor) != compat_id(describe(model_dir, block_tokens=8, dtype=torch.float32))


@pytest.mark.spec("R-012")
def test_weight_files_are_taken_in_ascending_byte_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "B", "a", "a10", "a2"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    (tmp_path / "training_args.bin").write_bytes(b"no weights")
    assert model_digest(tmp_path) == f"sha-256:{hashlib.sha256(b'B' + b'a' + b'a10' + b'a2' + b'b').hexdigest()}"


def test_a_directory_without_weights_or_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight"):
        model_digest(tmp_path)
    with pytest.raises(ValueError, match="tokenizer"):
        tokenizer_digest(tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        describe(tmp_path / "absent", block_tokens=8)


@pytest.mark.spec("R-014")
def test_rotary_parameters_appear_when_they_are_not_the_models_own() -> None:
    plain = LlamaConfig()
    far = LlamaConfig(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"})
    yarn = LlamaConfig(rope_parameters={"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0})
    assert positional(plain, plain) == positional(far, far) == positional(yarn, yarn) == "rope"
    assert positional(far, plain) == "rope;theta=500000"
    assert positional(GPT2Config(), GPT2Config()) == "none"


@pytest.mark.spec("R-014")
def test_what_the_registered_syntax_cannot_say_is_refused() -> None:
    plain = LlamaConfig()
    yarn = LlamaConfig(rope_parameters={"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0})
    fraction = LlamaConfig(rope_parameters={"rope_theta": 10000.5, "rope_type": "default"})
    for run, shipped in ((yarn, plain), (fraction, plain)):
        with pytest.raises(ValueError, match="registered name"):
            positional(run, shipped)


@pytest.mark.spec("R-013")
def test_adapters_are_named_in_order_or_not_at_all(model_dir: Path) -> None:
    one, two = "sha-256:" + "1" * 64, "sha-256:" + "2" * 64
    found = [describe(model_dir, block_tokens=8, adapters=given) for given in ((), (one, two), (two, one))]
    assert found[0].adapters is UNSET
    assert found[1].adapters == [one, two]
    assert len({compat_id(each) for each in found}) == 3


@pytest.mark.spec("R-010")
@pytest.mark.parametrize("config", [MambaConfig(num_hidden_layers=2), DeepseekV3Config(num_hidden_layers=2)])
def test_models_whose_state_a_descriptor_cannot_name_are_refused(
    model_dir: Path, config: PretrainedConfig
) -> None:
    with pytest.raises(ValueError, match="K and V"):
        describe(model_dir, config, block_tokens=8)
