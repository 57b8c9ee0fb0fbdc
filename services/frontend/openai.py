"""What a client may ask of the OpenAI API, and what of it we do (https://platform.openai.com/docs/api-reference).

Members that would change the answer and that we cannot honour are refused by name, never ignored. Unknown
members are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, Struct

from kvsp.protocol import jsonio, limits
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import Sampler, TokenId
from services.frontend.errors import ApiError, invalid

T = TypeVar("T", bound="Asked")

N_MAX: Final = 8
PROMPTS_MAX: Final = 16
STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 1024
COMPLETION_TOKENS_DEFAULT: Final = 16
TEMPERATURE_MIN: Final = 1e-4
"""Below it the likeliest token has all the weight that matters, and logits divided by it overflow: greedy."""

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Members that are refused, unless null or one of these values, which say what we do anyway."""

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""As chat templates know them; "developer" is the newer name of "system"."""

_AT: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


class StreamOptions(Struct, frozen=True):
    """How to stream."""

    include_usage: bool | None = None


class Asked(Struct, frozen=True, kw_only=True):
    """What both endpoints take. `top_k`, `ignore_eos`, `kvsp_scope` and `kvsp_explain` are extensions."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=-limits.INT_MAX, le=limits.INT_MAX)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=N_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    kvsp_scope: str | None = None
    kvsp_explain: bool | None = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    presence_penalty: Any = None


class AskedCompletion(Asked, frozen=True, kw_only=True):
    """POST v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class Part(Struct, frozen=True):
    """A piece of a message."""

    type: str
    text: str | None = None


class Message(Struct, frozen=True):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: Any = None
    function_call: Any = None


class AskedChat(Asked, frozen=True, kw_only=True):
    """POST v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: a method and its parameters as checkpoints carry them, and the seed asked for."""

    method: str
    params: Mapping[str, float | int]
    seed: int | None

    def sampler(self, seed: int, max_tokens: int, stop_tokens: Sequence[int], *, deterministic: bool) -> Sampler:
        """The sampler's state before the first token."""
        params = {**self.params, "max_tokens": max_tokens, "stop_tokens": list(stop_tokens)}
        return Sampler(self.method, params, seed, 0, deterministic)


def parse(body: bytes, kind: type[T]) -> T:
    """A request's body, every member of it checked. Raises ApiError that names the member."""
    if len(body) > limits.JSON_OCTETS_MAX:
        raise invalid(f"the body has more than {limits.JSON_OCTETS_MAX} octets", status=413)
    try:
        asked = jsonio.decode(body, kind)
    except KvspError as error:
        raise _malformed(error) from None
    for member, neutral in _NEUTRAL.items():
        value = getattr(asked, member, None)
        if value is not None and not any(_same(value, each) for each in neutral):
            raise invalid(f"{member} is not supported", member, "unsupported_parameter")
    _check_stops(stops(asked))
    return asked


def stops(asked: Asked) -> list[str]:
    """The stop strings."""
    return [asked.stop] if isinstance(asked.stop, str) else asked.stop or []


def sampling(asked: Asked, vocabulary: int) -> Sampling:
    """The sampler that a request asks for; temperature and top_p are 1 unless said. Raises ApiError."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    k = asked.top_k if asked.top_k is not None and 0 < asked.top_k < vocabulary else None
    p = 1.0 if asked.top_p is None else asked.top_p
    if temperature < TEMPERATURE_MIN or k == 1:
        return Sampling("greedy", {}, asked.seed)
    if k is None:
        return Sampling("top-p", {"p": p, "temperature": temperature}, asked.seed)
    if p < 1:
        raise invalid("top_k and top_p cannot be combined: leave one of them out", "top_k")
    return Sampling("top-k", {"k": k, "temperature": temperature}, asked.seed)


def prompts(asked: AskedCompletion, vocabulary: int) -> list[str | list[int]]:
    """The prompts of a completion request, as text or as tokens. Raises ApiError."""
    given = asked.prompt
    if isinstance(given, str):
        return [given]
    found: list[str | list[int]] = []
    if all(isinstance(each, int) for each in given):
        found = [[each for each in given if isinstance(each, int)]]
    elif all(isinstance(each, str) for each in given) or all(isinstance(each, list) for each in given):
        found = [each for each in given if not isinstance(each, int)]
    else:
        raise invalid("prompt mixes texts and tokens", "prompt")
    if len(found) > PROMPTS_MAX:
        raise invalid(f"more than {PROMPTS_MAX} prompts", "prompt")
    for each in found:
        if isinstance(each, list) and each and max(each) >= vocabulary:
            raise invalid(f"a token is beyond the vocabulary of {vocabulary}", "prompt")
    return found


def messages(asked: AskedChat) -> list[dict[str, str]]:
    """The conversation as a chat template takes it: roles and texts. Raises ApiError."""
    return [_message(message, f"messages[{at}]") for at, message in enumerate(asked.messages)]


def _message(message: Message, where: str) -> dict[str, str]:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid("this role is not supported", f"{where}.role", "unsupported_value")
    if message.tool_calls or message.function_call:
        raise invalid("tool calls are not supported", where, "unsupported_parameter")
    content = message.content
    if isinstance(content, list):
        if any(part.type != "text" or part.text is None for part in content):
            raise invalid("only text is supported", f"{where}.content", "unsupported_value")
        content = "".join(part.text or "" for part in content)
    if content is None:
        raise invalid("content is missing", f"{where}.content")
    return {"role": role, "content": content}


def _same(value: Any, neutral: Any) -> bool:
    """Equal, but 0 is not false: `logprobs: 0` asks for some."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _check_stops(given: Sequence[str]) -> None:
    if len(given) > STOPS_MAX:
        raise invalid(f"more than {STOPS_MAX} stop strings", "stop")
    if not all(given):
        raise invalid("a stop string is empty", "stop")
    if any(len(each) > STOP_CHARS_MAX for each in given):
        raise invalid(f"a stop string has more than {STOP_CHARS_MAX} characters", "stop")


def _malformed(error: KvspError) -> ApiError:
    """The parser's reason and the member it is about, which stands at the reason's end."""
    at = _AT.search(error.detail)
    param = at[1] if at else None
    missing = _MISSING.search(error.detail)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
    return invalid(_AT.sub("", error.detail), param or None, status=error.status)
