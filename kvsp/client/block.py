"""A block in memory, and what a replica record lets us expect of it."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import UnsetType

from kvsp.client.errors import mismatch
from kvsp.protocol import container, digests, limits, registry
from kvsp.protocol.container import Header
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
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

    `layer_digests` (of all layers of the block) and `replica_digest` come from the index's record or
    from the producer, `descriptor` from the caller; nothing from the holder. None: nothing to compare with.
    """

    layers: Layers | None = None
    layer_count: int | None = None
    codec: int | None = None
    payload_octets_max: int = _ANY_OCTETS
    layer_digests: tuple[bytes, ...] | None = None
    replica_digest: bytes | None = None
    descriptor: Descriptor | None = None

    @classmethod
    def of_record(
        cls,
        record: ReplicaRecord,
        layers: Layers | None = None,
        codec: int | None = None,
        descriptor: Descriptor | None = None,
        *,
        pinned: str | None = None,
    ) -> Expectation:
        """Raises KvspError (kvsp-digest-mismatch) when what came could not be verified against the record.

        `pinned` is the only digest accepted (R-212).
        """
        if pinned is not None and pinned != record.digest:
            raise mismatch("replica digest is not the producer's")
        if codec is not None and codec != record.codec:
            if pinned is not None:
                raise mismatch("transcoded octets cannot be verified against the producer's digest")
            # transcoded data is protected by Repr-Digest alone, and may have any size.
            return cls(layers, record.layer_count, codec, descriptor=descriptor)
        table = _layer_digests(record)
        # Repr-Digest is the holder's own word: without a digest of each layer only all of them can be
        # verified ("layer_digests ... REQUIRED for replicas that are served by layer range", R-042, D11).
        if table is None and layers not in (None, (0, record.layer_count - 1)):
            raise mismatch("record has no layer digests to verify a layer range with")
        replica_digest = digests.parse_digest(record.digest)
        return cls(layers, record.layer_count, record.codec, record.size, table, replica_digest, descriptor)

    @classmethod
    def of_holder(
        cls,
        layers: Layers | None = None,
        codec: int | None = None,
        descriptor: Descriptor | None = None,
        *,
        pinned: str | None = None,
    ) -> Expectation:
        """Without a record. Raises KvspError (kvsp-digest-mismatch) when a pinned digest could not be verified."""
        if pinned is not None and (layers is not None or codec is not None):
            raise mismatch("only a whole block as stored can be verified against the producer's digest")
        digest = None if pinned is None else digests.parse_digest(pinned)
        return cls(layers, codec=codec, replica_digest=digest, descriptor=descriptor)

    @property
    def payload_octets(self) -> int | None:
        """Octets of the payload, where the descriptor tells: in codec raw (R-033)."""
        if self.descriptor is None or self.codec != registry.RAW.value:
            return None
        count = self.descriptor.layers if self.layers is None else self.layers[1] - self.layers[0] + 1
        return 2 * count * self.descriptor.section_octets

    @property
    def octets_max(self) -> int:
        """Octets of the container at the most: "caps what it reads at the expected size" (D5)."""
        count = self.layer_count if self.layers is None else self.layers[1] - self.layers[0] + 1
        if count is None:
            count = limits.CONTAINER_LAYERS_MAX if self.descriptor is None else self.descriptor.layers
        payload = self.payload_octets_max if self.payload_octets is None else self.payload_octets
        return container.FIXED_OCTETS + limits.CONTAINER_LAYER_ENTRY_OCTETS * count + payload

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
        self._check_fit(header)

    def _check_fit(self, header: Header) -> None:
        """Layer digests cover "K || V" alone: where K ends, and of how many tokens, only the descriptor tells."""
        if self.descriptor is None:
            return
        check = container.check_geometry if self.layers is None else container.check_sections
        try:
            check(header, self.descriptor)
        except KvspError as error:
            raise mismatch(f"container does not fit the descriptor: {error}") from None

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
        if self.replica_digest is None or (self.layers is not None and len(found) != self.layer_count):
            return
        if not hmac.compare_digest(digests.replica_digest(found), self.replica_digest):
            raise mismatch("block does not match its replica digest")


def _layer_digests(record: ReplicaRecord) -> tuple[bytes, ...] | None:
    """Those of the record. Raises KvspError (kvsp-digest-mismatch) when it contradicts itself (R-036)."""
    if isinstance(record.layer_digests, UnsetType):
        return None
    table = tuple(map(bytes.fromhex, record.layer_digests))
    if not hmac.compare_digest(digests.replica_digest(table), digests.parse_digest(record.digest)):
        raise mismatch("layer digests of the record do not match its digest")
    return table
