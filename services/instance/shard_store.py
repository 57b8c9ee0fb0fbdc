"""The KV of one parallel group's context at this instance, in pieces (R-191, R-196).

A piece has at most PIECE_BLOCKS blocks and memory of its own. Hence a range is given back without touching what
stays: "A token range assigned to the same instance in both versions ... MUST NOT be transferred"; its KV stays at
the same address.

Ranges are half-open token ranges; rows are [token, kv_head, dim], as they travel; attention is shown
[kv_head, token, dim]. What belongs to which version of the map is not known here, see shards.py.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from kvsp.connectors.layout import DTYPES, LayerStates, octets_of
from kvsp.protocol import container
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import unavailable
from kvsp.protocol.reshard import Range, common, merged, without

PIECE_BLOCKS: Final = 16


class NotHeld(LookupError):  # noqa: N818  (a turn of events: a version of the map was left behind)
    """Tokens that are not held here, or not any more."""


class ShardStore:
    """Memory for at most `octets_max` octets of KV, in whole pieces. For any thread.

    Tokens are first reserved, then written, a layer of a range at a time, and are for others to read once
    `advance` said so. A reader keeps the memory that it looks at: what is released meanwhile goes when it is done.
    """

    def __init__(self, descriptor: Descriptor, octets_max: int) -> None:
        self.octets_max = octets_max
        self._descriptor = descriptor
        self._piece_tokens = PIECE_BLOCKS * descriptor.block_tokens
        self._lock = threading.Lock()
        self._pieces: dict[int, _Piece] = {}
        """By their place among pieces: tokens n * `_piece_tokens` ... are in piece n."""
        self._held: list[Range] = []
        self._arriving: dict[Range, int] = {}
        """Layers that are there, of what is not there whole."""
        self._watcher: Callable[[], None] = _nobody

    @property
    def octets(self) -> int:
        """Memory of all pieces, of which some tokens may not be held."""
        return len(self._pieces) * self._piece_octets

    def octets_of(self, tokens: Range) -> int:
        """What `reserve` of these tokens can take at the most."""
        return len(self._places(tokens)) * self._piece_octets

    def ranges(self) -> list[Range]:
        """What is held, reserved tokens included, ascending."""
        with self._lock:
            return list(self._held)

    # --- writing ---

    def reserve(self, tokens: Range) -> None:
        """Make room for tokens. Raises ValueError when some are held already, KvspError (503) without room."""
        with self._lock:
            if tokens[0] >= tokens[1] or common(self._held, [tokens]):
                raise ValueError("no tokens, or tokens that are held already")
            # Of a range of any length no more places are listed than there can be.
            fits = self.octets_of(tokens) <= self.octets_max
            missing = [place for place in self._places(tokens) if place not in self._pieces] if fits else []
            if not fits or self.octets + len(missing) * self._piece_octets > self.octets_max:
                raise unavailable("no room for more of this context")
            for place in missing:
                self._pieces[place] = _Piece(self._descriptor, self._piece_tokens)
            self._held = merged([*self._held, tokens])
            self._arriving[tokens] = 0

    def rows(self, layer: int, block: int) -> tuple[memoryview, memoryview]:
        """Where the K and the V section of a layer of a block belong. Raises NotHeld."""
        size = self._descriptor.block_tokens
        with self._lock:
            piece, at = self._piece(block * size, (block + 1) * size)
        keys, values = (octets_of(rows[at : at + size]) for rows in piece.rows[layer])
        return keys, values

    def write(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy states [kv_head, token, dim] of tokens from `first` on to their place. Raises NotHeld."""
        tokens = first, first + keys.shape[1]
        for (begin, end), places in self._spans(layer, tokens):
            for place, states in zip(places, (keys, values), strict=True):
                place.copy_(states[:, begin - first : end - first])

    def advance(self, tokens: Range, layers: int) -> None:
        """Layers 0 ... layers - 1 of what was reserved of these tokens are there, verified or computed."""
        with self._lock:
            for arriving in [each for each in self._arriving if tokens[0] <= each[0] and each[1] <= tokens[1]]:
                self._arriving[arriving] = layers
                if layers == self._descriptor.layers:
                    del self._arriving[arriving]
        self._watcher()

    def release(self, tokens: Range) -> None:
        """Hold these tokens no more; pieces without any that are held give their memory back."""
        with self._lock:
            self._held = without(self._held, [tokens])
            for place in list(self._pieces):
                if not common(self._held, [(place * self._piece_tokens, (place + 1) * self._piece_tokens)]):
                    del self._pieces[place]
            # What is left of a range that was on its way is on its way still.
            self._arriving = {
                rest: layers for each, layers in self._arriving.items() for rest in without([each], [tokens])
            }
        self._watcher()

    # --- reading ---

    def ready(self, layer: int, ranges: Sequence[Range]) -> bool:
        """Is this layer of all these tokens there? Raises NotHeld."""
        with self._lock:
            if without(ranges, self._held):
                raise NotHeld
            return not any(
                layers <= layer and common(ranges, [arriving]) for arriving, layers in self._arriving.items()
            )

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after each `advance` and `release`, on their thread: to wait without a thread."""
        self._watcher = watcher

    def views(self, layer: int, tokens: Range) -> list[LayerStates]:
        """Keys and values [kv_head, token, dim] of these tokens, piece by piece. Raises NotHeld."""
        return [states for _, states in self._spans(layer, tokens)]

    def export(self, block: int) -> bytes:
        """The container of a complete block, codec raw (R-030 ... R-034). Raises NotHeld."""
        layers = range(self._descriptor.layers)
        return container.build(0, self._descriptor.block_tokens, [self.rows(layer, block) for layer in layers])

    def address(self, block: int) -> int:
        """Where in memory a block is. Raises NotHeld."""
        size = self._descriptor.block_tokens
        with self._lock:
            piece, at = self._piece(block * size, (block + 1) * size)
        return piece.rows[0, 0, at].data_ptr()

    # --- inside ---

    @property
    def _piece_octets(self) -> int:
        return PIECE_BLOCKS * self._descriptor.payload_octets

    def _places(self, tokens: Range) -> range:
        return range(tokens[0] // self._piece_tokens, -(-tokens[1] // self._piece_tokens))

    def _piece(self, first: int, end: int) -> tuple[_Piece, int]:
        """The piece that has these tokens, and the place of the first of them within it."""
        if without([(first, end)], self._held):
            raise NotHeld
        place, at = divmod(first, self._piece_tokens)
        return self._pieces[place], at

    def _spans(self, layer: int, tokens: Range) -> Iterator[tuple[Range, LayerStates]]:
        """The tokens by piece, with keys and values of each."""
        size = self._piece_tokens
        with self._lock:
            if without([tokens], self._held):
                raise NotHeld
            pieces = [(place * size, self._pieces[place]) for place in self._places(tokens)]
        for start, piece in pieces:
            begin, end = max(tokens[0], start), min(tokens[1], start + size)
            keys, values = piece.states[layer]
            if end - begin < size:
                rows = slice(begin - start, end - start)
                keys, values = keys[:, rows], values[:, rows]
            yield (begin, end), (keys, values)


class _Piece:
    """Rows [layer, K or V, token, kv_head, dim] in a mapping of their own, which the system has back when nothing
    shows it any more; what an allocator frees it may keep."""

    def __init__(self, descriptor: Descriptor, tokens: int) -> None:
        octets = tokens // descriptor.block_tokens * descriptor.payload_octets
        memory = mmap.mmap(-1, octets, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        shape = descriptor.layers, 2, tokens, descriptor.kv_heads, descriptor.head_dim
        self.rows = torch.frombuffer(memory, dtype=torch.uint8).view(DTYPES[descriptor.kv_dtype]).view(shape)
        self.states = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in self.rows]


def _nobody() -> None:
    """Nobody watches."""
