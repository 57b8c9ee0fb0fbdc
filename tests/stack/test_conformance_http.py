"""The HTTP surface of the index and a holder as the protocol describes it, over HTTPS.

`wire.check_reply` holds for every response in here: problem+json with an absolute type (R-065, R-200),
no-store on all that is no block (R-067), media types (R-064), and no field of our own (R-068).
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.stack.harness import RunningStack
from tests.stack.wire import (
    BLOCK,
    JSON,
    NOT_FOUND,
    PLAIN,
    SCOPE_DENIED,
    Wire,
    box,
    expect,
    hex32,
    holder_id,
)

pytestmark = pytest.mark.stack
GOOD = box()
LEASE = "0f0e0d0c-0b0a-4908-8706-050403020100"
KEY = "ab" * 32


@pytest.fixture(scope="module")
def wire(stack: RunningStack) -> Wire:
    return Wire(stack)


@pytest.fixture(scope="module")
def block(wire: Wire) -> str:
    return wire.stored(GOOD)


def key_of(url: str) -> str:
    return url.rpartition("/")[2]


# --- resources and methods ---

RESOURCES = {
    "is/lookup": {"POST"},
    f"is/replicas/{holder_id('https://h1.example/kvsp/')}/{KEY}": {"PUT", "DELETE"},
    f"h1/blocks/{KEY}/{KEY[:32]}/{KEY}": {"GET", "HEAD", "PUT"},
    "h1/leases": {"POST"},
    f"h1/leases/{LEASE}": {"PUT", "DELETE"},
}
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]


@pytest.mark.spec("R-069", "R-072", "R-065", "R-067", "U-50", "D9")
@pytest.mark.parametrize("path", RESOURCES)
@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_told_all_that_are_there(wire: Wire, path: str, method: str) -> None:
    url = wire.index.removesuffix("is/") + path
    for identity in ("client-demo", "is", "outsider"):  # 405 comes before the role
        reply = wire.call(method, url, identity=identity)
        assert (reply.status == 405) == (method not in RESOURCES[path])
        if reply.status == 405:
            assert set(reply.headers["allow"].split(", ")) == RESOURCES[path]


@pytest.mark.spec("R-060", "R-069", "R-065", "R-067", "R-068")
@pytest.mark.parametrize(
    "path",
    [
        "", "lookup", "is", "is/", "is/lookups", "is/lookup/x", "is/replicas", f"is/replicas/{KEY}", "is/leases",
        "is/blocks",
        "h1", "h1/", "h1/lookup", "h1/blocks", f"h1/blocks/{KEY}/{KEY[:32]}",
        f"h1/blocks/{KEY}/{KEY[:32]}/{KEY}/x",
        f"h1/leases/{LEASE}/x", "h1/state", "h1/replicas/x/y", "h2/leases", "is/h1/leases", "h1/is/lookup", "docs",
        "openapi.json", "metrics", "ready", ".well-known/kvsp", "is/.well-known/kvsp", "favicon.ico", "stats",
    ],
)  # fmt: skip
def test_nothing_else_is_a_resource(wire: Wire, path: str) -> None:
    url = wire.index.removesuffix("is/") + path
    for method in METHODS:
        expect(wire.call(method, url), 404, PLAIN)


@pytest.mark.spec("R-070")
def test_holder_ids(wire: Wire) -> None:
    assert holder_id("https://h1.example/kvsp/") == "lHUr-xSeDt_3qpqwQwQffdTj0kqh7BCC4vrbIxWUOkw"
    record = wire.record()
    url = f"{wire.index}replicas/{holder_id(wire.ii1.rstrip('/'))}/{record['block_key']}"
    expect(wire.call("PUT", url, record, identity="ii1"), 403)
    expect(wire.publish(record), 201)


@pytest.mark.spec("R-071", "R-080", "R-085", "R-086", "R-140", "R-157", "U-12", "U-14")
def test_repeating_changes_nothing_more(wire: Wire) -> None:
    record = wire.record()
    url = wire.replica_url(record)
    assert [wire.publish(record).status for _ in range(3)] == [201, 200, 200]
    assert len(wire.lookup([record["block_key"]])["replicas"][0]) == 1
    assert [wire.call("DELETE", url, identity="ii1").status for _ in range(3)] == [204, 404, 404]
    assert wire.publish(record).status == 201
    block = wire.block_url(hex32())
    assert [wire.put(block, GOOD).status for _ in range(3)] == [201, 412, 412]
    lease = wire.holder + expect(wire.lease([key_of(block)]), 201).headers["location"]
    bodies = [expect(wire.call("PUT", lease, {"ttl_ms": 5000}), 200).json() for _ in range(2)]
    assert bodies[0] == bodies[1]
    assert [wire.call("DELETE", lease).status for _ in range(3)] == [204, 404, 404]
    expect(wire.call("PUT", lease, {"ttl_ms": 5000}), 404, NOT_FOUND)
    assert wire.call("GET", block).body == GOOD


ORDER: list[tuple[str, str, dict[str, Any], int, str]] = [
    # identity, what, changes, and which of its faults is told; "order of checks" in docs/architecture.md
    ("no method before a path", "PATCH h1/nothing", {}, 404, PLAIN),
    ("no method before a segment", "PATCH block bad", {}, 405, PLAIN),
    ("segment before role", "GET block bad", {"identity": "is"}, 404, NOT_FOUND),
    ("role before scope", "GET block foreign", {"identity": "is"}, 403, PLAIN),
    ("role before query", "GET block", {"identity": "is", "query": "?layers=x"}, 403, PLAIN),
    ("scope before query", "GET block foreign", {"query": "?layers=x"}, 403, SCOPE_DENIED),
    ("query before existence", "GET block missing", {"query": "?layers=x"}, 400, PLAIN),
    ("scope before 428", "PUT block foreign", {"if-none-match": None}, 403, SCOPE_DENIED),
    ("scope before 415", "PUT block foreign", {"content-type": "a/b"}, 403, SCOPE_DENIED),
    ("scope before 412", "PUT block foreign", {}, 403, SCOPE_DENIED),
    ("428 before 412", "PUT block", {"if-none-match": None}, 428, PLAIN),
    ("428 before 415", "PUT block", {"if-none-match": None, "content-type": "a/b"}, 428, PLAIN),
    ("415 before 412", "PUT block", {"content-type": "a/b"}, 415, PLAIN),
    ("Content-Range before 412", "PUT block", {"content-range": "bytes 0-1/2"}, 400, PLAIN),
    ("412 before the body", "PUT block", {"body": b"no container"}, 412, PLAIN),
    ("412 before its digest", "PUT block", {"repr-digest": "sha-256=:" + "A" * 43 + "=:"}, 412, PLAIN),
]  # fmt: skip


@pytest.mark.spec("U-01", "U-05", "U-09", "U-21", "R-158", "R-200", "D8")
@pytest.mark.parametrize(("name", "what", "changes", "status", "kind"), ORDER, ids=[row[0] for row in ORDER])
def test_the_order_of_checks(
    wire: Wire, block: str, name: str, what: str, changes: dict[str, Any], status: int, kind: str
) -> None:
    method, path, *which = what.split()
    urls = {
        "foreign": wire.block_url(key_of(block), scope=wire.stack.scope_id("other")),
        "missing": wire.block_url(hex32()),
        "bad": block.upper().replace(wire.holder.upper(), wire.holder).replace("BLOCKS", "blocks"),
    }
    url = urls[which[0]] if which else block if path == "block" else wire.index.removesuffix("is/") + path
    identity = changes.pop("identity", "client-demo")
    url += changes.pop("query", "")
    body = changes.pop("body", GOOD) if method == "PUT" else None
    fields = {"content-type": BLOCK, "if-none-match": "*"} | changes if method == "PUT" else changes
    fields = {field: value for field, value in fields.items() if value is not None}
    expect(wire.call(method, url, body, fields, identity), status, kind)
    assert wire.call("GET", block).body == GOOD


@pytest.mark.spec("U-01", "D8", "R-095", "U-16")
def test_the_order_of_checks_on_bodies(wire: Wire, block: str) -> None:
    lookup, other = wire.index + "lookup", wire.stack.scope_id("other")
    for identity, body, status, kind in (
        ("is", {}, 403, PLAIN),
        ("client-demo", {"scope_id": other, "block_keys": []}, 400, PLAIN),  # 400 before the scope of a body
        ("client-demo", wire.question([], scope_id=other), 403, SCOPE_DENIED),
    ):
        expect(wire.call("POST", lookup, body, identity=identity), status, kind)
    expect(wire.lease([key_of(block), hex32()], ttl_ms=10**9), 404, NOT_FOUND)  # existence before quota
    expect(wire.lease([hex32()], scope_id=other, ttl_ms=10**9), 403, SCOPE_DENIED)


# --- index ---


@pytest.mark.spec("R-040", "R-083", "R-084", "R-085", "U-11", "U-12", "R-003")
def test_ttls(wire: Wire) -> None:
    record = wire.record(ttl_ms=10**12)
    first = wire.publish(record)
    assert first.json() == {"ttl_ms": 3_600_000}  # the cap
    key = record["block_key"]
    shown = [wire.lookup([key])["replicas"][0][0]["ttl_ms"] for _ in range(5)]
    assert sorted(shown, reverse=True) == shown
    assert 1 <= shown[-1] <= shown[0] <= 3_600_000
    assert wire.publish(record | {"ttl_ms": 20_000}).json() == {"ttl_ms": 20_000}
    short = wire.lookup([key])["replicas"][0][0]["ttl_ms"]
    assert 1 <= short <= 20_000
    assert wire.publish(record | {"ttl_ms": 60_000}).json() == {"ttl_ms": 60_000}
    assert 20_000 < wire.lookup([key])["replicas"][0][0]["ttl_ms"] <= 60_000
    assert wire.publish(record | {"ttl_ms": 150}).json() == {"ttl_ms": 150}
    while (found := wire.lookup([key]))["matched"]:
        assert 1 <= found["replicas"][0][0]["ttl_ms"] <= 150
    assert found == {"matched": 0, "replicas": []}
    expect(wire.call("DELETE", wire.replica_url(record), identity="ii1"), 404, NOT_FOUND)
    assert wire.publish(record).status == 201


@pytest.mark.spec("R-050", "R-090", "R-091", "R-092", "R-093", "U-10", "U-11", "U-13")
def test_lookup_is_the_longest_prefix(wire: Wire) -> None:
    keys = [hex32() for _ in range(4)]
    for at in (0, 1, 3):
        expect(wire.publish(wire.record(block_key=keys[at])), 201)
    # Another holder, and another digest: "not an error"
    twin = wire.record(wire.ii2, block_key=keys[1], digest="sha-256:" + hex32())
    expect(wire.publish(twin, "ii2"), 201)
    found = wire.lookup(keys)
    assert found["matched"] == len(found["replicas"]) == 2
    assert [[each["holder"] for each in replicas] for replicas in found["replicas"]] in (
        [[wire.ii1], [wire.ii1, wire.ii2]],
        [[wire.ii1], [wire.ii2, wire.ii1]],
    )
    assert found.keys() == {"matched", "replicas"}
    assert wire.lookup([keys[2], keys[0]])["matched"] == 0
    assert wire.lookup([keys[0], keys[0], keys[3]])["matched"] == 3  # positionally
    assert wire.lookup([]) == {"matched": 0, "replicas": []}
    assert wire.lookup(keys, compat_id=hex32())["matched"] == 0
    targets = ["https://ii9.example/kvsp/", wire.ii1, "https://ii9.example/kvsp/"]
    assert wire.lookup(keys, targets=targets)["targets"] == [{"instance": each} for each in targets]
    assert wire.lookup(keys, targets=[])["targets"] == []
    expect(wire.call("DELETE", wire.replica_url(twin), identity="ii2"), 204)
    assert [len(each) for each in wire.lookup(keys)["replicas"]] == [1, 1]


@pytest.mark.spec("R-042", "R-044", "U-42")
def test_a_split_or_partial_residency_is_reported_as_it_is(wire: Wire) -> None:
    layers = [hex32() for _ in range(32)]
    digest = "sha-256:" + hashlib.sha256(bytes.fromhex("".join(layers))).hexdigest()
    split = [
        {"tier": "device", "layers": [0, 15]},
        {"tier": "host", "layers": [16, 31], "read_mbit_per_s": 400000},
    ]
    for residency in (split, split[1:]):
        record = wire.record(residency=residency, layer_digests=layers, digest=digest, size=2097152)
        expect(wire.publish(record), 201)
        found = wire.lookup([record["block_key"]])
        assert found["matched"] == 1
        assert found["replicas"][0][0]["residency"] == residency


# --- what must not be told ---


@pytest.mark.spec("R-215", "R-201", "D15")
def test_no_log_holds_a_key(wire: Wire) -> None:
    url = wire.stored(GOOD)
    key = key_of(url)
    wire.listed([key])
    expect(wire.lease([key]), 201)
    expect(wire.put(url, GOOD), 412)
    expect(wire.call("GET", url + "?layers=9-1"), 400)
    expect(wire.call("POST", wire.index + "lookup", {"block_keys": [key]}), 400)
    record = wire.record(block_key=hex32())
    expect(wire.publish(record), 201)
    expect(wire.call("DELETE", wire.replica_url(record), identity="pc"), 204)
    secrets = [key, record["block_key"], wire.stack.scope_key().reveal().hex()]
    for path in wire.stack.layout.home.rglob("*.log"):
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not any(secret in text for secret in secrets), path


@pytest.mark.spec("R-064", "R-065")
def test_json_has_our_media_type_both_ways(wire: Wire) -> None:
    body = b'{"scope_id":"%s","compat_id":"%s","block_keys":[]}' % (wire.scope.encode(), wire.compat.encode())
    fields = {"content-type": JSON, "accept": "text/html", "accept-charset": "utf-16", "accept-encoding": "gzip"}
    assert wire.call("POST", wire.index + "lookup", body, fields).body == b'{"matched":0,"replicas":[]}'
