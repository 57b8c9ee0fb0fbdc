from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsp.client import Client, Credentials, Endpoints, load_stack
from kvsp.protocol import digests, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import ReplicaRecord
from tests.client.peers import COMPAT, KEY, SCOPE, Authority, Peer, container_of, record_of

Serve = Callable[..., Peer]
Connect = Callable[..., Client]
HOLDER = "https://h1.example/kvsp/"
OTHER_KEY = "4c" * 32


@pytest.fixture
def record() -> ReplicaRecord:
    return record_of(HOLDER, container_of(2, 64))


def as_json(record: ReplicaRecord, **more: Any) -> dict[str, Any]:
    return {**json.loads(msgspec.json.encode(record)), **more}


@pytest.mark.spec("U-11", "R-004", "R-050", "R-090")
def test_lookup_replies_of_both_forms_are_understood(index: Peer, connect: Connect, record: ReplicaRecord) -> None:
    one, two = as_json(record, x={"y": [1]}), as_json(record, block_key=OTHER_KEY)
    targets = [{"instance": "https://ii.example/", "fetch_us": 7, "news": 1}]
    client = connect(index)
    replies = [
        {"matched": 2, "replicas": [[one, one], [two]], "targets": targets},
        {"matched": 2, "replicas": [one, two, one], "targets": targets, "more": None},
        {"matched": 2.0, "replicas": [[one | {"ttl_ms": 60000.0}, one], [two]], "targets": targets},
    ]
    for body in replies:
        index.replies["POST lookup"] = (200, body)
        reply = client.lookup(SCOPE, COMPAT, [KEY, OTHER_KEY, "00" * 32], ["https://ii.example/"])
        assert [[item.block_key for item in row] for row in reply.replicas] == [[KEY, KEY], [OTHER_KEY]]
        assert isinstance(reply.targets, list)
        assert reply.targets[0].fetch_us == 7
    asked = json.loads(index.bodies[0])
    assert asked == {
        "scope_id": SCOPE,
        "compat_id": COMPAT,
        "block_keys": [KEY, OTHER_KEY, "00" * 32],
        "targets": ["https://ii.example/"],
    }
    assert index.heads[0]["content-type"] == "application/kvsp+json"


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[" * 100_000,
        {"matched": 1, "replicas": []},
        {"matched": -1, "replicas": []},
        {"matched": 4, "replicas": [[], [], [], []]},
        {"matched": 1, "replicas": [{"block_key": KEY}]},
        ["list"],
    ],
)
def test_a_malformed_lookup_reply_is_an_error(body: Any, index: Peer, connect: Connect) -> None:
    index.replies["POST lookup"] = (200, body)
    with pytest.raises(KvspError) as caught:
        connect(index).lookup(SCOPE, COMPAT, [KEY])
    assert caught.value.problem == registry.UNAVAILABLE


@pytest.mark.spec("D11")
def test_records_of_another_block_are_refused(index: Peer, connect: Connect, record: ReplicaRecord) -> None:
    for change in ({"block_key": OTHER_KEY}, {"scope_id": "00" * 16}, {"compat_id": "00" * 32}):
        index.replies["POST lookup"] = (200, {"matched": 1, "replicas": [[as_json(record, **change)]]})
        with pytest.raises(KvspError):
            connect(index).lookup(SCOPE, COMPAT, [KEY])


def test_bad_arguments_are_told_before_anything_is_sent(index: Peer, connect: Connect) -> None:
    client = connect(index)
    for call in (
        lambda: client.lookup("x", COMPAT, [KEY]),
        lambda: client.lookup(SCOPE, COMPAT, [KEY.upper()]),
        lambda: client.withdraw(HOLDER, "../../x"),
        lambda: connect().lookup(SCOPE, COMPAT, [KEY]),
    ):
        with pytest.raises(KvspError) as caught:
            call()
        assert caught.value.status == 400
    assert index.seen == []


@pytest.mark.spec("R-065", "R-200", "R-201")
def test_a_problem_becomes_the_same_error(index: Peer, connect: Connect) -> None:
    problem = {
        "type": "https://iana.org/assignments/kvsp#kvsp-scope-denied",
        "title": "x",
        "status": 403,
        "detail": "no",
        "hint": 1,
    }
    index.replies["POST lookup"] = (403, problem)
    with pytest.raises(KvspError) as caught:
        connect(index).lookup(SCOPE, COMPAT, [KEY])
    error = caught.value
    assert (error.problem, error.detail, error.extensions) == (registry.SCOPE_DENIED, "no", {"hint": 1})
    index.replies["POST lookup"] = (503, b"<html>")
    with pytest.raises(KvspError) as plain:
        connect(index).lookup(SCOPE, COMPAT, [KEY])
    assert plain.value.problem == registry.UNAVAILABLE


@pytest.mark.spec("U-12", "R-086", "R-070")
def test_publish_tells_the_granted_time_and_withdraw_whether_there_was_a_record(
    index: Peer, connect: Connect, record: ReplicaRecord
) -> None:
    index.replies["PUT replicas"] = (201, {"ttl_ms": 1234})
    client = connect(index)
    assert client.publish(record) == 1234
    path = f"/replicas/{party_id(HOLDER)}/{KEY}"
    assert index.seen == [("PUT", path)]
    assert json.loads(index.bodies[0]) == as_json(record)
    assert client.withdraw(HOLDER, KEY)
    assert index.seen[1] == ("DELETE", path)
    index.replies["DELETE replicas"] = (
        404,
        {"type": "https://iana.org/assignments/kvsp#kvsp-not-found", "status": 404},
    )
    assert not client.withdraw(HOLDER, KEY)


@pytest.mark.spec("R-157", "R-160", "U-21", "U-27")
def test_put_stores_once_and_asks_before_it_sends_a_long_block(
    serve: Serve, connect: Connect, octets: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsp.client.client.ASK_FIRST_OCTETS", len(octets))
    holder = serve()
    client = connect(None, holder)
    assert client.put(holder.base, COMPAT, SCOPE, KEY, memoryview(octets))
    assert not client.put(holder.base, COMPAT, SCOPE, KEY, octets)
    assert list(holder.stored.values()) == [octets]
    head = holder.heads[0]
    assert head["if-none-match"] == "*"
    assert head["content-type"] == "application/kvsp-block"
    assert head["repr-digest"] == digests.repr_digest_field(hashlib.sha256(octets).digest())
    # The second upload was refused before its octets were sent.
    assert head["expect"] == "100-continue"
    assert len(holder.bodies) == 1
    assert client.put(holder.base, COMPAT, SCOPE, OTHER_KEY, container_of(2, 64))
    assert "expect" not in holder.heads[1]


@pytest.mark.spec("R-157")
def test_put_takes_any_buffer(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve()
    client = connect(None, holder)
    for at, same in enumerate((octets, bytearray(octets), memoryview(octets).cast("I"))):
        assert client.put(holder.base, COMPAT, SCOPE, f"{at:064x}", same)
    assert list(holder.stored.values()) == [octets] * 3


@pytest.mark.spec("R-157")
def test_an_upload_starts_over_when_the_kept_connection_was_closed(
    serve: Serve, connect: Connect, octets: bytes
) -> None:
    holder = serve("honest")
    client = connect(None, holder)
    assert client.put(holder.base, COMPAT, SCOPE, KEY, bytearray(octets))
    holder.hang_up_next = True
    assert client.put(holder.base, COMPAT, SCOPE, OTHER_KEY, bytearray(octets))
    assert holder.connections == 2
    assert list(holder.stored.values()) == [octets] * 2


@pytest.mark.spec("R-160")
def test_put_with_a_digest_that_does_not_match_stores_nothing(
    serve: Serve, connect: Connect, octets: bytes
) -> None:
    holder = serve()
    client = connect(None, holder)
    with pytest.raises(KvspError) as caught:
        client.put(holder.base, COMPAT, SCOPE, KEY, octets, sha256=bytes(32))
    assert caught.value.problem == registry.DIGEST_MISMATCH
    assert holder.stored == {}


@pytest.mark.spec("R-030")
def test_put_refuses_what_is_no_container(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve()
    for bad in (b"", octets[:-1], octets + b"\0", b"x" + octets[1:]):
        with pytest.raises(KvspError) as caught:
            connect(None, holder).put(holder.base, COMPAT, SCOPE, KEY, bad)
        assert caught.value.status == 400
    assert holder.seen == []


@pytest.mark.spec("R-068")
def test_only_standard_fields_are_sent(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve(octets=octets)
    client = connect(None, holder)
    client.get(record_of(holder.base, octets))
    client.put(holder.base, COMPAT, SCOPE, OTHER_KEY, octets)
    standard = {"host", "user-agent", "content-type", "content-length", "if-none-match", "repr-digest", "expect"}
    assert set().union(*holder.heads) <= standard


# --- TLS ------------------------------------------------------------------------------


def unreachable(client: Client) -> None:
    with pytest.raises(KvspError) as caught:
        client.lookup(SCOPE, COMPAT, [])
    assert caught.value.problem == registry.UNAVAILABLE


@pytest.mark.spec("R-061")
def test_tls_before_1_3_is_refused(serve: Serve, connect: Connect) -> None:
    peer = serve(tls=ssl.TLSVersion.TLSv1_2)
    unreachable(connect(peer))
    assert peer.seen == []


@pytest.mark.spec("R-062", "D10")
def test_both_ends_are_authenticated(
    serve: Serve, connect: Connect, authority: Authority, tmp_path: Path, credentials: Credentials
) -> None:
    stranger = Authority(tmp_path, "other-ca")
    misnamed = authority.issue("misnamed", "elsewhere.example")
    unreachable(connect(serve(server=misnamed)))
    foreign = Credentials(authority.ca, *_files(stranger.issue("foreign")))
    unreachable(connect(serve(), own=foreign))
    sceptic = Credentials(stranger.ca, *_files(credentials))
    unreachable(connect(serve(), own=sceptic))


def _files(credentials: Credentials) -> tuple[Path, Path]:
    return credentials.cert, credentials.key


@pytest.mark.spec("D10")
def test_proxies_of_the_environment_are_ignored(
    index: Peer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    index.replies["POST lookup"] = (200, {"matched": 0, "replicas": []})
    assert connect(index).lookup(SCOPE, COMPAT, []).matched == 0


@pytest.mark.spec("U-46")
def test_redirects_are_not_followed(serve: Serve, connect: Connect) -> None:
    target, index = serve(), serve()
    index.replies["POST lookup"] = (308, {"Location": target.base})
    with pytest.raises(KvspError) as caught:
        connect(index).lookup(SCOPE, COMPAT, [])
    assert caught.value.status == 308
    assert target.seen == []


def test_a_silent_peer_ends_with_the_deadline(serve: Serve, connect: Connect, octets: bytes) -> None:
    stalled = serve("stalled", octets)
    client = connect(None, stalled, total_s=0.3)
    with pytest.raises(KvspError) as caught:
        client.get(record_of(stalled.base, octets))
    assert caught.value.problem == registry.GATEWAY_TIMEOUT


def test_connections_are_kept(index: Peer, connect: Connect) -> None:
    index.replies["POST lookup"] = (200, {"matched": 0, "replicas": []})
    client = connect(index)
    for _ in range(3):
        client.lookup(SCOPE, COMPAT, [])
    assert len(index.seen) == 3
    assert index.connections == 1


@pytest.mark.spec("U-07", "R-060")
def test_endpoints_are_normalised_base_uris(tmp_path: Path) -> None:
    assert Endpoints("https://h.example/a/b/kvsp/", frozenset({HOLDER})).index
    for bad in ("http://h.example/", "https://h.example", "https://H.example/", "https://h.example/?x"):
        for member in ("index", "placement", "holders", "instances"):
            with pytest.raises(ValueError):
                Endpoints(**{member: bad if member in ("index", "placement") else frozenset({bad})})


def test_the_file_of_a_stack_tells_who_and_where(tmp_path: Path) -> None:
    home = tmp_path / ".kvsp"
    home.mkdir()
    body = {
        "ca": ".kvsp/pki/ca.pem",
        "roles": {
            "index": "https://localhost:8443/is/",
            "placement": "https://localhost:8443/pc/",
            "holders": {"h1": "https://localhost:8443/h1/"},
            "instances": {"ii1": "https://localhost:8443/ii1/"},
        },
        "identities": {"client-demo": {"uri": "x", "cert": ".kvsp/c.pem", "key": "/abs/k.pem"}, "odd": {}},
        "scopes": {"demo": {"scope_id": SCOPE, "key_file": ".kvsp/demo.key"}, "other": {}},
        "descriptor": ".kvsp/descriptor.json",
    }
    path = home / "endpoints.json"
    path.write_text(json.dumps(body))
    stack = load_stack(path, "client-demo")
    assert stack.credentials == Credentials(home / "pki/ca.pem", home / "c.pem", Path("/abs/k.pem"))
    assert stack.endpoints.holders == {"https://localhost:8443/h1/", "https://localhost:8443/ii1/"}
    assert stack.endpoints.instances == {"https://localhost:8443/ii1/"}
    assert stack.endpoints.placement == stack.placement == "https://localhost:8443/pc/"
    assert (stack.scopes, stack.scope_keys) == ({"demo": SCOPE}, {"demo": home / "demo.key"})
    path.write_text(json.dumps(body | {"descriptor": None}))
    assert load_stack(path, "client-demo").descriptor is None
    path.write_text(json.dumps(body | {"roles": {"index": "https://localhost:8443/is/"}}))
    assert load_stack(path, "client-demo").endpoints == Endpoints("https://localhost:8443/is/")
    for broken, identity in ((path, "odd"), (path, "nobody"), (home / "absent.json", "client-demo")):
        with pytest.raises(KvspError):
            load_stack(broken, identity)
    path.write_text("[]")
    with pytest.raises(KvspError):
        load_stack(path, "client-demo")
