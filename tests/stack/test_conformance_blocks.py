"""Blocks and leases as the protocol describes them, over HTTPS; see test_conformance_http.py."""

from __future__ import annotations

import base64
import hashlib
import http.client
import struct
import uuid
from urllib.parse import urljoin

import pytest

from tests.stack.harness import LARGE, Reply, RunningStack
from tests.stack.wire import (
    BLOCK,
    LAYERS_UNAVAILABLE,
    NOT_FOUND,
    PLAIN,
    SCOPE_DENIED,
    Wire,
    b64url,
    box,
    check_reply,
    digest_field,
    expect,
    hex32,
    same,
)

pytestmark = pytest.mark.stack
GOOD = box()


@pytest.fixture(scope="module")
def wire(stack: RunningStack) -> Wire:
    return Wire(stack)


@pytest.fixture(scope="module")
def block(wire: Wire) -> str:
    return wire.stored(GOOD)


def key_of(url: str) -> str:
    return url.rpartition("/")[2]


def part(octets: bytes, first: int, last: int) -> bytes:
    """Layers first..last of a block of equal layers, as a container (R-030, R-151)."""
    count = struct.unpack_from(">I", octets, 12)[0]
    header = 20 + 16 * count
    each = (len(octets) - header) // count
    fixed = octets[:8] + struct.pack(">II", first, last - first + 1) + octets[16:20]
    table = octets[20 + 16 * first : 20 + 16 * (last + 1)]
    return fixed + table + octets[header + each * first : header + each * (last + 1)]


@pytest.mark.spec("R-030", "R-034", "R-072", "R-075", "R-150", "R-151", "R-153", "R-154", "U-28", "U-29", "U-30")
@pytest.mark.parametrize("layers", [None, (0, 0), (0, 3), (1, 2), (3, 3)])
def test_get_and_head(wire: Wire, block: str, layers: tuple[int, int] | None) -> None:
    url = block if layers is None else f"{block}?layers={layers[0]}-{layers[1]}"
    octets = GOOD if layers is None else part(GOOD, *layers)
    got = expect(wire.call("GET", url), 200)
    assert got.body == octets
    assert got.headers["content-type"] == BLOCK
    assert got.headers["repr-digest"] == digest_field(octets)
    assert got.headers["etag"] == f'"{b64url(hashlib.sha256(octets).digest())}"'
    assert got.headers["accept-ranges"] == "none"
    # Range and codings are not for us; identity is what the digest is of.
    fields = {
        "range": "bytes=0-9",
        "accept-encoding": "gzip, br, *;q=0",
        "want-repr-digest": "sha-512=9",
        "accept": "a/b",
    }
    odd = expect(wire.call("GET", url, None, fields), 200)
    assert (odd.body, odd.headers["repr-digest"]) == (octets, got.headers["repr-digest"])
    head = expect(wire.call("HEAD", url), 200)
    unlike = {"date": "", "cache-control": ""}  # max-age may have gone on by a second
    assert dict(head.headers) | unlike == dict(got.headers) | unlike
    assert head.body == b""


@pytest.mark.spec("R-072", "U-30", "R-150", "R-151", "U-22", "R-067")
def test_head_mirrors_get_when_it_fails(wire: Wire, block: str) -> None:
    missing = wire.block_url(hex32())
    foreign = wire.block_url(hex32(), scope=wire.stack.scope_id("other"))
    for url, status, kind in (
        (missing, 404, NOT_FOUND),
        (block + "?layers=0-4", 404, LAYERS_UNAVAILABLE),
        (block + "?codec=7", 404, NOT_FOUND),
        (block + "?layers=4-3", 400, PLAIN),
        (foreign, 403, SCOPE_DENIED),
    ):
        got, head = expect(wire.call("GET", url), status, kind), expect(wire.call("HEAD", url), status)
        assert same(got, Reply(head.status, head.headers, got.body))


@pytest.mark.spec("U-30", "R-067", "R-071")
def test_conditional_get(wire: Wire, block: str) -> None:
    tag = wire.call("HEAD", block).headers["etag"]
    for url, value, status in (
        (block, tag, 304), (block, "*", 304), (block, f'"x", W/{tag}', 304), (block, '"x"', 200), (block, "x",
        200),
        (block + "?layers=0-0", tag, 200), (wire.block_url(hex32()), "*", 404),
    ):  # fmt: skip
        for method in ("GET", "HEAD"):
            reply = wire.call(method, url, None, {"if-none-match": value})
            assert reply.status == status
            if status == 304:
                assert reply.headers["etag"] == tag
                assert reply.body == b""


@pytest.mark.spec("R-154", "U-31", "R-035", "R-040", "U-26", "R-075")
def test_what_a_holder_publishes_of_a_block(wire: Wire) -> None:
    url = wire.stored(GOOD)
    [[record]] = wire.listed([key_of(url)])["replicas"]
    layers = [hashlib.sha256(GOOD[84 + 256 * at : 84 + 256 * (at + 1)]) for at in range(4)]
    replica = hashlib.sha256(b"".join(each.digest() for each in layers)).hexdigest()
    reply = wire.call("GET", url)
    max_age = int(reply.headers["cache-control"].rpartition("=")[2])
    assert max_age * 1000 <= record.pop("ttl_ms") <= 3_600_000  # "no longer than the remaining TTL"
    assert record == {
        "block_key": key_of(url), "compat_id": wire.compat, "scope_id": wire.scope, "holder": wire.holder,
        "codec": 1,
        "size": 1024, "digest": f"sha-256:{replica}", "layer_digests": [each.hexdigest() for each in layers],
        "residency": [{"tier": "host", "layers": [0, 3]}],
    }  # fmt: skip


@pytest.mark.spec("R-034", "R-035", "R-153")
def test_a_layer_can_be_verified_before_the_block_is_there(wire: Wire) -> None:
    section = LARGE.section_octets
    octets = box(tokens=16, sections=((section, section),) * 32)
    compat = wire.stack.compat_id(LARGE)
    url = wire.stored(octets, compat=compat)
    [[record]] = wire.listed([key_of(url)], compat_id=compat)["replicas"]
    host = url.split("/")[2]
    connection = http.client.HTTPSConnection(host, context=wire.context("client-demo"), timeout=30)
    connection.request("GET", url.partition(host)[2])
    reply = connection.getresponse()
    whole = hashlib.sha256(header := reply.read(20 + 16 * 32))
    assert header == octets[: len(header)]
    for digest in record["layer_digests"]:
        assert not reply.isclosed()
        layer = reply.read(2 * section)
        assert hashlib.sha256(layer).hexdigest() == digest
        whole.update(layer)
    assert reply.headers["repr-digest"] == f"sha-256=:{base64.b64encode(whole.digest()).decode()}:"
    assert reply.read() == b""
    connection.close()


@pytest.mark.spec("R-157", "R-159", "R-160", "U-21", "U-32", "D4")
def test_of_two_uploads_the_first_stays(wire: Wire) -> None:
    url = wire.block_url(hex32())
    host = url.split("/")[2]
    bodies = [box(), box()]
    links = []
    for body in bodies:
        link = http.client.HTTPSConnection(host, context=wire.context("client-demo"), timeout=30)
        link.putrequest("PUT", url.partition(host)[2])
        for name, value in {"content-type": BLOCK, "if-none-match": "*", "content-length": str(len(body))}.items():
            link.putheader(name, value)
        link.endheaders(body[:500])
        links.append(link)
    for link, body in zip(links, bodies, strict=True):
        link.send(body[500:])
    statuses = []
    for link in links:
        got = link.getresponse()
        reply = Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        check_reply("PUT", reply)
        statuses.append(reply.status)
        link.close()
    assert sorted(statuses) == [201, 412]
    assert wire.call("GET", url).body == bodies[statuses.index(201)]
    expect(wire.put(url, bodies[statuses.index(412)]), 412)
    assert wire.call("GET", url).body == bodies[statuses.index(201)]


@pytest.mark.spec("U-21", "R-157", "R-158", "D4")
def test_a_refusal_comes_instead_of_100_continue(wire: Wire, block: str) -> None:
    foreign = wire.block_url(hex32(), scope=wire.stack.scope_id("other"))
    for url, status in ((block, 412), (foreign, 403)):
        host = url.split("/")[2]
        link = http.client.HTTPSConnection(host, context=wire.context("client-demo"), timeout=30)
        link.putrequest("PUT", url.partition(host)[2])
        fields = {"content-type": BLOCK, "if-none-match": "*", "content-length": "1108", "expect": "100-continue"}
        for name, value in fields.items():
            link.putheader(name, value)
        link.endheaders()  # and the body never comes
        got = link.getresponse()
        reply = Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        check_reply("PUT", reply)
        assert reply.status == status
        link.close()


# --- leases ---


@pytest.mark.spec("R-140", "R-053", "U-06", "U-14", "U-17", "R-071")
def test_a_lease_and_its_place(wire: Wire, block: str) -> None:
    reply = expect(wire.lease([key_of(block)], ttl_ms=1234, scope_id=wire.scope, compat_id=wire.compat), 201)
    lease = reply.json()["lease"]
    assert reply.json() == {"lease": lease, "ttl_ms": 1234}
    assert str(uuid.UUID(lease)) == lease
    assert uuid.UUID(lease).version == 4
    assert reply.headers["location"] == f"leases/{lease}"
    url = urljoin(wire.holder + "leases", reply.headers["location"])  # relative: survives a rewritten prefix
    assert url == f"{wire.holder}leases/{lease}"
    renewed = expect(wire.call("PUT", url, {"ttl_ms": 300_000}), 200)
    assert renewed.json() == {"lease": lease, "ttl_ms": 300_000}
    for method, body in (("PUT", {"ttl_ms": 1}), ("DELETE", None)):
        foreign = wire.call(method, url, body, identity="client-other")
        unknown = wire.call(method, f"{wire.holder}leases/{uuid.uuid4()}", body, identity="client-other")
        assert same(expect(foreign, 404, NOT_FOUND), unknown)
    assert wire.call("DELETE", url).body == b""
    lapsing = expect(wire.lease([key_of(block)], ttl_ms=1), 201).headers["location"]
    while wire.call("PUT", wire.holder + lapsing, {"ttl_ms": 1}).status == 200:
        pass
    expect(wire.call("DELETE", wire.holder + lapsing), 404, NOT_FOUND)
