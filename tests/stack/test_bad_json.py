"""JSON that must be refused (D7, U-03) and the bounds of every member (A5), over HTTPS, with nothing changed."""

from __future__ import annotations

import gzip
import hashlib
import json
import uuid
from typing import Any

import pytest

from tests.stack.harness import LARGE, RunningStack
from tests.stack.wire import (
    DIGEST_MISMATCH,
    INCOMPATIBLE,
    JSON,
    LEASE_QUOTA,
    NOT_FOUND,
    PLAIN,
    SCOPE_DENIED,
    Wire,
    box,
    expect,
    hex32,
)

pytestmark = pytest.mark.stack
ABSENT = object()
HEX = "ab" * 32
BIG = 2**53


@pytest.fixture(scope="module")
def wire(stack: RunningStack) -> Wire:
    return Wire(stack)


class Requests:
    """A good body for each JSON resource, where it goes, and whether it took effect."""

    def __init__(self, wire: Wire, kind: str) -> None:
        self.wire, self.kind = wire, kind
        self.record = wire.record()
        self.key = self.record["block_key"]
        if kind == "lookup":
            self.good: dict[str, Any] = wire.question([self.key])
            self.target = "POST", wire.index + "lookup", "client-demo"
        elif kind == "publish":
            self.good = self.record
            self.target = "PUT", wire.replica_url(self.record), "ii1"
        else:
            self.key = wire.stored().rpartition("/")[2]
            self.good = {"block_keys": [self.key], "ttl_ms": 60000}
            self.target = "POST", wire.holder + "leases", "client-demo"

    def send(self, body: Any) -> Any:
        method, url, identity = self.target
        fields = {"content-type": JSON} if isinstance(body, bytes) else {}
        return self.wire.call(method, url, body, fields, identity)

    def refused(self, body: Any, status: int = 400, kind: str = PLAIN) -> None:
        reply = expect(self.send(body), status, kind)
        assert HEX not in reply.body.decode()  # nothing of a request is quoted
        if self.kind == "publish":
            assert self.wire.lookup([self.key])["matched"] == 0


KINDS = ["lookup", "publish", "lease"]
GOOD = {"lookup": 200, "publish": 201, "lease": 201}

# Replaces the text of the good body: %s is its members.
TEXTS = {
    "empty": b"", "space": b" ", "null": b"null", "array": b"[]", "string": b'"x"', "number": b"1",
    "true": b"true",
    "array of the object": b"[{%s}]", "two": b"{%s}{}", "trailing": b"{%s}x", "trailing NUL": b"{%s}\0",
    "cut": b"{%s", "comma": b"{%s,}", "leading comma": b"{,%s}", "comment": b"{%s/**/}", "line comment": b"{%s}//",
    "BOM": b"\xef\xbb\xbf{%s}", "NaN": b'{%s,"x":NaN}', "Infinity": b'{%s,"x":Infinity}',
    "-Infinity": b'{%s,"x":-Infinity}', "1e400": b'{%s,"x":1e400}', "nan": b'{%s,"x":nan}',
    "single quotes": b"{%s,'x':1}", "bare name": b"{%s,x:1}",
    "number name": b"{%s,1:1}", "leading zero": b'{%s,"x":01}', "plus": b'{%s,"x":+1}', "hex": b'{%s,"x":0x1}',
    "no fraction": b'{%s,"x":1.}', "no integer": b'{%s,"x":.5}', "underscore": b'{%s,"x":1_0}',
    "True": b'{%s,"x":True}',
    "Arabic digits": '{%s,"x":٣}'.encode(), "control character": b'{%s,"x":"\n"}',
    "bad escape": b'{%s,"x":"\\x41"}',
    "short escape": b'{%s,"x":"\\u12"}', "no UTF-8": b'{%s,"x":"\xff"}', "overlong": b'{%s,"x":"\xc0\xaf"}',
    "surrogate octets": b'{%s,"x":"\xed\xa0\x80"}', "lone surrogate": b'{%s,"x":"\\ud800"}',
    "lone low surrogate": b'{%s,"x":"\\udc00"}', "surrogate in a name": b'{%s,"\\ud800":1}',
    "swapped surrogates": b'{%s,"x":"\\ude02\\ud83d"}', "same name twice": b'{%s,"x":1,"x":1}',
    "same name escaped": b'{%s,"x":1,"\\u0078":1}', "same name below": b'{%s,"x":[{"y":1,"y":1}]}',
    "integer beyond 2^53": b'{%s,"x":9007199254740992}', "below -2^53": b'{%s,"x":-9007199254740992}',
    "5000 digits": b'{%s,"x":' + b"9" * 5000 + b"}", "deep arrays": b'{%s,"x":' + b"[" * 32 + b"]" * 32 + b"}",
    "deep objects": b'{%s,"x":' + b'{"a":' * 32 + b"1" + b"}" * 32 + b"}",
    "200k deep": b'{%s,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "200k open": b"[" * 200_000,
}  # fmt: skip


@pytest.mark.spec("D7", "U-01", "U-02", "U-03", "R-065", "R-215")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_strict_json(wire: Wire, kind: str, name: str) -> None:
    requests = Requests(wire, kind)
    requests.refused(TEXTS[name].replace(b"%s", json.dumps(requests.good).encode()[1:-1]))


@pytest.mark.spec("D7", "U-03")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"])
def test_only_utf_8(wire: Wire, kind: str, coding: str) -> None:
    requests = Requests(wire, kind)
    text = json.dumps(requests.good | {"x": "😂"}, ensure_ascii=False)
    octets = text.encode(coding)
    if coding == "utf-7":  # is ASCII and JSON, and no business of ours
        expect(requests.send(octets), GOOD[kind])
    else:
        requests.refused(octets)


@pytest.mark.spec("D7", "U-03", "R-001")
@pytest.mark.parametrize("kind", KINDS)
def test_every_name_counts_once_and_in_its_case(wire: Wire, kind: str) -> None:
    requests = Requests(wire, kind)
    for name, value in requests.good.items():
        rest = {other: each for other, each in requests.good.items() if other != name}
        requests.refused(rest | {name.title(): value})
        requests.refused(rest | {name.upper(): value})
        twice = json.dumps(requests.good)[:-1] + f", {json.dumps(name)}: {json.dumps(value)}}}"
        requests.refused(twice.encode())
    expect(requests.send(requests.good), GOOD[kind])


@pytest.mark.spec("R-004", "U-03", "R-003")
@pytest.mark.parametrize("kind", KINDS)
def test_what_strict_json_allows(wire: Wire, kind: str) -> None:
    requests = Requests(wire, kind)
    extras: list[Any] = [*({"y": [1, {"z": None}]}, "é😂\u0000", [[[[]]]], 1.5, -0.0, 2**53 - 1, None)]
    for extra in extras:
        more = requests.good | {"x": extra, "Residency": extra}
        if kind == "publish":
            more["residency"] = [{**entry, "x": extra} for entry in more["residency"]]
        reply = requests.send(json.dumps(more, ensure_ascii=False).encode())
        assert reply.status in {200, 201}
        assert b'"x"' not in reply.body
    spaced = json.dumps(requests.good, indent="\t ").replace('"block_key', '"\\u0062lock_key').encode()
    assert requests.send(b" \r\n" + spaced + b"\n").status in {200, 201}
    deep = json.dumps(requests.good)[:-1].encode() + b',"x":' + b"[" * 31 + b"]" * 31 + b"}"
    assert requests.send(deep).status in {200, 201}
    if "ttl_ms" in requests.good:
        for spelled in (b"60000.0", b"6e4", b"6.0E+4"):
            text = json.dumps(requests.good).encode().replace(b"60000", spelled)
            assert requests.send(text).json()["ttl_ms"] == 60000


HEX32: list[Any] = [
    ABSENT, None, 1, True, [], {}, "", HEX[1:], HEX + "a", HEX.upper(), HEX + "\n", " " + HEX, HEX[1:] + "g",
    HEX[1:] + "٣", "0x" + HEX[2:], HEX[:62] + "\u0000a",
]  # fmt: skip
SHORT = "ab" * 16
HEX16: list[Any] = [
    ABSENT, None, 1, True, [], {}, "", SHORT[1:], SHORT + "a", SHORT.upper(), SHORT + "\n", " " + SHORT[1:],
    SHORT[1:] + "g", SHORT[1:] + "٣", "0x" + SHORT[2:], SHORT[:30] + "\u0000a", HEX,
]  # fmt: skip
DIGESTS: list[Any] = [
    ABSENT, None, 1, "", HEX, "sha-256:" + HEX[1:], "sha-256:" + HEX.upper(), "SHA-256:" + HEX,
    "sha256:" + HEX, "sha-512:" + HEX, "sha-256=:" + HEX + ":", "sha-256:" + HEX + "\n", " sha-256:" + HEX,
]  # fmt: skip
COUNTS: list[Any] = [ABSENT, None, "1", True, False, [], {}, 0, -1, 1.5, BIG, 10**30, 1e30, -0.5]
URIS: list[Any] = [
    ABSENT, None, 1, "", "h1", "http://h1.example/", "https://h1.example", "https://H1.example/",
    "HTTPS://h1.example/",
    "https://h1.example:443/", "https://u@h1.example/", "https://h1.example/?q", "https://h1.example/#f",
    "https://h1.example/a", "https://h1.example/a/../b/", "https://h1.example/./", "https://h1.example//",
    "https://h1.example/%61/", "https://h1.example/é/", "https://h1.example:0/", "https://h1.example:99999/",
    "https:///", "//h1.example/", "https://h1.example/\n", " https://h1.example/", "https://h1.example:x/",
    "https://h_1.example/", "https://[::1/", "https://" + "a" * 3000 + "/", "ftp://h1.example/",
]  # fmt: skip
RANGES: list[Any] = [
    ABSENT, None, 0, "0-3", [], [0], [0, 1, 2], [1, 0], [-1, 0], [0, BIG], [0, 2**32], ["0", 1], [0, 1.5],
    [True, 3], [None, 1], {"0": 1},
]  # fmt: skip
TIERS: list[Any] = [ABSENT, None, 1, "", "Device", "a" * 33, "1host", "ho st", "host\n", "hôte", "-host"]
HOST = {"tier": "host", "layers": [0, 3]}
RESIDENCIES: list[Any] = [
    ABSENT, None, [], {}, "host", [None], ["host"], [[]], [HOST, HOST],
    [HOST, {"tier": "device", "layers": [3, 4]}], [{"tier": "device", "layers": [0, 15]}, {"tier": "host",
    "layers": [15, 31]}],
    [{"tier": "host", "layers": [1, 3]}], [{"tier": "host", "layers": [0, 1]}, {"tier": "host", "layers": [3, 3]}],
]  # fmt: skip
RESIDENCIES += [[{**HOST, "layers": value} if value is not ABSENT else {"tier": "host"}] for value in RANGES]
RESIDENCIES += [[{**HOST, "tier": value} if value is not ABSENT else {"layers": [0, 3]}] for value in TIERS]
RATES: list[Any] = [0, -1, "1", None, True, [], 1e19]
RESIDENCIES += [[{**HOST, "read_mbit_per_s": value}] for value in RATES]
LISTS: list[Any] = [[value] for value in HEX32 if value is not ABSENT]
BAD: dict[str, dict[str, list[Any]]] = {
    "publish": {
        "block_key": HEX32, "compat_id": HEX32, "scope_id": HEX16, "holder": URIS, "size": COUNTS,
        "digest": DIGESTS,
        "ttl_ms": COUNTS, "codec": [*COUNTS, 65536], "residency": RESIDENCIES, "moqt_namespace": [None, "AXg", 5],
        "layer_digests": [None, [], {}, HEX, [HEX], [HEX] * 4097, *LISTS],
    },
    "lookup": {
        "scope_id": HEX16, "compat_id": HEX32,
        "block_keys": [ABSENT, None, {}, HEX, 1, [HEX, None], [[HEX]], *LISTS],
        "targets": [None, {}, "https://ii7.example/", *([value] for value in URIS if value is not ABSENT)],
    },
    "lease": {
        "block_keys": [ABSENT, None, [], {}, HEX, 1, [HEX, None], [[HEX]], *LISTS], "ttl_ms": COUNTS,
        "scope_id": [value for value in HEX16 if value is not ABSENT],
        "compat_id": [value for value in HEX32 if value is not ABSENT],
    },
}  # fmt: skip


@pytest.mark.spec("R-002", "R-003", "R-006", "R-040", "R-041", "R-042", "R-043", "R-050", "R-053", "U-02", "U-07")
@pytest.mark.spec("U-08", "U-10", "U-14", "U-17", "D6", "D7", "R-005", "R-045")
@pytest.mark.parametrize(("kind", "member"), [(kind, member) for kind in BAD for member in BAD[kind]])
def test_every_member_missing_wrong_or_out_of_bounds(wire: Wire, kind: str, member: str) -> None:
    requests = Requests(wire, kind)
    for value in BAD[kind][member]:
        body = {name: each for name, each in requests.good.items() if name != member}
        try:
            requests.refused(body if value is ABSENT else body | {member: value})
        except AssertionError as error:
            raise AssertionError(f"{member}={str(value)[:100]!r}") from error
    expect(requests.send(requests.good), GOOD[kind])


@pytest.mark.spec("R-040", "R-043", "R-044", "U-08", "U-13", "U-24", "R-005", "R-032")
@pytest.mark.parametrize(
    "changes",
    [
        {"codec": 65535}, {"codec": 2.0, "size": 1}, {"size": BIG - 1, "ttl_ms": 1000}, {"layers": None},
        {"residency": [{"tier": "host", "layers": [3, 3]}], "layer_digests": [HEX] * 4},
        {"residency": [{"tier": "remote-tape", "layers": [0, 0], "read_mbit_per_s": 0.5}]},
        {"residency": [{"tier": "host", "layers": [16, 31], "read_mbit_per_s": 400000},
                       {"tier": "device", "layers": [0, 15]}]},
    ],
)  # fmt: skip
def test_records_come_back_as_published(wire: Wire, changes: dict[str, Any]) -> None:
    if "layer_digests" in changes:
        changes = changes | {"digest": digest_of(changes["layer_digests"])}
    record = wire.record(**changes)
    expect(wire.publish(record), 201)
    [[found]] = wire.lookup([record["block_key"]])["replicas"]
    assert 1 <= found.pop("ttl_ms") <= record.pop("ttl_ms")
    assert found == record


def digest_of(layer_digests: list[str]) -> str:
    return "sha-256:" + hashlib.sha256(bytes.fromhex("".join(layer_digests))).hexdigest()


@pytest.mark.spec("R-036", "U-24", "U-02")
def test_layer_digests_must_make_the_digest(wire: Wire) -> None:
    layers = [hex32() for _ in range(4)]
    record = wire.record(layer_digests=layers, digest=digest_of(layers))
    for bad in ([*layers[1:], layers[0]], [*layers[:3], hex32()], [*layers, layers[0]]):
        expect(wire.publish(record | {"layer_digests": bad}), 422, DIGEST_MISMATCH)
    assert wire.lookup([record["block_key"]])["matched"] == 0
    expect(wire.publish(record), 201)
    expect(wire.publish(record | {"digest": "sha-256:" + HEX}), 422, DIGEST_MISMATCH)  # a refresh, too
    assert wire.lookup([record["block_key"]])["replicas"][0][0]["digest"] == record["digest"]


@pytest.mark.spec("R-080", "R-082", "R-017", "U-13", "U-09")
def test_a_record_belongs_to_its_path_and_keeps_its_name(wire: Wire) -> None:
    record = wire.record()
    url = wire.replica_url(record)
    for changes in ({"block_key": hex32()}, {"holder": wire.ii2}, {"holder": wire.ii1 + "x/"}):
        expect(wire.call("PUT", url, record | changes, identity="ii1"), 400)
    expect(wire.publish(record | {"scope_id": "00" * 16}), 403, SCOPE_DENIED)
    assert wire.lookup([record["block_key"]])["matched"] == 0
    expect(wire.publish(record), 201)
    expect(wire.publish(record | {"compat_id": wire.stack.compat_id(LARGE)}), 409, INCOMPATIBLE)
    expect(wire.publish(record | {"scope_id": wire.stack.scope_id("other")}), 409, PLAIN)
    assert wire.lookup([record["block_key"]])["replicas"][0][0]["compat_id"] == wire.compat


@pytest.mark.spec("R-095", "R-214", "U-10", "D13")
def test_lookups_have_a_size(wire: Wire) -> None:
    keys = [hex32() for _ in range(8193)]
    url = wire.index + "lookup"
    assert wire.lookup(keys[:8192]) == {"matched": 0, "replicas": []}
    expect(wire.call("POST", url, wire.question(keys)), 413)
    targets = [f"https://ii{number}.example/" for number in range(257)]
    assert wire.lookup([], targets=targets[:256])["targets"] == [{"instance": uri} for uri in targets[:256]]
    expect(wire.call("POST", url, wire.question([], targets=targets)), 413)


@pytest.mark.spec("U-10", "U-16", "U-17", "R-142", "R-214", "D13")
def test_leases_have_a_size(wire: Wire) -> None:
    key = wire.stored().rpartition("/")[2]
    expect(wire.lease([key] * 2000), 201)  # duplicates collapse
    keys = [hex32() for _ in range(1025)]
    assert expect(wire.lease([key, *keys[:1023]]), 404, NOT_FOUND).json()["block_keys"] == keys[:1023]
    expect(wire.lease(keys), 413)
    expect(wire.lease([key], ttl_ms=600_000), 201)
    lease = expect(wire.lease([key], ttl_ms=600_000), 201).headers["location"]
    for ttl_ms in (600_001, BIG - 1):
        expect(wire.lease([key], ttl_ms=ttl_ms), 429, LEASE_QUOTA)
        expect(wire.call("PUT", wire.holder + lease, {"ttl_ms": ttl_ms}), 429, LEASE_QUOTA)


@pytest.mark.spec("R-053", "U-02", "U-06", "U-14", "R-007", "D7")
def test_renewals(wire: Wire) -> None:
    key = wire.stored().rpartition("/")[2]
    lease = expect(wire.lease([key]), 201).json()["lease"]
    url = wire.holder + "leases/"
    for value in COUNTS:
        expect(wire.call("PUT", url + lease, {} if value is ABSENT else {"ttl_ms": value}), 400)
    assert expect(wire.call("PUT", url + lease.upper(), {"ttl_ms": 1000}), 200).json()["lease"] == lease
    bare = lease.replace("-", "")
    for spelled in (
        bare,
        "{" + lease + "}",
        "urn:uuid:" + lease,
        lease[1:],
        lease + "0",
        bare[:4] + "-" + bare[4:],
    ):
        expect(wire.call("PUT", url + spelled, {"ttl_ms": 1000}), 404, NOT_FOUND)
    expect(wire.call("PUT", url + str(uuid.uuid4()), {"ttl_ms": 1000}), 404, NOT_FOUND)
    expect(wire.call("DELETE", url + lease), 204)


@pytest.mark.spec("U-15", "U-16", "R-017")
def test_leases_narrowed_by_scope_and_compat(wire: Wire) -> None:
    key, other = hex32(), hex32()
    for compat in (wire.compat, other):
        expect(wire.put(wire.block_url(key, compat=compat), box()), 201)
    for narrowed in ({}, {"compat_id": wire.compat}, {"compat_id": other}, {"scope_id": wire.scope}):
        expect(wire.lease([key], **narrowed), 201)
    expect(wire.lease([key], compat_id=hex32()), 404, NOT_FOUND)
    expect(wire.lease([key], scope_id=wire.stack.scope_id("other")), 403, SCOPE_DENIED)
    expect(wire.lease([key], "client-other"), 404, NOT_FOUND)
    expect(wire.lease([key], "client-other", scope_id=wire.stack.scope_id("other")), 404, NOT_FOUND)


@pytest.mark.spec("R-064", "R-073", "U-04", "D4")
@pytest.mark.parametrize("kind", KINDS)
def test_media_types_and_codings(wire: Wire, kind: str) -> None:
    requests = Requests(wire, kind)
    method, url, identity = requests.target
    body = json.dumps(requests.good).encode()
    for media in ("application/json", "text/plain", "application/kvsp-block", "application/kvsp", "kvsp+json", ""):
        expect(wire.call(method, url, body, {"content-type": media}, identity), 415)
    expect(wire.call(method, url, body, identity=identity), 415)
    bomb = gzip.compress(bytes(64 << 20))
    for coding, octets in (("gzip", gzip.compress(body)), ("gzip", bomb), ("br", body), ("identity, gzip", body)):
        fields = {"content-type": JSON, "content-encoding": coding}
        reply = expect(wire.call(method, url, octets, fields, identity), 415)
        assert reply.headers["accept-encoding"] == "identity"
    if kind == "publish":
        assert wire.lookup([requests.key])["matched"] == 0
    for fields in (
        {"content-type": "Application/KVSP+JSON ; charset=utf-8"},
        {"content-type": JSON, "accept": "x/y"},
    ):
        assert wire.call(method, url, body, fields, identity).status in {200, 201}
