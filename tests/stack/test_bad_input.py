"""Blocks, paths and sizes that must be refused (D3 ... D6), over HTTPS, with nothing stored or changed."""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterator

import pytest

from tests.stack.harness import RunningStack
from tests.stack.senders import chunks, origin_and_path, put_chunked
from tests.stack.wire import (
    BLOCK,
    DIGEST_MISMATCH,
    INCOMPATIBLE,
    JSON,
    LAYERS_UNAVAILABLE,
    NOT_FOUND,
    PLAIN,
    Wire,
    box,
    digest_field,
    expect,
    hex32,
    holder_id,
)

pytestmark = pytest.mark.stack
U32, U64 = 2**32, 2**64
PUT = {"content-type": BLOCK, "if-none-match": "*"}


@pytest.fixture(scope="module")
def wire(stack: RunningStack) -> Wire:
    return Wire(stack)


# --- containers (D5) ---

GOOD = box()
EVIL: dict[str, bytes] = {
    "empty": b"", "one octet": b"K", "19 octets": GOOD[:19], "20 octets": GOOD[:20], "cut in the table": GOOD[:83],
    "header alone": GOOD[:84], "one octet short": GOOD[:-1], "one octet more": GOOD + b"x", "twice": GOOD + GOOD,
    "zeros": bytes(1108), "magic KVB0": box(magic=b"KVB0"), "magic kvb1": box(magic=b"kvb1"),
    "magic reversed": box(magic=b"1BVK"), "version 0": box(version=0), "version 2": box(version=2),
    "flags 1": box(flags=1), "flags 128": box(flags=128), "codec 0": box(codec=0),
    "little-endian": struct.pack("<IBBHIII", 0x4B564231, 1, 0, 1, 0, 4, 4) + GOOD[20:],
    "no layers": box(sections=()), "no layers with payload": box(sections=(), payload=bytes(64)),
    "a layer less than said": box(count=5), "a layer more than said": box(count=3),
    "2^32-1 layers": box(count=U32 - 1), "4097 layers": box(sections=((1, 1),) * 4097),
    "layers beyond 2^32": box(first=U32 - 3), "last layer 2^32": box(first=U32 - 4 + 1),
    "no tokens": box(tokens=0), "empty K": box(sections=((0, 128),) * 4), "empty V": box(sections=((128, 0),) * 4),
    "one empty section": box(sections=((128, 128),) * 3 + ((0, 256),)), "all empty": box(sections=((0, 0),) * 4),
    "K of 2^64-1": box(sections=((U64 - 1, 1),), payload=b"x"), "K of 2^63": box(sections=((2**63, 1),),
    payload=b"x"),
    "a sum that wraps to 1024": box(sections=((U64 - 512, 512), (512, 512)), payload=bytes(1024)),
    "2^63 twice wraps to 0": box(sections=((2**63, 2**63), (512, 512)), payload=bytes(1024)),
    "header and payload wrap": box(sections=((U64 - 36, 1),), payload=b""),
    "256 MiB said": box(sections=((128 << 20, 128 << 20),), payload=bytes(1024)),
}  # fmt: skip


@pytest.mark.spec("D5", "R-030", "R-031", "R-032", "U-01", "U-25", "R-065", "R-067")
@pytest.mark.parametrize("name", EVIL)
def test_containers_that_are_none(wire: Wire, name: str) -> None:
    for compat in (wire.compat, hex32()):
        url = wire.block_url(hex32(), compat=compat)
        expect(wire.put(url, EVIL[name]), 400)
        expect(put_chunked(wire, url, chunks(EVIL[name], 50), PUT), 400)
        expect(wire.call("GET", url), 404, NOT_FOUND)
        expect(wire.put(url, GOOD), 201)  # nothing of the failed ones stands in the way
        assert wire.call("GET", url).body == GOOD


MISFITS = {
    "first layer 1": box(first=1), "3 layers": box(sections=((128, 128),) * 3), "5 layers": box(sections=((128,
    128),) * 5),
    "5 tokens": box(tokens=5), "5 tokens, of that size": box(tokens=5, sections=((160, 160),) * 4),
    "short K": box(sections=((127, 129),) * 4), "longer": box(sections=((129, 128),) * 4),
    "one layer differs": box(sections=((128, 128),) * 3 + ((64, 64),)),
    "one layer of all octets": box(sections=((512, 512),)), "private codec, 3 layers": box(codec=0xFF00,
    sections=((9, 9),) * 3),
}  # fmt: skip


@pytest.mark.spec("R-033", "R-017", "U-25", "D5")
@pytest.mark.parametrize("name", MISFITS)
def test_containers_of_another_geometry(wire: Wire, name: str) -> None:
    url = wire.block_url(hex32())
    expect(wire.put(url, MISFITS[name]), 409, INCOMPATIBLE)
    expect(wire.call("GET", url), 404, NOT_FOUND)
    # Without a descriptor only the structure can be judged, and that the block is whole.
    unknown = wire.block_url(hex32(), compat=hex32())
    reply = wire.put(unknown, MISFITS[name])
    expect(reply, 409, INCOMPATIBLE) if name == "first layer 1" else expect(reply, 201)


@pytest.mark.spec("R-032", "R-035", "R-037", "R-152", "U-22", "U-26")
@pytest.mark.parametrize("codec", [2, 0xFF00, 0xFFFF])
def test_other_codecs_are_kept_as_stored(wire: Wire, codec: int) -> None:
    sections = ((1, 7), (300, 2), (5, 5), (64, 1))
    octets = box(codec=codec, sections=sections)
    url = wire.stored(octets)
    assert wire.call("GET", url).body == wire.call("GET", f"{url}?codec={codec}").body == octets
    expect(wire.call("GET", url + "?codec=1"), 404, NOT_FOUND)
    [[record]] = wire.listed([url.rpartition("/")[2]])["replicas"]
    at, layers = 20 + 16 * 4, []
    for k, v in sections:
        layers.append(hashlib.sha256(octets[at : at + k + v]).hexdigest())
        at += k + v
    assert (record["codec"], record["size"], record["layer_digests"]) == (codec, sum(map(sum, sections)), layers)


# --- selections (D6) ---

BAD_LAYERS = [
    "5-3", "-1-2", "0x0-1", "+0-1", "%2B0-1", "%200-1", "0-1%20", "0-%201", "00-1", "0-01", "0--1", "0-", "-1",
    "-", "",
    "0", "1", "a-b", "0-1-2", "0-1,2-3", "0..1", "0-4294967296", "0-9999999999", "0-99999999999999999999", "1e0-2",
    "0_0-1", "0-1%0A", "%0A0-1", "0-1%00", "%D9%A0-%D9%A1", "%EF%BC%90-1", "0%E2%80%931", "0-1.0", "[0,1]",
    "0-1&layers=0-1",
    "0-1&layers=", "0-1&l%61yers=2-3", "%FF-1",
]  # fmt: skip
BAD_CODECS = [
    "0", "65536", "99999", "100000", "-1", "+1", "%2B1", "%201", "1%20", "01", "0x1", "1.0", "1e0", "raw", "", "a",
    "%D9%A1", "1%0A", "1_0", "1,2", "1&codec=1", "1&codec=2", "1&cod%65c=1",
]  # fmt: skip
SELECTIONS = [(f"layers={value}", 400, PLAIN) for value in BAD_LAYERS]
SELECTIONS += [(f"codec={value}", 400, PLAIN) for value in BAD_CODECS]
SELECTIONS += [
    (f"layers={value}", 404, LAYERS_UNAVAILABLE)
    for value in ("0-4", "4-4", "3-4", "0-4294967295", "4294967295-4294967295", "1000000-2000000")
]
SELECTIONS += [(f"codec={value}", 404, NOT_FOUND) for value in (2, 65280, 65535)]
SELECTIONS += [
    (query, 200, "")
    for query in ("", "x=1", "layer=9-1", "LAYERS=9-1", "codec=1&x=layers", "layers=0%2D3", "codec=%31&&", "x=%zz")
]


@pytest.fixture(scope="module")
def block(wire: Wire) -> str:
    return wire.stored(GOOD)


@pytest.mark.spec("D6", "R-005", "R-151", "R-152", "R-072", "U-22", "U-23")
@pytest.mark.parametrize(("query", "status", "kind"), SELECTIONS)
def test_selections(wire: Wire, block: str, query: str, status: int, kind: str) -> None:
    reply = expect(wire.call("GET", f"{block}?{query}"), status, kind)
    head = expect(wire.call("HEAD", f"{block}?{query}"), status, kind)
    assert head.headers["content-length"] == reply.headers["content-length"]
    if status == 200:
        assert reply.body == GOOD
    # A selection of a block that is not there: what is wrong with the request comes first, absence second.
    missing = wire.block_url(hex32())
    assert wire.call("GET", f"{missing}?{query}").status == (400 if status == 400 else 404)


# --- paths (D3, U-05) ---


def aliases(path: str, segment: str) -> Iterator[str]:
    """Paths that a lenient server could take for `path`, whose last but variable part is `segment`."""
    at = path.rindex(segment)
    before, after = path[:at], path[at + len(segment) :]
    first, rest = segment[0], segment[1:]
    spelled = [
        f"%{ord(first):02x}{rest}", f"%{ord(first):02X}{rest}", segment + "%00", segment + "%0a", segment + "%20",
        segment + ";", segment + ";x=1", segment + "%3b", segment + "/", segment + "//", segment + "%2F",
        segment + "/.",
        segment + "%2e", "./" + segment, "%2e/" + segment, "x/../" + segment, "x/%2e%2e/" + segment,
        "x%2f..%2f" + segment,
        "/" + segment, "%5c" + segment, segment + "\\", segment + "%c3%a9", segment + "%ef%bc%a1", segment + "0",
        segment[:-1],
        segment + "%", segment + "%zz", segment + ".json", "~" + rest, "*", "%2a", segment + "=", segment + "%23",
    ]  # fmt: skip
    if segment.upper() != segment and "-" not in segment:
        spelled.append(segment.upper())
    yield from (before + each + after for each in spelled)
    yield (
        path.replace("/blocks/", "/Blocks/").replace("/replicas/", "/REPLICAS/").replace("/leases/", "/leases%2f")
    )
    yield path.replace("/", "//")
    yield "/x/.." + path
    yield "/%2e%2e" + path


@pytest.mark.spec("D3", "U-05", "R-002", "R-060", "R-065", "R-067")
def test_a_block_has_one_spelling(wire: Wire, block: str) -> None:
    origin, path = origin_and_path(block)
    for part in (-1, -2, -3):
        for alias in aliases(path, path.split("/")[part]):
            for method in ("GET", "HEAD"):
                assert wire.call(method, origin + alias).status in {400, 404}, alias
    assert wire.call("GET", block).body == GOOD


@pytest.mark.spec("D3", "U-05", "R-002", "R-070")
def test_a_record_has_one_spelling(wire: Wire) -> None:
    record = wire.record()
    expect(wire.publish(record), 201)
    origin, path = origin_and_path(wire.replica_url(record))
    identifier = holder_id(wire.ii1)
    others = [alias for part in (record["block_key"], identifier) for alias in aliases(path, part)]
    for alias in others:
        assert wire.call("DELETE", origin + alias, identity="pc").status in {400, 404}, alias
        # In place of ii1's id a well-formed alias is the id of somebody else.
        assert wire.call("PUT", origin + alias, record, identity="ii1").status in {400, 403, 404}, alias
    # Base64url has spare bits: four spellings of the same octets, three of which are other names.
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet.index(identifier[-1])
    for spare in range(1, 4):
        alias = path.replace(identifier, identifier[:-1] + alphabet[last + spare])
        expect(wire.call("DELETE", origin + alias, identity="pc"), 404, NOT_FOUND)
        expect(wire.call("DELETE", origin + alias, identity="ii1"), 403)
    assert wire.lookup([record["block_key"]])["matched"] == 1
    expect(wire.call("DELETE", origin + path, identity="pc"), 204)


@pytest.mark.spec("D3", "U-05", "U-06")
def test_a_lease_has_one_spelling(wire: Wire, block: str) -> None:
    lease = expect(wire.lease([block.rpartition("/")[2]]), 201).json()["lease"]
    origin, path = origin_and_path(f"{wire.holder}leases/{lease}")
    for alias in aliases(path, lease):
        assert wire.call("DELETE", origin + alias).status in {400, 404}, alias
    expect(wire.call("DELETE", origin + path), 204)


# --- fields of a PUT (U-21, U-27, U-29) ---

WRONG = digest_field(b"x")
RIGHT, RIGHT512 = digest_field(GOOD), digest_field(GOOD, "sha-512")
FIELDS: list[tuple[dict[str, str | None], int, str]] = [
    ({"if-none-match": None}, 428, PLAIN), ({"if-none-match": '"x"'}, 400, PLAIN), ({"if-none-match": '*,"x"'},
    400, PLAIN),
    ({"if-none-match": '"*"'}, 400, PLAIN), ({"if-none-match": ""}, 400, PLAIN), ({"if-none-match": "*, *"}, 400,
    PLAIN),
    ({"if-none-match": None, "if-match": "*"}, 428, PLAIN), ({"content-type": None}, 415, PLAIN),
    ({"content-type": JSON}, 415, PLAIN), ({"content-type": "application/octet-stream"}, 415, PLAIN),
    ({"content-encoding": "gzip"}, 415, PLAIN), ({"content-encoding": "aes128gcm"}, 415, PLAIN),
    ({"content-range": "bytes 0-9/1108"}, 400, PLAIN), ({"content-range": "x"}, 400, PLAIN),
    ({"repr-digest": WRONG}, 422, DIGEST_MISMATCH), ({"content-digest": WRONG}, 422, DIGEST_MISMATCH),
    ({"repr-digest": RIGHT, "content-digest": WRONG}, 422, DIGEST_MISMATCH),
    ({"repr-digest": f"{RIGHT}, {digest_field(b'x', 'sha-512')}"}, 422, DIGEST_MISMATCH),
    ({"repr-digest": f"{RIGHT}, {WRONG}"}, 422, DIGEST_MISMATCH), ({"repr-digest": "sha-256"}, 400, PLAIN),
    ({"repr-digest": "sha-256=:AAAA:"}, 400, PLAIN), ({"repr-digest": "sha-256=x"}, 400, PLAIN),
    ({"repr-digest": RIGHT.replace(":", "")}, 400, PLAIN), ({"repr-digest": RIGHT + ","}, 400, PLAIN),
    ({"repr-digest": "sha-256:" + hashlib.sha256(GOOD).hexdigest()}, 400, PLAIN), ({"repr-digest": RIGHT[:-1]},
    400, PLAIN),
    ({"repr-digest": RIGHT.upper()}, 400, PLAIN),
    ({}, 201, ""), ({"repr-digest": RIGHT}, 201, ""), ({"repr-digest": f"{WRONG}, {RIGHT}"}, 201, ""),
    ({"repr-digest": RIGHT.replace("=:", ":").replace("sha-256:", "sha-256=:")}, 201, ""),
    ({"repr-digest": "md5=:AAAA:, x=:AA==:"}, 201, ""), ({"repr-digest": f"{RIGHT512},{RIGHT};x=1"}, 201, ""),
    ({"content-digest": RIGHT512}, 201, ""), ({"content-type": BLOCK + "; x=y"}, 201, ""),
    ({"content-encoding": "identity"}, 201, ""), ({"range": "bytes=0-9"}, 201, ""),
]  # fmt: skip


@pytest.mark.spec("R-157", "R-160", "R-064", "R-073", "U-02", "U-21", "U-27", "U-29", "U-32", "D4")
@pytest.mark.parametrize(("changes", "status", "kind"), FIELDS)
def test_fields_of_a_put(wire: Wire, changes: dict[str, str | None], status: int, kind: str) -> None:
    url = wire.block_url(hex32())
    fields = {name: value for name, value in (PUT | changes).items() if value is not None}
    expect(wire.call("PUT", url, GOOD, fields), status, kind)
    got = wire.call("GET", url)
    assert got.status == 404 if status != 201 else got.body == GOOD
    assert wire.put(url, GOOD).status == (201 if status != 201 else 412)


@pytest.mark.spec("U-06", "U-17")
def test_a_lease_that_never_was(wire: Wire) -> None:
    for method in ("PUT", "DELETE"):
        body = {"ttl_ms": 1000} if method == "PUT" else None
        expect(wire.call(method, f"{wire.holder}leases/{uuid.uuid4()}", body), 404, NOT_FOUND)
