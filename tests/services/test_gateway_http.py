"""The gateway's front: identity, paths, methods, order of checks, problems, JSON."""

from __future__ import annotations

import pytest

from gateway import identity
from gateway.app import SERVED
from gateway.config import load
from kvsp.protocol.errors import KvspError
from kvsp.rpc.config import ConfigError
from tests.services.gateway_harness import CLIENT, COMPAT, FOREIGN, H1, H1_ID, NOWHERE, SCOPE, World, read_response

KEY = "ef" * 32
JSON = {"content-type": "application/kvsp+json"}


def record(key: str = KEY, **changes: object) -> dict[str, object]:
    return {
        "block_key": key, "compat_id": COMPAT, "scope_id": SCOPE, "holder": H1, "codec": 1, "size": 4096,
        "digest": "sha-256:" + "00" * 32, "residency": [{"tier": "host", "layers": [0, 1]}], "ttl_ms": 60000,
    } | changes  # fmt: skip


# --- identity (D2) ---


@pytest.mark.spec("D2", "U-39", "R-062")
@pytest.mark.parametrize(
    ("value", "uri"),
    [
        ("URI=spiffe://a/b", "spiffe://a/b"),
        ('By=spiffe://gw;Hash=aa;Subject="CN=x,O=\\"y;z\\"";URI=spiffe://a/b;DNS=c', "spiffe://a/b"),
        ("hash=aa;uri=spiffe://a/b", "spiffe://a/b"),
        ('URI="https://h1.example/x=y/"', "https://h1.example/x=y/"),
        ("By=x;By=y;URI=https://h/", "https://h/"),
    ],
)
def test_xfcc_with_exactly_one_uri(value: str, uri: str) -> None:
    assert identity.principal([(b"x-forwarded-client-cert", value.encode())]) == uri


@pytest.mark.spec("D2", "U-39")
@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["Hash=aa"],
        ["URI="],
        ["URI=spiffe://a,URI=spiffe://b"],
        ["URI=spiffe://a;URI=spiffe://b"],
        ['URI="a,URI=b"'],
        ["URI=spiffe://a,Hash=bb"],
        ["URI=spiffe://a", "URI=spiffe://a"],
        ['URI="spiffe://a'],
        ["URI=spiffe://a;x=y"],
        ["URI=spiffe://a b"],
        ["URI=spiffe://ä"],
        ["URI=spiffe://" + "a" * 3000],
        ["garbage"],
        ['{"uri":"spiffe://a"}'],
    ],
)
def test_xfcc_that_is_no_identity(lines: list[str]) -> None:
    with pytest.raises(KvspError) as caught:
        identity.principal([(b"x-forwarded-client-cert", line.encode("latin-1")) for line in lines])
    assert caught.value.status == 403


@pytest.mark.spec("D2", "R-210", "U-09")
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"client-cert": ":AAAA:"},
        {"x_forwarded_client_cert": f"URI={CLIENT}"},
        {"x-forwarded-client-cert": f"URI={CLIENT},URI=spiffe://test/other"},
        [("X-Forwarded-Client-Cert", f"URI={CLIENT}"), ("x-forwarded-client-cert", f"URI={CLIENT}")],
    ],
)
def test_no_identity_is_403_before_anything_else(world: World, headers: dict[str, str]) -> None:
    for target in ("/is/lookup", "/nowhere"):
        response = world.request("POST", target, b"{}", headers, principal=None)
        assert response.status == 403
        assert response.problem["type"] == "about:blank"


@pytest.mark.spec("D1", "D2")
def test_identity_outside_the_policy_is_403(world: World) -> None:
    response = world.json("POST", "/is/lookup", {}, principal="spiffe://test/outsider")
    assert (response.status, response.problem["type"]) == (403, "about:blank")
    assert world.request("GET", world.block_path(KEY), principal="spiffe://test/outsider").status == 403


# --- paths and methods (D3, R-069, R-072) ---


@pytest.mark.spec("R-060", "R-065", "R-067", "R-069", "D3")
@pytest.mark.parametrize(
    "target",
    [
        "/", "/lookup", "/is", "/is/", "/is/lookup/", "/is//lookup", "//is/lookup", "/is/%6cookup", "/is/lookup;x",
        "/is/lookup%00", "/is/../is/lookup", "/is/%2e%2e/is/lookup", "/is%2Flookup", "/is/lookup\\", "/is/Lookup",
        "/docs", "/openapi.json", "/redoc", "/is/docs", "/h1/lookup", "/is/leases", "/h1/blocks",
        "/h1/blocks/a/b/c/d", "*",
    ],
)  # fmt: skip
def test_no_such_route(world: World, target: str) -> None:
    response = world.request("POST", target, b"{}", JSON)
    assert (response.status, response.problem["type"]) == (404, "about:blank")
    assert response.problem["title"] == "Not Found"


@pytest.mark.spec("U-05", "D3", "R-002")
@pytest.mark.parametrize(
    "segment",
    [
        KEY.upper(), KEY[:-1], KEY + "0", KEY + "%0a", KEY[:-2] + "%61", KEY[:-1] + "%2F", KEY[:-1] + ";", "",
        KEY[:-1] + "%c3%a9", KEY[:-1] + "g", "%2e%2e", ".",
    ],
)  # fmt: skip
def test_malformed_segment_names_no_resource(world: World, segment: str) -> None:
    for target in (world.block_path(segment), f"/is/replicas/{H1_ID}/{segment}", f"/h1/leases/{segment}"):
        response = world.request("PUT", target, b"", principal="spiffe://test/outsider")
        assert (response.status, response.type) == (404, "kvsp-not-found"), target


@pytest.mark.spec("R-069", "R-072", "U-50", "D9")
@pytest.mark.parametrize(
    ("target", "allow"),
    [
        ("/is/lookup", {"POST"}),
        (f"/is/replicas/{H1_ID}/{KEY}", {"PUT", "DELETE"}),
        (f"/h1/blocks/{COMPAT}/{SCOPE}/{KEY}", {"GET", "HEAD", "PUT"}),
        ("/h1/leases", {"POST"}),
        ("/h1/leases/0f0e0d0c-0b0a-4908-8706-050403020100", {"PUT", "DELETE"}),
    ],
)
def test_wrong_method_names_all_right_ones(world: World, target: str, allow: set[str]) -> None:
    for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"} - allow:
        response = world.request(method, target)
        assert response.status == 405
        assert set(response.headers["allow"].split(", ")) == allow
        if method != "HEAD":
            assert response.problem["title"] == "Method Not Allowed"
    # 405 comes before segment syntax.
    assert world.request("PATCH", target[:-1] + "%").status in (404, 405)


@pytest.mark.spec("D4", "R-065")
def test_oversize_target_and_fields(world: World) -> None:
    assert world.request("GET", "/is/" + "a" * 9000).status == 414
    many = [(f"x-{n}", "a" * 1000) for n in range(100)]
    assert world.request("GET", "/is/lookup", headers=many).status == 431
    # The connection goes on, and so does the limit per request.
    assert world.request("GET", "/is/lookup").status == 405


@pytest.mark.spec("R-065", "R-067")
def test_what_is_no_http_gets_a_problem_too(world: World) -> None:
    async def send(octets: bytes) -> object:
        reader, writer = await world.connect()
        writer.write(octets)
        response = await read_response(reader)
        assert await reader.read() == b""
        writer.close()
        return response.problem["status"]

    assert world.run(send(b"nonsense\r\n\r\n")) == 400
    assert world.run(send(b"GET /is/l\xf6okup HTTP/1.1\r\nhost: x\r\n\r\n")) == 400  # a URI is ASCII
    smuggled = (
        b"POST /is/lookup HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    assert world.run(send(smuggled)) == 400


# --- order of checks (docs/architecture.md) ---


@pytest.mark.spec("D1", "D8", "U-01", "U-09")
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_nothing_about_a_request_is_told_before_authorization(world: World, method: str) -> None:
    """Role and scope come before query syntax, 428, 415, Content-Range and 413."""
    world.holder.blocks[COMPAT, FOREIGN, KEY] = b"x"
    broken = {"content-range": "bytes 0-1/2", "content-type": "text/plain", "content-length": "999999999"}
    bodies = set()
    for scope in (FOREIGN, NOWHERE):
        target = world.block_path(KEY, scope) + "?layers=9-1"
        response = world.request(method, target, headers=broken if method == "PUT" else {})
        assert response.status == 403
        bodies.add(response.head + response.body)
        good = world.request(method, world.block_path(KEY, scope), headers={"if-none-match": "*"} | JSON)
        assert good.status == 403
    assert len(bodies) == 1  # foreign and nonexistent: not one octet differs
    if method != "HEAD":
        assert response.type == "kvsp-scope-denied"
    target = world.block_path(KEY, SCOPE) + "?layers=9-1"
    index = world.request(method, target, headers=broken, principal="spiffe://test/is")
    assert index.status == 403
    assert method == "HEAD" or index.problem["type"] == "about:blank"


@pytest.mark.spec("D1", "R-081")
def test_a_broken_body_is_held_back_from_those_who_may_not_publish(world: World) -> None:
    target = f"/is/replicas/{H1_ID}/{KEY}"
    assert world.request("PUT", target, b"{", JSON).status == 403
    assert world.request("PUT", target, b"{", JSON, principal="spiffe://test/h1").status == 400
    assert world.request("PUT", target, b"{", principal="spiffe://test/h1").status == 415


# --- JSON bodies (R-064, R-073, U-02, U-03, D4, D7) ---


@pytest.mark.spec("R-064", "R-073", "U-04")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 415),
        ({}, 415),
        ([("content-type", "application/kvsp+json"), ("content-type", "text/plain")], 415),
        ({"content-type": "Application/KVSP+json; charset=utf-8"}, 200),
        ({"content-type": "application/kvsp+json", "content-encoding": "identity"}, 200),
        ({"content-type": "application/kvsp+json", "accept": "text/html"}, 200),
        ({"content-type": "application/kvsp+json", "content-encoding": "gzip"}, 415),
    ],
)
def test_content_type_and_coding(world: World, headers: dict[str, str], status: int) -> None:
    body = b'{"scope_id":"%s","compat_id":"%s","block_keys":[]}' % (SCOPE.encode(), COMPAT.encode())
    response = world.request("POST", "/is/lookup", body, headers)
    assert response.status == status
    if status == 200:
        assert response.headers["content-type"] == "application/kvsp+json"
        assert response.headers["cache-control"] == "no-store"
    elif "content-encoding" in dict(headers):
        assert response.headers["accept-encoding"] == "identity"


@pytest.mark.spec("U-02", "U-03", "D7", "R-001", "R-003")
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"{}", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b'{"ttl_ms":NaN}',
        b'{"ttl_ms":Infinity}', b'{"ttl_ms":1e400}', b'{"ttl_ms":1.5}', b'{"ttl_ms":true}', b'{"ttl_ms":"1"}',
        b'{"ttl_ms":0}', b'{"ttl_ms":-1}', b'{"ttl_ms":1,"ttl_ms":2}', b'{"TTL_MS":1}',
        b'{"ttl_ms":9007199254740992}', b'{"ttl_ms":' + b"9" * 5000 + b"}",
        b'{"ttl_ms":1,"x":"\\ud800"}', b'{"ttl_ms":1,"x":' + b"[" * 200_000,
        b'{"ttl_ms":1,"x":' + b"[" * 40 + b"]" * 40 + b"}", b'{"ttl_ms":1}{}', b"{'ttl_ms':1}", b"\x1f\x8b\x08",
    ],
)  # fmt: skip
def test_malformed_bodies_are_400(world: World, body: bytes) -> None:
    target = "/h1/leases/0f0e0d0c-0b0a-4908-8706-050403020100"
    response = world.request("PUT", target, body, JSON)
    assert (response.status, response.problem["type"]) == (400, "about:blank")
    assert response.problem["title"] == "Bad Request"


@pytest.mark.spec("R-004", "U-03")
def test_unknown_members_and_integral_floats_pass(world: World) -> None:
    lease = world.json("POST", "/h1/leases", {"block_keys": [KEY], "ttl_ms": 5000, "x": {"y": [1]}})
    assert lease.status == 201
    renewed = world.request("PUT", "/h1/" + lease.headers["location"], b'{"ttl_ms":6e3}', JSON)
    assert (renewed.status, renewed.body) == (200, lease.body.replace(b"5000", b"6000"))


@pytest.mark.spec("D4", "U-10")
def test_body_limit_by_declaration_and_by_count(world: World) -> None:
    declared = world.request("POST", "/is/lookup", b"", {"content-length": "8388609"} | JSON)
    assert (declared.status, declared.problem["title"]) == (413, "Content Too Large")

    assert world.chunked("POST", "/is/lookup", CLIENT) == 413


# --- the JSON resources ---


@pytest.mark.spec("R-080", "R-086", "R-090", "U-11", "U-12", "R-067", "R-071")
def test_publish_lookup_withdraw(world: World) -> None:
    target = f"/is/replicas/{H1_ID}/{KEY}"
    first = world.json("PUT", target, record(), "spiffe://test/h1")
    again = world.json("PUT", target, record(ttl_ms=10**12), "spiffe://test/h1")
    assert (first.status, first.body, again.status, again.body) == (
        201, b'{"ttl_ms":60000}', 200, b'{"ttl_ms":3600000}',
    )  # fmt: skip
    found = world.json(
        "POST", "/is/lookup", {"scope_id": SCOPE, "compat_id": COMPAT, "block_keys": [KEY, "00" * 32]}
    )
    assert found.status == 200
    assert int(found.headers["content-length"]) == len(found.body)
    assert b'"matched":1' in found.body
    assert H1.encode() in found.body
    gone = world.request("DELETE", target, principal="spiffe://test/h1")
    assert (gone.status, gone.body, gone.headers) == (204, b"", {"cache-control": "no-store"})
    assert world.request("DELETE", target, principal="spiffe://test/h1").type == "kvsp-not-found"
    assert world.json("PUT", f"/is/replicas/{H1_ID}/{'00' * 32}", record(), "spiffe://test/h1").status == 400


@pytest.mark.spec("R-094", "R-095", "D8")
def test_lookup_bounds_and_scopes(world: World) -> None:
    request = {"scope_id": SCOPE, "compat_id": COMPAT, "block_keys": [KEY] * 101}
    assert world.json("POST", "/is/lookup", request).status == 413
    denied = [
        world.json("POST", "/is/lookup", request | {"scope_id": scope, "block_keys": [KEY]})
        for scope in (FOREIGN, NOWHERE)
    ]
    assert denied[0].type == "kvsp-scope-denied"
    assert denied[0].head + denied[0].body == denied[1].head + denied[1].body


@pytest.mark.spec("R-140", "U-14", "U-17", "R-067", "U-06")
def test_lease_life(world: World) -> None:
    made = world.json("POST", "/h1/leases", {"block_keys": [KEY], "ttl_ms": 5000, "scope_id": SCOPE})
    assert made.status == 201
    target = "/h1/" + made.headers["location"]
    assert world.json("PUT", target, {"ttl_ms": 1}, principal="spiffe://test/other").type == "kvsp-not-found"
    over = world.json("PUT", target.upper().replace("/H1/LEASES", "/h1/leases"), {"ttl_ms": 700_000})
    assert (over.status, over.type, over.headers["retry-after"]) == (429, "kvsp-lease-quota", "3")
    assert over.problem["limit"] == 600_000
    released = world.request("DELETE", target)
    assert (released.status, released.headers) == (204, {"cache-control": "no-store"})
    assert world.request("DELETE", target).status == 404
    assert world.json("POST", "/h1/leases", {"block_keys": [], "ttl_ms": 1}).status == 400
    assert world.json("POST", "/h1/leases", {"block_keys": [KEY], "ttl_ms": 1, "scope_id": FOREIGN}).status == 403


# --- failures ---


@pytest.mark.spec("R-065", "R-201", "R-215")
def test_unexpected_errors_say_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"secret {KEY}")

    backend = "gateway.backend.HolderClient.open"
    monkeypatch.setattr(backend, fail)
    response = world.request("GET", world.block_path(KEY))
    assert response.problem == {"type": "about:blank", "title": "Internal Server Error", "status": 500}
    assert KEY not in "".join(capsys.readouterr())


@pytest.mark.spec("U-01", "D14")
def test_a_backend_that_is_down_is_503_until_it_returns(world: World) -> None:
    holder = world.servers.pop()
    world.run(holder.stop(None))
    response = world.request("GET", world.block_path(KEY))
    assert (response.status, response.headers["retry-after"]) == (503, "1")
    lease = world.json("POST", "/h1/leases", {"block_keys": [KEY], "ttl_ms": 1})
    assert (lease.status, lease.headers["retry-after"]) == (503, "1")
    # Said only after authorization, which nobody can give now.
    assert world.request("GET", world.block_path(KEY) + "?layers=x").status == 503
    world.run(world.start_holder())
    while (response := world.request("GET", world.block_path(KEY))).status == 503:
        pass
    assert response.type == "kvsp-not-found"


# --- start and stop ---


@pytest.mark.spec("D2", "U-07", "R-060")
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("unix:/tmp/gateway.sock", "127.0.0.1:8080", "without Envoy"),
        ('role = "index"', 'role = "indexx"', "indexx"),
        ('role = "index"', 'role = "gateway"', "gateway"),
        ('role = "holder"', 'role = "instance"', "blocks"),
        ('"unix:/tmp/h1.sock"}', '"unix:/tmp/h1.sock"}\nblocks = {address = "unix:/tmp/b.sock"}', "blocks"),
        ("https://localhost/is/", "https://localhost/is", "base_uri"),
        ("https://localhost/is/", "https://LOCALHOST/is/", "base_uri"),
        ("https://localhost/is/", "https://other/h1/", "twice"),
        ('principal = "x"', 'principal = "x"\npolicy = "y"', "policy"),
    ],
)
def test_unusable_config(tmp_path: object, old: str, new: str, reason: str) -> None:
    text = """
listen = "unix:/tmp/gateway.sock"
principal = "x"
[[roles]]
role = "index"
base_uri = "https://localhost/is/"
backend = {address = "unix:/tmp/is.sock"}
[[roles]]
role = "holder"
base_uri = "https://localhost/h1/"
backend = {address = "unix:/tmp/h1.sock"}
"""
    path = tmp_path / "gateway.toml"  # type: ignore[operator]
    path.write_text(text)
    assert len(load(path, SERVED).roles) == 2
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=reason):
        load(path, SERVED)


@pytest.mark.spec("D14", "D2")
def test_the_socket_is_the_owners_alone(world: World) -> None:
    assert (world.folder / "gateway.sock").stat().st_mode & 0o777 == 0o600
