"""The gateway's application: a FastAPI app with one route per base URI, each fed from the route table.

Within a base URI our own matching decides, not FastAPI's, which would match decoded paths, know no HEAD, build
`Allow` from one route, and put objects between a block and its socket (D3, D9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import prometheus_client
import structlog
from fastapi import FastAPI
from starlette.routing import BaseRoute, Match

from gateway import blocks, frontend, identity, records
from gateway.backend import Backend, Call
from gateway.exchange import Disconnected, Exchange
from gateway.problems import FieldError
from kvsp.protocol import limits, registry, routes
from kvsp.protocol.errors import KvspError
from kvsp.protocol.routes import ROUTES
from kvsp.rpc.interceptors import frames

log = structlog.get_logger()

# Labels hold templates and statuses only: nothing confidential.
REQUESTS: Final = prometheus_client.Counter(
    "kvsp_gateway_requests_total", "Requests by role, route and outcome", ["role", "method", "route", "status"]
)

Handler = Callable[[Call], Awaitable[None]]

HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {
    ("POST", "lookup"): records.handler(records.lookup),
    ("PUT", "replicas/{holder_id}/{block_key}"): records.handler(records.put_replica),
    ("DELETE", "replicas/{holder_id}/{block_key}"): records.handler(records.delete_replica),
    ("GET", "blocks/{compat}/{scope}/{block_key}"): blocks.get_block,
    ("PUT", "blocks/{compat}/{scope}/{block_key}"): blocks.put_block,
    ("POST", "leases"): records.handler(records.create_lease),
    ("PUT", "leases/{lease}"): records.handler(records.renew_lease),
    ("DELETE", "leases/{lease}"): records.handler(records.release_lease),
    ("PUT", "instances/{instance_id}/status"): records.handler(records.put_status),
    ("PUT", "sessions/{session}/checkpoint"): records.handler(records.put_checkpoint),
    ("POST", "prefetch"): records.handler(records.prefetch),
    ("GET", "prefetch/{directive}"): records.handler(records.get_directive),
    ("POST", "sessions/{session}/resume"): records.handler(records.resume),
    ("POST", "reshard"): records.handler(records.reshard),
    ("PUT", "state"): records.handler(records.put_state),
}

SERVED: Final = frozenset({frontend.ROLE}.union(*(route.roles for route in ROUTES)))
"""Roles that may stand in the config."""

REQUESTS_PER_IDENTITY_MAX: Final = 256
"""Requests of one identity under way: more could take all connections that Envoy keeps to us (D13)."""


def make_app(backends: Sequence[Backend]) -> FastAPI:
    """The ASGI application in front of `backends`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    under_way: Counter[str] = Counter()
    by_length = sorted(backends, key=lambda backend: len(backend.path), reverse=True)
    app.router.routes.extend(BaseUri(backend, under_way) for backend in by_length)
    app.router.default = _nothing_here
    return app


async def _nothing_here(scope: Any, receive: Any, send: Any) -> None:
    """What lies under no base URI."""
    await answer(Exchange(scope, receive, send), None, Counter())


class BaseUri(BaseRoute):
    """All resources of one role below its base URI."""

    def __init__(self, backend: Backend, under_way: Counter[str]) -> None:
        self.path = backend.path
        self._backend = backend
        self._under_way = under_way

    def matches(self, scope: Any) -> tuple[Match, Any]:
        """By the raw path: no other spelling of it names anything (D3)."""
        return (Match.FULL if scope["raw_path"].startswith(self.path.encode()) else Match.NONE), {}

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        await answer(Exchange(scope, receive, send), self._backend, self._under_way)


async def answer(exchange: Exchange, backend: Backend | None, under_way: Counter[str]) -> None:
    """Route, then handler; every failure becomes a problem. `under_way` counts requests by identity."""
    labels = ["", "", ""]
    principal = ""
    try:
        principal = _identify(exchange)
        under_way[principal] += 1
        if under_way[principal] > REQUESTS_PER_IDENTITY_MAX:
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many requests at once", retry_after_s=1)
        if backend is not None and backend.role == frontend.ROLE:
            await frontend.relay(exchange, backend, principal, labels)
        else:
            call = _call(exchange, backend, principal, labels)
            await HANDLERS[call.route.method, call.route.path](call)
    except KvspError as error:
        await exchange.fail(error)
    except Disconnected:
        exchange.status = 0
    except Exception as error:  # the boundary: nothing internal may leave
        _report(error, labels)
        await exchange.fail(KvspError(registry.INTERNAL))
    finally:
        if principal:
            under_way[principal] -= 1
            if not under_way[principal]:
                del under_way[principal]
        REQUESTS.labels(*labels, str(exchange.status)).inc()


def _identify(exchange: Exchange) -> str:
    if exchange.incoming.headers_too_large:
        raise KvspError(registry.HEADERS_TOO_LARGE)
    if len(exchange.path) + len(exchange.query) > limits.URI_OCTETS_MAX:
        raise KvspError(registry.URI_TOO_LONG)
    return identity.principal(exchange.headers)


def _call(exchange: Exchange, backend: Backend | None, principal: str, labels: list[str]) -> Call:
    """The next steps of the order of checks: route 404, method 405, segments 404."""
    if backend is None:
        raise KvspError(registry.NO_ROUTE)
    labels[0] = backend.role
    matched = routes.match(backend.role, exchange.path[len(backend.path) :])
    if matched is None:
        raise KvspError(registry.NO_ROUTE)
    route = matched.methods.get("GET" if exchange.method == "HEAD" else exchange.method)
    if route is None:
        raise FieldError(registry.METHOD_NOT_ALLOWED, "", (b"allow", matched.allow.encode()))
    labels[1:] = exchange.method, route.path
    if routes.is_malformed(matched):
        raise KvspError(registry.NOT_FOUND)  # U-05: it names no resource
    return Call(exchange, backend, route, matched.segments, principal)


def _report(error: Exception, labels: list[str]) -> None:
    """Where it happened, but not its text or the path, which may hold keys (R-215)."""
    role, method, route = labels
    log.error("unexpected", role=role, method=method, route=route, kind=type(error).__name__, at=frames(error))
