"""A fleet among sources that lie or never end, floods, and epochs that cannot be: streams go on as ever."""

from __future__ import annotations

import itertools
import socket
import time
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from deploy.local import pki
from deploy.local.layout import Layout, write_private
from deploy.local.policy import identity_uri
from deploy.local.toml import dumps
from kvsp.client import Client, Credentials, Endpoints
from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import SessionCheckpoint
from tests.client.peers import LEASE, Peer, Server, record_of
from tests.stack.fleet_load import (
    PROMPT,
    Ask,
    ask,
    block_names,
    count,
    empty_checkpoint,
    put_checkpoint,
    put_status,
    shape_of,
    states,
    streaming,
    undisturbed,
    where,
)
from tests.stack.harness import RunningStack, start_fleet, temporary_layout
from tests.stack.traffic import assert_problem, client_of, container_of, eventually

pytestmark = pytest.mark.stack

STRANGER = "h9"
CHECKPOINTS_PER_S = 10
FLOOD = 20 * CHECKPOINTS_PER_S


@pytest.fixture(scope="module")
def peer() -> Peer:
    """A holder of another maker, which the fleet knows; it serves blocks as its mode says."""
    return Peer(replies={
        "POST leases": (201, {"lease": LEASE, "ttl_ms": 60_000}), "DELETE leases": (204, None),
    })  # fmt: skip


@pytest.fixture(scope="module")
def abused(peer: Peer) -> Iterator[RunningStack]:
    running: list[Server] = []

    def edit(layout: Layout) -> None:
        uri, _, _ = pki.add_identity(layout, STRANGER)
        running.append(Server(peer, _credentials(layout, "envoy")))
        policy = tomllib.loads(layout.policy.read_text())
        identities = policy["identities"]
        scopes = identities[identity_uri("h1")]["scopes"]
        identities[uri] = {"roles": ["holder"], "base_uris": [peer.base], "scopes": scopes}
        for name in ("ii1", "ii2"):
            identities[identity_uri(name)]["withdraw_for"] = [peer.base]
            config = tomllib.loads(layout.config(name).read_text())
            config["holders"].append({"base_uri": peer.base})
            files = _credentials(layout, name)
            config["https"] = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
            config["fetch_timeout_ms"] = 1000
            write_private(layout.config(name), dumps(config).encode())
        write_private(layout.policy, dumps(policy).encode())

    overrides = {"placement": {"session_checkpoints_per_s": CHECKPOINTS_PER_S}}
    try:
        with temporary_layout() as layout, start_fleet(layout, overrides, edit) as started:
            yield started
    finally:
        for server in running:
            server.stop()


def _credentials(layout: Layout, name: str) -> Credentials:
    return Credentials(layout.pki / "ca.pem", layout.pki / f"{name}.pem", layout.pki / f"{name}-key.pem")


@pytest.fixture(scope="module")
def expected(abused: RunningStack) -> dict[Ask, str]:
    return undisturbed(abused)


# --- sources ------------------------------------------------------------------------------


def direct(
    fleet: RunningStack, instance: str, blocks: Sequence[tuple[str, list[str]]], deadline_ms: int = 20_000
) -> dict[str, Any]:
    """The outcome of a directive: block keys, each with its sources."""
    base = fleet.instances[instance]
    body = {
        "directive": str(uuid.uuid4()), "scope_id": fleet.scope_id(),
        "compat_id": fleet.compat_id(shape_of(fleet)), "deadline_ms": deadline_ms, "lease_ms": 10_000,
        "blocks": [{"block_key": key, "sources": sources} for key, sources in blocks],
        "layer_order": "ascending",
    }  # fmt: skip
    assert fleet.request("POST", f"{base}prefetch", body, identity="pc").status == 202

    def outcome() -> dict[str, Any] | None:
        status = fleet.request("GET", f"{base}prefetch/{body['directive']}", identity="pc").json()
        return None if status["state"] == "pending" else dict(status)

    return eventually(outcome, "the directive does not end")


def publish(fleet: RunningStack, peer: Peer, names: Sequence[str]) -> None:
    """The stranger says that it has these blocks."""
    peer.octets = container_of(shape_of(fleet))
    endpoints = Endpoints(index=fleet.index, holders=frozenset({peer.base}))
    with Client(_credentials(fleet.layout, STRANGER), endpoints) as stranger:
        for name in names:
            changes = {
                "block_key": name, "compat_id": fleet.compat_id(shape_of(fleet)), "scope_id": fleet.scope_id()
            }  # fmt: skip
            stranger.publish(record_of(peer.base, peer.octets, **changes))


def listed(fleet: RunningStack, names: Sequence[str]) -> int:
    """How many leading blocks the index knows."""
    with client_of(fleet) as client:
        return client.lookup(fleet.scope_id(), fleet.compat_id(shape_of(fleet)), names).matched


@pytest.mark.spec("R-130", "R-155", "R-161", "R-162", "D4", "D11", "U-18", "U-47")
@pytest.mark.parametrize("mode", ["flipped", "dripping"])
def test_a_source_that_lies_or_never_ends(
    abused: RunningStack, expected: dict[Ask, str], peer: Peer, mode: str
) -> None:
    known = Ask(f"True, {mode}. {PROMPT}", tokens=8)
    (true, *_), names = block_names(abused, known.prompt), block_names(abused, f"Said, {mode}. {3 * PROMPT}")
    ask(abused, known)
    eventually(lambda: listed(abused, [true]), "not published")
    peer.mode = mode
    blocks = [(true, [abused.holder, abused.instances["ii1"]]), *((name, [peer.base]) for name in names)]

    def directed() -> bool:
        """A directive ends with what is true alone. Was the peer asked?"""
        asked = peer.count("GET")
        outcome = direct(abused, "ii2", blocks, 20_000 if mode == "flipped" else 800)
        assert (outcome["state"], outcome["loaded"]) == ("partial", [true])
        return peer.count("GET") > asked

    def unlisted() -> bool:
        """Was every lie found out, and reported?"""
        directed()
        return not listed(abused, names)

    def generated(attempt: int) -> bool:
        """A session computes what it cannot load. Was the peer asked?"""
        promised = Ask(f"Promised {attempt}, {mode}. {3 * PROMPT}", tokens=40)
        publish(abused, peer, block_names(abused, promised.prompt))
        asked, answer = peer.count("GET"), ask(abused, promised)
        assert (answer.text, answer.cached_tokens) == (undisturbed(abused, [promised])[promised], 0)
        return peer.count("GET") > asked

    attempts = itertools.count()
    with streaming(abused, expected) as streams:
        publish(abused, peer, names)
        eventually(directed, "the peer was not asked for the blocks of a directive")
        if mode == "flipped":
            eventually(unlisted, "what does not match is still listed")
            assert count(abused, "ii2", "kvsp_instance_digest_failures_total", where="fetch") > 0
        eventually(lambda: generated(next(attempts)), "the peer was not asked for the blocks of a session")
        streams.finish()


@pytest.mark.spec("D10", "U-20", "R-125")
def test_a_source_that_nobody_registered_is_never_connected(
    abused: RunningStack, expected: dict[Ask, str]
) -> None:
    known = Ask(f"Registered. {PROMPT}", tokens=8)
    (true, *_) = block_names(abused, known.prompt)
    foreign = block_names(abused, f"Unregistered. {PROMPT}")
    ask(abused, known)
    eventually(lambda: listed(abused, [true]), "not published")
    with streaming(abused, expected) as streams, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        elsewhere = f"https://localhost:{listener.getsockname()[1]}/"
        outcome = direct(abused, "ii1", [(name, [elsewhere]) for name in foreign])
        assert (outcome["state"], outcome["loaded"]) == ("failed", [])
        sources = [elsewhere, "moqt://localhost/", abused.holder, *abused.instances.values()]
        outcome = direct(abused, "ii1", [(true, sources)])
        assert (outcome["state"], outcome["loaded"]) == ("complete", [true])
        streams.finish()
        with pytest.raises(BlockingIOError):
            listener.accept()


# --- floods and epochs --------------------------------------------------------------------


def _pour(client: Client, checkpoint: SessionCheckpoint) -> None:
    for _ in range(FLOOD):
        assert client.put_checkpoint(checkpoint).output_offset > 0  # what is recorded stays


@pytest.mark.spec("D13", "R-214")
def test_a_flood_of_checkpoints_harms_nobody(abused: RunningStack, expected: dict[Ask, str]) -> None:
    with streaming(abused, expected) as streams:
        streams.come(64)  # each has been checkpointed
        answer = streams.slowest()
        again = empty_checkpoint(abused, answer.placement["session"], answer.placement["epoch"])
        flood = msgspec.convert(again, SessionCheckpoint)
        with client_of(abused, where(answer)) as client, pytest.raises(KvspError) as refused:
            _pour(client, flood)
        assert refused.value.problem is registry.TOO_MANY_REQUESTS
        assert refused.value.retry_after_s
        streams.finish()


@pytest.mark.spec("D12", "R-103", "U-34")
def test_epochs_that_cannot_be_lock_out_nobody_else(abused: RunningStack, expected: dict[Ask, str]) -> None:
    far = count(abused, "placement", "kvsp_placement_far_epochs_total")
    with streaming(abused, expected) as streams:
        # "only the PC increments"
        answer = streams.slowest()
        refused = put_checkpoint(abused, where(answer), answer.placement["session"], limits.INT_MAX)
        assert_problem(refused, 409)
        for epoch in (limits.INT_MAX + 1, -1):
            assert put_status(abused, "ii3", epoch).status == 400
        for epoch in (limits.INT_MAX, limits.INT_MAX):
            assert put_status(abused, "ii3", epoch).status == 200
        assert count(abused, "placement", "kvsp_placement_far_epochs_total") == far + 2
        now_ms = time.time_ns() // 1_000_000
        assert_problem(put_status(abused, "ii3", now_ms), 409, "kvsp-stale-epoch")
        # One whose epoch cannot rise any more ends with its instance.
        assert put_checkpoint(abused, "ii3", str(uuid.uuid4()), limits.INT_MAX).status == 201
        streams.finish()
    # "operator reset", once the record that locks it out has expired
    eventually(lambda: states(abused)["ii3"] == "failed", "its record does not expire")
    assert abused.background.call(_reset_epoch(abused, "ii3")) == limits.INT_MAX
    assert put_status(abused, "ii3", now_ms).status == 200


async def _reset_epoch(fleet: RunningStack, name: str) -> int:
    async with fleet.background.stack.controller() as controller:
        return await controller.reset_epoch(fleet.instances[name])
