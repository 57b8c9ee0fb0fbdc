"""Who may do what (D1): every identity x every resource x own, foreign and nonexistent scope, over HTTPS."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.stack.harness import Reply
from tests.stack.ruled import NOWHERE, A, B, C, start_ruled
from tests.stack.wire import NOT_FOUND, PLAIN, SCOPE_DENIED, Wire, box, expect, hex32, holder_id, same

pytestmark = pytest.mark.stack

IDENTITIES = [
    "pc",
    "ii1",
    "ii2",
    "h1",
    "deputy",
    "client-demo",
    "client-other",
    "is",
    "outsider",
    "no-uri",
    "two-uris",
]
"""`deputy` may publish and withdraw for ii1, pc withdraw for all; ids, roles and scopes are in ruled.py."""

# Own / foreign / nonexistent scope. S: 403 kvsp-scope-denied, R: 403 about:blank, N: 404 kvsp-not-found.
TABLE = {
    "POST lookup":
        "200/S/S 200/S/S 200/S/S 200/S/S 200/S/S 200/S/S 200/S/S R/R/R R/R/R R/R/R R/R/R",
    "PUT replicas of h1":
        "R/R/R   R/R/R   R/R/R   201/S/S R/R/R   R/R/R   R/R/R   R/R/R R/R/R R/R/R R/R/R",
    "PUT replicas of ii1":
        "R/R/R   201/S/S R/R/R   R/R/R   201/S/S R/R/R   R/R/R   R/R/R R/R/R R/R/R R/R/R",
    "PUT replicas of ii2":
        "R/R/R   R/R/R   201/S/S R/R/R   R/R/R   R/R/R   R/R/R   R/R/R R/R/R R/R/R R/R/R",
    "DELETE replicas of h1":
        "204/N/N R/R/R   R/R/R   204/N/N R/R/R   R/R/R   R/R/R   R/R/R R/R/R R/R/R R/R/R",
    "DELETE replicas of ii1":
        "204/N/N 204/N/N R/R/R   R/R/R   204/N/N R/R/R   R/R/R   R/R/R R/R/R R/R/R R/R/R",
    "DELETE replicas of ii2":
        "204/N/N R/R/R   204/N/N R/R/R   R/R/R   R/R/R   R/R/R   R/R/R R/R/R R/R/R R/R/R",
    "GET blocks":
        "200/S/S 200/S/S 200/S/S 200/S/S 200/S/S 200/S/S 200/S/S R/R/R R/R/R R/R/R R/R/R",
    "HEAD blocks":
        "200/S/S 200/S/S 200/S/S 200/S/S 200/S/S 200/S/S 200/S/S R/R/R R/R/R R/R/R R/R/R",
    "PUT blocks":
        "201/S/S 201/S/S 201/S/S 201/S/S 201/S/S 201/S/S 201/S/S R/R/R R/R/R R/R/R R/R/R",
    "POST leases":
        "201/S/S 201/S/S 201/S/S 201/S/S 201/S/S 201/S/S 201/S/S R/R/R R/R/R R/R/R R/R/R",
    "PUT leases/{id}":
        "200/N/N 200/N/N 200/N/N 200/N/N 200/N/N 200/N/N 200/N/N N/N/N R/R/R R/R/R R/R/R",
    "DELETE leases/{id}":
        "204/N/N 204/N/N 204/N/N 204/N/N 204/N/N 204/N/N 204/N/N N/N/N R/R/R R/R/R R/R/R",
}  # fmt: skip
PROBLEMS = {"S": (403, SCOPE_DENIED), "R": (403, PLAIN), "N": (404, NOT_FOUND)}

# Resources of roles that have no process behind this stack's Envoy name nothing there, for anyone.
# test_fleet_matrix.py has those of instances and of the placement controller.
NOT_SERVED = [
    "POST ii1/prefetch", "GET ii1/prefetch/a2b7c9e0-1f3d-4c1a-8f5b-6d2e9a7c3b10",
    "HEAD ii1/prefetch/a2b7c9e0-1f3d-4c1a-8f5b-6d2e9a7c3b10",
    "POST ii2/sessions/6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11/resume", "POST ii1/reshard", "PUT ii1/state",
]  # fmt: skip

WITH_SCOPES = IDENTITIES[:7]
FOREIGN = {"ii1": C, "ii2": C, "h1": C, "client-other": A}
READERS = {A: "client-demo", B: "client-other", C: "vault"}
HELD = {"h1": {A, B}, "ii1": {A, B}, "ii2": {A, B}}
CASES = [(row, name) for row in TABLE for name in IDENTITIES]


class Matrix:
    """One method a resource: make what it needs, send the request, and see that a refusal changed nothing."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.bases = {name: wire.index.replace("/is/", f"/{name}/") for name in ("h1", "ii1", "ii2", "vault")}
        self.keys: dict[str, str] = {NOWHERE: hex32(), C: hex32()}
        for scope in (A, B):
            self.keys[scope] = hex32()
            url = wire.block_url(self.keys[scope], scope=scope)
            expect(wire.put(url, box(), identity=READERS[scope]), 201)
        for scope in (A, B):  # which the holder publishes; the lookup of C finds the vault's record
            wire.listed([self.keys[scope]], READERS[scope], scope_id=scope)
        expect(self.publish("vault", C, self.keys[C]), 201)

    def publish(self, holder: str, scope: str, key: str, identity: str = "") -> Reply:
        record = self.wire.record(self.bases[holder], scope_id=scope, block_key=key)
        return self.wire.publish(record, identity or holder)

    def matched(self, scope: str, key: str) -> int:
        """What those see who may look; a scope that is nobody's holds nothing."""
        if scope == NOWHERE:
            return 0
        return int(self.wire.lookup([key], READERS[scope], scope_id=scope)["matched"])

    def lookup(self, identity: str, scope: str) -> Reply:
        question = self.wire.question([self.keys[scope]], scope_id=scope)
        reply = self.wire.call("POST", self.wire.index + "lookup", question, identity=identity)
        assert reply.status != 200 or reply.json()["matched"] == 1
        return reply

    def put_replica(self, holder: str, identity: str, scope: str) -> Reply:
        key = hex32()
        reply = self.publish(holder, scope, key, identity)
        assert self.matched(scope, key) == (reply.status == 201)
        return reply

    def delete_replica(self, holder: str, identity: str, scope: str) -> Reply:
        key = hex32()
        if scope != NOWHERE:
            expect(self.publish(holder if scope in HELD[holder] else "vault", scope, key), 201)
        url = f"{self.wire.index}replicas/{holder_id(self.bases[holder])}/{key}"
        reply = self.wire.call("DELETE", url, identity=identity)
        assert self.matched(scope, key) == (scope != NOWHERE and reply.status != 204)
        return reply

    def read(self, method: str, identity: str, scope: str) -> Reply:
        return self.wire.call(method, self.wire.block_url(self.keys[scope], scope=scope), identity=identity)

    def write(self, identity: str, scope: str) -> Reply:
        url = self.wire.block_url(hex32(), scope=scope)
        reply = self.wire.put(url, box(), identity=identity)
        if scope in (A, B):
            found = self.wire.call("HEAD", url, identity=READERS[scope])
            assert found.status == (200 if reply.status == 201 else 404)
        return reply

    def make_lease(self, identity: str, scope: str) -> Reply:
        reply = self.wire.lease([self.keys[scope]], identity, scope_id=scope)
        if reply.status == 201:
            self.end(reply.json()["lease"], identity)
        return reply

    def use_lease(self, method: str, identity: str, scope: str) -> Reply:
        """Own: its own lease, if it can have one. Foreign: another's. Nonexistent: a lease that never was."""
        another = "deputy" if identity == "client-demo" else "client-demo"
        owner = identity if identity in WITH_SCOPES and scope == own_scope(identity) else another
        lease = str(uuid.uuid4())
        if scope != NOWHERE:
            lease = expect(self.wire.lease([self.keys[own_scope(owner)]], owner), 201).json()["lease"]
        url = f"{self.wire.holder}leases/{lease}"
        body = {"ttl_ms": 50000} if method == "PUT" else None
        reply = self.wire.call(method, url, body, identity=identity)
        if scope != NOWHERE and reply.status != 204:
            self.end(lease, owner)
        return reply

    def end(self, lease: str, owner: str) -> None:
        expect(self.wire.call("DELETE", f"{self.wire.holder}leases/{lease}", identity=owner), 204)

    def send(self, row: str, identity: str, scope: str) -> Reply:
        method, *rest = row.split()
        senders: dict[str, Callable[[], Reply]] = {
            "POST lookup": lambda: self.lookup(identity, scope),
            "PUT replicas": lambda: self.put_replica(rest[-1], identity, scope),
            "DELETE replicas": lambda: self.delete_replica(rest[-1], identity, scope),
            "GET blocks": lambda: self.read("GET", identity, scope),
            "HEAD blocks": lambda: self.read("HEAD", identity, scope),
            "PUT blocks": lambda: self.write(identity, scope),
            "POST leases": lambda: self.make_lease(identity, scope),
            "PUT leases/{id}": lambda: self.use_lease("PUT", identity, scope),
            "DELETE leases/{id}": lambda: self.use_lease("DELETE", identity, scope),
        }
        return senders[f"{method} {rest[0]}"]()


def own_scope(identity: str) -> str:
    """Whoever has no scope tries A."""
    return B if identity == "client-other" else A


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with start_ruled() as wire:
        yield Matrix(wire)


@pytest.mark.spec("D1", "D8", "R-024", "R-081", "R-082", "R-089", "R-094", "R-158", "R-210", "U-09", "U-39")
@pytest.mark.spec("U-17", "U-47", "R-140", "R-162")
@pytest.mark.parametrize(("row", "identity"), CASES, ids=[f"{row}, {name}" for row, name in CASES])
def test_every_cell(matrix: Matrix, row: str, identity: str) -> None:
    cells = TABLE[row].split()[IDENTITIES.index(identity)].split("/")
    scopes = own_scope(identity), FOREIGN.get(identity, B), NOWHERE
    replies = [matrix.send(row, identity, scope) for scope in scopes]
    for cell, reply in zip(cells, replies, strict=True):
        expect(reply, *PROBLEMS[cell]) if cell in PROBLEMS else expect(reply, int(cell))
    # "foreign and nonexistent must be indistinguishable", to the octet
    assert same(*replies[1:])


@pytest.mark.spec("D1", "R-060", "R-069")
@pytest.mark.parametrize("row", NOT_SERVED)
def test_resources_of_roles_without_a_process(matrix: Matrix, row: str) -> None:
    method, path = row.split()
    origin = matrix.wire.index.removesuffix("is/")
    below_holder = "h1/" + path.partition("/")[2]
    for identity in IDENTITIES:
        for where in (path, below_holder):
            reply = matrix.wire.call(method, origin + where, {} if method[0] == "P" else None, identity=identity)
            unknown = where == below_holder and identity in ("no-uri", "two-uris")
            expect(reply, 403 if unknown else 404)


@pytest.mark.spec("D1", "U-15", "U-16", "D8")
def test_a_lease_by_key_alone_tells_nothing_of_foreign_blocks(matrix: Matrix) -> None:
    wire = matrix.wire
    key = hex32()
    before = wire.lease([key])
    expect(wire.put(wire.block_url(key, scope=B), box(), identity="client-other"), 201)
    after = wire.lease([key])
    assert expect(before, 404, NOT_FOUND).json()["block_keys"] == [key]
    assert same(before, after)
