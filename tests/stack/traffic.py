"""Traffic for tests of a running stack: sample blocks, requests that stop half-way, conditions to wait for."""

from __future__ import annotations

import http.client
import io
import secrets
import socket
import ssl
import struct
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvsp.client import Client, Options, load_stack
from kvsp.protocol import container
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.keys import block_keys
from kvsp.protocol.names import party_id
from kvsp.protocol.records import LookupReply
from tests.stack.harness import SMALL, Reply, RunningStack

T = TypeVar("T")
DEADLINE_S = 30.0
POLL_S = 0.02


def eventually(check: Callable[[], T | None], what: str, timeout_s: float = DEADLINE_S) -> T:
    """The first true result of `check`, asked again and again until the deadline."""
    end = time.monotonic() + timeout_s
    while not (result := check()):
        assert time.monotonic() < end, what
        time.sleep(POLL_S)
    return result


@dataclass(frozen=True, slots=True)
class Sample:
    """A block that no other test has: its names and its container."""

    compat_id: str
    scope_id: str
    block_key: str
    octets: bytes

    @property
    def path(self) -> str:
        """Below the holder's base URI."""
        return f"blocks/{self.compat_id}/{self.scope_id}/{self.block_key}"

    @property
    def payload(self) -> bytes:
        """All sections, without the header."""
        return self.octets[container.parse_header(self.octets).header_octets :]


def random_tokens(blocks: int, descriptor: Descriptor = SMALL) -> list[int]:
    """Tokens of a prompt of so many whole blocks; all have ten digits, so that they are found in any text."""
    return [4_000_000_000 + secrets.randbelow(200_000_000) for _ in range(blocks * descriptor.block_tokens)]


def container_of(descriptor: Descriptor) -> bytes:
    """Random octets in the shape of the descriptor."""
    half = descriptor.section_octets
    sections = [secrets.token_bytes(2 * half) for _ in range(descriptor.layers)]
    return container.build(0, descriptor.block_tokens, [(each[:half], each[half:]) for each in sections])


def chain(
    stack: RunningStack,
    blocks: int,
    descriptor: Descriptor = SMALL,
    scope: str = "demo",
    tokens: Sequence[int] = (),
) -> list[Sample]:
    """The blocks of one prompt, in prefix order."""
    compat = stack.compat_id(descriptor)
    tokens = tokens or random_tokens(blocks, descriptor)
    keys = block_keys(stack.scope_key(scope), bytes.fromhex(compat), tokens, descriptor.block_tokens)
    return [Sample(compat, stack.scope_id(scope), key.hex(), container_of(descriptor)) for key in keys]


def block_of(stack: RunningStack, octets: int, scope: str = "demo") -> Sample:
    """One block of an unknown compatibility id whose container has exactly so many octets."""
    payload = octets - container.FIXED_OCTETS - 16
    half = secrets.token_bytes(1 << 16) * (payload // 2 // (1 << 16) + 1)
    built = container.build(0, 16, [(half[: payload // 2], half[: payload - payload // 2])])
    assert len(built) == octets
    return Sample(secrets.token_hex(32), stack.scope_id(scope), secrets.token_hex(32), built)


# --- whole requests -----------------------------------------------------------------------


def put(stack: RunningStack, sample: Sample, identity: str = "client-demo") -> Reply:
    """PUT the block; it asks first, so that a refusal is always seen however long the body is."""
    request = HalfRequest(stack, "PUT", sample.path, _put_fields(sample) + "expect: 100-continue\r\n", identity)
    if request.peek().startswith(b"HTTP/1.1 100"):
        request.send(sample.octets)
    return request.finish()


def get(stack: RunningStack, sample: Sample, identity: str = "client-demo") -> Reply:
    """GET the block."""
    return stack.request("GET", stack.holder + sample.path, identity=identity)


def store(stack: RunningStack, samples: Sequence[Sample]) -> None:
    """PUT all of them, on one connection."""
    with client_of(stack) as client:
        for each in samples:
            assert client.put(stack.holder, each.compat_id, each.scope_id, each.block_key, each.octets)


def create_lease(
    stack: RunningStack, samples: Sequence[Sample], ttl_ms: int, identity: str = "client-demo"
) -> Reply:
    """POST leases."""
    body = {"block_keys": [each.block_key for each in samples], "ttl_ms": ttl_ms}
    return stack.request("POST", stack.holder + "leases", body, identity=identity)


def look_up(stack: RunningStack, samples: Sequence[Sample], identity: str = "client-demo") -> Reply:
    """POST lookup."""
    body = {
        "scope_id": samples[0].scope_id,
        "compat_id": samples[0].compat_id,
        "block_keys": [each.block_key for each in samples],
    }
    return stack.request("POST", stack.index + "lookup", body, identity=identity)


def matched(stack: RunningStack, samples: Sequence[Sample]) -> int:
    """How long the prefix is that the index lists."""
    reply = look_up(stack, samples)
    assert reply.status == 200, reply
    return int(reply.json()["matched"])


def published(stack: RunningStack, client: Client, samples: Sequence[Sample]) -> LookupReply:
    """The lookup once the holder's publications have reached the index."""
    keys = [each.block_key for each in samples]
    first = samples[0]

    def complete() -> LookupReply | None:
        reply = client.lookup(first.scope_id, first.compat_id, keys)
        return reply if reply.matched == len(keys) else None

    return eventually(complete, "not published")


@contextmanager
def client_of(stack: RunningStack, identity: str = "client-demo", **options: float) -> Iterator[Client]:
    """An SDK client of that party."""
    party = load_stack(stack.layout.endpoints, identity)
    with Client(party.credentials, party.endpoints, Options(**options)) as client:  # type: ignore[arg-type]
        yield client


# --- requests that stop half-way ----------------------------------------------------------


class HalfRequest:
    """A request on a connection of its own that goes on only when told to."""

    def __init__(
        self, stack: RunningStack, method: str, path: str, fields: str = "", identity: str = "client-demo"
    ) -> None:
        where = urlsplit(stack.holder + path)
        plain = socket.create_connection(("127.0.0.1", where.port or 443), timeout=DEADLINE_S)
        # A small window, so that what is not read stays with the server.
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._link: ssl.SSLSocket = stack.ssl_context(identity).wrap_socket(plain, server_hostname="localhost")
        self._received: io.BufferedReader = self._link.makefile("rb")
        self.send(f"{method} {where.path} HTTP/1.1\r\nhost: {where.netloc}\r\n{fields}\r\n".encode())

    def send(self, octets: bytes) -> None:
        """More of the body."""
        self._link.sendall(octets)

    def peek(self) -> bytes:
        """The beginning of the response, which stays there to be read."""
        return self._received.peek(1)

    def finish(self) -> Reply:
        """The whole final response; raises as http.client does when it breaks off."""
        with self._link, http.client.HTTPResponse(self) as response:  # type: ignore[arg-type]
            response.begin()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, fields, response.read())

    def makefile(self, _: str) -> io.BufferedReader:
        """What http.client asks of a socket."""
        return self._received

    def reset(self) -> None:
        """Vanish, as a killed process or a broken network does."""
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._received.close()
        self._link.close()


def _put_fields(sample: Sample) -> str:
    length = len(sample.octets)
    return f"content-type: application/kvsp-block\r\nif-none-match: *\r\ncontent-length: {length}\r\n"


def half_put(stack: RunningStack, sample: Sample, octets: int | None = None) -> HalfRequest:
    """A PUT of which `octets` (default: half) have been sent."""
    request = HalfRequest(stack, "PUT", sample.path, _put_fields(sample))
    request.send(sample.octets[: len(sample.octets) // 2 if octets is None else octets])
    return request


def half_get(stack: RunningStack, sample: Sample) -> HalfRequest:
    """A GET whose response has begun to arrive."""
    request = HalfRequest(stack, "GET", sample.path)
    assert request.peek().startswith(b"HTTP/1.1 200")
    return request


# --- what can be seen of the processes ----------------------------------------------------


def metric(admin: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels, from an admin address `host:port`."""
    with urllib.request.urlopen(f"http://{admin}/metrics") as reply:
        text = reply.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def arenas(stack: RunningStack) -> list[Path]:
    """Shared memory files of the holder h1, by its configuration."""
    folder = Path(tomllib.loads(stack.layout.config("h1").read_text())["arena_dir"])
    return list(folder.glob(f"kvsp-{party_id(stack.holder)[:16]}-*"))


def assert_problem(reply: Reply, status: int, kind: str = "about:blank", *, retry: bool = False) -> None:
    """Problem Details with no-store, and with Retry-After if asked for (R-065, R-067)."""
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["cache-control"] == "no-store"
    problem = reply.json()
    assert problem["status"] == status
    assert problem["type"] == (kind if ":" in kind else f"https://iana.org/assignments/kvsp#{kind}")
    if retry:
        assert int(reply.headers["retry-after"]) >= 1
