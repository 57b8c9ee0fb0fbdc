"""Who may do what at a controller and at instances (D1), over HTTPS against the real ones."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from kvsp.client import Client, load_stack
from kvsp.protocol import descriptor, keys
from kvsp.protocol.names import party_id
from tests.stack.harness import RunningStack

pytestmark = pytest.mark.stack

UNKNOWN = str(uuid.uuid4())
TABLE = {
    "PUT pc instances/{ii1}/status": {"ii1"},
    "PUT pc sessions/{unknown}/checkpoint": {"ii1", "ii2", "ii3"},
    "POST ii1 prefetch": {"pc"},
    "GET ii1 prefetch/{unknown}": {"pc"},
    "HEAD ii1 prefetch/{unknown}": {"pc"},
    "POST ii1 sessions/{unknown}/resume": {"pc"},
    "POST ii1 reshard": {"pc"},
    "PUT ii1 state": {"pc"},
}


@pytest.mark.spec("D1", "R-104", "R-107", "R-126", "R-174", "R-182", "R-197", "R-210", "U-09")
@pytest.mark.parametrize("row", TABLE)
def test_every_cell(fleet: RunningStack, row: str) -> None:
    method, role, path = row.split()
    base = fleet.placement if role == "pc" else fleet.instances[role]
    url = base + path.format(ii1=party_id(fleet.instances["ii1"]), unknown=UNKNOWN)
    body = {} if method in {"PUT", "POST"} else None
    for name in fleet.endpoints["identities"]:
        reply = fleet.request(method, url, body, identity=name)
        # an empty object is bad and no directive has that id, which only those hear who may ask
        allowed = 404 if body is None else 400
        assert reply.status == (allowed if name in TABLE[row] else 403), name
        if reply.status == 403 and method != "HEAD":
            assert reply.json()["type"] == "about:blank"


@pytest.mark.spec("R-074", "R-140", "R-150", "R-171")
def test_an_instance_serves_its_blocks_and_leases_at_its_own_base_uri(fleet: RunningStack) -> None:
    me = load_stack(fleet.layout.endpoints, "client-demo")
    assert me.descriptor is not None
    shape = descriptor.load(me.descriptor.read_bytes())
    prompt = f"{uuid.uuid4()} " * 3
    body = {"model": shape.model, "prompt": prompt, "max_tokens": 1}
    url = f"{fleet.frontend}v1/completions"
    assert fleet.request("POST", url, body, {"content-type": "application/json"}).status == 200
    tokens = _tokens(fleet, prompt)
    scope_key, compat = fleet.scope_key("demo"), descriptor.compat_id(shape)
    names = [key.hex() for key in keys.block_keys(scope_key, compat, tokens, shape.block_tokens)]
    with Client(me.credentials, me.endpoints) as client:
        records = _records(client, me.scopes["demo"], compat.hex(), names[0], set(fleet.instances.values()))
        with client.lease(records[0].holder, [records[0].block_key], ttl_ms=5000):
            block = client.get(records, descriptor=shape)
    assert len(block.layer(0)[1]) == shape.section_octets


def _tokens(fleet: RunningStack, text: str) -> list[int]:
    from tokenizers import Tokenizer

    model: Path | None = fleet.background.stack.model
    assert model is not None
    return list(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


def _records(client: Client, scope: str, compat: str, key: str, holders: set[str]) -> list:
    """Replicas at instances, once they are published."""
    while True:
        found = client.lookup(scope, compat, [key]).replicas
        if at := [each for row in found for each in row if each.holder in holders]:
            return at
