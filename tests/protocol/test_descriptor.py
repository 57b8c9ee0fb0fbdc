import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import descriptor, registry
from kvsp.protocol.errors import KvspError
from tests.protocol.vectors import DESCRIPTOR, text

DIGEST = "sha-256:" + "a" * 64
BAD_COUNTS: list[Any] = [0, -1, 1.5, True, "32", None, [], 2**53]
BAD_ADAPTERS: list[Any] = [[], None, DIGEST, [1], ["a" * 64]]


def load(**changes: Any) -> descriptor.Descriptor:
    return descriptor.load(json.dumps(DESCRIPTOR | changes).encode())


def refused(octets: bytes) -> KvspError:
    with pytest.raises(KvspError) as caught:
        descriptor.load(octets)
    assert caught.value.problem is registry.BAD_REQUEST
    return caught.value


@pytest.mark.spec("R-010", "R-015", "R-016")
def test_vector() -> None:
    loaded = load()
    assert descriptor.canonical(loaded).decode() == text("jcs_descriptor")
    assert descriptor.compat_id(loaded).hex() == text("compat_id")


@pytest.mark.spec("R-015")
@given(st.permutations(list(DESCRIPTOR)), st.sampled_from([None, 1, 4]))
def test_member_order_and_whitespace_are_irrelevant(names: list[str], indent: int | None) -> None:
    octets = json.dumps({name: DESCRIPTOR[name] for name in names}, indent=indent).encode()
    assert descriptor.compat_id(descriptor.load(octets)).hex() == text("compat_id")


@pytest.mark.spec("R-015", "U-03")
@pytest.mark.parametrize("number", ["32.0", "3.2e1", "320e-1"])
def test_integral_numbers_are_one_number(number: str) -> None:
    octets = json.dumps(DESCRIPTOR).replace('"layers": 32', f'"layers": {number}').encode()
    assert number.encode() in octets
    assert descriptor.compat_id(descriptor.load(octets)).hex() == text("compat_id")


@pytest.mark.spec("R-010")
@pytest.mark.parametrize("name", list(DESCRIPTOR))
def test_every_member_is_required(name: str) -> None:
    refused(json.dumps({key: value for key, value in DESCRIPTOR.items() if key != name}).encode())


@pytest.mark.spec("R-010", "R-006", "R-013")
@pytest.mark.parametrize(
    ("name", "value"),
    [(name, bad) for name in ("layers", "kv_heads", "head_dim", "block_tokens")
     for bad in BAD_COUNTS]
    + [(name, bad) for name in ("model_digest", "tokenizer_digest")
       for bad in ("a" * 64, "SHA-256:" + "a" * 64, DIGEST.upper(), DIGEST + "\n", DIGEST[:-1], 1, None)]
    + [(name, bad) for name in ("model", "kv_dtype", "positional", "layout") for bad in ("", 1, None, True)]
    + [("kv_dtype", "int4"), ("layout", "kvsp-layout-2"), ("model", "m" * 1025)]
    + [("adapters", bad) for bad in BAD_ADAPTERS],
)  # fmt: skip
def test_bad_member(name: str, value: Any) -> None:
    refused(json.dumps(DESCRIPTOR | {name: value}).encode())


@pytest.mark.spec("R-010")
def test_unknown_member_is_no_silent_part_of_the_identity() -> None:
    assert "adapter" in refused(json.dumps(DESCRIPTOR | {"adapter": [DIGEST]}).encode()).detail


@pytest.mark.spec("R-013")
def test_adapter_order_is_identity() -> None:
    other = "sha-256:" + "b" * 64
    ids = {descriptor.compat_id(load(**extra)) for extra in (
        {}, {"adapters": [DIGEST]}, {"adapters": [DIGEST, other]}, {"adapters": [other, DIGEST]}
    )}  # fmt: skip
    assert len(ids) == 4


@pytest.mark.spec("R-011")
def test_model_name_is_not_normalised() -> None:
    composed, decomposed = load(model="\u00e9"), load(model="e\u0301")
    assert descriptor.compat_id(composed) != descriptor.compat_id(decomposed)


@pytest.mark.spec("R-014")
@pytest.mark.parametrize("value", ["none", "rope", "rope;theta=500000", "rope;theta=500000,scaling=yarn"])
def test_positional(value: str) -> None:
    assert load(positional=value).positional == value


@pytest.mark.spec("R-014")
@pytest.mark.parametrize(
    "value",
    ["rope;", "rope;theta=1e4", "none;theta=1", "none;", "rope;theta=", "rope;theta=-1", "rope;theta=١",
     "rope;theta=1;scaling=yarn", "rope;theta=1,scaling=", "Rope", "rope ", "rope;theta=1\n", "alibi"],
)  # fmt: skip
def test_bad_positional(value: str) -> None:
    refused(json.dumps(DESCRIPTOR | {"positional": value}).encode())


@pytest.mark.spec("U-03", "R-016")
@pytest.mark.parametrize(
    "make",
    [
        lambda text: text.replace("{", '{"layers": 32, ', 1),
        lambda text: "\ufeff" + text,
        lambda text: text.replace(": 32", ": NaN"),
        lambda text: text.replace(": 32", ": Infinity"),
        lambda text: text.replace(": 32", ": 1e400"),
        lambda text: text.replace(": 32", ": 9007199254740992"),
        lambda text: text.replace(": 32", ": " + "9" * 5000),
        lambda text: text.replace("example-model", "\\ud800"),
        lambda text: text.replace('"model"', '"\\ud800"'),
        lambda text: f"[{text}]",
        lambda text: text[:-1],
        lambda text: text + "{}",
        lambda text: "",
        lambda text: "[" * 200_000,
        lambda text: text.replace(": 32", ": " + '{"a":' * 40 + "1" + "}" * 40),
    ],
)
def test_strict_json(make: Any) -> None:
    refused(make(json.dumps(DESCRIPTOR)).encode())


@pytest.mark.spec("U-03")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_only_utf8(encoding: str) -> None:
    refused(json.dumps(DESCRIPTOR | {"model": "é"}, ensure_ascii=False).encode(encoding))


@pytest.mark.spec("R-018")
def test_claimed_id_is_not_trusted() -> None:
    loaded = load()
    descriptor.check_claimed(loaded, text("compat_id"))
    for claimed, problem in [
        ("0" * 64, registry.INCOMPATIBLE),
        (text("compat_id").upper(), registry.BAD_REQUEST),
        (text("compat_id") + "\n", registry.BAD_REQUEST),
        ("\ud800", registry.BAD_REQUEST),
    ]:
        with pytest.raises(KvspError) as caught:
            descriptor.check_claimed(loaded, claimed)
        assert caught.value.problem is problem


@pytest.mark.spec("R-033", "U-26")
@pytest.mark.parametrize(
    ("kv_dtype", "octets"), [("bf16", 2), ("fp16", 2), ("fp32", 4), ("fp8-e4m3", 1), ("fp8-e5m2", 1)]
)
def test_geometry(kv_dtype: str, octets: int) -> None:
    loaded = load(kv_dtype=kv_dtype, block_tokens=16)
    assert loaded.section_octets == 16 * 8 * 128 * octets
    assert loaded.payload_octets == 2 * 32 * loaded.section_octets
    if kv_dtype == "bf16":
        assert loaded.payload_octets == 2097152  # the example record of the text


@pytest.mark.spec("R-016")
def test_canonical_form_of_the_library() -> None:
    # From the JCS test data: UTF-16 order puts the surrogate pair before U+FB33.
    assert rfc8785.dumps({"\ufb33": 1e30, "😂": -0.0}).decode() == '{"😂":0,"\ufb33":1e+30}'
    for bad in (2**53, float("nan"), float("inf"), "\ud800"):
        with pytest.raises(rfc8785.CanonicalizationError):
            rfc8785.dumps({"a": bad})
