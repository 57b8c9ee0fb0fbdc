"""Just enough HTTP/2 (RFC 9113) to send what no well-behaved client would."""

from __future__ import annotations

import contextlib
import ssl
import struct
from collections.abc import Iterator, Sequence

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
MAX_CONCURRENT_STREAMS = 0x3
CANCEL = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Frame = tuple[int, int, int, bytes]
"""Type, flags, stream, payload."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame as octets."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(stream: int, fields: Sequence[tuple[str, str]], *, end: bool = True) -> bytes:
    """A HEADERS frame; every field literal without indexing and without Huffman coding (RFC 7541, 6.2.2)."""
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block)


def get(path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """The fields of a GET."""
    return [(":method", "GET"), (":scheme", "https"), (":authority", "localhost"), (":path", path), *more]


class Link:
    """An HTTP/2 connection on a TLS socket."""

    def __init__(self, socket: ssl.SSLSocket) -> None:
        assert socket.selected_alpn_protocol() == "h2"
        self._socket = socket
        socket.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def send(self, octets: bytes) -> None:
        """Send frames; the peer may have closed already."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            self._socket.sendall(octets)

    def frames(self) -> Iterator[Frame]:
        """Frames until the peer closes. SETTINGS and PING are acknowledged."""
        pending = b""
        while True:
            while len(pending) < 9 or len(pending) < 9 + int.from_bytes(pending[:3], "big"):
                try:
                    piece = self._socket.recv(65536)
                except (ConnectionError, ssl.SSLError):
                    return
                if not piece:
                    return
                pending += piece
            length = int.from_bytes(pending[:3], "big")
            kind, flags = pending[3], pending[4]
            stream = int.from_bytes(pending[5:9], "big") & 0x7FFFFFFF
            payload, pending = pending[9 : 9 + length], pending[9 + length :]
            if kind in {SETTINGS, PING} and not flags & ACK:
                self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
            yield kind, flags, stream, payload

    def exchange(self, stream: int) -> tuple[bytes, bytes, bool]:
        """The header block and body of a stream's response, and whether it ended properly (not reset)."""
        block = body = b""
        for kind, flags, number, payload in self.frames():
            if kind == GOAWAY or (number == stream and kind == RST_STREAM):
                return block, body, False
            if number != stream:
                continue
            if kind == HEADERS:
                block += payload
            if kind == DATA:
                body += payload
            if flags & END_STREAM:
                return block, body, True
        return block, body, False


def settings(payload: bytes) -> dict[int, int]:
    """The parameters of a SETTINGS frame."""
    return dict(struct.iter_unpack(">HI", payload))


def _text(text: str) -> bytes:
    octets = text.encode("latin-1")
    if len(octets) < 127:
        return bytes((len(octets),)) + octets
    rest, more = len(octets) - 127, bytearray((127,))
    while rest >= 128:
        more.append(rest % 128 + 128)
        rest //= 128
    more.append(rest)
    return bytes(more) + octets
