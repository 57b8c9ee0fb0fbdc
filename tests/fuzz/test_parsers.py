"""Whatever arrives, a parser returns or raises KvspError: no other exception may reach a client."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsp.protocol import container, descriptor, digests, jsonio, records
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Policy
from tests.protocol.vectors import DERIVED, DESCRIPTOR

RECORDS = [
    records.ReplicaRecord, records.InstanceStatus, records.SessionCheckpoint, records.LookupRequest,
    records.LookupReply, records.LeaseRequest, records.LeaseReply, records.PrefetchDirective,
    records.DirectiveStatus, records.ShardMap, records.ReshardRequest, records.StateChange,
]  # fmt: skip
NAMES = sorted({name for record in RECORDS for name in record.__struct_encode_fields__})
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["a" * 64, "a" * 32, "sha-256:" + "a" * 64, "https://h.example/", "moqt://h", "active",
                       "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11", "https://[::1/", "https://h:99999/"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*NAMES, "tier", "layers", "tokens"]) | st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)
FULL = bytes.fromhex(DERIVED["container_full"])


def attempt(parse: Any, *arguments: Any) -> None:
    try:
        parse(*arguments)
    except KvspError as error:
        json.dumps(error.to_problem())


def digest_in_pieces(octets: bytes, step: int) -> None:
    digester = digests.ContainerDigester(full=True)
    for start in range(0, len(octets), step):
        digester.feed(octets[start : start + step])
    digester.finish()


@st.composite
def mutated(draw: st.DrawFn, origin: bytes) -> bytes:
    octets = bytearray(origin)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(octets) - 1))
        octets[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
        octets = octets or bytearray(b"\0")
    return bytes(octets)


@pytest.mark.spec("U-03", "D7")
@given(st.binary() | st.text().map(str.encode), st.sampled_from(RECORDS))
@example(b"[" * 100_000, records.StateChange)
@example(b'{"state":' + b"9" * 5000 + b"}", records.StateChange)
def test_json_octets(octets: bytes, record: type) -> None:
    attempt(jsonio.decode, octets, record)
    attempt(descriptor.load, octets)


@pytest.mark.spec("U-03", "D7")
@given(st.sampled_from(RECORDS), st.data())
def test_json_of_the_right_shape(record: Any, data: st.DataObject) -> None:
    members = {name: data.draw(VALUES, label=name) for name in record.__struct_encode_fields__}
    attempt(jsonio.decode, json.dumps(members).encode(), record)


@pytest.mark.spec("R-010", "U-03")
@given(st.dictionaries(st.sampled_from([*DESCRIPTOR, "adapters"]), VALUES))
def test_descriptor(changes: dict[str, Any]) -> None:
    attempt(descriptor.load, json.dumps(DESCRIPTOR | changes).encode())


@pytest.mark.spec("D5", "R-030")
@given(st.binary(max_size=200) | mutated(FULL), st.integers(1, 200))
def test_container(octets: bytes, step: int) -> None:
    attempt(container.header_length, octets)
    attempt(container.parse_header, octets)
    attempt(digest_in_pieces, octets, step)


@pytest.mark.spec("U-27")
@given(st.text() | mutated(DERIVED["repr_digest_full"].encode()).map(lambda octets: octets.decode("latin-1")))
def test_digest_fields(text: str) -> None:
    attempt(digests.parse_digest_field, text)
    attempt(digests.parse_digest, text)


@pytest.mark.spec("U-39")
@given(st.text() | VALUES.map(lambda value: f"[identities.'a:b']\nroles = {json.dumps(value)}\n"))
@example("a = " + "[" * 100_000)
def test_policy(text: str) -> None:
    # A file of the operator and not a request: ValueError, whose message names the place.
    with contextlib.suppress(ValueError):
        Policy.load(text)
