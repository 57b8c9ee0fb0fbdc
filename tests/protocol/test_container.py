import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import container, limits, registry
from kvsp.protocol.container import Header, build, header_length, parse_header
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from tests.protocol.vectors import DERIVED, DESCRIPTOR, text

FULL = bytes.fromhex(DERIVED["container_full"])
PART = bytes.fromhex(DERIVED["container_layers_1_1"])
LAYERS = [(bytes(range(16)), bytes(range(16, 32))), (bytes(range(32, 48)), bytes(range(48, 64)))]

sections = st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 2**20)), min_size=1, max_size=40)
headers = st.builds(
    Header,
    codec=st.integers(1, 0xFFFF),
    first_layer=st.integers(0, 2**32 - 40),
    token_count=st.integers(1, 2**32 - 1),
    sections=sections.map(tuple),
)


def fixed(magic: bytes = b"KVB1", version: int = 1, flags: int = 0, codec: int = 1, first: int = 0,
          count: int = 1, tokens: int = 4) -> bytes:  # fmt: skip
    return struct.pack(">4sBBHIII", magic, version, flags, codec, first, count, tokens)


def refused(octets: bytes, parse: Any = parse_header) -> None:
    with pytest.raises(KvspError) as caught:
        parse(octets)
    assert caught.value.problem is registry.BAD_REQUEST


@pytest.mark.spec("R-030", "R-031", "R-033")
def test_vector_header() -> None:
    octets = bytes.fromhex(text("container_header"))
    header = parse_header(octets)
    assert header == Header(1, 0, 4, ((8192, 8192), (8192, 8192)))
    assert header.encode() == octets
    assert (header.header_octets, header.payload_octets, header.total_octets) == (52, 32768, 32820)


@pytest.mark.spec("R-030", "R-034", "R-151")
def test_vector_containers() -> None:
    assert build(0, 4, LAYERS) == FULL
    assert build(1, 4, LAYERS[1:]) == PART
    assert build(0, 4, [(bytearray(k), memoryview(v)) for k, v in LAYERS]) == FULL
    header = parse_header(FULL)
    selected = header.select(1, 1)
    start, octets = header.layer_span(1)
    payload = FULL[header.header_octets :]
    assert selected.encode() + payload[start : start + octets] == PART


@pytest.mark.spec("R-030", "R-032")
@given(headers, st.binary(max_size=5))
def test_round_trip_with_trailing_octets(header: Header, trailing: bytes) -> None:
    octets = header.encode()
    assert len(octets) == header.header_octets == header_length(octets[:20])
    for buffer in (octets + trailing, bytearray(octets), memoryview(octets)):
        assert parse_header(buffer) == header


@pytest.mark.spec("R-030")
def test_every_truncation_of_the_header() -> None:
    for end in range(52):
        refused(FULL[:end])
    for end in range(20):
        refused(FULL[:end], header_length)


@pytest.mark.spec("R-151", "D6")
@given(headers, st.data())
def test_selection_is_one_slice(header: Header, data: st.DataObject) -> None:
    first = data.draw(st.integers(*header.layers))
    last = data.draw(st.integers(first, header.layers[1]))
    selected = header.select(first, last)
    assert selected.layers == (first, last)
    assert selected.layer_count == last - first + 1
    assert header.layer_span(first)[0] + selected.payload_octets == sum(header.layer_span(last))
    assert sum(header.layer_span(layer)[1] for layer in range(first, last + 1)) == selected.payload_octets


@pytest.mark.spec("R-151", "D6")
@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 2), (1, 0), (-1, 0), (0, 2**32 - 1), (2**53, 2**53)])
def test_layers_not_held(first: int, last: int) -> None:
    with pytest.raises(KvspError) as caught:
        parse_header(FULL).select(first, last)
    assert caught.value.problem is registry.LAYERS_UNAVAILABLE


@pytest.mark.spec("R-031", "R-032", "D5")
@pytest.mark.parametrize(
    "head",
    [fixed(magic=b"KVB2"), fixed(magic=b"kvb1"), fixed(version=0), fixed(version=2), fixed(flags=1),
     fixed(flags=0x80), fixed(codec=0), fixed(count=0), fixed(count=2**32 - 1), fixed(count=4097),
     fixed(tokens=0), fixed(first=2**32 - 1, count=2), b"KVB1\x01" + bytes(range(1, 16))],
)  # fmt: skip
def test_bad_fixed_part_is_refused_before_the_table(head: bytes) -> None:
    refused(head, header_length)
    refused(head + struct.pack(">QQ", 8, 8) * 2)


@pytest.mark.spec("R-032")
@pytest.mark.parametrize("codec", [1, 2, 0xFF00, 0xFFFF])
def test_codecs(codec: int) -> None:
    assert parse_header(fixed(codec=codec) + struct.pack(">QQ", 8, 8)).codec == codec


@pytest.mark.spec("D5")
def test_bounds_are_inclusive() -> None:
    last = parse_header(fixed(first=2**32 - 1) + struct.pack(">QQ", 1, 1))
    assert last.layers == (2**32 - 1, 2**32 - 1)
    most = fixed(count=4096, tokens=2**32 - 1) + struct.pack(">QQ", 1, 1) * 4096
    assert parse_header(most).layer_count == limits.CONTAINER_LAYERS_MAX
    room = limits.BLOCK_OCTETS_MAX - 36
    assert parse_header(fixed() + struct.pack(">QQ", room - 1, 1)).total_octets == limits.BLOCK_OCTETS_MAX
    refused(fixed() + struct.pack(">QQ", room, 1))


@pytest.mark.spec("D5")
@pytest.mark.parametrize(
    "table",
    [[(2**64 - 1, 1)], [(1, 2**64 - 1)], [(2**63, 2**63)], [(2**64 - 1, 2), (1, 1)], [(0, 1)], [(1, 0)],
     [(8, 8), (0, 0)], [(2**28, 1)], [(2**27, 2**27)]],
)  # fmt: skip
def test_bad_sections(table: list[tuple[int, int]]) -> None:
    refused(fixed(count=len(table)) + b"".join(struct.pack(">QQ", *entry) for entry in table))


@pytest.mark.spec("D5")
def test_header_by_hand_is_checked_too() -> None:
    for bad in [(0, 0, 4, ((1, 1),)), (1, -1, 4, ((1, 1),)), (1, 0, 0, ((1, 1),)), (1, 0, 4, ()),
                (1, 0, 4, ((-1, 1),)), (0x10000, 0, 4, ((1, 1),))]:  # fmt: skip
        with pytest.raises(KvspError):
            Header(*bad)
    with pytest.raises(KvspError):
        build(0, 4, [(b"", b"v")])


@pytest.mark.spec("R-033", "U-25")
def test_geometry() -> None:
    descriptor = Descriptor(**DESCRIPTOR)
    exact = (descriptor.section_octets, descriptor.section_octets)
    whole = Header(1, 0, 4, (exact,) * 32)
    container.check_geometry(whole, descriptor)
    container.check_sections(whole.select(3, 5), descriptor)
    # sections of other codecs are their own affair
    container.check_geometry(Header(0xFF00, 0, 4, ((1, 2),) * 32), descriptor)
    for bad in [
        Header(1, 0, 4, (exact,) * 31),
        Header(1, 1, 4, (exact,) * 31),
        Header(1, 1, 4, (exact,) * 32),
        Header(1, 0, 5, (exact,) * 32),
        Header(1, 0, 4, ((exact[0] - 1, exact[1]),) + (exact,) * 31),
        Header(1, 0, 4, (exact,) * 31 + ((exact[0], exact[1] + 1),)),
    ]:
        with pytest.raises(KvspError) as caught:
            container.check_geometry(bad, descriptor)
        assert caught.value.problem is registry.INCOMPATIBLE
    with pytest.raises(KvspError):
        container.check_sections(Header(1, 32, 4, (exact,)), descriptor)
