"""Prefix reuse for Hugging Face transformers: look up, load layer by layer, save.

connector = KvspConnector(client, scope_key, describe(model_dir, block_tokens=32), holder)
prefix = connector.load(connector.match(tokens))
output = prefix.forward(model, tokens)          # computes the tail only, starts before all is there
connector.save(tokens, prefix.cache)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import Cache

from kvsp.connectors.describe import describe
from kvsp.connectors.layout import export_block, export_blocks, layer_states
from kvsp.connectors.prefix import PrefixCache, PrefixShortened
from kvsp.protocol import descriptor as descriptors
from kvsp.protocol import keys, limits, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import ReplicaRecord

if TYPE_CHECKING:
    from kvsp.client import Client

__all__ = ["KvspConnector", "Match", "Prefix", "PrefixCache", "describe", "export_blocks"]

ROOM_TOKENS: Final = 1024
"""Default room behind a loaded prefix for the tail and what is generated."""

REQUEST_OCTETS_MIN: Final = 256 << 10
"""Layers of a block are fetched in ranges of at least this many octets.

Measured through Envoy on 2 cores, 59 blocks of 512 KiB: at 64 KiB all is there after 0.67 s, at 256 KiB
after 0.21 s (the first layers after 0.12 s), at 512 KiB after 0.17 s, with nothing to compute meanwhile.
"""


@dataclass(frozen=True)
class Match:
    """The longest known prefix of a token sequence: the replicas of each of its blocks."""

    replicas: list[list[ReplicaRecord]]

    @property
    def blocks(self) -> int:
        """Matched blocks."""
        return len(self.replicas)


class Prefix:
    """A matched prefix on its way into `cache`."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.cache.prefix_tokens

    def forward(self, model: Any, tokens: Sequence[int], **options: Any) -> Any:
        """Run the model over what follows the prefix; its output is that of the whole sequence's end.

        Starts while layers are arriving. When a block turns out to be lost, computes again from there.
        """
        while True:
            tail = torch.tensor([tokens[self.tokens :]], device=model.device)
            try:
                return model(tail, cache=self.cache, use_cache=True, **options)
            except PrefixShortened:
                self.cache.rewind()

    def wait(self) -> PrefixCache:
        """The cache once all that can be had is there, for `generate` and other callers of the model."""
        while True:
            try:
                self.cache.wait()
                return self.cache
            except PrefixShortened:
                self.cache.rewind()


class KvspConnector:
    """One model in one scope: what is shared, under which names, and where new blocks are put.

    `holder` is the base URI of the holder that takes new blocks; `parallel` is how many requests are
    in flight while loading or storing. Methods raise KvspError when a service refuses or is away.
    """

    def __init__(
        self, client: Client, scope_key: ScopeKey, descriptor: Descriptor, holder: str, parallel: int = 4
    ) -> None:
        self._client = client
        self._scope_key = scope_key
        self._scope_id = keys.scope_id(scope_key).hex()
        self._descriptor = descriptor
        # "MUST compute the Compatibility ID from the descriptor"
        self._compat_id = descriptors.compat_id(descriptor)
        self._holder = holder
        self._pool = ThreadPoolExecutor(parallel, "kvsp-connector")

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._descriptor.block_tokens

    def close(self) -> None:
        """End the threads; loads under way finish first."""
        self._pool.shutdown()

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of complete blocks that is known, one token short of all at the most.

        A model needs at least one token to compute, or there is no output to go on from.
        """
        names = self._block_keys(tokens)
        usable = names[: min((len(tokens) - 1) // self.block_tokens, limits.LOOKUP_KEYS_MAX)]
        if not usable:
            return Match([])
        reply = self._client.lookup(self._scope_id, self._compat_id.hex(), usable)
        replicas = [[record for record in row if record.codec == registry.RAW.value] for row in reply.replicas]
        # The cache can be filled from raw sections only: the prefix ends where no replica has them.
        return Match(list(itertools.takewhile(bool, replicas)))

    def load(self, match: Match, room: int = ROOM_TOKENS) -> Prefix:
        """Begin to load a match; returns at once. `room` is for the tokens that will follow."""
        cache = PrefixCache(self._descriptor, match.blocks, room)
        threading.Thread(target=self._fill, args=(cache, match), name="kvsp-load", daemon=True).start()
        return Prefix(cache)

    def save(self, tokens: Sequence[int], cache: Cache, known: int = 0) -> int:
        """Put the complete blocks of `tokens` to the holder, but for the first `known`, which it has.

        `cache` holds the KV of at least those tokens. Returns how many blocks were new to the holder.
        """
        names = self._block_keys(tokens)
        states = layer_states(cache, self._descriptor)
        if states[0][0].shape[-2] < len(names) * self.block_tokens:
            raise ValueError("the cache holds fewer tokens than were named")

        def put(block: int) -> bool:
            octets = export_block(states, self.block_tokens, block)
            return self._client.put(self._holder, self._compat_id.hex(), self._scope_id, names[block], octets)

        return sum(self._pool.map(put, range(known, len(names))))

    def _block_keys(self, tokens: Sequence[int]) -> list[str]:
        return [key.hex() for key in keys.block_keys(self._scope_key, self._compat_id, tokens, self.block_tokens)]

    def _fill(self, cache: PrefixCache, match: Match) -> None:
        """Load range after range of layers, each for all blocks, so that the first layers are early."""
        try:
            for first, last in self._layer_ranges():
                fetch = partial(self._fetch, cache, match, (first, last))
                # A range is announced when all of it has come: nothing is written to it afterwards.
                list(self._pool.map(fetch, range(cache.arrival.blocks)))
                cache.arrival.advance(last + 1)
        except BaseException as error:
            cache.arrival.fail(error)  # whoever waits for the layers must hear of it

    def _fetch(self, cache: PrefixCache, match: Match, layers: tuple[int, int], block: int) -> None:
        """Load a range of layers of one block; when no replica has them in order, the prefix ends here."""
        if block >= cache.arrival.blocks:
            return
        try:
            received = self._client.get(match.replicas[block], layers=layers, descriptor=self._descriptor)
            for layer in range(layers[0], layers[1] + 1):
                _, k, v = received.layer(layer)
                for place, section in zip(cache.rows(layer, block), (k, v), strict=True):
                    place[:] = section  # of equal length: `get` compared it with the descriptor
        except KvspError:
            cache.arrival.shorten(block)

    def _layer_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of layers, ascending, each inclusive and worth a request."""
        layers = self._descriptor.layers
        step = -(-REQUEST_OCTETS_MIN // (2 * self._descriptor.section_octets))
        for first in range(0, layers, step):
            yield first, min(first + step, layers) - 1
