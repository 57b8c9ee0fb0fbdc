"""A black-box client: every response it sees is held to what the protocol says of all responses.

Octets are made by hand here rather than with `kvsp.protocol`, so that the two check each other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.stack.harness import Reply, RunningStack, request

JSON = "application/kvsp+json"
BLOCK = "application/kvsp-block"
PROBLEM = "application/problem+json"
PLAIN = "about:blank"
NOT_FOUND = "kvsp-not-found"
SCOPE_DENIED = "kvsp-scope-denied"
INCOMPATIBLE = "kvsp-incompatible"
LEASE_QUOTA = "kvsp-lease-quota"
DIGEST_MISMATCH = "kvsp-digest-mismatch"
LAYERS_UNAVAILABLE = "kvsp-layers-unavailable"

TYPE_BASE = "https://iana.org/assignments/kvsp#"
KVSP_STATUS = {
    NOT_FOUND: 404, SCOPE_DENIED: 403, INCOMPATIBLE: 409, LEASE_QUOTA: 429, "kvsp-stale-epoch": 409,
    "kvsp-invalid-state": 409, DIGEST_MISMATCH: 422, "kvsp-plan-conflict": 409, LAYERS_UNAVAILABLE: 404,
}  # fmt: skip
PHRASES = {
    400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 409: "Conflict",
    412: "Precondition Failed", 413: "Content Too Large", 414: "URI Too Long", 415: "Unsupported Media Type",
    428: "Precondition Required", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}  # fmt: skip
REGISTERED_FIELDS = {
    "accept-encoding", "accept-ranges", "allow", "cache-control", "connection", "content-length", "content-type",
    "date", "etag", "location", "repr-digest", "retry-after", "transfer-encoding",
}  # fmt: skip
"""All that our responses use; each is in the IANA registry ("KVSP defines no new HTTP fields", R-068)."""
DATE = re.compile(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT")

Fields = Mapping[str, str] | Sequence[tuple[str, str]]


def check_reply(method: str, reply: Reply) -> None:
    """R-065 ... R-068, R-071, R-200, R-201: what holds for every response, whoever made it."""
    headers = reply.headers
    assert headers.keys() <= REGISTERED_FIELDS, headers
    assert DATE.fullmatch(headers["date"])
    if method != "HEAD" and "content-length" in headers:
        assert int(headers["content-length"]) == len(reply.body)
    if reply.status >= 400:
        _check_problem(method, reply)
    elif headers.get("content-type") == BLOCK or reply.status == 304:
        assert re.fullmatch(r"private, immutable, no-transform, max-age=\d+", headers["cache-control"])
        return
    else:
        assert reply.status in {200, 201, 204}
        assert headers.get("content-type") == (JSON if reply.body else None)
        assert "repr-digest" not in headers
    assert headers["cache-control"] == "no-store"
    assert "etag" not in headers


def _check_problem(method: str, reply: Reply) -> None:
    assert reply.headers["content-type"] == PROBLEM
    assert ("allow" in reply.headers) == (reply.status == 405)
    if method == "HEAD":
        assert reply.body == b""
        return
    problem = reply.json()
    assert problem["status"] == reply.status
    suffix = problem_type(reply)
    assert (
        reply.status == KVSP_STATUS[suffix] if suffix != PLAIN else problem["title"] == PHRASES.get(reply.status)
    )
    assert isinstance(problem["title"], str)
    assert isinstance(problem.get("detail", ""), str)
    assert problem.keys() <= {"type", "title", "status", "detail", "block_keys"}


def problem_type(reply: Reply) -> str:
    """The suffix of a KVSP problem type, or about:blank."""
    uri = reply.json()["type"]
    assert uri == PLAIN or uri.startswith(TYPE_BASE + "kvsp-")
    return str(uri).removeprefix(TYPE_BASE)


def expect(reply: Reply, status: int, kind: str = PLAIN) -> Reply:
    """The reply has that status and, when it is an error, that problem type."""
    assert reply.status == status, (reply.status, reply.body[:500])
    if status >= 400 and reply.body:
        assert problem_type(reply) == kind, reply.body
    return reply


def same(left: Reply, right: Reply) -> bool:
    """Nothing tells the two apart but the date, and `Connection`: Envoy's, when it is yet to read the body."""
    hop = {"date": "", "connection": ""}
    return (left.status, dict(left.headers) | hop, left.body) == (
        right.status, dict(right.headers) | hop, right.body,
    )  # fmt: skip


def hex32() -> str:
    """A key or id that nobody else has."""
    return secrets.token_hex(32)


def b64url(octets: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(octets).rstrip(b"=").decode()


def holder_id(base_uri: str) -> str:
    """R-070."""
    return b64url(hashlib.sha256(base_uri.encode()).digest())


def digest_field(octets: bytes, algorithm: str = "sha-256") -> str:
    """A member of `Repr-Digest` (RFC 9530)."""
    digest = hashlib.new(algorithm.replace("-", ""), octets).digest()
    return f"{algorithm}=:{base64.b64encode(digest).decode()}:"


def box(
    *,
    magic: bytes = b"KVB1",
    version: int = 1,
    flags: int = 0,
    codec: int = 1,
    first: int = 0,
    count: int | None = None,
    tokens: int = 4,
    sections: Sequence[tuple[int, int]] = ((128, 128),) * 4,
    payload: bytes | None = None,
) -> bytes:
    """A container; by default a random block that fits the descriptor SMALL."""
    layers = len(sections) if count is None else count
    fixed = struct.pack(">4sBBHIII", magic, version, flags, codec, first, layers, tokens)
    if payload is None:
        payload = secrets.token_bytes(sum(map(sum, sections)))
    return fixed + b"".join(struct.pack(">QQ", k, v) for k, v in sections) + payload


class Wire:
    """Requests to one stack, as any of its identities or with a credential of one's own."""

    def __init__(self, stack: RunningStack) -> None:
        self.stack = stack
        self.index, self.holder = stack.index, stack.holder
        self.scope, self.compat = stack.scope_id(), stack.compat_id()
        self.ii1: str = stack.endpoints["roles"]["instances"]["ii1"]
        self.ii2: str = stack.endpoints["roles"]["instances"]["ii2"]
        self.credentials: dict[str, tuple[str, str]] = {}
        self._contexts: dict[str, ssl.SSLContext] = {}

    def context(self, identity: str) -> ssl.SSLContext:
        """The TLS context of an identity, kept."""
        if identity not in self._contexts:
            files = self.credentials.get(identity) or self.stack.identity(identity)
            context = ssl.create_default_context(cafile=self.stack.ca)
            context.load_cert_chain(*files)
            self._contexts[identity] = context
        return self._contexts[identity]

    def call(
        self, method: str, url: str, body: Any = None, fields: Fields = (), identity: str = "client-demo"
    ) -> Reply:
        """One request; what is no octets is sent as KVSP JSON. The reply has passed `check_reply`."""
        headers = list(fields.items() if isinstance(fields, Mapping) else fields)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.append(("content-type", JSON))
        reply = request(method, url, self.context(identity), body, headers)
        check_reply(method, reply)
        return reply

    # --- index ---

    def record(self, holder: str | None = None, **changes: Any) -> dict[str, Any]:
        """A Replica Record of ii1, which has no process of its own; a value of None leaves the member out."""
        record = {
            "block_key": hex32(), "compat_id": self.compat, "scope_id": self.scope, "holder": holder or self.ii1,
            "codec": 1, "size": 1024, "digest": "sha-256:" + "00" * 32,
            "residency": [{"tier": "host", "layers": [0, 3]}], "ttl_ms": 60000,
        } | changes  # fmt: skip
        return {name: value for name, value in record.items() if value is not None}

    def replica_url(self, record: Mapping[str, Any]) -> str:
        """Where a record belongs."""
        return f"{self.index}replicas/{holder_id(record['holder'])}/{record['block_key']}"

    def publish(self, record: Mapping[str, Any], identity: str = "ii1") -> Reply:
        """PUT a record where it belongs."""
        return self.call("PUT", self.replica_url(record), dict(record), identity=identity)

    def question(self, keys: Sequence[str], **changes: Any) -> dict[str, Any]:
        """A lookup request."""
        return {"scope_id": self.scope, "compat_id": self.compat, "block_keys": list(keys)} | changes

    def lookup(self, keys: Sequence[str], identity: str = "client-demo", **changes: Any) -> dict[str, Any]:
        """What the index lists."""
        reply = self.call("POST", self.index + "lookup", self.question(keys, **changes), identity=identity)
        return dict(expect(reply, 200).json())

    def listed(self, keys: Sequence[str], identity: str = "client-demo", **changes: Any) -> dict[str, Any]:
        """The lookup, once what a holder publishes has arrived."""
        end = time.monotonic() + 20
        while (found := self.lookup(keys, identity, **changes))["matched"] < len(keys):
            assert time.monotonic() < end, "not published"
        return found

    # --- holder ---

    def block_url(self, key: str, *, scope: str | None = None, compat: str | None = None) -> str:
        """Where a block is."""
        return f"{self.holder}blocks/{compat or self.compat}/{scope or self.scope}/{key}"

    def put(self, url: str, octets: bytes, fields: Fields = (), identity: str = "client-demo") -> Reply:
        """PUT a block that may not exist yet."""
        headers = {"content-type": BLOCK, "if-none-match": "*"} | dict(fields)
        return self.call("PUT", url, octets, headers, identity)

    def stored(self, octets: bytes | None = None, **where: Any) -> str:
        """The URL of a new block."""
        url = self.block_url(hex32(), **where)
        expect(self.put(url, octets or box()), 201)
        return url

    def lease(self, keys: Sequence[str], identity: str = "client-demo", **changes: Any) -> Reply:
        """POST leases."""
        body = {"block_keys": list(keys), "ttl_ms": 60000} | changes
        return self.call("POST", self.holder + "leases", body, identity=identity)
