"""The engine for any local causal language model that transformers can run with a cache of K and V.

Exactness (`batch_invariant`). The octets of a matrix product depend on its shape: a library chooses other kernels,
and with them another order of summation, for another number of rows. So every position is computed in a forward
pass of one and the same shape, whoever asks:

* The prompt runs on a fixed grid: chunks of `chunk_tokens`, a multiple of the block, from position 0 on. A chunk
  that the prompt does not fill is padded; what the padding computes is not used, and a row never depends on later
  rows.
* A prefix that ends inside a chunk does not move the grid: the whole chunk is computed, and the rows that were
  loaded stay as they are. Their tokens need not even be known.
* Output is computed one token a pass. A resumed session computes the output whose KV was not loaded in that way
  again.

Hence KV and logits of a position are a function of the session's tokens up to it (and of where its prompt ends).
Other processors or another number of threads may still give other octets: instances that are to agree must agree
in these.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvsp.connectors.describe import describe
from kvsp.connectors.layout import export_block
from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol import descriptor as descriptors
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import bad_request
from kvsp.protocol.records import Sampler
from services.instance import ragged, sampling
from services.instance.device import Changed, DeviceTier
from services.instance.engine import CHUNK_TOKENS, TokensUnknown, Work
from services.instance.sharded import Sharded, forward, scales

THREADS_MAX: Final = 8
POSITIONS_MAX: Final = 32_768
"""For a model that sets no bound."""

MEASURED_STEPS: Final = 4
_PAD: Final = 0
_GREEDY: Final = Sampler("greedy", {}, 0, 0, True)
_log = structlog.get_logger(__name__)


@dataclass
class TorchSequence:
    """A session's tokens and KV; see `engine.SessionState`."""

    cache: PrefixCache
    prompt_tokens: int
    known_from: int
    tokens: list[int] = field(repr=False)
    """Of positions `known_from` ..."""
    choice: sampling.Choice
    loaded: int
    done: int
    logits: torch.Tensor | None = field(default=None, repr=False)
    """That follow the last known token, [vocabulary]; None when they are still to be computed."""

    @property
    def length(self) -> int:
        """Positions up to the last known token."""
        return self.known_from + len(self.tokens)

    @property
    def ready(self) -> bool:
        """The next token can be sampled."""
        return self.logits is not None

    @property
    def at(self) -> int:
        """The next position to compute: the last one again when its KV is there and its logits are not."""
        return min(self.done, self.length - 1)

    def ids(self, first: int, end: int) -> list[int]:
        """Tokens of these positions; a placeholder where they are not known."""
        tokens, known_from, length = self.tokens, self.known_from, self.length
        return [tokens[at - known_from] if known_from <= at < length else _PAD for at in range(first, end)]


class TorchEngine:
    """See `engine.Engine`. Computes on the CPU, in the type that the weights are stored in."""

    def __init__(
        self,
        model: Any,
        descriptor: Descriptor,
        *,
        batch_invariant: bool = True,
        chunk_tokens: int = CHUNK_TOKENS,
        device: DeviceTier | None = None,
    ) -> None:
        self.descriptor = descriptor
        # "MUST compute the Compatibility ID from the descriptor"
        self.compat_id = descriptors.compat_id(descriptor)
        self.batch_invariant = batch_invariant
        self.chunk_tokens = max(chunk_tokens // descriptor.block_tokens, 1) * descriptor.block_tokens
        self.device = device
        config = model.config.get_text_config(decoder=True)
        self.positions_max: int = getattr(config, "max_position_embeddings", None) or POSITIONS_MAX
        self._vocabulary: int = config.vocab_size
        self._model = model
        self._attends = ragged.enable(model, descriptor)
        self.ragged = self._attends and not batch_invariant
        self.rates = self._measure()

    def prefix(self, blocks: int, room: int) -> PrefixCache:
        """See `Engine.prefix`; there is some more room, for the padding of a chunk."""
        room = min(room, self.positions_max - blocks * self.descriptor.block_tokens)
        cache = PrefixCache(self.descriptor, blocks, max(room, 0) + self.chunk_tokens)
        if blocks == 0:
            cache.arrival.advance(self.descriptor.layers)
        return cache

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """See `Engine.scales`. Takes a trial: only who has other instances to share with asks."""
        return scales(self._model, self.descriptor) if self._attends else ()

    @property
    def can_shard(self) -> bool:
        """See `Engine.can_shard`."""
        return bool(self.scales)

    def check(self, work: Work) -> sampling.Choice:
        """See `Engine.check`."""
        length = work.known_from + len(work.tokens)
        if not 0 < work.prompt_tokens <= length <= work.prompt_tokens + work.max_tokens or work.known_from < 0:
            raise bad_request("prompt, output and max_tokens do not fit together")
        if work.sampler.step != length - work.prompt_tokens:
            raise bad_request("sampler step is not the number of output tokens")
        if work.prompt_tokens >= self.positions_max:
            raise bad_request("prompt is longer than the model's context")
        self.check_tokens(work.tokens)
        return sampling.parse(work.sampler)

    def begin(self, work: Work) -> TorchSequence:
        """See `Engine.begin`."""
        choice, length = self.check(work), work.known_from + len(work.tokens)
        cache = work.prefix or self.prefix(0, work.prompt_tokens + work.max_tokens)
        loaded = min(cache.prefix_tokens, length)
        return TorchSequence(
            cache, work.prompt_tokens, work.known_from, list(work.tokens), choice, loaded, done=loaded
        )

    def provide(self, sequence: TorchSequence, tokens: Sequence[int]) -> None:
        """See `Engine.provide`."""
        if len(tokens) < sequence.known_from:
            raise ValueError("tokens are missing between these and those that are known")
        self.check_tokens(tokens)
        sequence.tokens = [*tokens[: sequence.known_from], *sequence.tokens]
        sequence.known_from = 0

    def rewind(self, sequence: TorchSequence) -> None:
        """See `Engine.rewind`."""
        sequence.cache.rewind()
        sequence.loaded = min(sequence.loaded, sequence.cache.prefix_tokens)
        sequence.done = min(sequence.done, sequence.loaded)
        sequence.logits = None

    @torch.inference_mode()
    def prefill(self, sequence: TorchSequence) -> int:
        """See `Engine.prefill`. Output is computed again as it was at first, a token a call."""
        if sequence.at < sequence.known_from:
            raise TokensUnknown
        if sequence.at >= sequence.prompt_tokens:
            self._single(sequence)
            return 1
        return self._chunk(sequence)

    def sample(self, sequence: TorchSequence) -> int:
        """See `Engine.sample`."""
        logits: Any = sequence.logits
        token = sequence.choice.pick(logits.float().numpy(), sequence.length - sequence.prompt_tokens)
        sequence.tokens.append(token)
        sequence.logits = None
        return token

    @torch.inference_mode()
    def step(self, sequences: Sequence[TorchSequence]) -> dict[int, Exception]:
        """See `Engine.step`."""
        if self.ragged and len(sequences) > 1:
            try:
                self._together(sequences)
                return {}
            except Exception:
                # Nothing counts as computed yet: one by one it shows whose fault it was.
                _log.warning("a ragged forward failed", sessions=len(sequences), exc_info=True)
        failed: dict[int, Exception] = {}
        for at, sequence in enumerate(sequences):
            try:
                self._single(sequence)
            except Exception as error:
                failed[at] = error
        return failed

    def export(self, sequence: TorchSequence, block: int) -> bytes:
        """See `Engine.export`."""
        sequence.cache.seek(sequence.done)
        layers: list[Any] = sequence.cache.layers
        states = [(layer.keys, layer.values) for layer in layers]
        return export_block(states, self.descriptor.block_tokens, block)

    @torch.inference_mode()
    def forward_shard(self, sharded: Sharded, tokens: Sequence[int]) -> torch.Tensor:
        """See `Engine.forward_shard`."""
        return forward(self._model, sharded, tokens)

    def _chunk(self, sequence: TorchSequence) -> int:
        """The chunk of the prompt that has the next position or, if nothing must be exact, begins with it."""
        at, size = sequence.at, self.chunk_tokens
        start = at // size * size if self.batch_invariant else at
        end = min(start + size, sequence.prompt_tokens)
        width = size if self.batch_invariant else end - start
        last = end == sequence.length
        logits = self._forward(sequence, start, width, keep=[end - 1 - start] if last else [])
        sequence.done = max(sequence.done, end)
        sequence.logits = logits[0] if last else None
        return end - at

    def _single(self, sequence: TorchSequence) -> None:
        at = sequence.at
        logits = self._forward(sequence, at, 1, keep=[0])
        sequence.done = max(sequence.done, at + 1)
        sequence.logits = logits[0] if at + 1 == sequence.length else None

    def _together(self, sequences: Sequence[TorchSequence]) -> None:
        positions = [sequence.at for sequence in sequences]
        for sequence in sequences:
            sequence.cache.seek(sequence.at)
        tokens = [sequence.tokens[-1] for sequence in sequences]
        logits = ragged.forward(self._model, [sequence.cache for sequence in sequences], tokens, positions)
        for row, sequence in enumerate(sequences):
            sequence.done += 1
            sequence.logits = logits[row]

    def _forward(self, sequence: TorchSequence, start: int, width: int, keep: list[int]) -> torch.Tensor:
        """Compute positions start ... start + width - 1; logits of the rows `keep` of them."""
        sequence.cache.seek(start, keep=sequence.done)
        # Padding may reach over the end of the model's positions.
        positions = torch.arange(start, start + width).clamp_(max=self.positions_max - 1)
        output = self._model(
            torch.tensor([sequence.ids(start, start + width)]),
            position_ids=positions.unsqueeze(0),
            cache=sequence.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(keep, dtype=torch.long),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _measure(self) -> tuple[float, float]:
        """See `Engine.rates`."""
        tokens = [1] * min(self.chunk_tokens, self.positions_max - MEASURED_STEPS - 1)
        work = Work("", 0, len(tokens), 0, tokens, _GREEDY, MEASURED_STEPS + 1)
        rates = (0.0, 0.0)
        for _ in range(2):  # the first time memory and kernels are set up
            sequence = self.begin(work)
            started = time.perf_counter()
            self.prefill(sequence)
            prefilled = time.perf_counter()
            for _ in range(MEASURED_STEPS):
                self.sample(sequence)
                self.step([sequence])
            ended = time.perf_counter()
            rates = len(tokens) / (prefilled - started), MEASURED_STEPS / (ended - prefilled)
        return rates

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """See `Engine.check_tokens`."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise bad_request("a token is not in the model's vocabulary")


def load_engine(
    model_dir: Path,
    *,
    block_tokens: int,
    threads: int = 0,
    batch_invariant: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    device_octets: int = 0,
    device_layers: int = 0,
    device_changed: Changed | None = None,
) -> TorchEngine:
    """The engine for a model directory. Takes seconds, reads every weight file.

    `threads` compute (0: one a core, 8 at the most). `device_octets` of hot blocks' first `device_layers` layers
    (0: all) stay in the engine's memory (0: none). Raises ValueError or OSError when the model cannot be used.
    """
    torch.set_num_threads(threads or min(len(os.sched_getaffinity(0)), THREADS_MAX))
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    descriptor = describe(model_dir, block_tokens=block_tokens)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, dtype="auto")
    device = None
    if device_octets:
        device = DeviceTier(descriptor, device_octets, device_layers, changed=device_changed)
    return TorchEngine(
        model.eval(), descriptor, batch_invariant=batch_invariant, chunk_tokens=chunk_tokens, device=device
    )
