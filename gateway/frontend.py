"""The front end behind the gateway: an OpenAI-style API at a base URI of its own. Not part of KVSP.

Its requests and answers go through as octets. Only what the gateway itself has to say is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc

from gateway.backend import Backend
from gateway.exchange import Exchange
from gateway.problems import NO_STORE, FieldError
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.channel import DEFAULT_TIMEOUT_S
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, frontend_pb2

ROLE: Final = "frontend"
MEDIA: Final = "application/json"
BODY_OCTETS_MAX: Final = 8 << 20
ANSWER_S: Final = 3600.0
"""The longest that a generation may take."""

_METHODS: Final[Mapping[str, str]] = {
    "v1/completions": "POST",
    "v1/chat/completions": "POST",
    "v1/models": "GET",
    "v1/models/{id}": "GET",
}
_MODEL: Final = "v1/models/"


async def relay(exchange: Exchange, backend: Backend, principal: str, labels: list[str]) -> None:
    """One request, and the answer piece by piece as it is made. Raises KvspError, Disconnected."""
    path = exchange.path[len(backend.path) :]
    method = _find(exchange.method, path, labels)
    me = speak_for(principal)
    # Before any octet of a body is read, and before anything is told of one: the order of checks.
    async with translated():
        request = common_pb2.AuthorizeRequest(method=method, path=path)
        await backend.authority.Authorize(request, metadata=me, timeout=DEFAULT_TIMEOUT_S)
    if method == "POST":
        exchange.check_content(MEDIA, BODY_OCTETS_MAX)
    body = await exchange.body(BODY_OCTETS_MAX)
    answer = backend.frontend.Call(
        frontend_pb2.ApiRequest(method=method, path=path, body=body), metadata=me, timeout=ANSWER_S
    )
    try:
        async with translated():
            await exchange.while_connected(_send(exchange, answer))
    finally:
        answer.cancel()  # nobody waits for the rest; it changes nothing when there is none


def _find(method: str, path: str, labels: list[str]) -> str:
    """The method to call with; labels get the template, never a path. Raises KvspError (404, 405)."""
    labels[0] = ROLE
    is_model = path.startswith(_MODEL) and len(path) > len(_MODEL)
    template = "v1/models/{id}" if is_model else path
    served = _METHODS.get(template)
    if served is None:
        raise KvspError(registry.NO_ROUTE)
    if method != served and (served, method) != ("GET", "HEAD"):
        allow = "GET, HEAD" if served == "GET" else served
        raise FieldError(registry.METHOD_NOT_ALLOWED, "", (b"allow", allow.encode()))
    labels[1:] = method, template
    return served


async def _send(exchange: Exchange, answer: grpc.aio.UnaryStreamCall[Any, frontend_pb2.ApiReply]) -> None:
    parts = aiter(answer)
    head = await anext(parts, None)
    if head is None or not head.HasField("start"):
        raise KvspError(registry.INTERNAL)
    start = head.start
    fields = [(b"content-type", start.content_type.encode()), NO_STORE]
    if start.HasField("length"):
        fields.append((b"content-length", b"%d" % start.length))
    await exchange.start(start.status, fields)
    async for part in parts:
        await exchange.write(part.octets)
    await exchange.finish()
