"""The dev stack for tests: started once per test process on free ports, in a home of its own.

`RunningStack` is what tests use: who is who, where everything is, one plain request, and killing or restarting
one process by name (`index`, `placement`, `h1`, `gateway`, `envoy`; in a fleet `ii1`, `ii1-blocks`, ... and
`frontend`, too).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.local import pki
from deploy.local.configs import ALL_INSTANCES, Settings
from deploy.local.layout import Layout
from deploy.local.model import TINY, ensure_model
from deploy.local.ports import free_ports
from deploy.local.stack import Background, prepare, running
from kvsp.protocol.descriptor import Descriptor, canonical, compat_id
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.names import party_id

REACHED_S = 10.0
FLEET_ARENA_OCTETS = 32 << 20
UNAVAILABLE = 503

SMALL = Descriptor(
    model="example/small",
    model_digest="sha-256:" + "11" * 32,
    tokenizer_digest="sha-256:" + "22" * 32,
    layers=4,
    kv_heads=2,
    head_dim=8,
    kv_dtype="bf16",
    positional="rope;theta=10000",
    block_tokens=4,
    layout="kvsp-layout-1",
)
"""1,024 octets of payload a block."""

LARGE = Descriptor(
    model="example/large",
    model_digest="sha-256:" + "33" * 32,
    tokenizer_digest="sha-256:" + "44" * 32,
    layers=32,
    kv_heads=8,
    head_dim=128,
    kv_dtype="bf16",
    positional="rope;theta=500000",
    block_tokens=16,
    layout="kvsp-layout-1",
)
"""2 MiB of payload a block."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP response; header names in lower case, repeated fields joined by ', '."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body parsed as JSON."""
        return json.loads(self.body)


class RunningStack:
    """A stack that runs. Everything it knows comes from endpoints.json."""

    def __init__(self, background: Background) -> None:
        self.background = background
        self.layout = background.stack.layout
        self.endpoints = background.stack.endpoints
        self.ca: str = self.endpoints["ca"]
        self.index: str = self.endpoints["roles"]["index"]
        self.holder: str = self.endpoints["roles"]["holders"]["h1"]
        self.placement: str = self.endpoints["roles"]["placement"]
        self.instances: dict[str, str] = self.endpoints["roles"]["instances"]
        self.frontend: str = self.endpoints["roles"]["frontend"]

    def identity(self, name: str) -> tuple[str, str]:
        """Paths of the certificate and key of a party."""
        each = self.endpoints["identities"][name]
        return each["cert"], each["key"]

    def scope_id(self, name: str = "demo") -> str:
        """The scope's id (hex16)."""
        return str(self.endpoints["scopes"][name]["scope_id"])

    def scope_key(self, name: str = "demo") -> ScopeKey:
        """The scope's key."""
        return ScopeKey.parse(Path(self.endpoints["scopes"][name]["key_file"]).read_bytes())

    def compat_id(self, descriptor: Descriptor = SMALL) -> str:
        """The Compatibility ID (hex32) of a descriptor that the stack knows."""
        return compat_id(descriptor).hex()

    def ssl_context(self, identity: str | None = "client-demo") -> ssl.SSLContext:
        """A client context of that party; None: without a certificate."""
        return client_context(self.ca, self.identity(identity) if identity else None)

    def request(
        self,
        method: str,
        url: str,
        body: bytes | Any = None,
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        identity: str | None = "client-demo",
    ) -> Reply:
        """One HTTP/1.1 request on a connection of its own. A body that is no octets is sent as KVSP JSON."""
        fields = list(headers.items() if isinstance(headers, Mapping) else headers)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            if not any(name.lower() == "content-type" for name, _ in fields):
                fields.append(("content-type", "application/kvsp+json"))
        return request(method, url, self.ssl_context(identity), body, fields)

    def kill(self, name: str) -> None:
        """SIGKILL one process; it stays down until `start`."""
        self.background.kill(name)

    def stop(self, name: str) -> None:
        """SIGTERM one process, and wait until it is gone."""
        self.background.call(self.background.stack.supervisor.stop_one(name))

    def start(self, name: str) -> None:
        """Start one process (again) and wait until requests reach it: the gateway looks for it once a second."""
        self.background.start_again(name)
        deadline = time.monotonic() + REACHED_S
        while self._probe(name) == UNAVAILABLE:
            assert time.monotonic() < deadline, f"{name} is not reached again"
            time.sleep(0.05)

    def _probe(self, name: str) -> int:
        """Status of a request that gets as far as the process."""
        if name == "index":
            body = {"scope_id": self.scope_id(), "compat_id": self.compat_id(), "block_keys": []}
            return self.request("POST", self.index + "lookup", body).status
        if name == "placement":
            url = f"{self.placement}instances/{party_id(self.instances['ii1'])}/status"
            return self.request("PUT", url, {}, identity="ii1").status
        if name == "frontend":
            return self.request("GET", self.frontend + "v1/models").status
        if name in self.instances:
            return self.request("PUT", self.instances[name] + "state", {}, identity="pc").status
        holders = {"h1": self.holder} | {f"{each}-blocks": uri for each, uri in self.instances.items()}
        if name in holders:
            url = f"{holders[name]}blocks/{self.compat_id()}/{self.scope_id()}/{'00' * 32}"
            return self.request("HEAD", url).status
        return self.request("GET", self.index + "nothing").status

    def restart(self, name: str) -> None:
        """Kill one process and start it again."""
        self.kill(name)
        self.start(name)

    def pid(self, name: str) -> int:
        """The process id, for measuring memory and the like."""
        return self.background.stack.supervisor.pid(name)

    def log(self, name: str) -> str:
        """The log of one process."""
        return self.layout.log(name).read_text(encoding="utf-8", errors="replace")


def request(
    method: str, url: str, context: ssl.SSLContext, body: bytes | None, headers: Sequence[tuple[str, str]] = ()
) -> Reply:
    """One HTTP/1.1 request, its path sent as it stands."""
    parts = urlsplit(url)
    target = url[url.index(parts.netloc) + len(parts.netloc) :] or "/"
    connection = http.client.HTTPSConnection(parts.netloc, context=context, timeout=30)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        if body is not None and not any(
            name.lower() in {"content-length", "transfer-encoding"} for name, _ in headers
        ):
            connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        # A server may answer and close before it has read the body; the answer is what counts.
        with contextlib.suppress(ConnectionError):
            connection.send(body or b"")
        reply = connection.getresponse()
        fields: dict[str, str] = {}
        for name, value in reply.getheaders():
            key = name.lower()
            fields[key] = f"{fields[key]}, {value}" if key in fields else value
        return Reply(reply.status, fields, reply.read())
    finally:
        connection.close()


def client_context(ca: str, credential: tuple[str, str] | None) -> ssl.SSLContext:
    """Verifies the server by `ca`, shows `credential` (certificate, key)."""
    context = ssl.create_default_context(cafile=ca)
    if credential is not None:
        context.load_cert_chain(*credential)
    return context


def credential_files(directory: Path, name: str, credential: pki.Credential) -> tuple[str, str]:
    """Write a credential that a test issued. Returns paths for `client_context`."""
    credential.write(directory, name)
    return str(directory / f"{name}.pem"), str(directory / f"{name}-key.pem")


def free_port() -> int:
    """A TCP port that nobody uses now."""
    return free_ports(1)[0]


@contextlib.contextmanager
def temporary_layout() -> Iterator[Layout]:
    """A home under /tmp with a short path, as Unix sockets need, and free ports; removed at the end."""
    home = Path(tempfile.mkdtemp(prefix="kvsp-"))
    try:
        yield Layout(home, free_port(), free_port())
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def start_stack(
    layout: Layout, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[RunningStack]:
    """The real stack with the descriptors SMALL and LARGE. `overrides` replaces config keys by process name."""
    layout.make_directories()
    files = [layout.home / "small.json", layout.home / "large.json"]
    for path, descriptor in zip(files, (SMALL, LARGE), strict=True):
        path.write_bytes(canonical(descriptor))
    stack = prepare(layout, Settings(files, overrides=overrides or {}), print, restart=False)
    with running(stack) as background:
        yield RunningStack(background)


@contextlib.contextmanager
def start_fleet(
    layout: Layout,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    edit: Callable[[Layout], None] | None = None,
) -> Iterator[RunningStack]:
    """The whole fleet with a tiny model: two instances, front end, and everything else.

    `edit` may change the files that the processes read.
    """
    layout.make_directories()
    model, _ = ensure_model(layout.home, TINY)
    small = {"arena_octets": FLEET_ARENA_OCTETS}
    given = dict.fromkeys(("h1", *(f"{name}-blocks" for name in ALL_INSTANCES)), small) | dict(overrides or {})
    settings = Settings([layout.descriptor], overrides=given, model=model, metrics=True)
    stack = prepare(layout, settings, print, restart=False)
    if edit is not None:
        edit(layout)
    with running(stack) as background:
        yield RunningStack(background)
