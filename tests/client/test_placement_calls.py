"""The controller's calls to an instance that has no internal address: over HTTPS, at its base URI."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvsp.client import Credentials
from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ResumeRequest
from kvsp.rpc.config import Party, Tls
from services.placement.instances import Instances
from tests.client.peers import Peer
from tests.client.test_roles import CASES, CHECKPOINT, DIRECTIVE, LOADED, PREFETCH, RESUMED

Serve = Callable[..., Peer]
PRINCIPAL = "spiffe://t/pc"


@pytest.fixture
def https(credentials: Credentials) -> Tls:
    return Tls(str(credentials.ca), str(credentials.cert), str(credentials.key))


@pytest.mark.spec("R-107", "R-125", "R-129", "R-179", "R-062", "U-35")
async def test_every_call_reaches_the_resource(serve: Serve, https: Tls) -> None:
    peer = serve()
    peer.replies = {
        "POST prefetch": (202, LOADED),
        "GET prefetch": (200, LOADED),
        "POST sessions": (202, RESUMED),
        "PUT state": (200, {"state": "draining"}),
    }
    instances = Instances(PRINCIPAL, [Party(peer.base)], https)
    calls = instances[peer.base]
    assert (await calls.prefetch(PREFETCH)).state == "partial"
    assert (await calls.directive(DIRECTIVE)).state == "partial"
    await calls.resume(ResumeRequest(2, CHECKPOINT))
    assert await calls.put_state("draining") == "draining"
    wanted = [CASES[name][2][:2] for name in ("prefetch", "directive", "resume", "state")]
    assert peer.seen == [(method, f"/{path}") for method, path in wanted]
    assert json.loads(peer.bodies[2])["epoch"] == 2
    await instances.close()


@pytest.mark.spec("R-065", "R-182")
async def test_what_an_instance_refuses_is_refused(serve: Serve, https: Tls) -> None:
    peer = serve()
    problem = {"type": registry.STALE_EPOCH.uri, "title": "x", "status": 409}
    peer.replies["POST sessions"] = (409, problem)
    instances = Instances(PRINCIPAL, [Party(peer.base)], https)
    with pytest.raises(KvspError) as error:
        await instances[peer.base].resume(ResumeRequest(2, CHECKPOINT))
    assert error.value.problem == registry.STALE_EPOCH
    await instances.close()


@pytest.mark.spec("D10")
async def test_nobody_else_is_called(serve: Serve, https: Tls) -> None:
    peer = serve()
    instances = Instances(PRINCIPAL, [Party("https://ii1.example/")], https)
    for uri in (peer.base, "https://ii2.example/"):
        with pytest.raises(KvspError) as error:
            _: Any = instances[uri]
        assert error.value.problem == registry.UNAVAILABLE
    assert peer.seen == []
    await instances.close()
