"""What instances and the placement controller say to each other through the SDK."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvsp.client import AsyncClient, Client, Credentials, Endpoints
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import (
    CheckpointReply,
    DirectiveBlock,
    DirectiveStatus,
    InstanceStatus,
    Link,
    PrefetchDirective,
    ResumeReply,
    Sampler,
    SessionCheckpoint,
)
from tests.client.peers import COMPAT, KEY, SCOPE, Peer

Serve = Callable[..., Peer]
Connect = Callable[..., Client]
II1 = "https://ii1.example/kvsp/"
SESSION = "01234567-89ab-4cde-8f01-23456789abcd"
DIRECTIVE = "11234567-89ab-4cde-8f01-23456789abcd"
STATUS = InstanceStatus(II1, 12, "active", 1, 2, 8, 0.25, 42000.0, 1900.0, 1500, [Link(II1, 2e5, 12.0)])
SAMPLER = Sampler("top-k", {"k": 5, "temperature": 0.5}, -7, 2, deterministic=False)
CHECKPOINT = SessionCheckpoint(SESSION, 1, COMPAT, SCOPE, [KEY], [1, 2], [3, 4294967295], 2, SAMPLER)
PREFETCH = PrefetchDirective(DIRECTIVE, SCOPE, COMPAT, [DirectiveBlock(KEY, [II1])], 500, 3000, "ref")
LOADED = {"directive": DIRECTIVE, "state": "partial", "loaded": [KEY], "news": 1}
RECORDED = {"epoch": 1, "output_offset": 2, "news": 1}
RESUMED = {"session": SESSION, "epoch": 2, "output_offset": 2, "news": 1}

# name: call(client, instance), what it returns, how it is asked (method, path, body), and the reply
CASES: dict[str, tuple[Callable[[Any, str], Any], Any, tuple[str, str, Any], tuple[int, Any]]] = {
    "status": (
        lambda client, _: client.put_status(STATUS),
        "draining",
        ("PUT", f"instances/{party_id(II1)}/status", STATUS),
        (200, {"state": "draining", "news": 1}),
    ),
    "checkpoint": (
        lambda client, _: client.put_checkpoint(CHECKPOINT),
        CheckpointReply(1, 2),
        ("PUT", f"sessions/{SESSION}/checkpoint", CHECKPOINT),
        (201, RECORDED),
    ),
    "prefetch": (
        lambda client, instance: client.prefetch(instance, PREFETCH),
        DirectiveStatus(DIRECTIVE, "partial", [KEY]),
        ("POST", "prefetch", PREFETCH),
        (202, LOADED),
    ),
    "directive": (
        lambda client, instance: client.directive(instance, DIRECTIVE.upper()),
        DirectiveStatus(DIRECTIVE, "partial", [KEY]),
        ("GET", f"prefetch/{DIRECTIVE}", None),
        (200, LOADED),
    ),
    "resume": (
        lambda client, instance: client.resume(instance, 2, CHECKPOINT),
        ResumeReply(SESSION, 2, 2),
        ("POST", f"sessions/{SESSION}/resume", {"epoch": 2, "checkpoint": CHECKPOINT}),
        (202, RESUMED),
    ),
    "state": (
        lambda client, instance: client.set_state(instance, "sleeping"),
        "draining",
        ("PUT", "state", {"state": "sleeping"}),
        (200, {"state": "draining"}),
    ),
}


def reply_of(name: str) -> str:
    """How Peer.replies names the request."""
    method, path, _ = CASES[name][2]
    return f"{method} {path.split('/')[0]}"


@pytest.fixture
def peer(serve: Serve) -> Peer:
    """A placement controller and an instance in one."""
    return serve()


@pytest.fixture
def client(peer: Peer, connect: Connect) -> Client:
    return connect(placement=peer, instances=[peer])


@pytest.mark.spec("R-100", "R-104", "R-125", "R-129", "R-170", "R-179", "R-107", "R-064", "R-004", "U-34", "U-35")
@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_and_what_comes_back(name: str, peer: Peer, client: Client) -> None:
    call, returned, (method, path, body), reply = CASES[name]
    peer.replies[reply_of(name)] = reply
    assert call(client, peer.base) == returned
    assert peer.seen == [(method, f"/{path}")]
    sent = json.loads(peer.bodies[0]) if peer.bodies[0] else None
    assert sent == (None if body is None else json.loads(msgspec.json.encode(body)))
    assert peer.heads[0].get("content-type") == (None if body is None else "application/kvsp+json")


@pytest.mark.parametrize("name", CASES)
async def test_awaited(name: str, peer: Peer, credentials: Credentials) -> None:
    call, returned, _, reply = CASES[name]
    peer.replies[reply_of(name)] = reply
    async with AsyncClient(
        credentials, Endpoints(placement=peer.base, instances=frozenset({peer.base}))
    ) as awaited:
        assert await call(awaited, peer.base) == returned


@pytest.mark.spec("R-066")
@pytest.mark.parametrize("name", CASES)
def test_statuses_count_by_class(name: str, peer: Peer, client: Client) -> None:
    call, returned, _, (_, body) = CASES[name]
    for status in (200, 201, 202, 299):
        peer.replies[reply_of(name)] = (status, body)
        assert call(client, peer.base) == returned
    for status in (302, 308, 471, 599):
        peer.replies[reply_of(name)] = (status, body)
        with pytest.raises(KvspError) as caught:
            call(client, peer.base)
        assert caught.value.status == status


@pytest.mark.spec("R-065", "R-200", "R-103", "R-173", "R-181", "R-109", "R-131")
@pytest.mark.parametrize("name", CASES)
def test_a_problem_becomes_the_same_error(name: str, peer: Peer, client: Client) -> None:
    call = CASES[name][0]
    rows = (registry.STALE_EPOCH, registry.INVALID_STATE, registry.INCOMPATIBLE, registry.NOT_FOUND)
    for problem in (*rows, registry.SCOPE_DENIED, registry.CONFLICT, registry.TOO_MANY_REQUESTS):
        peer.replies[reply_of(name)] = (problem.status, KvspError(problem, "why").to_problem())
        with pytest.raises(KvspError) as caught:
            call(client, peer.base)
        assert (caught.value.problem, caught.value.detail) == (problem, "why")


@pytest.mark.spec("R-129", "R-104")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, {"state": "confused"}, {"epoch": -1}, None])
def test_a_malformed_reply_is_an_error(name: str, body: Any, peer: Peer, client: Client) -> None:
    peer.replies[reply_of(name)] = (200, body)
    with pytest.raises(KvspError) as caught:
        CASES[name][0](client, peer.base)
    assert caught.value.problem == registry.UNAVAILABLE


@pytest.mark.spec("D10", "R-211")
@pytest.mark.parametrize("name", CASES)
def test_nobody_is_contacted_who_is_not_registered(name: str, peer: Peer, connect: Connect) -> None:
    # As a holder it is known, but that does not make it an instance or a placement controller.
    stranger = connect(peer, peer)
    with pytest.raises(KvspError) as caught:
        CASES[name][0](stranger, peer.base)
    assert caught.value.status == (400 if name in ("status", "checkpoint") else 403)
    assert peer.seen == []


@pytest.mark.spec("U-35", "U-36", "U-06")
def test_bad_arguments_are_told_before_anything_is_sent(peer: Peer, client: Client) -> None:
    for call in (
        lambda: client.resume(peer.base, 1, CHECKPOINT),
        lambda: client.set_state(peer.base, "hibernating"),
        lambda: client.directive(peer.base, "../state"),
        lambda: client.directive(peer.base, "{" + DIRECTIVE + "}"),
    ):
        with pytest.raises(KvspError) as caught:
            call()
        assert caught.value.status == 400
    assert peer.seen == []


@pytest.mark.spec("R-215")
def test_no_token_is_in_the_text_of_a_failure(client: Client, peer: Peer) -> None:
    peer.replies["PUT sessions"] = (200, b"nonsense")
    for call in (CASES["checkpoint"][0], CASES["prefetch"][0]):
        with pytest.raises(KvspError) as caught:
            call(client, peer.base)
        for secret in ("4294967295", KEY, SESSION):
            assert secret not in str(caught.value)
