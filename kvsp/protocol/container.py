"""The KV Block Container "KVB1" (R-030 ... R-034, U-25, D5).

Magic u32 | version u8 | flags u8 | codec u16 | first_layer u32 | layer_count u32 | token_count u32 |
layer_count entries {k_len u64, v_len u64} | for each layer ascending: K octets, V octets. Network
order. Whatever violates this is a KvspError (400); Python integers do not wrap, so sums are exact.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

from kvsp.protocol import limits, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError, bad_request

Buffer = bytes | bytearray | memoryview
Section = tuple[int, int]
"""Octets of the K and of the V section of one layer."""

MAGIC: Final = b"KVB1"
VERSION: Final = 1
FIXED_OCTETS: Final = limits.CONTAINER_HEADER_FIXED_OCTETS
_FIXED: Final = struct.Struct(">4sBBHIII")
_ENTRY: Final = struct.Struct(">QQ")


@dataclass(frozen=True)
class Header:
    """A checked container header. Layers are numbered as in the block, not from `first_layer`."""

    codec: int
    first_layer: int
    token_count: int
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        _check_fields(self.codec, self.first_layer, len(self.sections), self.token_count)
        if any(not 0 < octets <= limits.BLOCK_OCTETS_MAX for section in self.sections for octets in section):
            raise bad_request("container section is empty or too long")
        if self.total_octets > limits.BLOCK_OCTETS_MAX:
            raise bad_request("container too long")

    @property
    def layer_count(self) -> int:
        """Number of layers in the container."""
        return len(self.sections)

    @property
    def layers(self) -> tuple[int, int]:
        """First and last layer, inclusive."""
        return self.first_layer, self.first_layer + self.layer_count - 1

    @property
    def header_octets(self) -> int:
        """Octets of the header."""
        return FIXED_OCTETS + limits.CONTAINER_LAYER_ENTRY_OCTETS * self.layer_count

    @property
    def payload_octets(self) -> int:
        """Octets of all sections."""
        return self._ends[-1]

    @property
    def total_octets(self) -> int:
        """Octets of the whole container."""
        return self.header_octets + self.payload_octets

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Offsets from the start of the payload: 0, then the end of every layer."""
        return tuple(accumulate((k + v for k, v in self.sections), initial=0))

    def layer_span(self, layer: int) -> tuple[int, int]:
        """Offset from the start of the payload and octets of K and V of `layer`.

        Raises KvspError (kvsp-layers-unavailable) when the container does not hold it.
        """
        self._check_held(layer, layer)
        at = layer - self.first_layer
        return self._ends[at], self._ends[at + 1] - self._ends[at]

    def select(self, first: int, last: int) -> Header:
        """The header of the container of layers first..last alone (R-151).

        Its payload is the contiguous slice that starts at `layer_span(first)[0]`. Raises KvspError
        (kvsp-layers-unavailable) when the container does not hold them.
        """
        self._check_held(first, last)
        start, end = first - self.first_layer, last - self.first_layer + 1
        return Header(self.codec, first, self.token_count, self.sections[start:end])

    def encode(self) -> bytes:
        """The header octets."""
        fixed = _FIXED.pack(MAGIC, VERSION, 0, self.codec, self.first_layer, self.layer_count, self.token_count)
        return fixed + b"".join(_ENTRY.pack(k, v) for k, v in self.sections)

    def _check_held(self, first: int, last: int) -> None:
        held_first, held_last = self.layers
        if not held_first <= first <= last <= held_last:
            raise KvspError(registry.LAYERS_UNAVAILABLE, "layers not in the container")


def header_length(first_20: Buffer) -> int:
    """Octets of the header that begins with these 20 octets, fully checked but for the layer table.

    Call it before the table is read or room for it is made (D5). Raises KvspError (400).
    """
    layer_count = _read_fixed(first_20)[2]
    return FIXED_OCTETS + limits.CONTAINER_LAYER_ENTRY_OCTETS * layer_count


class HeaderReader:
    """Collects a header from pieces of any size; each part is checked before room for the next is made (D5)."""

    def __init__(self) -> None:
        self.octets = bytearray()
        self.header: Header | None = None
        self._wanted = FIXED_OCTETS

    def feed(self, piece: Buffer) -> memoryview:
        """Take what belongs to the header. Returns what follows it. Raises KvspError (400)."""
        view = memoryview(piece).cast("B")
        while self.header is None:
            take = self._wanted - len(self.octets)
            self.octets += view[:take]
            view = view[take:]
            if len(self.octets) < self._wanted:
                break
            if self._wanted == FIXED_OCTETS:
                self._wanted = header_length(self.octets)
            else:
                self.header = parse_header(self.octets)
        return view


def parse_header(octets: Buffer) -> Header:
    """Parse a whole header; octets beyond it are not looked at. Raises KvspError (400)."""
    codec, first_layer, _, token_count = _read_fixed(octets)
    length = header_length(octets)
    if len(octets) < length:
        raise bad_request("container truncated in its header")
    table = memoryview(octets)[FIXED_OCTETS:length]
    return Header(codec, first_layer, token_count, tuple(_ENTRY.iter_unpack(table)))


def build(
    first_layer: int,
    token_count: int,
    layers: Sequence[tuple[Buffer, Buffer]],
    codec: int = registry.RAW.value,
) -> bytes:
    """A container of the (K, V) sections of consecutive layers. Raises KvspError (400)."""
    views = [(memoryview(k).cast("B"), memoryview(v).cast("B")) for k, v in layers]
    header = Header(codec, first_layer, token_count, tuple((len(k), len(v)) for k, v in views))
    return b"".join((header.encode(), *(view for pair in views for view in pair)))


def raw_header(descriptor: Descriptor) -> Header:
    """Of a whole block of the descriptor, codec raw."""
    sections = ((descriptor.section_octets, descriptor.section_octets),) * descriptor.layers
    return Header(registry.RAW.value, 0, descriptor.block_tokens, sections)


def check_geometry(header: Header, descriptor: Descriptor) -> None:
    """A container holds one whole block of the descriptor (U-25). Raises KvspError (kvsp-incompatible)."""
    if header.first_layer != 0 or header.layer_count != descriptor.layers:
        raise KvspError(registry.INCOMPATIBLE, "container does not hold the layers of the descriptor")
    check_sections(header, descriptor)


def check_sections(header: Header, descriptor: Descriptor) -> None:
    """Any layer range of a block fits the descriptor (R-033). Raises KvspError (kvsp-incompatible)."""
    if header.layers[1] >= descriptor.layers:
        raise KvspError(registry.INCOMPATIBLE, "container holds a layer beyond the descriptor")
    if header.token_count != descriptor.block_tokens:
        raise KvspError(registry.INCOMPATIBLE, "token_count is not block_tokens of the descriptor")
    # "the K and V sections of a layer each hold Token Count x kv_heads x head_dim elements"
    exact = (descriptor.section_octets, descriptor.section_octets)
    if header.codec == registry.RAW.value and any(section != exact for section in header.sections):
        raise KvspError(registry.INCOMPATIBLE, "section length does not fit the descriptor")


def _read_fixed(octets: Buffer) -> tuple[int, int, int, int]:
    """Codec, first layer, layer count and token count, checked."""
    if len(octets) < FIXED_OCTETS:
        raise bad_request("container truncated in its header")
    magic, version, flags, codec, first_layer, layer_count, token_count = _FIXED.unpack_from(octets)
    if magic != MAGIC or version != VERSION:
        raise bad_request("not a KVB1 container of version 1")
    # "Flags are reserved and set to zero." Other formats share the magic and the version octet, so
    # everything that follows is checked too rather than trusted on the strength of five octets.
    if flags != 0:
        raise bad_request("container flags are not zero")
    _check_fields(codec, first_layer, layer_count, token_count)
    return codec, first_layer, layer_count, token_count


def _check_fields(codec: int, first_layer: int, layer_count: int, token_count: int) -> None:
    if not registry.CODEC_RESERVED < codec <= registry.CODEC_MAX:
        raise bad_request("container codec is reserved")
    if not 1 <= layer_count <= limits.CONTAINER_LAYERS_MAX:
        raise bad_request("container layer count out of bounds")
    if first_layer < 0 or first_layer + layer_count > limits.LAYER_MAX + 1:
        raise bad_request("container layers beyond 2^32")
    if not 1 <= token_count <= limits.TOKEN_MAX:
        raise bad_request("container token count out of bounds")
