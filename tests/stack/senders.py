"""Requests as no ordinary client sends them: without a declared length, over raw octets, or by another way."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
from collections.abc import Iterable, Iterator

import pycurl

from tests.stack.harness import Reply
from tests.stack.wire import Wire, check_reply


def origin_and_path(url: str) -> tuple[str, str]:
    """Of a URL."""
    host = url.split("/")[2]
    return "https://" + host, url.partition(host)[2]


def chunks(octets: bytes, size: int) -> Iterator[bytes]:
    """Pieces of `size` octets."""
    for at in range(0, len(octets), size):
        yield octets[at : at + size]


def put_chunked(
    wire: Wire, url: str, pieces: Iterable[bytes], fields: dict[str, str], method: str = "PUT"
) -> Reply:
    """HTTP/1.1 without a declared length."""
    host = url.split("/")[2]
    connection = http.client.HTTPSConnection(host, context=wire.context("client-demo"), timeout=30)
    try:
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):  # answered before it had read everything
            connection.request(method, url.partition(host)[2], iter(pieces), fields, encode_chunked=True)
        got = connection.getresponse()
        reply = Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
    finally:
        connection.close()
    check_reply(method, reply)
    return reply


def put_h2(wire: Wire, url: str, octets: bytes, fields: dict[str, str], method: str = "PUT") -> Reply:
    """HTTP/2 without a declared length."""
    handle, sent, body = pycurl.Curl(), io.BytesIO(octets), io.BytesIO()
    headers: dict[str, str] = {}

    def on_header(line: bytes) -> None:
        name, colon, value = line.decode().partition(":")
        if colon:
            headers[name.lower()] = value.strip()

    certificate, key = wire.stack.identity("client-demo")
    options = {
        pycurl.URL: url, pycurl.UPLOAD: 1, pycurl.READFUNCTION: sent.read, pycurl.WRITEFUNCTION: body.write,
        pycurl.HEADERFUNCTION: on_header, pycurl.CAINFO: wire.stack.ca, pycurl.SSLCERT: certificate,
        pycurl.SSLKEY: key, pycurl.CUSTOMREQUEST: method, pycurl.TIMEOUT: 30,
        pycurl.HTTP_VERSION: pycurl.CURL_HTTP_VERSION_2TLS,
        pycurl.HTTPHEADER: [f"{name}: {value}" for name, value in fields.items()],
    }  # fmt: skip
    for option, value in options.items():
        handle.setopt(option, value)
    try:
        handle.perform()
        assert handle.getinfo(pycurl.INFO_HTTP_VERSION) == pycurl.CURL_HTTP_VERSION_2_0
        reply = Reply(handle.getinfo(pycurl.RESPONSE_CODE), headers, body.getvalue())
    finally:
        handle.close()
    check_reply(method, reply)
    return reply


@contextlib.contextmanager
def tls_link(wire: Wire, alpn: str = "http/1.1") -> Iterator[ssl.SSLSocket]:
    """A connection of client-demo."""
    host, port = wire.holder.split("/")[2].split(":")
    context = wire.stack.ssl_context()
    context.set_alpn_protocols([alpn])
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as link,
    ):
        yield link


def raw(wire: Wire, octets: bytes) -> Reply:
    """The first answer to octets that are sent over HTTP/1.1 as they are."""
    with tls_link(wire) as link:
        link.sendall(octets)
        got = http.client.HTTPResponse(link)
        got.begin()
        reply = Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
    check_reply("?", reply)
    return reply


def head(url: str, method: str, fields: dict[str, str]) -> bytes:
    """The octets of a request up to its body."""
    host = url.split("/")[2]
    lines = [f"{method} {url.partition(host)[2]} HTTP/1.1", f"host: {host}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in fields.items()), "", ""]).encode()
