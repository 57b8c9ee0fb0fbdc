"""Answers in the shapes of the OpenAI API, whole and as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kvsp.protocol import jsonio
from kvsp.v1 import placement_pb2
from services.frontend.session import Placed

MEDIA_JSON: Final = "application/json"
MEDIA_EVENTS: Final = "text/event-stream"
DONE: Final = b"data: [DONE]\n\n"

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TextChoice(Struct, frozen=True):
    """A completion, or a piece of one."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Said(Struct, frozen=True, omit_defaults=True):
    """The assistant's message, or what a chunk adds to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class MessageChoice(Struct, frozen=True):
    """A chat completion."""

    index: int
    message: Said
    logprobs: None
    finish_reason: str | None


class DeltaChoice(Struct, frozen=True):
    """A piece of a chat completion."""

    index: int
    delta: Said
    logprobs: None
    finish_reason: str | None


Choice = TextChoice | MessageChoice | DeltaChoice


class Candidate(Struct, frozen=True, omit_defaults=True):
    """An instance as the placement controller saw it; what it did not know is left out."""

    instance: str
    wait_us: int
    fetch_us: int | UnsetType = UNSET
    recompute_all_us: int | UnsetType = UNSET
    cost_us: int | UnsetType = UNSET


class Placement(Struct, frozen=True, omit_defaults=True):
    """Where a choice was made, and under which session epoch; with the first: why there (R-117, R-119)."""

    choice: int
    session: str
    instance: str
    epoch: int
    matched_blocks: int | UnsetType = UNSET
    cost_us: int | UnsetType = UNSET
    directive: str | UnsetType = UNSET
    candidates: list[Candidate] | UnsetType = UNSET


class Body(Struct, frozen=True, omit_defaults=True):
    """A completion of either kind, or a chunk of one; `usage` is null in chunks when it comes in the last.

    `kvsp` is there when it was asked for, in a chunk of its own.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[Choice]
    usage: Usage | UnsetType | None = UNSET
    kvsp: list[Placement] | UnsetType = UNSET


class Model(Struct, frozen=True):
    """The model that is served."""

    id: str
    created: int
    owned_by: str = "kvsp"
    object: str = "model"


class Models(Struct, frozen=True):
    """All of them."""

    data: list[Model]
    object: str = "list"


@dataclass(frozen=True, slots=True)
class Completed:
    """A choice at its end: the whole text."""

    text: str
    finish_reason: str


class Shape(Protocol):
    """How one endpoint says things."""

    prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> Choice | None:
        """What comes before a choice's first piece."""

    def piece(self, index: int, text: str, finish_reason: str | None) -> Choice:
        """A piece of a choice."""

    def complete(self, index: int, choice: Completed) -> Choice:
        """A whole choice."""


class TextShape:
    """v1/completions."""

    prefix = "cmpl-"
    whole = chunk = "text_completion"

    def opening(self, index: int) -> Choice | None:
        """Nothing."""
        del index
        return None

    def piece(self, index: int, text: str, finish_reason: str | None) -> Choice:
        """A piece of text."""
        return TextChoice(index, text, None, finish_reason)

    def complete(self, index: int, choice: Completed) -> Choice:
        """The text."""
        return TextChoice(index, choice.text, None, choice.finish_reason)


class ChatShape:
    """v1/chat/completions."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int) -> Choice | None:
        """Who speaks."""
        return DeltaChoice(index, Said(role="assistant", content="", refusal=None), None, None)

    def piece(self, index: int, text: str, finish_reason: str | None) -> Choice:
        """What is added to the message."""
        return DeltaChoice(index, Said(content=text) if text else Said(), None, finish_reason)

    def complete(self, index: int, choice: Completed) -> Choice:
        """The message."""
        said = Said(role="assistant", content=choice.text, refusal=None)
        return MessageChoice(index, said, None, choice.finish_reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: what all its parts have in common, and how they are written."""

    shape: Shape
    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    explain: bool = False

    def whole(
        self, choices: Sequence[Completed], usage: Usage, placed: Sequence[tuple[int, Placed]] = ()
    ) -> bytes:
        """The body of an answer that is not streamed."""
        made = [self.shape.complete(index, choice) for index, choice in enumerate(choices)]
        explained = [_placement(index, each) for index, each in placed] if self.explain else UNSET
        return jsonio.encode(self._body(self.shape.whole, made, usage, explained))

    def opening(self, index: int) -> bytes:
        """What comes before a choice's first piece, possibly nothing."""
        choice = self.shape.opening(index)
        return b"" if choice is None else self._chunk([choice], self._no_usage)

    def placed(self, index: int, placed: Placed | None) -> bytes:
        """The event that tells where a choice is made, if that was asked for."""
        if placed is None or not self.explain:
            return b""
        return event(self._body(self.shape.chunk, [], self._no_usage, [_placement(index, placed)]))

    def piece(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """The events for a piece of a choice, possibly none."""
        events = b""
        if text:
            events = self._chunk([self.shape.piece(index, text, None)], self._no_usage)
        if finish_reason is not None:
            events += self._chunk([self.shape.piece(index, "", finish_reason)], self._no_usage)
        return events

    def ending(self, usage: Usage) -> bytes:
        """The last events."""
        return (self._chunk([], usage) if self.include_usage else b"") + DONE

    @property
    def _no_usage(self) -> UnsetType | None:
        return None if self.include_usage else UNSET

    def _chunk(self, choices: Sequence[Choice], usage: Usage | UnsetType | None) -> bytes:
        return event(self._body(self.shape.chunk, choices, usage))

    def _body(
        self,
        kind: str,
        choices: Sequence[Choice],
        usage: Usage | UnsetType | None,
        explained: list[Placement] | UnsetType = UNSET,
    ) -> Body:
        return Body(self.id, kind, self.created, self.model, self.fingerprint, choices, usage, explained)


def _placement(index: int, placed: Placed) -> Placement:
    at = Placement(index, placed.session, placed.instance, placed.epoch)
    why = placed.assigned
    if why is None:
        return at
    return msgspec.structs.replace(
        at,
        matched_blocks=why.matched,
        cost_us=why.cost_us,
        directive=why.directive or UNSET,
        candidates=[_candidate(each) for each in why.candidates],
    )


def _candidate(seen: placement_pb2.Candidate) -> Candidate:
    return Candidate(
        seen.instance,
        seen.wait_us,
        fetch_us=seen.fetch_us if seen.HasField("fetch_us") else UNSET,
        recompute_all_us=seen.recompute_all_us if seen.HasField("recompute_all_us") else UNSET,
        cost_us=seen.cost_us if seen.HasField("cost_us") else UNSET,
    )


def event(body: Struct) -> bytes:
    """A server-sent event; JSON text holds no line break."""
    return b"data: " + jsonio.encode(body) + b"\n\n"
