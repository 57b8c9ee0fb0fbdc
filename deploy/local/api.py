"""A plain client of the front end's OpenAI API: HTTPS with a client certificate, server-sent events."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from deploy.local.layout import StackError

TIMEOUT_S: Final = 120.0  # of silence
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """What a request brought. Times are seconds since it was sent; `pieces` has the time of every piece of text.

    `placement` is what the front end tells of where it went and why, `moved` of where it went on, if it did.
    """

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    placement: dict[str, Any] = field(default_factory=dict)
    moved: dict[str, Any] = field(default_factory=dict)
    pieces: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """Time to first token."""
        return self.pieces[0] if self.pieces else 0.0


class Api:
    """The API of a running stack as one of its clients."""

    def __init__(self, endpoints: Mapping[str, Any], identity: str) -> None:
        own = endpoints["identities"][identity]
        self._context = ssl.create_default_context(cafile=endpoints["ca"])
        self._context.load_cert_chain(own["cert"], own["key"])
        self._base = urlsplit(endpoints["roles"]["frontend"])

    def models(self) -> list[str]:
        """Names of the models. Raises StackError."""
        with _Exchange(self._base, self._context, "GET", "v1/models") as reply:
            return [each["id"] for each in json.loads(reply.read())["data"]]

    def complete(
        self, prompt: str, max_tokens: int, on_text: Callable[[Answer], None] | None = None, **options: Any
    ) -> Answer:
        """Stream a completion; `on_text` is called whenever there is more of it. Raises StackError."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        answer = Answer()
        started = time.perf_counter()
        with _Exchange(self._base, self._context, "POST", "v1/completions", body) as reply:
            for event in _events(reply):
                if _take(answer, event):
                    answer.pieces.append(time.perf_counter() - started)
                    if on_text is not None:
                        on_text(answer)
        if not answer.finish_reason:
            raise StackError("the stream broke off")
        return answer


class _Exchange:
    """One request; the response, once it is a success."""

    def __init__(self, base: Any, context: ssl.SSLContext, method: str, path: str, body: Any = None) -> None:
        self._connection = http.client.HTTPSConnection(base.netloc, context=context, timeout=TIMEOUT_S)
        self._request = method, base.path + path, body

    def __enter__(self) -> http.client.HTTPResponse:
        method, path, body = self._request
        fields = {} if body is None else {"content-type": "application/json"}
        octets = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, octets, fields)
            reply = self._connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                raise StackError(f"{method} {path}: {reply.status} {reply.read(500).decode(errors='replace')}")
        except OSError as error:
            self._connection.close()
            raise StackError(f"{method} {path}: {error}") from None
        return reply

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events. Raises StackError."""
    try:
        for line in reply:
            if line.startswith(_DATA) and (data := line.removeprefix(_DATA).strip()) != _DONE:
                yield json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise StackError(f"the stream broke off: {error!r}") from None


def _take(answer: Answer, event: dict[str, Any]) -> bool:
    """Add an event to the answer; True when it brought text. Raises StackError."""
    if "error" in event:
        raise StackError(f"the front end: {event['error'].get('message')}")
    for placed in event.get("kvsp", ()):
        if answer.placement:
            answer.moved = placed
        else:
            answer.placement = placed
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    text = ""
    for choice in event.get("choices", ()):
        text += choice.get("text") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.text += text
    return bool(text)
