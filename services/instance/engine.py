"""The seam between an inference instance's shell and its compute: work in, events out.

The shell hands a `Work` to the `Scheduler` (scheduler.py), which runs it on one compute thread with an
`Engine` and calls back, on the event loop, with events in the order in which they came about:

    Started, Sampled, Sampled, ..., Finished

with `BlockDone` among them, after `Started`, and possibly after the last `Sampled`, but before `Finished`.
A resumed session whose tokens are needed says `PrefixLost` first, each time more of the prefix is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.records import Sampler

if TYPE_CHECKING:
    import torch

    from kvsp.connectors.prefix import PrefixCache
    from services.instance.device import DeviceTier
    from services.instance.sampling import Choice
    from services.instance.sharded import Sharded


CHUNK_TOKENS: Final = 256
"""Tokens of a chunk, about: a whole number of blocks.

Longer chunks read the weights less often; shorter ones hold up others' decoding less, and cost less where a loaded
prefix ends inside one. CPU time of 2,000 tokens of the demo model against one pass over them all, with the last
chunk's padding: 64: 1.25, 128: 1.15, 256: 1.04, 512: 1.02.
"""

KV_OCTETS: Final = 4 << 30
"""KV memory of all sessions together, unless the configuration says otherwise."""


class TokensUnknown(Exception):  # noqa: N818  (a turn of events, not a fault of the caller)
    """KV has to be computed for positions whose tokens are not known."""


FinishReason = Literal["stop", "length", "failed"]
"""A stop token was sampled; `max_tokens` or the model's last position was reached; an error ended the session."""


@dataclass(frozen=True)
class Work:
    """One session for the engine, new or resumed.

    Positions are counted from the start of the prompt; output index i is position `prompt_tokens + i`.
    `tokens` are those of positions `known_from`, `known_from + 1`, ...: the rest of the prompt, then all output
    so far. A new session has `known_from` 0; one resumed from a checkpoint alone starts behind the prompt's
    complete blocks, which `prefix` must then bring. `sampler.step` equals the output tokens so far (U-33).
    """

    session: str
    epoch: int
    prompt_tokens: int
    """Tokens of the prompt, at least 1."""
    known_from: int
    tokens: Sequence[int]
    sampler: Sampler
    """Method and params as in `sampling.parse`; max_tokens and stop_tokens within params are not looked at."""
    max_tokens: int
    """Output tokens in all, those before a resume included."""
    stop_tokens: frozenset[int] = frozenset()
    prefix: PrefixCache | None = None
    """From `Engine.prefix`, being filled by the loader; None: nothing is loaded. It may cover every token, output
    included: what is needed to go on is computed again, to the same bits."""


@dataclass(frozen=True)
class Started:
    """The prompt has been computed; comes just before the first `Sampled`.

    `cached_tokens` counts tokens of the prompt whose KV was loaded, not computed.
    """

    session: str
    epoch: int
    cached_tokens: int


@dataclass(frozen=True)
class Sampled:
    """An output token. After it the sampler's step is `index + 1`. Stop tokens are reported as any other."""

    session: str
    epoch: int
    index: int
    token: int


@dataclass(frozen=True)
class BlockDone:
    """A complete block that was computed here, as a KVB1 container of all layers, codec raw (R-030 ... R-034).

    `block` is its number in the sequence of prompt and output. Blocks that were loaded are not reported. The
    prompt's blocks come after the first token was sampled, so that it is not late for them.
    """

    session: str
    epoch: int
    block: int
    octets: bytes


@dataclass(frozen=True)
class PrefixLost:
    """Loading ended at `blocks` blocks and the tokens that follow are not known, or, to go on, the last of the
    prompt has to be computed again and is not known.

    The session waits for `Scheduler.provide_tokens`, without end: the caller bounds the wait and cancels.
    """

    session: str
    epoch: int
    blocks: int


@dataclass(frozen=True)
class Finished:
    """The last event of a session that was not cancelled. `detail` says what failed, without any content."""

    session: str
    epoch: int
    reason: FinishReason
    detail: str = ""


Event = Started | Sampled | BlockDone | PrefixLost | Finished


def end_reason(work: Work, length: int, positions: int, token: int) -> FinishReason | None:
    """Whether `token`, the last of `length`, ends the output; there is room for `positions` tokens."""
    if token in work.stop_tokens:
        return "stop"
    if length - work.prompt_tokens >= work.max_tokens or length >= positions:
        return "length"
    return None


@dataclass(frozen=True)
class Stats:
    """What the status record says of compute (R-046)."""

    running: int
    """Sessions in the batch, those that wait for layers of their prefix included."""
    queued: int
    """Submitted, not in the batch yet."""
    kv_utilization: float
    """Of the memory for sessions' KV, the part that is taken: 0 ... 1."""
    prefill_tokens_per_s: float
    """Tokens computed per second of prefill, a moving average; 0.0 until measured."""
    decode_tokens_per_s: float
    """Output tokens per second of decoding, all sessions together, a moving average; 0.0 until measured."""


S = TypeVar("S", bound="SessionState")


class SessionState(Protocol):
    """What an engine keeps of one session. It knows some tokens and has the KV of some."""

    cache: PrefixCache
    prompt_tokens: int
    loaded: int
    """Positions, from the first on, whose KV was loaded (or is on its way)."""
    done: int
    """Positions, from the first on, whose KV was loaded or computed."""

    @property
    def length(self) -> int:
        """Positions up to the last known token."""
        ...

    @property
    def ready(self) -> bool:
        """The logits that follow the last known token are there: the next can be sampled."""
        ...


class Engine(Protocol[S]):
    """A model that computes KV and logits.

    `prefix`, `begin` and `device` may be used on any thread, all else belongs to the compute thread.
    """

    descriptor: Descriptor
    compat_id: bytes
    """32 octets, computed from `descriptor` (R-018)."""
    batch_invariant: bool
    """KV and logits of a session are the same bits whatever was loaded, batched along or resumed."""
    chunk_tokens: int
    """Tokens of a full chunk of `prefill`."""
    positions_max: int
    """Tokens of prompt and output that a session can have."""
    rates: tuple[float, float]
    """Tokens per second of prefill and of decoding one session, from a short run at start."""
    device: DeviceTier | None
    """KV of hot blocks in the engine's own memory; None when not configured."""

    @property
    def scales(self) -> tuple[float, ...]:
        """What attention multiplies scores by, of each layer; () unless `can_shard`."""
        ...

    @property
    def can_shard(self) -> bool:
        """Sessions can be sharded over several instances (sharded.py)."""
        ...

    def prefix(self, blocks: int, room: int) -> PrefixCache:
        """Room for `blocks` loaded blocks and `room` tokens that follow (rest of the prompt and all output).

        The loader writes to `rows(layer, block)`; it calls `arrival.advance(l + 1)` once layer l of every block
        has been verified and none will be written to any more, `arrival.shorten(b)` when block b cannot be had
        (and goes on to advance for the blocks before it), `arrival.fail(error)` on any other fault, which ends the
        session.
        """
        ...

    def begin(self, work: Work) -> S:
        """The sequence of a session. Raises KvspError (400) when the work cannot be done here."""
        ...

    def prefill(self, sequence: S) -> int:
        """Compute the next chunk of what is known; returns its tokens. Not to be called when `ready`.

        Waits for layers that are still arriving. Raises PrefixShortened (then call `rewind`), Interrupted (the
        wait was cut short by `arrival.interrupt`; call again), TokensUnknown, or what the loader failed with.
        """
        ...

    def rewind(self, sequence: S) -> None:
        """Go back to the end of the shorter prefix."""
        ...

    def provide(self, sequence: S, tokens: Sequence[int]) -> None:
        """Tell the tokens of the first positions. Raises ValueError when they end before those that are known."""
        ...

    def sample(self, sequence: S) -> int:
        """Choose the token that follows, and append it; the sequence is not `ready` after it."""
        ...

    def step(self, sequences: Sequence[S]) -> dict[int, Exception]:
        """Compute one token of each, then they are `ready`; returns what failed, by place in `sequences`."""
        ...

    def export(self, sequence: S, block: int) -> bytes:
        """The container of a complete block."""
        ...

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises KvspError (400) when one is not in the model's vocabulary. On any thread."""
        ...

    def check(self, work: Work) -> Choice:
        """How its tokens are chosen. Raises KvspError (400) when the work cannot be done here. On any thread."""
        ...

    def forward_shard(self, sharded: Sharded, tokens: Sequence[int]) -> torch.Tensor:
        """Compute the tokens of a pass; logits that follow the last, [vocabulary]. On the thread of a shard's run.

        Raises GroupLost, Halted.
        """
        ...
