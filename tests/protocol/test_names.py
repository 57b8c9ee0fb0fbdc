import base64
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import names
from tests.protocol.vectors import DERIVED

BASE = "https://h1.example/kvsp/"


def bad(check: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(ValueError):
        check(*arguments)


@pytest.mark.spec("R-070")
@pytest.mark.parametrize(("uri", "expected"), DERIVED["holder_id"].items())
def test_party_id_vectors(uri: str, expected: str) -> None:
    assert names.party_id(uri) == expected
    assert names.PARTY_ID.fullmatch(expected)
    assert names.party_id(uri[:-1]) != expected


@pytest.mark.spec("R-002", "D7")
@given(st.binary(min_size=32, max_size=32))
def test_hex(octets: bytes) -> None:
    text = octets.hex()
    names.check_hex32(text, "x")
    names.check_hex16(text[:32], "x")
    names.check_hex32_list([text, text], "x")
    names.check_digest("sha-256:" + text, "x")


@pytest.mark.spec("R-002", "R-006", "D7")
@pytest.mark.parametrize(
    "text", ["", "a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n", "a" * 63 + "\n", " " + "a" * 63,
    "g" + "a" * 63,
             "a" * 31 + "g" + "a" * 32, "١" * 64, "é" * 64, "\ud800" * 64, "0x" + "a" * 62],
)  # fmt: skip
def test_bad_hex(text: str) -> None:
    bad(names.check_hex32, text, "x")
    bad(names.check_hex32_list, ["a" * 64, text], "x")
    bad(names.check_hex16, text.replace("a" * 32, "", 1), "x")
    bad(names.check_digest, "sha-256:" + text, "x")


@pytest.mark.spec("R-002")
def test_hex_lists_do_not_let_lengths_cancel_out() -> None:
    bad(names.check_hex32_list, ["a" * 63, "a" * 65], "x")
    names.check_hex32_list([], "x")


@pytest.mark.spec("R-043", "U-08")
def test_registry_names() -> None:
    for good in ("device", "local-storage", "x", "a" * 32, "fp8-e4m3"):
        names.check_token(good, "x")
    for text in ("", "Device", "1a", "-a", "a" * 33, "a_b", "a\n", "dévice"):
        bad(names.check_token, text, "x")


@pytest.mark.spec("R-007", "U-06", "D7")
def test_uuid() -> None:
    text = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
    assert names.normal_uuid(text.upper()) == text
    assert names.normal_uuid("00000000-0000-0000-0000-000000000000")
    for other in ("", text[:-1], text + "\n", "{" + text + "}", "urn:uuid:" + text, text.replace("-", ""),
                  "6f1d0a9e2-c55-4d7e-9a0e-5b7f2f9f6a11", text.replace("6", "g"), text.replace("1", "١"),
                  text.replace("1", "\u212a")):  # fmt: skip
        bad(names.normal_uuid, other)


@pytest.mark.spec("U-07")
@pytest.mark.parametrize(
    "uri",
    [BASE, "https://h1.example/", "https://localhost:8443/is/", "https://[::1]:8443/a/b/", "https://10.0.0.1/"],
)
def test_base_uri(uri: str) -> None:
    names.check_base_uri(uri)


@pytest.mark.spec("U-07", "D10")
@pytest.mark.parametrize(
    "uri",
    ["", "https://h1.example", "https://h1.example/kvsp", "http://h1.example/", "HTTPS://h1.example/",
     "https://H1.example/", "https://h1.example:443/", "https://h1.example:0/", "https://h1.example:/",
     "https://h1.example:08443/", "https://h1.example:99999/", "https://u@h1.example/",
     "https://u:p@h1.example/",
     "https://h1.example/?", "https://h1.example/?a/", "https://h1.example/#", "https://h1.example/#/",
     "https://h1.example//", "https://h1.example/a//b/", "https://h1.example/./", "https://h1.example/../",
     "https://h1.example/a/../", "https://h1.example/%61/", "https://h1.example/a b/", "https:///",
     "https://",
     "https://h1.example/\n", "\nhttps://h1.example/", "https://h1.exa\tmple/", "https://h1.example\\/",
     "https:h1/",
     "https://hé.example/", "https://[::1/", "https://[0::1]/", "https://[::1%25eth0]/", "https://-h/",
     "https://h./",
     "https://h1.example/;x\\/", "file:///etc/", "https://" + "h" * 2048 + "/", "https://\ud800/",
     "//h1.example/"],
)  # fmt: skip
def test_bad_base_uri(uri: str) -> None:
    bad(names.check_base_uri, uri)


@pytest.mark.spec("R-040", "R-045", "U-07")
def test_holder_uri() -> None:
    for uri in (BASE, "moqt://relay.example", "moqt://relay.example/", "moqt://relay.example:4443/a/b"):
        names.check_holder_uri(uri)
    for uri in ("moqt:", "moqt://", "moqt://u@h/", "moqt://h/?q", "moqt://h/../", "wss://h/", "moqt://H/"):
        bad(names.check_holder_uri, uri)


def encoded(fields: list[bytes], tail: bytes = b"") -> str:
    octets = b"".join(bytes([len(each)]) + each for each in fields) + tail
    return base64.urlsafe_b64encode(octets).rstrip(b"=").decode()


@pytest.mark.spec("R-045")
@given(st.lists(st.binary(min_size=1, max_size=255), min_size=5, max_size=5))
def test_moqt_namespace(fields: list[bytes]) -> None:
    names.check_moqt_namespace(encoded(fields))


FIVE = [b"a", b"b", b"c", b"d", b"e"]


@pytest.mark.spec("R-045", "D7")
@pytest.mark.parametrize(
    "text",
    ["", encoded(FIVE[:4]), encoded([*FIVE, b"f"]), encoded([*FIVE[:4], b""]), encoded(FIVE, b"\0"),
    encoded(FIVE, b"x"),
     encoded(FIVE) + "==", encoded(FIVE) + "\n", encoded(FIVE[:4], b"\x05e"), encoded(FIVE)[:-1] + "h", "!",
     "é",
     base64.b64encode(b"\xff" * 9).decode(), encoded(FIVE)[:-1]],
)  # fmt: skip
def test_bad_moqt_namespace(text: str) -> None:
    bad(names.check_moqt_namespace, text)
