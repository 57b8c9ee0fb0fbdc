"""A block in memory, and what a replica record lets us expect of it."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import UnsetType

from kvsp.client.errors import mismatch
from kvsp.protocol import container, digests, limits
from kvsp.protocol.container import Header
from kvsp.protocol.records import ReplicaRecord

Layers = tuple[int, int]
"""First and last layer, inclusive (R-005)."""


class Layer(NamedTuple):
    """K and V octets of one layer, as views into the block's buffer."""

    number: int
    k: memoryview
    v: memoryview


@dataclass(frozen=True, slots=True)
class Block:
    """A container received from `holder`. `payload` are all K and V sections, ascending, no header.

    `verified` is False only where the client was told not to verify.
    """

    header: Header
    payload: memoryview
    holder: str
    verified: bool

    def layer(self, number: int) -> Layer:
        """One layer. Raises KvspError (kvsp-layers-unavailable) when the container lacks it."""
        return layer_of(self.header, self.payload, number)


def layer_of(header: Header, payload: memoryview, number: int) -> Layer:
    """The views of one layer of a payload."""
    start, octets = header.layer_span(number)
    k_octets = header.sections[number - header.first_layer][0]
    middle = start + k_octets
    return Layer(number, payload[start:middle], payload[middle : start + octets])


_ANY_OCTETS: Final = limits.BLOCK_OCTETS_MAX


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must be true of a reply before and after its octets are taken (R-155, D5, D11).

    `layer_digests` (of all layers of the block) and `replica_digest` come from the index's record,
    never from the holder. None: nothing to compare with.
    """

    layers: Layers | None = None
    layer_count: int | None = None
    codec: int | None = None
    octets_max: int = _ANY_OCTETS
    layer_digests: tuple[bytes, ...] | None = None
    replica_digest: bytes | None = None

    @classmethod
    def of_record(cls, record: ReplicaRecord, layers: Layers | None, codec: int | None) -> Expectation:
        """Raises KvspError (kvsp-digest-mismatch) when the record contradicts itself (R-036)."""
        if codec is not None and codec != record.codec:
            # transcoded data is protected by Repr-Digest alone, and may have any size.
            return cls(layers, record.layer_count, codec)
        table = None
        replica_digest = digests.parse_digest(record.digest)
        if not isinstance(record.layer_digests, UnsetType):
            table = tuple(map(bytes.fromhex, record.layer_digests))
            if not hmac.compare_digest(digests.replica_digest(table), replica_digest):
                raise mismatch("layer digests of the record do not match its digest")
        head = container.FIXED_OCTETS + limits.CONTAINER_LAYER_ENTRY_OCTETS * record.layer_count
        return cls(layers, record.layer_count, record.codec, head + record.size, table, replica_digest)

    def check_header(self, header: Header) -> None:
        """The container is the one asked for. Raises KvspError (kvsp-digest-mismatch)."""
        if self.layers is not None and header.layers != self.layers:
            raise mismatch("container does not hold the layers asked for")
        if self.layers is None and (
            header.first_layer != 0 or (self.layer_count is not None and header.layer_count != self.layer_count)
        ):
            raise mismatch("container does not hold all layers")
        if self.codec is not None and header.codec != self.codec:
            raise mismatch("container has another codec than the record")
        if header.total_octets > self.octets_max:
            raise mismatch("container is longer than the record says")

    def check_layers(self, header: Header, found: list[bytes], start: int) -> None:
        """Layer digests from the `start`-th on. Raises KvspError (kvsp-digest-mismatch)."""
        if self.layer_digests is None:
            return
        for at in range(start, len(found)):
            layer = header.first_layer + at
            expected = self.layer_digests[layer] if layer < len(self.layer_digests) else b""
            if not hmac.compare_digest(found[at], expected):
                raise mismatch(f"layer {layer} does not match its digest")

    def check_replica(self, found: list[bytes]) -> None:
        """The digest over all layers, "when all layers were fetched". Raises KvspError."""
        if self.replica_digest is None or len(found) != self.layer_count:
            return
        if not hmac.compare_digest(digests.replica_digest(found), self.replica_digest):
            raise mismatch("block does not match its replica digest")
