"""The `device` tier: KV of hot blocks in the engine's own memory, the least recently used evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol import container, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import bad_request

Changed = Callable[[Sequence[str], tuple[int, int] | None], None]
"""Blocks by name, and the layers (inclusive) of them that the tier holds from now on; None: none of them."""


class DeviceTier:
    """The first `layers` layers (0: all) of blocks, in `octets` octets of torch device `device`.

    A block's name is the caller's (its key); all are of `descriptor`. For any thread; `changed` is called on the
    caller's, in the order of the changes, and must not call back.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        octets: int,
        layers: int = 0,
        *,
        device: str = "cpu",
        changed: Changed | None = None,
    ) -> None:
        self._descriptor = descriptor
        self._layers = min(layers or descriptor.layers, descriptor.layers)
        self._capacity = octets // (2 * descriptor.section_octets * self._layers)
        self._device = torch.device(device)
        self._changed = changed
        self._is_open = True
        self._blocks: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def layers(self) -> tuple[int, int]:
        """The layers that are kept of a block, inclusive."""
        return 0, self._layers - 1

    @property
    def octets(self) -> int:
        """What is taken at present."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks.values())

    def names(self) -> list[str]:
        """What is held, the least recently used first."""
        with self._lock:
            return list(self._blocks)

    def put(self, name: str, octets: container.Buffer) -> None:
        """Keep a block, from its container of all layers, codec raw. Raises KvspError when it is not one.

        A tier that is closed, or has no room for a block, keeps none.
        """
        header = container.parse_header(octets)
        container.check_geometry(header, self._descriptor)
        if header.codec != registry.RAW.value or len(octets) != header.total_octets:
            raise bad_request("not a whole container in codec raw")
        end = header.header_octets + sum(header.layer_span(self._layers - 1))
        kept = torch.frombuffer(bytearray(memoryview(octets)[header.header_octets : end]), dtype=torch.uint8)
        with self._lock:
            is_new = self._is_open and self._capacity > 0 and name not in self._blocks
            if is_new:
                self._blocks[name] = kept.to(self._device)
            self._touch(name)
            evicted = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
            if evicted:
                self._tell(evicted, None)
            if is_new:
                self._tell([name], self.layers)

    def fill(self, name: str, cache: PrefixCache, block: int) -> int:
        """Copy a block to its place in a cache; returns how many layers, from the first on, that were."""
        with self._lock:
            kept = self._blocks.get(name)
            self._touch(name)
        if kept is None:
            return 0
        sections = kept.view(self._layers, 2, self._descriptor.section_octets)
        for layer in range(self._layers):
            for place, section in zip(cache.rows(layer, block), sections[layer], strict=True):
                torch.frombuffer(place, dtype=torch.uint8).copy_(section)
        return self._layers

    def drop(self, names: Sequence[str]) -> None:
        """Forget blocks, held or not."""
        with self._lock:
            if dropped := [name for name in names if self._blocks.pop(name, None) is not None]:
                self._tell(dropped, None)

    def open(self) -> None:
        """Keep blocks again, after `close`."""
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        """Forget every block, on sleep and at stop (U-49). What is still being stored then is not kept either."""
        with self._lock:
            self._is_open = False
            dropped = list(self._blocks)
            self._blocks.clear()
            if dropped:
                self._tell(dropped, None)

    def _touch(self, name: str) -> None:
        if name in self._blocks:
            self._blocks.move_to_end(name)

    def _tell(self, names: Sequence[str], layers: tuple[int, int] | None) -> None:
        if self._changed is not None:
            self._changed(names, layers)
