"""The gateway's application: FastAPI around one dispatcher that is fed from the route table.

FastAPI's own routing is not used: it would match decoded paths, know no HEAD, build `Allow` from one
route, and put objects between a block and its socket (D3, D9).
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog
from fastapi import FastAPI
from prometheus_client import Counter

from gateway import blocks, identity, problems, records
from gateway.backend import Backend, Call
from gateway.exchange import Disconnected, Exchange
from gateway.problems import FieldError
from kvsp.protocol import limits, registry, routes
from kvsp.protocol.errors import KvspError
from kvsp.protocol.routes import ROUTES

log = structlog.get_logger()

# Labels hold templates and statuses only: nothing confidential.
REQUESTS: Final = Counter(
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
}

SERVED: Final = frozenset(role for route in ROUTES for role in route.roles) - frozenset(
    role for route in ROUTES for role in route.roles if (route.method, route.path) not in HANDLERS
)
"""Roles of which every route has a handler."""


def make_app(backends: Sequence[Backend]) -> FastAPI:
    """The ASGI application in front of `backends`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    problems.install(app)
    app.router.default = Dispatcher(backends)
    return app


class Dispatcher:
    """Base URI, then route, then handler; every failure becomes a problem."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = sorted(backends, key=lambda backend: len(backend.path), reverse=True)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        exchange = Exchange(scope, receive, send)
        labels = ["", "", ""]
        try:
            call = self._call(exchange, labels)
            await HANDLERS[call.route.method, call.route.path](call)
        except KvspError as error:
            await exchange.fail(error)
        except Disconnected:
            exchange.status = 0
        except Exception as error:  # the boundary: nothing internal may leave
            _report(error, labels)
            await exchange.fail(KvspError(registry.INTERNAL))
        finally:
            REQUESTS.labels(*labels, str(exchange.status)).inc()

    def _call(self, exchange: Exchange, labels: list[str]) -> Call:
        """The first steps of the order of checks: identity 403, route 404, method 405, segments 404."""
        if exchange.incoming.headers_too_large:
            raise KvspError(registry.HEADERS_TOO_LARGE)
        if len(exchange.path) + len(exchange.query) > limits.URI_OCTETS_MAX:
            raise KvspError(registry.URI_TOO_LONG)
        principal = identity.principal(exchange.headers)
        backend = next((b for b in self._backends if exchange.path.startswith(b.path)), None)
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
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    log.error(
        "unexpected", role=labels[0], method=labels[1], route=labels[2], kind=type(error).__name__, at=frames
    )
