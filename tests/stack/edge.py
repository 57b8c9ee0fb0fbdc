"""Envoy with the stack's own configuration, before an application that tells what Envoy lets through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import uvicorn

from deploy.local import configs, envoy, pki
from deploy.local.envoy import Tuning
from deploy.local.layout import Layout, write_private
from deploy.local.stack import Background, Stack, programs, running
from deploy.local.supervisor import Supervisor
from tests.stack.harness import Reply, client_context, request

SHORT = Tuning(headers_timeout_s=0.6, idle_timeout_s=1.0, stream_duration_s=3.0)


async def mirror(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with what it got. `?body=N` sends N octets, `?drip=N` one every 0.3 s, `?hang` nothing."""
    assert scope["type"] == "http"
    query = scope["query_string"].decode()
    received = 0
    if query != "deny":
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
    if query == "hang":
        await receive()
        return
    kind, _, count = query.partition("=")
    if kind in {"body", "drip"}:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", count.encode())]}
        )
        piece = 1 if kind == "drip" else 1 << 16
        for start in range(0, int(count), piece):
            if kind == "drip":
                await asyncio.sleep(0.3)
            octets = bytes(min(piece, int(count) - start))
            await send({"type": "http.response.body", "body": octets, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    seen = {
        "method": scope["method"],
        "path": scope["raw_path"].decode("latin-1"),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        "received": received,
    }
    body = json.dumps(seen).encode()
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


class _Application:
    """The mirror on the gateway's socket, in a thread."""

    def __init__(self, path: str) -> None:
        self.server = uvicorn.Server(
            uvicorn.Config(
                mirror,
                uds=path,
                log_level="warning",
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=7200,
            )
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> _Application:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join()


class Edge:
    """A running Envoy and the means to talk to it."""

    def __init__(self, layout: Layout, authority: pki.Credential, background: Background) -> None:
        self.layout = layout
        self.authority = authority
        self.background = background
        self.ca = str(layout.pki / "ca.pem")
        self.url = layout.base_uri("h1")

    def credential(self, name: str = "client-demo") -> tuple[str, str]:
        """Paths of certificate and key."""
        return str(self.layout.pki / f"{name}.pem"), str(self.layout.pki / f"{name}-key.pem")

    def context(self, name: str = "client-demo", alpn: str = "http/1.1") -> ssl.SSLContext:
        """A client context of that party."""
        context = client_context(self.ca, self.credential(name))
        context.set_alpn_protocols([alpn])
        return context

    def get(self, path: str, headers: list[tuple[str, str]] | None = None) -> Reply:
        """GET of a path as it stands, over HTTP/1.1."""
        authority = self.url.split("/")[2]
        return request("GET", f"https://{authority}{path}", self.context(), None, headers or [])

    def stat(self, suffix: str) -> int:
        """The sum of Envoy's counters whose name ends so."""
        with urllib.request.urlopen(self.layout.admin_url + "/stats", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return sum(int(line.rpartition(": ")[2]) for line in lines if line.partition(": ")[0].endswith(suffix))

    def connect(self, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        """A TLS connection."""
        raw = socket.create_connection(("127.0.0.1", self.layout.port), timeout=20)
        return (context or self.context()).wrap_socket(raw, server_hostname="localhost")

    def raw(self, octets: bytes) -> bytes:
        """Send octets over HTTP/1.1 and return all that comes until Envoy closes."""
        with self.connect() as link:
            link.sendall(octets)
            return read_all(link)


def read_all(link: ssl.SSLSocket) -> bytes:
    """Everything until the peer closes, gracefully or not."""
    received = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := link.recv(65536):
            received += piece
    return received


@contextlib.contextmanager
def start_edge(layout: Layout, tuning: Tuning = SHORT, *, serve: bool = True) -> Iterator[Edge]:
    """Envoy and, with `serve`, the mirror."""
    layout.make_directories()
    authority = pki.ensure(layout)
    write_private(layout.envoy, envoy.render(layout, configs.served_prefixes(), tuning).encode())
    program = next(each for each in programs(layout, configs.Settings()) if each.name == "envoy")
    stack = Stack(layout, {}, Supervisor([program], print, restart=False))
    application = _Application(str(layout.socket("gateway"))) if serve else contextlib.nullcontext()
    with application, running(stack) as background:
        yield Edge(layout, authority, background)
