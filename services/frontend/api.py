"""The OpenAI API: a request in, the parts of its answer out. Authorization of the role is the server's."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from kvsp.protocol import jsonio, keys, limits
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.policy import Identity
from kvsp.v1 import frontend_pb2
from services.frontend import openai
from services.frontend.answers import (
    MEDIA_EVENTS,
    MEDIA_JSON,
    Answer,
    ChatShape,
    Model,
    Models,
    Shape,
    TextShape,
    event,
)
from services.frontend.choices import Piece, Tally, choice, merged
from services.frontend.errors import ApiError, forbidden, invalid, of_fleet, unavailable
from services.frontend.fleet import Fleet
from services.frontend.metrics import REQUESTS, TOKENS
from services.frontend.openai import Asked, AskedChat, AskedCompletion, Sampling
from services.frontend.quota import Quota
from services.frontend.session import Plan
from services.frontend.tokenizer import Tokenizer

_MODEL: Final = "v1/models/"
_PATHS: Final = {"v1/completions": "POST", "v1/chat/completions": "POST", "v1/models": "GET", _MODEL: "GET"}

Parts = AsyncGenerator[frontend_pb2.ApiReply, None]

CALLER_CHOICES_MAX: Final = 512
"""Four requests as large as one can be."""

CALLER_CHARS_MAX: Final = 4 << 20
"""Some four seconds of the one thread that encodes for all callers."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: the model, the scopes whose keys are here, by name, and what is asserted of the fleet.

    `deterministic` holds for greedy decoding, `deterministic_sampling` for seeded sampling: every instance
    yields the same bits from the same state (R-049). `created` is in Unix seconds.
    """

    model: str
    compat_id: bytes
    block_tokens: int
    context_tokens: int
    scopes: dict[str, ScopeKey]
    created: int
    default_scope: str = ""
    deterministic: bool = False
    deterministic_sampling: bool = False
    requests_max: int = 1024
    caller_choices_max: int = CALLER_CHOICES_MAX
    caller_chars_max: int = CALLER_CHARS_MAX


class Api:
    """Answers requests of callers that may call at all."""

    def __init__(self, served: Served, tokenizer: Tokenizer, fleet: Fleet) -> None:
        self._served = served
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._scope_ids = {name: keys.scope_id(key).hex() for name, key in served.scopes.items()}
        self._under_way = 0
        self._choices = Quota(served.caller_choices_max, "choices")
        self._characters = Quota(served.caller_chars_max, "prompt characters")

    async def answer(self, identity: Identity, request: frontend_pb2.ApiRequest) -> Parts:
        """The answer to one request, in parts. Errors are answers, or events once a stream has begun."""
        path = _MODEL if request.path.startswith(_MODEL) else request.path
        status = 499  # as others count clients that left
        self._under_way += 1
        try:
            async with aclosing(self._answered(identity, path, request)) as parts:
                async for part in parts:
                    status = part.start.status or status
                    yield part
        except (ApiError, KvspError) as error:
            failure = error if isinstance(error, ApiError) else of_fleet(error)
            status = failure.status
            for part in _whole(jsonio.encode(failure.body), status):
                yield part
        finally:
            self._under_way -= 1
            REQUESTS.labels(path if path in _PATHS else "other", str(status)).inc()

    async def _answered(self, identity: Identity, path: str, request: frontend_pb2.ApiRequest) -> Parts:
        method = _PATHS.get(path)
        if method is None:
            raise invalid("there is nothing at this path", None, "unknown_url", status=404)
        if request.method != method:
            raise invalid(f"this path takes {method} alone", None, "method_not_allowed", status=405)
        if path in ("v1/models", _MODEL):
            for part in _whole(jsonio.encode(self._models(request.path))):
                yield part
            return
        if self._under_way > self._served.requests_max:
            raise unavailable("too many requests at once")
        make = self._completion if path == "v1/completions" else self._chat
        async with aclosing(make(identity, request.body)) as parts:
            async for part in parts:
                yield part

    def _models(self, path: str) -> Struct:
        model = Model(self._served.model, self._served.created)
        if path == "v1/models":
            return Models([model])
        self._require_model(path.removeprefix(_MODEL), None)
        return model

    # --- the two endpoints ---

    async def _completion(self, identity: Identity, body: bytes) -> Parts:
        asked = openai.parse(body, AskedCompletion)
        job = self._job(identity, asked, TextShape())
        given = openai.prompts(asked, self._tokenizer.vocabulary)
        texts = [each for each in given if isinstance(each, str)]
        for text in texts:
            self._require_short([text], "prompt")
        with self._choices.held(identity.uri, len(given) * (asked.n or 1), "n"):
            with self._characters.held(identity.uri, sum(map(len, texts)), "prompt"):
                prompts = [await self._tokenizer.encode(each) if isinstance(each, str) else each for each in given]
            wanted = asked.max_tokens
            room = min(self._room(prompt, wanted, "prompt") for prompt in prompts)
            tokens = min(room, openai.COMPLETION_TOKENS_DEFAULT) if wanted is None else wanted
            async with aclosing(self._generated(job, prompts, tokens)) as parts:
                async for part in parts:
                    yield part

    async def _chat(self, identity: Identity, body: bytes) -> Parts:
        asked = openai.parse(body, AskedChat)
        job = self._job(identity, asked, ChatShape())
        said = openai.messages(asked)
        texts = [message["content"] for message in said]
        self._require_short(texts, "messages")
        with self._choices.held(identity.uri, asked.n or 1, "n"):
            try:
                with self._characters.held(identity.uri, sum(map(len, texts)), "messages"):
                    prompt = await self._tokenizer.encode_chat(said)
            except KvspError as error:
                raise invalid(error.detail, "messages") from None
            wanted = asked.max_completion_tokens or asked.max_tokens
            room = self._room(prompt, wanted, "messages")
            async with aclosing(self._generated(job, [prompt], wanted or room)) as parts:
                async for part in parts:
                    yield part

    # --- checks ---

    def _job(self, identity: Identity, asked: Asked, shape: Shape) -> _Job:
        """Scope, model and sampler of a request. Raises ApiError."""
        scope = self._scope(identity, asked.kvsp_scope)
        self._require_model(asked.model, "model")
        if asked.stream_options is not None and not asked.stream:
            raise invalid("stream_options goes with stream alone", "stream_options")
        sampling = openai.sampling(asked, self._tokenizer.vocabulary)
        answer = Answer(
            shape=shape,
            id=f"{shape.prefix}{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._served.model,
            fingerprint=f"kvsp_{self._served.compat_id.hex()[:12]}",
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            explain=bool(asked.kvsp_explain),
        )
        return _Job(asked, scope, sampling, answer)

    def _scope(self, identity: Identity, wanted: str | None) -> ScopeKey:
        """The scope of a request: one of the caller's, of which the key is here."""
        open_to = [name for name, scope_id in self._scope_ids.items() if scope_id in identity.scopes]
        # Foreign and unknown scopes are refused alike (D8).
        if not open_to or (wanted is not None and wanted not in open_to):
            raise forbidden("the caller has no such scope here" if open_to else "the caller has no scope here")
        name = wanted or (open_to[0] if len(open_to) == 1 else self._served.default_scope)
        if name not in open_to:
            raise invalid("the caller has several scopes: name one in kvsp_scope", "kvsp_scope")
        return self._served.scopes[name]

    def _require_model(self, model: str, param: str | None) -> None:
        if model != self._served.model:
            raise invalid("no such model is served here", param, "model_not_found", status=404)

    def _require_short(self, texts: Sequence[str], param: str) -> None:
        """Refuse what is too long whatever its tokens are, before it is tokenized."""
        least = self._tokenizer.least_tokens(texts)
        if least >= self._served.context_tokens:
            raise self._too_long(f"the prompt has at least {least}", param)

    def _room(self, prompt: Sequence[int], wanted: int | None, param: str) -> int:
        """Tokens that may follow a prompt. Raises ApiError when there is none, or less room than wanted."""
        if not prompt:
            raise invalid("the prompt is empty", param)
        room = self._served.context_tokens - len(prompt)
        if room < (wanted or 1):
            asked = f" and {wanted} more are asked for" if wanted else ""
            raise self._too_long(f"the prompt has {len(prompt)}{asked}", param)
        return room

    def _too_long(self, found: str, param: str) -> ApiError:
        most = self._served.context_tokens
        message = f"this model's maximum context length is {most} tokens; {found}"
        return invalid(message, param, "context_length_exceeded")

    # --- generation ---

    def _generated(self, job: _Job, prompts: Sequence[list[int]], max_tokens: int) -> Parts:
        n = job.asked.n or 1
        tally = Tally([len(prompt) for prompt in prompts], n)
        stop_tokens = frozenset() if job.asked.ignore_eos else self._tokenizer.stop_tokens
        seed = secrets.randbelow(limits.INT_MAX) if job.sampling.seed is None else job.sampling.seed
        greedy = job.sampling.method == "greedy"
        deterministic = self._served.deterministic if greedy else self._served.deterministic_sampling
        choices = []
        for prompt in prompts:
            for at in range(n):
                sampler = job.sampling.sampler(
                    _shifted(seed, at), max_tokens, sorted(stop_tokens), deterministic=deterministic
                )
                plan = Plan(job.scope, self._served.compat_id, self._served.block_tokens, prompt, sampler)
                stops = openai.stops(job.asked)
                choices.append(choice(self._fleet, plan, self._tokenizer.decode, stops, stop_tokens))
        return _stream(job, merged(choices), tally) if job.asked.stream else _collect(job, merged(choices), tally)


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that may be served, before its prompt is tokens."""

    asked: Asked
    scope: ScopeKey
    sampling: Sampling
    answer: Answer


Pieces = AsyncGenerator[tuple[int, Piece], None]


async def _collect(job: _Job, pieces: Pieces, tally: Tally) -> Parts:
    """The whole answer at its end."""
    try:
        async with aclosing(pieces):
            async for index, piece in pieces:
                tally.add(index, piece, keep=True)
    finally:
        _count(tally)
    for part in _whole(job.answer.whole(tally.choices(), tally.usage(), tally.placed)):
        yield part


async def _stream(job: _Job, pieces: Pieces, tally: Tally) -> Parts:
    """The answer as it comes. What fails before anything came is no stream but an error."""
    answer = job.answer
    try:
        async with aclosing(pieces):
            index, piece = await anext(pieces)
            yield _start(200, MEDIA_EVENTS)
            tally.add(index, piece, keep=False)
            opened = b"".join(map(answer.opening, range(len(tally.prompts) * tally.n)))
            if octets := opened + _told(answer, index, piece):
                yield _octets(octets)
            try:
                async for index, piece in pieces:
                    tally.add(index, piece, keep=False)
                    if octets := _told(answer, index, piece):
                        yield _octets(octets)
            except KvspError as error:
                yield _octets(event(of_fleet(error).body))
                return
            yield _octets(answer.ending(tally.usage()))
    finally:
        _count(tally)


def _told(answer: Answer, index: int, piece: Piece) -> bytes:
    return answer.placed(index, piece.placed) + answer.piece(index, piece.text, piece.finish_reason)


def _count(tally: Tally) -> None:
    usage = tally.usage()
    TOKENS.labels("prompt").inc(usage.prompt_tokens)
    TOKENS.labels("cached").inc(usage.prompt_tokens_details.cached_tokens)
    TOKENS.labels("output").inc(usage.completion_tokens)


def _shifted(seed: int, at: int) -> int:
    """Another seed for each choice of a prompt, within the bounds of seeds."""
    return (seed + at + limits.INT_MAX) % (2 * limits.INT_MAX + 1) - limits.INT_MAX


def _start(status: int, media: str, length: int | None = None) -> frontend_pb2.ApiReply:
    return frontend_pb2.ApiReply(start=frontend_pb2.ApiStart(status=status, content_type=media, length=length))


def _octets(octets: bytes) -> frontend_pb2.ApiReply:
    return frontend_pb2.ApiReply(octets=octets)


def _whole(body: bytes, status: int = 200) -> list[frontend_pb2.ApiReply]:
    """A body of known length, in messages of a size that gRPC takes."""
    pieces = [body[at : at + limits.GRPC_CHUNK_OCTETS] for at in range(0, len(body), limits.GRPC_CHUNK_OCTETS)]
    return [_start(status, MEDIA_JSON, len(body)), *map(_octets, pieces)]
