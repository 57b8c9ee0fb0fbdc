"""A forward pass over a context that is sharded over several instances by token range.

A pass computes the tokens [first, end) in one go. Its own keys and values go to the store of this instance, layer
by layer, where the other members' queries find them as soon as they are there. Attention of a layer is put
together from partials (partial.py): the new tokens among themselves, the older tokens that are here, and what each
other member says of those that it has. Earlier tokens never wait for later ones: no members wait in a circle.

All partials of a layer come from one version of the map. When the version moves on in the midst of a layer, the
layer's attention is computed again, under the next.

KV and tokens are those of one instance but for rounding: the order of summation differs, as it does between batch
sizes. `batch_invariant` does not hold for a group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import structlog
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvsp.connectors.prefix import PrefixCache
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.reshard import Range, common
from services.instance.partial import Partial, attend, joined, merge
from services.instance.shard_store import PIECE_BLOCKS, NotHeld, ShardStore

ASKED_OCTETS: Final = 2 << 20
"""Of float32 output that one `Remote.attend` asks for, at most, so that it fits one gRPC message (4 MiB)."""

ASKED_AHEAD: Final = 4
"""Calls of `Remote.attend` that are open at a time. Each takes memory at both ends, and its time runs."""

JOINED_PIECES: Final = 16
"""Partials that are kept before they are merged."""

_log = structlog.get_logger(__name__)


class VersionMoved(Exception):  # noqa: N818  (a turn of events, not a fault of the caller)
    """A member serves the next version of the map already, and `Remote.view` gives it from now on."""


class GroupLost(Exception):  # noqa: N818  (a turn of events, not a fault of the caller)
    """A member does not answer, or the members do not agree: the context is not whole."""


class Halted(Exception):  # noqa: N818  (a turn of events, not a fault of the caller)
    """The run was cancelled."""


class View(NamedTuple):
    """The authoritative version of the map, as far as one instance needs it."""

    version: int
    ranges: tuple[Range, ...]
    """Held here, ascending."""
    end: int
    """Of the map. Tokens behind it are of no shard: whoever computes them (home) has them."""


class Remote(Protocol):
    """The other members. Both methods are called on the compute thread."""

    def view(self) -> View:
        """The version that is authoritative now; an attribute that the event loop replaces, to be read at once."""
        ...

    def attend(self, version: int, layer: int, queries: torch.Tensor, before: int) -> Future[list[Partial]]:
        """Ask every other member for its partial over those of its tokens that are older than `before`.

        Returns at once. `queries` are [heads, new, dim] of the model's type, contiguous, at most ASKED_OCTETS as
        float32; several calls of a layer may be open, and are answered in any order. The future gives a partial of
        each member that was asked ([] if there is none), all of `version`; or VersionMoved, once `view` gives a
        later version; or GroupLost, when a member does not answer in time. It may be cancelled.
        """
        ...


class Halt:
    """Ends a run at once, also while it waits for others. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._halted = False
        self._awaited: Future[Any] | None = None

    @property
    def halted(self) -> bool:
        """`set` was called."""
        return self._halted

    def set(self) -> None:
        """Whoever waits, or is about to, gets Halted."""
        with self._lock:
            self._halted = True
            awaited = self._awaited
        if awaited is not None:
            awaited.cancel()

    def wait(self, future: Future[list[Partial]]) -> list[Partial]:
        """The result. Raises what it failed with, or Halted."""
        with self._lock:
            self._awaited = None if self._halted else future
        if self._halted:
            raise Halted
        try:
            return future.result()
        except CancelledError:
            raise (Halted if self._halted else GroupLost) from None

    def check(self) -> None:
        """Raises Halted after `set`."""
        if self._halted:
            raise Halted


class Sharded(Cache):
    """One pass over the tokens [first, end): the model's cache, and its attention when passed as `sharded=`."""

    def __init__(self, store: ShardStore, tokens: Range, remote: Remote, halt: Halt) -> None:
        super().__init__(layers=[])
        self.tokens = tokens
        self._store = store
        self._remote = remote
        self._halt = halt
        self._layer = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new states, for others to ask for; returns them alone."""
        del args, kwargs
        self._layer = layer_idx
        self._store.write(layer_idx, self.tokens[0], key_states[0], value_states[0])
        self._store.advance(self.tokens, layer_idx + 1)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing comes before the new tokens, as far as the model is concerned."""
        del layer_idx
        return 0

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of the new tokens over all up to them, [new, heads, dim], in the queries' type.

        Queries are [heads, new, dim], keys and values those of the new tokens, [kv_heads, new, dim]. Raises
        GroupLost, Halted.
        """
        while True:
            view = self._remote.view()
            output = None
            with suppress(VersionMoved, NotHeld):  # a range is released at once when the version moves on
                output = self._attend(view, queries, keys, values, scale)
            moved = self._remote.view().version != view.version
            if output is not None and not moved:
                return output
            if not moved:
                raise GroupLost

    def _attend(
        self, view: View, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        first = self.tokens[0]
        heads, new, dim = queries.shape
        output = torch.empty(new, heads, dim, dtype=queries.dtype)
        rows = max(1, ASKED_OCTETS // (4 * heads * dim))
        spans = [(start, min(start + rows, new)) for start in range(0, new, rows)]
        # The first tokens of a context have nobody to ask.
        asks = (self._ask(view, queries[:, start:end]) for start, end in (spans if first else ()))
        asked = deque(islice(asks, ASKED_AHEAD))
        older = common([*view.ranges, (view.end, max(view.end, first))], [(0, first)])
        try:
            for start, end in spans:
                self._halt.check()
                mine, before = queries[:, start:end], first + start
                partials = [attend(mine, keys[:, start:end], values[:, start:end], scale, first=0)]
                here = [*older, (first, before)]
                partials.append(attend_local(self._store, here, self._layer, mine, before, scale=scale))
                if asked:
                    partials += self._halt.wait(asked[0])
                    asked.popleft()
                output[start:end] = merge(partials).transpose(0, 1)
                asked.extend(islice(asks, 1))
        finally:
            for future in asked:
                future.cancel()
        return output

    def _ask(self, view: View, queries: torch.Tensor) -> Future[list[Partial]]:
        return self._remote.attend(view.version, self._layer, queries.contiguous(), self.tokens[0])


def attend_local(
    store: ShardStore, ranges: Sequence[Range], layer: int, queries: torch.Tensor, before: int, *, scale: float
) -> Partial:
    """Attention of queries [heads, new, dim] over the tokens of `ranges` that are older than `before`.

    The layer must be `ready`; `scale` is the model's (`Engine.scales`). Log-sum -inf where there is no such token.
    Raises NotHeld. Computes on the calling thread.
    """
    partials = [Partial(torch.zeros(queries.shape), torch.full(queries.shape[:2], float("-inf")))]
    for tokens in common(ranges, [(0, before)]):
        for keys, values in store.views(layer, tokens):
            partials.append(attend(queries, keys, values, scale))
            if len(partials) > JOINED_PIECES:
                partials = [joined(partials)]
    return joined(partials)


def forward(model: Any, sharded: Sharded, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [vocabulary] that follow the last of the tokens of a pass. Raises GroupLost, Halted."""
    output = model(
        torch.tensor([tokens]),
        position_ids=torch.arange(*sharded.tokens).unsqueeze(0),
        # A mask of four dimensions is passed on as it is; none is needed, see `Sharded.attend`.
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=model.dtype),
        cache=sharded,
        use_cache=True,
        sharded=sharded,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def scales(model: Any, descriptor: Descriptor) -> tuple[float, ...]:
    """What attention multiplies scores by, layer by layer; () when a trial shows that the model cannot be sharded.

    The model uses `ragged.attention`.
    """
    config = model.config.get_text_config(decoder=True)
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        reason = "not every layer keeps every token"
    else:
        try:
            if found := _trial(model, descriptor):
                return found
            reason = "other logits than in one piece"
        except Exception as error:  # whatever a model that was not made for it does
            reason = type(error).__name__
    _log.info("sessions are not sharded over instances: the model cannot be", reason=reason)
    return ()


@torch.inference_mode()
def _trial(model: Any, descriptor: Descriptor) -> tuple[float, ...]:
    """The scales, if two halves of a context give the logits of the whole but for rounding."""
    size = descriptor.block_tokens
    prompt = [1 + at % 7 for at in range(2 * size)]
    cache = PrefixCache(descriptor, 0, 2 * size + 1)
    cache.arrival.advance(descriptor.layers)
    expected = [model(torch.tensor([ids]), cache=cache, use_cache=True).logits[0, -1] for ids in (prompt, [9])]
    stores = [ShardStore(descriptor, 2 * PIECE_BLOCKS * descriptor.payload_octets) for _ in range(2)]
    noted: list[float] = []
    found = []
    for store, tokens, ids in (
        (stores[0], (0, size), prompt[:size]),
        (stores[1], (size, 2 * size), prompt[size:]),
        (stores[1], (2 * size, 2 * size + 1), [9]),
    ):
        store.reserve(tokens)
        found.append(forward(model, _Noting(store, tokens, _Other(stores[0], size, noted), noted), ids))
    tolerance = torch.finfo(model.dtype).eps ** 0.5
    one, other = torch.stack(expected).float(), torch.stack(found[1:]).float()
    equal = torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max()))
    return tuple(noted) if equal and len(noted) == descriptor.layers else ()


class _Noting(Sharded):
    """A pass of the trial, which notes the scale of each layer when it is the first."""

    def __init__(self, store: ShardStore, tokens: Range, remote: Remote, noted: list[float]) -> None:
        super().__init__(store, tokens, remote, Halt())
        self._noted = noted

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See Sharded.attend."""
        if self.tokens[0] == 0:
            self._noted.append(scale)
        return super().attend(queries, keys, values, scale)


class _Other:
    """The first half of the trial's context, as it is to the second."""

    def __init__(self, store: ShardStore, end: int, noted: Sequence[float]) -> None:
        self._store, self._end, self._noted = store, end, noted

    def view(self) -> View:
        """See Remote.view."""
        return View(1, (), self._end)

    def attend(self, version: int, layer: int, queries: torch.Tensor, before: int) -> Future[list[Partial]]:
        """See Remote.attend."""
        del version
        answer: Future[list[Partial]] = Future()
        whole, scale = [(0, self._end)], self._noted[layer]
        answer.set_result([attend_local(self._store, whole, layer, queries, before, scale=scale)])
        return answer
