import json
import math
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from kvsp.protocol import jsonio, limits, registry
from kvsp.protocol.errors import KvspError


class Sample(Struct, frozen=True):
    n: Annotated[int, Meta(ge=0, le=limits.INT_MAX)]
    any: Any = None
    names: list[str] = []


def refused(octets: bytes) -> str:
    with pytest.raises(KvspError) as caught:
        jsonio.decode(octets, Sample)
    assert caught.value.problem is registry.BAD_REQUEST
    return caught.value.detail


@pytest.mark.spec("U-03", "R-003")
@pytest.mark.parametrize("number", ["32", "32.0", "3.2e1", "320E-1"])
def test_integral_numbers(number: str) -> None:
    assert jsonio.decode(f'{{"n": {number}}}'.encode(), Sample).n == 32


@pytest.mark.spec("U-03", "R-003", "D7")
@pytest.mark.parametrize(
    "number", ["1.5", "true", '"32"', "null", "-1", "9007199254740992", "1e300", "+5", "1_0", "٣", "0x1", "01", ""]
)
def test_bad_integers(number: str) -> None:
    refused(f'{{"n": {number}}}'.encode())


@pytest.mark.spec("R-001", "R-004")
def test_unknown_members_are_ignored_and_names_are_case_sensitive() -> None:
    assert jsonio.decode(b'{"n":1,"x":{"y":[1,null,"\\ud83d\\ude02"]},"N":2}', Sample) == Sample(1)
    refused(b'{"N":1}')


@pytest.mark.spec("U-03", "U-02", "D7")
@pytest.mark.parametrize("member", ["any", "unknown"])
@pytest.mark.parametrize(
    "value",
    [b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"', b'"\\udc00\\ud800"', b'{"\\ud800":1}', b'{"a":1,"a":2}',
     b'{"a":1,"\\u0061":2}', b"9007199254740992", b"-9007199254740992", b"[1," + b"9" * 5000 + b"]",
     b"[" * 200_000,
     b"[" * 40 + b"]" * 40, b'"\xff"', b'"\xed\xa0\x80"', b'"\x01"', b"'a'", b"1.", b".5", b"[1,]", b"//"],
)  # fmt: skip
def test_strict_everywhere(member: str, value: bytes) -> None:
    refused(b'{"n":1,"' + member.encode() + b'":' + value + b"}")


@pytest.mark.spec("U-03")
@pytest.mark.parametrize(
    "octets",
    [b"", b" ", b"[]", b"1", b"null", b'"n"', b'{"n":1', b'{"n":1}x', b'{"n":1}{}', b'{"n":1,"n":1}',
    b"\xef\xbb\xbf{}",
     '{"n":1}'.encode("utf-16"), '{"n":1}'.encode("utf-32"), '{"n":1}'.encode("utf-16-le")],
)  # fmt: skip
def test_bad_texts(octets: bytes) -> None:
    refused(octets)


@pytest.mark.spec("U-03")
def test_bounds_are_inclusive() -> None:
    inner = limits.JSON_DEPTH_MAX - 1
    nested = b'{"n":9007199254740991,"any":' + b"[" * inner + b"]" * inner + b"}"
    assert jsonio.decode(nested, Sample).n == limits.INT_MAX
    refused(nested.replace(b"[]", b"[[]]"))
    brackets = json.dumps({"n": 1, "any": "[{" * 100 + '"\\'}).encode()
    assert jsonio.decode(brackets, Sample).any == "[{" * 100 + '"\\'
    flat = json.dumps({"n": 1, "any": [[] for _ in range(100)]}).encode()
    assert len(jsonio.decode(flat, Sample).any) == 100


@pytest.mark.spec("U-10")
def test_too_long() -> None:
    refused(b'{"n":1}' + b" " * limits.JSON_OCTETS_MAX)


@pytest.mark.spec("U-03")
def test_a_long_unterminated_string_costs_linear_time() -> None:
    # Quadratic matching of this text would not end within the life of the test run.
    refused(b'{"a":' + b"[" * 33 + b'"' + b'\\"' * 2_000_000)


@pytest.mark.spec("R-047")
def test_free_members_keep_large_numbers_as_they_are() -> None:
    value = jsonio.decode(b'{"n":1.0,"any":{"p":1e30,"q":0.9}}', Sample).any
    assert math.isclose(value["p"], 1e30)
    assert isinstance(value["p"], float)
    assert jsonio.decode(jsonio.encode(Sample(1, value)), Sample).any == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-limits.INT_MAX, limits.INT_MAX)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@pytest.mark.spec("U-03")
@given(JSON)
def test_round_trip(value: Any) -> None:
    octets = json.dumps({"n": 1, "any": value}).encode()
    assert jsonio.decode(octets, Sample).any == value
    assert jsonio.decode(jsonio.encode(Sample(1, value)), Sample).any == value
