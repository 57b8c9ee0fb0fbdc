"""Real HTTPS peers with mutual TLS: an index and holders that keep or break the rules on demand."""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import ssl
import struct
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvsp.client import Credentials
from kvsp.protocol import container, digests
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.records import ReplicaRecord, Residency

COMPAT = "c0" * 32
GEOMETRY = Descriptor(
    model="m",
    model_digest="sha-256:" + "11" * 32,
    tokenizer_digest="sha-256:" + "22" * 32,
    layers=4,
    kv_heads=8,
    head_dim=512,
    kv_dtype="bf16",
    positional="rope",
    block_tokens=16,
    layout="kvsp-layout-1",
)
"""Of a block of four layers of 256 KiB."""
SCOPE = "5c" * 16
KEY = "4b" * 32
LEASE = "01234567-89ab-4cde-8f01-23456789abcd"


class Authority:
    """A CA that signs certificates into files."""

    def __init__(self, home: Path, name: str = "ca") -> None:
        self.home = home
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = name
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self._cert = self._builder(name, self._key).add_extension(constraints, critical=True)
        self.ca = home / f"{name}.pem"
        signed = self._cert.sign(self._key, hashes.SHA256())
        self.ca.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, host: str = "localhost") -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        san = x509.SubjectAlternativeName([x509.DNSName(host)])
        signed = self._builder(name, key).add_extension(san, critical=False).sign(self._key, hashes.SHA256())
        cert_path, key_path = self.home / f"{name}-cert.pem", self.home / f"{name}-key.pem"
        cert_path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Credentials(self.ca, cert_path, key_path)

    def _builder(self, name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )


def container_of(layers: int, section: int, first: int = 0, seed: int = 1) -> bytes:
    """Sections of different content; `section` octets each."""
    sections = [
        (bytes([(seed + 2 * at) % 251]) * section, bytes([(seed + 2 * at + 1) % 251]) * section)
        for at in range(layers)
    ]
    return container.build(first, 16, sections)


def select(octets: bytes, first: int, last: int) -> bytes:
    header = container.parse_header(octets)
    part = header.select(first, last)
    start = header.header_octets + header.layer_span(first)[0]
    return part.encode() + octets[start : start + part.payload_octets]


def layer_digests_of(octets: bytes) -> list[bytes]:
    digester = digests.ContainerDigester()
    digester.feed(octets)
    digester.finish()
    return digester.layer_digests


def record_of(holder: str, octets: bytes, **changes: Any) -> ReplicaRecord:
    header = container.parse_header(octets)
    found = layer_digests_of(octets)
    members: dict[str, Any] = {
        "block_key": KEY,
        "compat_id": COMPAT,
        "scope_id": SCOPE,
        "holder": holder,
        "codec": header.codec,
        "size": header.payload_octets,
        "digest": digests.format_digest(digests.replica_digest(found)),
        "layer_digests": [item.hex() for item in found],
        "residency": [Residency("host", (0, header.layer_count - 1))],
        "ttl_ms": 60000,
    }
    return ReplicaRecord(**{**members, **changes})


@dataclass
class Peer:
    """What one server does. `mode` names how it serves blocks; `gate` holds back what follows its wait."""

    mode: str = "honest"
    octets: bytes = b""
    replies: dict[str, tuple[int, Any]] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)
    base: str = ""
    connections: int = 0
    hang_up_next: bool = False

    def count(self, method: str) -> int:
        return sum(1 for name, _ in self.seen if name == method)

    def wait_count(self, method: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count(method) >= count, 30)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    peer: Peer

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def handle_expect_100(self) -> bool:
        """Refuse what is held already before its octets come."""
        if self.path in self.peer.stored:
            self.close_connection = True
            self.problem(412)
            return False
        return super().handle_expect_100()

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.peer.hang_up_next:
            self.peer.hang_up_next, self.close_connection = False, True
            self.connection.unwrap()
            return
        path = self.path
        with self.peer.changed:
            self.peer.seen.append((self.command, path))
            self.peer.heads.append({name.lower(): value for name, value in self.headers.items()})
            self.peer.bodies.append(body)
            self.peer.changed.notify_all()
        name = f"{self.command} {path.removeprefix('/').split('/')[0].split('?')[0]}"
        if name in self.peer.replies:
            status, reply = self.peer.replies[name]
            self.reply(status, reply)
        elif self.command == "PUT":
            self.store(path, body)
        elif self.command == "GET":
            getattr(self, self.peer.mode)(self.wanted())
        else:
            self.block_head(self.wanted())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve  # noqa: N815

    def reply(self, status: int, body: Any) -> None:
        octets = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        media = "application/kvsp+json" if status < 400 else "application/problem+json"
        self.head(status, len(octets), media)
        self.wfile.write(octets)

    def head(self, status: int, length: int, media: str, **fields: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(length))
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def problem(self, status: int, suffix: str = "", **fields: str) -> None:
        kind = f"https://iana.org/assignments/kvsp#{suffix}" if suffix else "about:blank"
        body = json.dumps({"type": kind, "status": status, "title": "t", "detail": "as asked"}).encode()
        self.head(status, len(body), "application/problem+json", **fields)
        self.wfile.write(body)

    def store(self, path: str, body: bytes) -> None:
        digest = digests.repr_digest_field(hashlib.sha256(body).digest())
        if path in self.peer.stored:
            self.problem(412)
        elif self.headers["Repr-Digest"] != digest:
            self.problem(422, "kvsp-digest-mismatch")
        else:
            self.peer.stored[path] = body
            self.reply(201, None)

    def wanted(self) -> bytes:
        query = urlsplit(self.path).query
        if "layers=" in query:
            first, last = query.split("layers=")[1].split("&")[0].split("-")
            return select(self.peer.octets, int(first), int(last))
        return self.peer.octets

    def block_head(self, octets: bytes, promised: bytes | None = None, **fields: str) -> None:
        digest = digests.repr_digest_field(hashlib.sha256(octets if promised is None else promised).digest())
        more = {"Repr_Digest": digest, "Cache_Control": "private, immutable, max-age=7"} | fields
        self.head(200, len(octets), "application/kvsp-block", **more)

    # --- ways to serve a block --------------------------------------------------------

    def honest(self, octets: bytes) -> None:
        self.block_head(octets)
        self.wfile.write(octets)

    def flipped(self, octets: bytes) -> None:
        """Wrong octets under a Repr-Digest that matches them."""
        bad = octets[:-1] + bytes([octets[-1] ^ 1])
        self.block_head(bad)
        self.wfile.write(bad)

    def corrupt(self, octets: bytes) -> None:
        """Wrong octets under the Repr-Digest of the right ones."""
        self.block_head(octets)
        self.wfile.write(octets[:-1] + bytes([octets[-1] ^ 1]))

    def misdigested(self, octets: bytes) -> None:
        """Right octets under a wrong Repr-Digest."""
        self.block_head(octets, b"something else")
        self.wfile.write(octets)

    def undigested(self, octets: bytes) -> None:
        self.head(200, len(octets), "application/kvsp-block")
        self.wfile.write(octets)

    def malformed(self, octets: bytes) -> None:
        bad = b"\x00\x00\x00\x00" + octets[4:]
        self.block_head(bad)
        self.wfile.write(bad)

    def giant_table(self, octets: bytes) -> None:
        """A claim of 2^32-1 layers."""
        bad = octets[:12] + b"\xff\xff\xff\xff" + octets[16:]
        self.block_head(bad)
        self.wfile.write(bad)

    def oversized(self, octets: bytes) -> None:
        self.block_head(octets + bytes(1 << 20))
        self.wfile.write(octets + bytes(1 << 20))

    def endless(self, octets: bytes) -> None:
        """No Content-Length, and more octets than the container has."""
        self.send_response(200)
        self.send_header("Content-Type", "application/kvsp-block")
        self.send_header("Repr-Digest", digests.repr_digest_field(hashlib.sha256(octets).digest()))
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (octets, bytes(1 << 16)):
            self.wfile.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def truncated(self, octets: bytes) -> None:
        self.block_head(octets)
        self.wfile.write(octets[: len(octets) // 2])
        self.close_connection = True

    def shortened(self, octets: bytes) -> None:
        """A complete reply whose container is not."""
        self.block_head(octets[:-5])
        self.wfile.write(octets[:-5])

    def reset(self, octets: bytes) -> None:
        self.truncated(octets)
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def stalled(self, octets: bytes) -> None:
        self.block_head(octets)
        self.wfile.write(octets[: len(octets) // 2])
        self.wfile.flush()
        self.peer.gate.wait()
        self.close_connection = True

    def dripping(self, octets: bytes) -> None:
        """One octet after the other, with no end in sight."""
        self.block_head(octets)
        for at in range(len(octets)):
            self.wfile.write(octets[at : at + 1])
            self.wfile.flush()
            if self.peer.gate.wait(0.01):
                break
        self.close_connection = True

    def gated(self, octets: bytes) -> None:
        """The header and the first layer; the rest when the gate opens."""
        header = container.parse_header(octets)
        first = header.header_octets + header.layer_span(header.first_layer)[1]
        self.block_head(octets)
        self.wfile.write(octets[:first])
        self.wfile.flush()
        self.peer.gate.wait()
        self.wfile.write(octets[first:])

    def redirected(self, octets: bytes) -> None:
        self.head(307, 0, "text/plain", Location="https://localhost:1/elsewhere")

    def missing(self, octets: bytes) -> None:
        self.problem(404, "kvsp-not-found")

    def denied(self, octets: bytes) -> None:
        self.problem(403, "kvsp-scope-denied")

    def busy(self, octets: bytes) -> None:
        self.problem(503, Retry_After="3")

    def mistyped(self, octets: bytes) -> None:
        self.reply(200, octets)

    def other_layers(self, octets: bytes) -> None:
        self.honest(select(self.peer.octets, 0, 0))

    def shifted(self, octets: bytes) -> None:
        """The same payload, but the first K ends two octets earlier."""
        header = container.parse_header(octets)
        k, v = header.sections[0]
        sections = ((k - 2, v + 2), *header.sections[1:])
        self.reheaded(container.Header(header.codec, header.first_layer, header.token_count, sections), octets)

    def retokened(self, octets: bytes) -> None:
        """The same payload, said to be of twice the tokens."""
        header = container.parse_header(octets)
        tokens = 2 * header.token_count
        self.reheaded(container.Header(header.codec, header.first_layer, tokens, header.sections), octets)

    def reheaded(self, header: container.Header, octets: bytes) -> None:
        self.honest(header.encode() + octets[header.header_octets :])

    def overlong(self, octets: bytes) -> None:
        """A well-formed container of the layers asked for, with more in each of them."""
        header = container.parse_header(octets)
        sections = tuple((k + 2, v) for k, v in header.sections)
        longer = container.Header(header.codec, header.first_layer, header.token_count, sections)
        self.honest(longer.encode() + bytes(longer.payload_octets))

    def coded(self, octets: bytes) -> None:
        self.block_head(octets, Content_Encoding="gzip")
        self.wfile.write(octets)


class Server(http.server.ThreadingHTTPServer):
    """A Peer on a port of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, peer: Peer, credentials: Credentials, tls: ssl.TLSVersion | None = None) -> None:
        super().__init__(("localhost", 0), type("PeerHandler", (Handler,), {"peer": peer}))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls is not None:
            context.maximum_version = tls
        context.load_cert_chain(credentials.cert, credentials.key)
        context.load_verify_locations(credentials.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        self._context = context
        self._open: set[socket.socket] = set()
        self.peer = peer
        peer.base = f"https://localhost:{self.server_port}/"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        plain, address = self.socket.accept()
        try:
            secured = self._context.wrap_socket(plain, server_side=True)
        except OSError:
            plain.close()
            raise
        self._open.add(secured)
        self.peer.connections += 1
        return secured, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""

    def stop(self) -> None:
        self.peer.gate.set()
        self.shutdown()
        self._thread.join()
        for request in list(self._open):
            request.close()
        self.server_close()
