"""A cache whose layers may be used while later ones are still arriving.

One thread loads (`PrefixCache.rows` gives it the place of every section), another runs the model: the
`update` of layer l waits until layer l of every block has arrived and been verified. When a block is
lost, what follows it is of no use; the model's thread gets `PrefixShortened`, calls `rewind` and
computes again from the end of the shorter prefix. Wrong octets are never computed with (R-161).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvsp.connectors.layout import DTYPES, octets_of
from kvsp.protocol.descriptor import Descriptor


class PrefixShortened(Exception):  # noqa: N818  (a turn of events, not a fault of the caller)
    """Part of the prefix was lost while it was in use."""


class Interrupted(Exception):  # noqa: N818  (a turn of events, not a fault of the caller)
    """A wait for layers was cut short, because the waiting thread has other things to do."""


class Arrival:
    """How many layers are there, and for how many blocks; shared by the loader and the model."""

    def __init__(self, blocks: int) -> None:
        self._changed = threading.Condition()
        self._layers = 0
        self._blocks = blocks
        self._error: BaseException | None = None
        self._interrupted = False
        self._watcher: Callable[[], None] = _nobody

    @property
    def blocks(self) -> int:
        """Blocks from the start of the prefix that can still be used."""
        return self._blocks

    def advance(self, layers: int) -> None:
        """Layers 0..layers-1 of all usable blocks have arrived and been verified; no octet of them, lost blocks
        included, will be written any more."""
        with self._changed:
            self._layers = layers
            self._changed.notify_all()
        self._watcher()

    def shorten(self, blocks: int) -> None:
        """Block number `blocks` is lost, and with it all that follow."""
        with self._changed:
            self._blocks = min(self._blocks, blocks)
            self._changed.notify_all()
        self._watcher()

    def fail(self, error: BaseException) -> None:
        """Loading ended by a fault that is not the loss of a block; waiters get it."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._watcher()

    def interrupt(self) -> None:
        """Whoever waits, or is the next to, gets Interrupted instead."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after each change, on the loader's thread."""
        self._watcher = watcher

    def settled(self, layers: int) -> bool:
        """Waiting for `layers` layers would end at once, for better or worse."""
        with self._changed:
            return self._layers >= layers or self._error is not None

    def wait(self, layers: int, blocks: int) -> None:
        """Return when `layers` layers of `blocks` blocks are there. Raises PrefixShortened, Interrupted."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._layers >= layers or self._blocks < blocks or self._error or self._interrupted
            )
            if self._error is not None:
                raise self._error
            if self._blocks < blocks:
                raise PrefixShortened
            if self._layers < layers:
                self._interrupted = False
                raise Interrupted


def _nobody() -> None:
    """Nobody watches."""


class PrefixLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer: rows [token, head, dim] as they travel, seen by the model as [1, head, token, dim].

    Rows for `room` more tokens follow the prefix, so that generating does not copy it at every step.
    """

    def __init__(self, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self._kept = 0
        self.dtype, self.device = rows[0].dtype, rows[0].device
        self.is_initialized = True

    def show(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold the first `tokens` rows, no more."""
        keys, values = (rows[:tokens].transpose(0, 1).unsqueeze(0) for rows in self._rows)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; returns all keys and values."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        # Beam search and the like replace the tensors; then this is a DynamicLayer as any other.
        if end > len(self._rows[0]) or not self._holds_rows():
            return super().update(key_states, value_states, *args, **kwargs)
        first = min(max(start, self._kept), end)
        for rows, states in zip(self._rows, (key_states, value_states), strict=True):
            rows[first:end] = states[0, :, first - start :].transpose(0, 1)
        return self.show(end)

    def keep(self, tokens: int) -> None:
        """`update` leaves the first `tokens` rows as they are, whatever it is given for them."""
        self._kept = tokens

    def _holds_rows(self) -> bool:
        if self.keys is None:
            return False
        # By storage: an empty tensor has no address of its own.
        storages = [tensor.untyped_storage().data_ptr() for tensor in (self.keys, self._rows[0])]
        return storages[0] == storages[1] and self.keys.storage_offset() == 0


class PrefixCache(Cache):
    """A cache that starts with `blocks` blocks of `descriptor`, empty until the loader fills them."""

    def __init__(self, descriptor: Descriptor, blocks: int, room: int) -> None:
        self._block_tokens = descriptor.block_tokens
        self._section_octets = descriptor.section_octets
        shape = (blocks * descriptor.block_tokens + room, descriptor.kv_heads, descriptor.head_dim)
        dtype = DTYPES[descriptor.kv_dtype]
        rows = [
            (torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(descriptor.layers)
        ]
        self._octets = [(octets_of(keys), octets_of(values)) for keys, values in rows]
        self.arrival = Arrival(blocks)
        self._prefix_layers = [PrefixLayer(pair) for pair in rows]
        super().__init__(layers=list(self._prefix_layers))
        self.rewind()

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix as of the last `rewind`."""
        return self._blocks * self._block_tokens

    def rewind(self) -> None:
        """Forget what the model appended and keep the blocks that can still be used."""
        self._blocks = self.arrival.blocks
        for layer in self._prefix_layers:
            layer.show(self.prefix_tokens)

    def seek(self, tokens: int, keep: int = 0) -> None:
        """Go on after `tokens` rows; rows before `keep` stay as they are when the model computes them again."""
        for layer in self._prefix_layers:
            layer.show(tokens)
            layer.keep(keep)

    def wait(self) -> None:
        """Return when all layers are there. Raises PrefixShortened."""
        self.arrival.wait(len(self.layers), self._blocks)

    def rows(self, layer: int, block: int) -> tuple[memoryview, memoryview]:
        """Where the K and the V section of a layer of a block belong."""
        start, length = block * self._section_octets, self._section_octets
        keys, values = self._octets[layer]
        return keys[start : start + length], values[start : start + length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the layer, then append. Raises PrefixShortened when a block was lost meanwhile."""
        self.arrival.wait(layer_idx + 1, self._blocks)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
