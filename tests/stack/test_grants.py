"""What only a policy of its own can show: grants, trusted holders, MOQT records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.stack.ruled import MOQT, A, B, C, start_ruled
from tests.stack.wire import (
    NOT_FOUND,
    PLAIN,
    SCOPE_DENIED,
    Wire,
    b64url,
    box,
    expect,
    hex32,
)

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with start_ruled() as started:
        yield started


@pytest.mark.spec("R-211", "R-081", "R-082")
def test_only_holders_trusted_for_the_scope(wire: Wire) -> None:
    vault = wire.index.replace("/is/", "/vault/")
    record = wire.record(vault, scope_id=A)
    expect(wire.publish(record, "deputy"), 403, SCOPE_DENIED)  # a grant, and the scope; the vault lacks it
    expect(wire.publish(wire.record(vault, scope_id=C), "vault"), 201)
    expect(wire.call("GET", wire.block_url(hex32(), scope=C), identity="vault"), 403, SCOPE_DENIED)
    expect(wire.put(wire.block_url(hex32(), scope=C), box(), identity="vault"), 403, SCOPE_DENIED)
    expect(wire.lease([hex32()], "vault", scope_id=C), 403, SCOPE_DENIED)
    assert wire.lookup([record["block_key"]])["matched"] == 0


@pytest.mark.spec("R-024", "R-094")
def test_the_same_key_in_two_scopes(wire: Wire) -> None:
    key = hex32()
    expect(wire.publish(wire.record(wire.ii1, block_key=key, scope_id=B)), 201)
    assert wire.lookup([key], scope_id=A)["matched"] == 0
    assert wire.lookup([key], "client-other", scope_id=B)["matched"] == 1


@pytest.mark.spec("U-47", "R-162", "R-089")
def test_a_bad_replica_is_withdrawn_with_a_grant_only(wire: Wire) -> None:
    record = wire.record(wire.ii1)
    expect(wire.publish(record), 201)
    expect(wire.call("DELETE", wire.replica_url(record)), 403)
    assert wire.lookup([record["block_key"]])["matched"] == 1
    expect(wire.call("DELETE", wire.replica_url(record), identity="deputy"), 204)
    expect(wire.call("DELETE", wire.replica_url(record), identity="deputy"), 404, NOT_FOUND)


def fields(*lengths: int) -> bytes:
    return b"".join(bytes((length,)) + b"x" * length for length in lengths)


@pytest.mark.spec("R-045", "R-040")
@pytest.mark.parametrize(
    ("namespace", "status"),
    [
        (b64url(fields(1, 2, 3, 4, 5)), 201),
        (b64url(fields(1, 1, 1, 1, 255)), 201),
        (b64url(fields(1, 2, 3, 4)), 400),
        (b64url(fields(1, 2, 3, 4, 5, 6)), 400),
        (b64url(fields(1, 0, 3, 4, 5)), 400),
        (b64url(fields(1, 1, 1, 1, 1) + b"\1"), 400),
        (b64url(fields(1, 1, 1, 1, 2)[:-1]), 400),
        (b64url(fields(1, 1, 1, 1, 2)) + "=", 400),
        (b64url(fields(1, 1, 1, 1, 2))[:-1] + "+", 400),
        ("", 400),
        (5, 400),
        (None, 400),
    ],
)
def test_moqt_records(wire: Wire, namespace: Any, status: int) -> None:
    record = wire.record(MOQT, moqt_namespace=namespace)
    expect(wire.publish(record), status)
    found = wire.lookup([record["block_key"]])
    assert found["matched"] == (status == 201)
    assert status != 201 or found["replicas"][0][0]["moqt_namespace"] == namespace
    # "The publisher of that namespace is the holder for the purposes of authorization"
    expect(wire.publish(record, "ii2"), 403, PLAIN)
