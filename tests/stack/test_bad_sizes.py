"""Lengths that are too long, not declared, or not kept (D4), over HTTPS, with nothing stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.stack import h2
from tests.stack.harness import RunningStack
from tests.stack.senders import chunks, head, origin_and_path, put_chunked, put_h2, raw, tls_link
from tests.stack.wire import (
    BLOCK,
    JSON,
    NOT_FOUND,
    Wire,
    box,
    expect,
    hex32,
)

pytestmark = pytest.mark.stack
PUT = {"content-type": BLOCK, "if-none-match": "*"}
GOOD = box()
TOO_LONG = box(sections=((128 << 20, 128 << 20),), payload=bytes(1024))
"""A header that promises 256 MiB and more."""


@pytest.fixture(scope="module")
def wire(stack: RunningStack) -> Wire:
    return Wire(stack)


@pytest.mark.spec("D4", "U-01", "U-10", "R-065", "R-067")
@pytest.mark.parametrize(("kind", "octets"), [("lookup", 8 << 20), ("leases", 8 << 20), ("block", 256 << 20)])
@pytest.mark.parametrize("expectation", [{}, {"expect": "100-continue"}])
def test_a_body_too_long_by_its_declaration(
    wire: Wire, kind: str, octets: int, expectation: dict[str, str]
) -> None:
    """413 comes before the first octet of the body."""
    targets = {"lookup": wire.index + "lookup", "leases": wire.holder + "leases", "block": wire.block_url(hex32())}
    fields = (PUT if kind == "block" else {"content-type": JSON}) | expectation
    for length in (octets + 1, 10**15):
        method = "PUT" if kind == "block" else "POST"
        expect(raw(wire, head(targets[kind], method, fields | {"content-length": str(length)})), 413)


@pytest.mark.spec("D4", "U-10")
@pytest.mark.parametrize("send", [put_chunked, put_h2], ids=["h1", "h2"])
def test_a_json_body_too_long_by_count(wire: Wire, send: Any) -> None:
    for url in (wire.index + "lookup", wire.holder + "leases"):
        good = wire.question([]) if url.endswith("lookup") else {"block_keys": [hex32()], "ttl_ms": 1}
        text = json.dumps(good).encode()
        fields = {"content-type": JSON}
        fits = text + b" " * ((8 << 20) - len(text))
        parts = chunks if send is put_chunked else lambda octets, _: octets
        assert send(wire, url, parts(fits, 1 << 20), fields, "POST").status in {200, 404}
        expect(send(wire, url, parts(fits + b" ", 1 << 20), fields, "POST"), 413)


@pytest.mark.spec("D4", "D5", "R-030")
@pytest.mark.parametrize("send", [put_chunked, put_h2], ids=["h1", "h2"])
def test_a_block_without_declared_length_is_counted(wire: Wire, send: Any) -> None:
    parts = chunks if send is put_chunked else lambda octets, _: octets
    url = wire.block_url(hex32())
    for octets in (GOOD + b"x", GOOD + bytes(1 << 17), GOOD[:-1], TOO_LONG):
        expect(send(wire, url, parts(octets, 1 << 16), PUT), 400)
        expect(wire.call("HEAD", url), 404)
    expect(send(wire, url, parts(GOOD, 100), PUT), 201)
    assert wire.call("GET", url).body == GOOD


@pytest.mark.spec("D4", "R-159")
def test_content_length_that_is_not_kept(wire: Wire) -> None:
    url = wire.block_url(hex32())
    for declared in (len(GOOD) + 1, 2 * len(GOOD)):
        with tls_link(wire) as link:  # and gone
            link.sendall(head(url, "PUT", PUT | {"content-length": str(declared)}) + GOOD)
        expect(wire.call("GET", url), 404, NOT_FOUND)
    short = PUT | {"content-length": str(len(GOOD) - 1), "connection": "close"}
    expect(raw(wire, head(url, "PUT", short) + GOOD), 400)
    path = origin_and_path(url)[1]
    for declared in (len(GOOD) - 1, len(GOOD) + 1):
        fields = h2.get(path, *PUT.items(), ("content-length", str(declared)))
        fields[0] = (":method", "PUT")
        with tls_link(wire, "h2") as link:
            stream = h2.Link(link)
            stream.send(h2.headers(1, fields, end=False) + h2.frame(h2.DATA, h2.END_STREAM, 1, GOOD))
            _, _, whole = stream.exchange(1)
            assert not whole  # a malformed request (RFC 9113, 8.1.1)
        expect(wire.call("GET", url), 404, NOT_FOUND)
    expect(wire.put(url, GOOD), 201)


@pytest.mark.spec("D4", "U-01")
def test_targets_and_fields_too_long(wire: Wire) -> None:
    block = wire.stored(GOOD)
    expect(wire.call("GET", block + "?x=" + "a" * 9000), 414)
    expect(wire.call("GET", block, None, {"x": "a" * (61 << 10)}), 431)
    assert wire.call("GET", block + "?x=" + "a" * 7000).body == GOOD
