from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvsp.client import Client, Lease
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from tests.client.peers import COMPAT, KEY, LEASE, SCOPE, Peer

Serve = Callable[..., Peer]
Connect = Callable[..., Client]
NOT_FOUND = (404, {"type": "https://iana.org/assignments/kvsp#kvsp-not-found", "status": 404})


@pytest.fixture
def holder(serve: Serve) -> Peer:
    peer = serve()
    peer.replies |= {
        "POST leases": (201, {"lease": LEASE, "ttl_ms": 90}),
        "PUT leases": (200, {"lease": LEASE, "ttl_ms": 60}),
        "DELETE leases": (204, None),
    }
    return peer


@pytest.mark.spec("R-140", "U-14")
def test_a_lease_is_renewed_while_open_and_released_at_exit(holder: Peer, connect: Connect) -> None:
    with connect(None, holder).lease(holder.base, [KEY], 100, scope_id=SCOPE, compat_id=COMPAT) as lease:
        assert (lease.id, lease.ttl_ms) == (LEASE, 90)
        assert lease.wait_renewed(2, 30)
        assert lease.ttl_ms == 60
        lease.check()
    assert [method for method, _ in holder.seen[:3]] == ["POST", "PUT", "PUT"]
    assert holder.seen[-1] == ("DELETE", f"/leases/{LEASE}")
    assert holder.seen[1][1] == f"/leases/{LEASE}"
    created = json.loads(holder.bodies[0])
    assert created == {"block_keys": [KEY], "ttl_ms": 100, "scope_id": SCOPE, "compat_id": COMPAT}
    assert json.loads(holder.bodies[1]) == {"ttl_ms": 100}


@pytest.mark.spec("R-142")
def test_a_refused_lease_is_raised(holder: Peer, connect: Connect) -> None:
    quota = {"type": "https://iana.org/assignments/kvsp#kvsp-lease-quota", "status": 429}
    holder.replies["POST leases"] = (429, quota)
    with pytest.raises(KvspError) as caught, connect(None, holder).lease(holder.base, [KEY], 100):
        pytest.fail("entered")
    assert caught.value.problem == registry.LEASE_QUOTA
    with pytest.raises(KvspError):
        connect(None, holder).lease(holder.base, [], 100)


@pytest.mark.spec("R-140", "R-141")
def test_a_lost_lease_is_told(holder: Peer, connect: Connect) -> None:
    holder.replies["PUT leases"] = holder.replies["DELETE leases"] = NOT_FOUND
    with connect(None, holder).lease(holder.base, [KEY], 100) as lease:
        assert not lease.wait_renewed(1, 30)
        with pytest.raises(KvspError) as caught:
            lease.check()
        assert caught.value.problem == registry.NOT_FOUND


@pytest.mark.spec("R-141", "U-14")
def test_a_lease_is_over_with_its_time_though_no_renewal_was_answered(holder: Peer, connect: Connect) -> None:
    now = [100.0]
    holder.replies["POST leases"] = (201, {"lease": LEASE, "ttl_ms": 9000})
    client = connect(None, holder)
    calls = client.lease(holder.base, [KEY], 9000)._calls
    with Lease(calls, lambda: now[0]) as lease:
        now[0] += 8.9
        lease.check()
        now[0] += 0.1
        with pytest.raises(KvspError) as caught:
            lease.check()
    assert caught.value.problem == registry.UNAVAILABLE


def test_a_failed_renewal_is_tried_again(holder: Peer, connect: Connect) -> None:
    holder.replies["POST leases"] = (201, {"lease": LEASE, "ttl_ms": 9000})
    holder.replies["PUT leases"] = (503, {"type": "about:blank", "status": 503})
    client = connect(None, holder)
    with client.lease(holder.base, [KEY], 9000) as lease:
        lease.renew_now()
        holder.wait_count("PUT", 2)
        holder.replies["PUT leases"] = (200, {"lease": LEASE, "ttl_ms": 9000})
        assert lease.wait_renewed(1, 30)
        lease.check()
