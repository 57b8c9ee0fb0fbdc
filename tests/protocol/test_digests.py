import hashlib
from base64 import b64encode
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import digests, registry
from kvsp.protocol.container import build, parse_header
from kvsp.protocol.digests import ContainerDigester, parse_digest_field
from kvsp.protocol.errors import KvspError
from tests.protocol.vectors import DERIVED

FULL = bytes.fromhex(DERIVED["container_full"])
PART = bytes.fromhex(DERIVED["container_layers_1_1"])
SHA256 = bytes(range(32))
FIELD = b64encode(SHA256).decode()
SHA512 = b64encode(bytes(64)).decode()


@pytest.mark.spec("R-035", "R-036")
def test_layer_and_replica_digest_vectors() -> None:
    payload = FULL[52:]
    layers = [digests.layer_digest(payload[:16], payload[16:32]), digests.layer_digest(payload[32:])]
    assert [layer.hex() for layer in layers] == DERIVED["layer_digests"]
    assert digests.format_digest(digests.replica_digest(layers)) == DERIVED["replica_digest"]


@pytest.mark.spec("R-153")
def test_repr_digest_vectors() -> None:
    for octets, name in ((FULL, "repr_digest_full"), (PART, "repr_digest_layers_1_1")):
        sha256 = hashlib.sha256(octets).digest()
        assert digests.repr_digest_field(sha256) == DERIVED[name]
        assert parse_digest_field(DERIVED[name]) == {"sha-256": sha256}


@pytest.mark.spec("R-006")
@given(st.binary(min_size=32, max_size=32))
def test_digest_string_round_trip(digest: bytes) -> None:
    assert digests.parse_digest(digests.format_digest(digest)) == digest
    assert parse_digest_field(digests.repr_digest_field(digest)) == {"sha-256": digest}


@pytest.mark.spec("R-006")
@pytest.mark.parametrize(
    "text",
    ["", "a" * 64, "SHA-256:" + "a" * 64, "sha-256:" + "A" * 64, "sha-256:" + "a" * 63, f"sha-256=:{FIELD}:",
     "sha-256:" + "a" * 64 + "\n", "sha-256: " + "a" * 63, "sha-256:" + "١" * 64, "sha-512:" + "a" * 64],
)  # fmt: skip
def test_bad_digest_string(text: str) -> None:
    with pytest.raises(KvspError):
        digests.parse_digest(text)


@pytest.mark.spec("U-27")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (f"  sha-256=:{FIELD}:  ", {"sha-256": SHA256}),
        (f"sha-256=:{FIELD.rstrip('=')}:", {"sha-256": SHA256}),
        (f"md5=:AAAA:,\tsha-256=:{FIELD}: , crc32c=::", {"sha-256": SHA256}),
        ("unixsum=:AAAA:", {}),
        (f"sha-256=:{FIELD}:;a;b=1;  c=\"x;,\\\"\";d=?1;e=tok/en;f=:AA==:;g=-1.5;*h=@12",
        {"sha-256": SHA256}),
        (f"sha-256=:{b64encode(bytes(32)).decode()}:, sha-256=:{FIELD}:", {"sha-256": SHA256}),
        (f"sha-512=:{SHA512}:,sha-256=:{FIELD}:", {"sha-512": bytes(64), "sha-256": SHA256}),
    ],
)  # fmt: skip
def test_digest_field(text: str, expected: dict[str, bytes]) -> None:
    assert parse_digest_field(text) == expected


@pytest.mark.spec("U-27")
@pytest.mark.parametrize(
    "text",
    [f"sha-256=:{FIELD}:,", f",sha-256=:{FIELD}:", f"sha-256=:{FIELD}", f"sha-256={FIELD}", "sha-256",
    "sha-256=1",
     f"SHA-256=:{FIELD}:", f"sha-256 =:{FIELD}:", f"sha-256=: {FIELD}:", f"sha-256=:{FIELD[1:]}:",
     "sha-256=::", "sha-256=:AAAA:", f"sha-256=:{FIELD}A:", f"sha-256=:{FIELD}=:", "sha-256=:A:",
     "sha-256=:A=A=:",
     f"sha-256=:{FIELD.replace('/', '_').replace('+', '-')[:-2]}_=:", f"sha-256=:{FIELD}: x=:AAAA:",
     f"sha-256=:{FIELD}:;", f"sha-256=:{FIELD}: ;a", f"sha-256=:{FIELD}:;A", "sha-256=(:AAAA:)",
     f"\nsha-256=:{FIELD}:", f"sha-256=:{FIELD}:\n", f"sha-256=:{SHA512}:", f"sha-512=:{FIELD}:", "é=:AAAA:",
     "sha-256:" + "a" * 64],
)  # fmt: skip
def test_malformed_digest_field(text: str) -> None:
    with pytest.raises(KvspError) as caught:
        parse_digest_field(text)
    assert caught.value.problem is registry.BAD_REQUEST


def feed(octets: bytes, cuts: list[int], digester: ContainerDigester) -> ContainerDigester:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(octets)), len(octets)]
    for start, end in pairwise(edges):
        digester.feed(memoryview(octets)[start:end])
    return digester


@pytest.mark.spec("R-030", "R-034", "R-035", "R-153")
@given(st.lists(st.integers(0, len(FULL)), max_size=12))
def test_digester_in_any_pieces(cuts: list[int]) -> None:
    digester = feed(FULL, cuts, ContainerDigester(full=True, extra=["sha-512"]))
    digester.finish()
    assert digester.header == parse_header(FULL)
    assert [layer.hex() for layer in digester.layer_digests] == DERIVED["layer_digests"]
    assert digester.sha256() == hashlib.sha256(FULL).digest()
    assert digester.digest("sha-512") == hashlib.sha512(FULL).digest()


@pytest.mark.spec("R-034")
def test_layers_appear_as_they_arrive() -> None:
    digester = ContainerDigester()
    seen = []
    for at in range(len(FULL)):
        digester.feed(FULL[at : at + 1])
        seen.append((digester.header is not None, len(digester.layer_digests)))
    assert seen.index((True, 0)) == 51
    assert seen.index((True, 1)) == 52 + 32 - 1
    assert seen.index((True, 2)) == 52 + 64 - 1


@pytest.mark.spec("R-030")
def test_digester_refuses_every_truncation() -> None:
    for end in range(len(FULL)):
        digester = feed(FULL[:end], [], ContainerDigester())
        with pytest.raises(KvspError):
            digester.finish()


@pytest.mark.spec("R-030", "D5")
@pytest.mark.parametrize("cuts", [[], [len(FULL)], [10, 60], list(range(len(FULL) + 1))])
def test_digester_refuses_trailing_octets(cuts: list[int]) -> None:
    with pytest.raises(KvspError):
        feed(FULL + b"\0", cuts, ContainerDigester())


@pytest.mark.spec("D5")
def test_digester_refuses_a_bad_header_at_its_twentieth_octet() -> None:
    digester = ContainerDigester()
    digester.feed(FULL[:12])
    with pytest.raises(KvspError):
        digester.feed(b"\xff\xff\xff\xff" + FULL[16:20])


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.binary(min_size=1, max_size=9)),
                min_size=1, max_size=6), st.integers(1, 7))  # fmt: skip
def test_digester_against_the_formula(layers: list[tuple[bytes, bytes]], step: int) -> None:
    octets = build(3, 2, layers, codec=0xFF01)
    digester = feed(octets, list(range(0, len(octets), step)), ContainerDigester())
    digester.finish()
    assert digester.layer_digests == [hashlib.sha256(k + v).digest() for k, v in layers]


def test_digest_not_asked_for() -> None:
    with pytest.raises(KeyError):
        ContainerDigester().sha256()
