"""One session at an instance: its tokens, which of them may leave, and when it is checkpointed. Pure.

The release rule (R-175): the tokens of a deterministic sampler leave at once, others not "before the PC has
acknowledged a checkpoint that covers" them. The schedule (R-170): a deterministic session is checkpointed when a
block of its tokens completes and at least every 64 tokens; any other whenever it has tokens that are not covered,
all of them in one checkpoint, so that what is sampled while one is under way goes with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvsp.protocol import keys, limits, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import Sampler, SessionCheckpoint, TokenId

Reason = Literal["stop", "length", "failed"]

Name = Callable[[Sequence[int], bytes], list[bytes]]
"""Block keys of the complete blocks of some tokens, chained onto a parent, in the session's scope."""

CHECKPOINT_TOKENS: Final = 64
"""R-170: "at least every 64 output tokens"."""

RETRY_MS: Final = (100, 2_000)
"""Pauses after a checkpoint that nobody answered: the first, and the longest."""

SILENCE_MS_MAX: Final = 300_000
"""Without an answer to any checkpoint for so long a session ends here.

The placement controller may have ended it, and forgets that it has been there after twice this time (`ended_ms` in
services/placement/settings.py). A checkpoint that got through then would be taken for a new session's.
"""

STOP_TOKENS_MAX: Final = 64


def naming(key: ScopeKey, compat_id: str, block_tokens: int) -> Name:
    """Names blocks of one scope and model."""

    def name(tokens: Sequence[int], parent: bytes) -> list[bytes]:
        return keys.block_keys(key, bytes.fromhex(compat_id), tokens, block_tokens, parent)

    return name


def kept(sampler: Sampler, *, batch_invariant: bool) -> Sampler:
    """A sampler with what an instance can keep of it; its checkpoints say the same.

    "true only if every instance eligible to resume the session produces bit-identical output tokens from the same
    state": one without batch-invariant kernels does not.
    """
    return msgspec.structs.replace(sampler, deterministic=sampler.deterministic and batch_invariant)


class Bounds(Struct, frozen=True):
    """What `sampler.params` say of the end; they travel there so that a checkpoint alone suffices to go on."""

    max_tokens: Annotated[int, Meta(ge=1, le=limits.INT_MAX)] = limits.INT_MAX
    stop_tokens: Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX)] = []


def bounds_of(sampler: Sampler) -> Bounds:
    """Raises KvspError (400)."""
    try:
        return msgspec.convert(sampler.params, Bounds)
    except msgspec.ValidationError as error:
        raise bad_request(f"sampler params: {error}") from None


@dataclass
class Session:
    """A session under one epoch; a resume under a higher one makes another.

    `prompt` are all its tokens when they are known, `prompt_blocks` the keys of its complete blocks, `prompt_tail`
    the tokens behind them. `generated` are all output tokens, those before a resume included (U-33). `covered` of
    them the placement controller has acknowledged, `released` may have left.
    """

    id: str
    epoch: int
    scope_id: str
    compat_id: str
    block_tokens: int
    name: Name
    sampler: Sampler
    prompt_blocks: list[str]
    prompt_tail: list[int]
    prompt: list[int] | None = None
    generated: list[int] = field(default_factory=list)
    max_tokens: int = limits.INT_MAX
    stop_tokens: frozenset[int] = frozenset()
    origin: SessionCheckpoint | None = None
    """What it was resumed from, to tell a repetition from another resume (U-35)."""

    covered: int = 0
    released: int = 0
    due: bool = False
    in_flight: int | None = None
    retry_ms: int = 0
    """No checkpoint before this time."""
    pause_ms: int = 0
    silent_ms: int | None = None
    """Since when no checkpoint has been answered; None: the latest was."""
    needs_prompt: bool = False
    """The engine waits for tokens of the prompt; until `ends_ms`."""
    reason: Reason | None = None
    """Why the engine is done with it."""
    ended: bool = False
    """Nothing will be added to its output; kept until `ends_ms`."""
    ends_ms: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that were not computed here, once known."""
    _keys: list[bytes] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt_blocks) * self.block_tokens + len(self.prompt_tail)

    @property
    def known_from(self) -> int:
        """The first position whose token is known; all after it are, too."""
        return 0 if self.prompt is not None else len(self.prompt_blocks) * self.block_tokens

    @property
    def tokens(self) -> list[int]:
        """The tokens from position `known_from` on: prompt and output."""
        return (self.prompt_tail if self.prompt is None else self.prompt) + self.generated

    @property
    def deterministic(self) -> bool:
        """Its tokens need no checkpoint to leave."""
        return self.sampler.deterministic

    def keys(self) -> list[bytes]:
        """The keys of all its complete blocks, generated ones chained onto the prompt's (U-33)."""
        if not self._keys:
            self._keys = [bytes.fromhex(key) for key in self.prompt_blocks]
        behind = self.prompt_tail + self.generated
        known = len(self._keys) - len(self.prompt_blocks)
        parent = self._keys[-1] if self._keys else keys.ZERO
        self._keys += self.name(behind[known * self.block_tokens :], parent)
        return self._keys

    def add(self, index: int, token: int) -> bool:
        """An output token was sampled. False: it is not the next one, and was not taken."""
        if index != len(self.generated) or self.reason is not None:
            return False
        self.generated.append(token)
        offset = index + 1
        block_ends = (self.prompt_tokens + offset) % self.block_tokens == 0
        last = self.covered if self.in_flight is None else self.in_flight
        if not self.deterministic or block_ends or offset - last >= CHECKPOINT_TOKENS:
            self.due = True
        return True

    def give_prompt(self, prompt: Sequence[int]) -> None:
        """The front end brought the prompt's tokens. Raises KvspError (400) when they are another prompt's."""
        if self.prompt is not None or self.ended:
            return
        head = len(self.prompt_blocks) * self.block_tokens
        named = [key.hex() for key in self.name(prompt[:head], bytes(32))]
        if (
            len(prompt) != self.prompt_tokens
            or named != self.prompt_blocks
            or list(prompt[head:]) != self.prompt_tail
        ):
            raise bad_request("the prompt is not that of the session")
        self.prompt = list(prompt)

    def end(self, ends_ms: int) -> None:
        """Nothing will be added to its output, which is kept until then; what it was computed from is not."""
        self.ended, self.ends_ms = True, ends_ms
        self.prompt, self._keys = None, []

    # --- checkpoints ---

    def checkpoint_wanted(self, now_ms: int) -> bool:
        """May and should one be sent now? One is under way at a time, and none once the output has ended."""
        return self.due and self.in_flight is None and not self.ended and now_ms >= self.retry_ms

    def take_checkpoint(self) -> SessionCheckpoint:
        """The checkpoint of all tokens so far; it counts as under way."""
        self.due = False
        self.in_flight = len(self.generated)
        sampler = msgspec.structs.replace(self.sampler, step=self.in_flight)
        return SessionCheckpoint(
            self.id, self.epoch, self.compat_id, self.scope_id, self.prompt_blocks, self.prompt_tail,
            list(self.generated), self.in_flight, sampler,
        )  # fmt: skip

    def acknowledged(self, recorded: int) -> None:
        """The one under way is recorded. Raises KvspError (kvsp-stale-epoch): the session is another's by now.

        A higher offset than any of ours was written by an earlier life of this instance under the same epoch,
        whose tokens may have left: what was sampled here may differ from them.
        """
        sent, self.in_flight = self.in_flight, None
        if sent is None:
            return
        if recorded > sent:
            raise KvspError(registry.STALE_EPOCH, "another run of the session is ahead of this one")
        self.covered = max(self.covered, recorded)
        self.pause_ms = self.retry_ms = 0
        self.silent_ms = None

    def unanswered(self, now_ms: int) -> bool:
        """The one under way may be lost: another follows later, with all that has come by then.

        False: none has been answered for so long that none must follow.
        """
        least, most = RETRY_MS
        self.in_flight = None
        self.due = self.reason is None or not self.deterministic
        self.pause_ms = min(most, max(least, 2 * self.pause_ms))
        self.retry_ms = now_ms + self.pause_ms
        self.silent_ms = now_ms if self.silent_ms is None else self.silent_ms
        return now_ms - self.silent_ms < SILENCE_MS_MAX

    # --- output ---

    def release(self) -> tuple[int, list[int]]:
        """The tokens that may leave now and could not before, and the index of the first."""
        first = self.released
        allowed = len(self.generated) if self.deterministic else self.covered
        self.released = max(first, allowed)
        return first, self.generated[first : self.released]

    @property
    def complete(self) -> bool:
        """Everything has left and no checkpoint is under way.

        It would reach the placement controller after the front end has told it that the session is over.
        """
        return self.reason is not None and self.released == len(self.generated) and self.in_flight is None
