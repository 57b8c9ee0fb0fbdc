"""The choices of an answer: text out of each session's tokens, and all of them as one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from services.frontend.answers import Completed, PromptTokensDetails, Usage
from services.frontend.fleet import Fleet
from services.frontend.metrics import FIRST_TOKEN
from services.frontend.session import Placed, Plan, Progress, generate
from services.frontend.text import Decode, Detokenizer, Stops

WAITING_MAX: Final = 4
"""Pieces that wait for a client. While it takes none, nothing is read from the instances either."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of a choice. `tokens` counts those sampled, shown or not; `cached` is of its prompt."""

    text: str = ""
    tokens: int = 0
    cached: int | None = None
    finish_reason: str | None = None
    placed: Placed | None = None


@dataclass(slots=True)
class Tally:
    """What an answer has cost, and its choices' texts; `prompts` are the lengths, `n` choices are made of each."""

    prompts: Sequence[int]
    n: int
    began: float = field(default_factory=time.perf_counter)
    output_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    texts: dict[int, list[str]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    placed: list[tuple[int, Placed]] = field(default_factory=list)

    def add(self, index: int, piece: Piece, *, keep: bool) -> None:
        """Count a piece of choice `index`; `keep` its text for a whole answer."""
        if piece.tokens and not self.output_tokens:
            FIRST_TOKEN.observe(time.perf_counter() - self.began)
        self.output_tokens += piece.tokens
        if piece.cached is not None:
            self.cached.setdefault(index, piece.cached)
        if piece.placed is not None:
            self.placed.append((index, piece.placed))
        if keep:
            self.texts.setdefault(index, []).append(piece.text)
        if piece.finish_reason is not None:
            self.reasons[index] = piece.finish_reason

    def choices(self) -> list[Completed]:
        """The whole choices, once they are."""
        return [Completed("".join(self.texts[index]), self.reasons[index]) for index in sorted(self.reasons)]

    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has; what was cached, as its first choice found it."""
        prompt = sum(self.prompts)
        cached = sum(self.cached.get(at * self.n, 0) for at in range(len(self.prompts)))
        return Usage(prompt, self.output_tokens, prompt + self.output_tokens, PromptTokensDetails(cached))


async def choice(
    fleet: Fleet, plan: Plan, decode: Decode, stops: Sequence[str], stop_tokens: frozenset[int]
) -> AsyncGenerator[Piece, None]:
    """A choice piece by piece. Ends the session at a stop string. Raises KvspError."""
    text = _Text(decode, stops, stop_tokens)
    async with aclosing(generate(fleet, plan)) as progresses:
        async for progress in progresses:
            piece = text.add(progress)
            yield piece
            if piece.finish_reason is not None:
                return


class _Text:
    """Turns the tokens of a session into pieces."""

    def __init__(self, decode: Decode, stops: Sequence[str], stop_tokens: frozenset[int]) -> None:
        self._characters = Detokenizer(decode)
        self._stops = Stops(stops)
        self._stop_tokens = stop_tokens

    def add(self, progress: Progress) -> Piece:
        """What is new."""
        text, tokens = "", 0
        for token in progress.tokens:
            if self._stops.hit:  # what was sampled after a stop string does not count
                break
            tokens += 1
            if token not in self._stop_tokens:
                text += self._stops.push(self._characters.push(token))
        if progress.finished is not None and not self._stops.hit:
            text += self._stops.push(self._characters.flush()) + self._stops.flush()
        reason = "stop" if self._stops.hit else progress.finished
        return Piece(text, tokens, progress.cached, reason, progress.placed)


async def merged(choices: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all choices as they come, with their indexes. Raises what any of them raises."""
    waiting: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(WAITING_MAX)

    async def pump(index: int) -> None:
        try:
            async with aclosing(choices[index]) as pieces:
                async for piece in pieces:
                    await waiting.put((index, piece))
        except Exception as error:  # raised where the pieces are read
            await waiting.put((index, error))
        else:
            await waiting.put((index, None))

    pumps = [asyncio.create_task(pump(index)) for index in range(len(choices))]
    left = len(pumps)
    try:
        while left:
            index, piece = await waiting.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield index, piece
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
