"""The Placement Controller over real sockets, with a real index and stub instances."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from structlog.testing import capture_logs

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.names import party_id
from kvsp.protocol.records import LookupRequest
from kvsp.rpc.errors import from_rpc_error
from kvsp.v1 import placement_pb2
from services.placement import metrics
from services.placement.store import StoreError
from tests.services.placement_records import (
    COMPAT,
    H1,
    OTHER_COMPAT,
    OTHER_SCOPE,
    SCOPE,
    A,
    B,
    checkpoint,
    keys,
    refused,
    session_id,
    status,
)
from tests.services.placement_world import World, until, world
from tests.services.rpc import problem_of


@pytest.fixture
async def pc(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


# --- authorization and the order of checks --------------------------------------------


@pytest.mark.spec("R-104", "R-210", "D1")
@pytest.mark.parametrize(
    ("name", "instance", "problem"),
    [
        ("ii1", A, None),
        ("ii2", A, registry.FORBIDDEN),
        ("h1", A, registry.FORBIDDEN),
        ("h1", H1, registry.FORBIDDEN),
        ("pc", A, registry.FORBIDDEN),
        ("is", A, registry.FORBIDDEN),
        ("fe", A, registry.FORBIDDEN),
        ("client", A, registry.FORBIDDEN),
        ("nobody", A, registry.FORBIDDEN),
    ],
)
async def test_who_may_report(pc: World, name: str, instance: str, problem: registry.ProblemType | None) -> None:
    if problem is None:
        assert await pc.report(status(instance), name) == "active"
    else:
        with refused(problem):
            await pc.report(status(instance), name)


@pytest.mark.spec("R-104", "R-046", "R-103")
async def test_a_status_is_checked_before_it_counts(pc: World) -> None:
    with refused(registry.BAD_REQUEST):
        await pc.report(status(B), "ii1", party_id(A))
    with refused(registry.BAD_REQUEST):
        await pc.report(status(A, kv_utilization=2.0))
    with refused(registry.FORBIDDEN):  # role and party come before what the body says
        await pc.report(status(A, kv_utilization=2.0), "ii2")
    await pc.report(status(A, epoch=12))
    with refused(registry.STALE_EPOCH):
        await pc.report(status(A, epoch=11))


@pytest.mark.spec("R-174", "R-210", "D1", "D8")
@pytest.mark.parametrize("name", ["pc", "h1", "is", "fe", "client", "nobody", "bare"])
async def test_only_instances_checkpoint(pc: World, name: str) -> None:
    with refused(registry.FORBIDDEN):
        await pc.put(name, checkpoint(1))


@pytest.mark.spec("R-174", "R-173", "U-34", "R-215")
async def test_a_checkpoint_is_checked_in_order(pc: World) -> None:
    await pc.report(status(A))
    await pc.report(status(B))
    assert await pc.put("ii1", checkpoint(1, 3, 1)) == (True, 3, 1)
    worst = {"scope_id": OTHER_SCOPE, "compat_id": OTHER_COMPAT}
    with refused(registry.BAD_REQUEST):  # path against body, before the scope
        await pc.put("ii2", checkpoint(1, 2, 1, **worst), session_id(2))
    with refused(registry.BAD_REQUEST):
        await pc.put("ii2", checkpoint(1, 2, 1, **worst), output_offset=2)
    with refused(registry.CONTENT_TOO_LARGE):
        await pc.put("ii2", checkpoint(1, 2, 1, prompt_blocks=keys(8193), **worst))
    foreign, unknown = [
        await _problem(pc, checkpoint(1, 2, 1, scope_id=scope)) for scope in (OTHER_SCOPE, "0c" * 16)
    ]
    assert foreign == unknown == (registry.SCOPE_DENIED, "")
    for epoch in (2, 3, 4):  # nor is a session of another scope told of
        assert await _problem(pc, checkpoint(1, epoch, 1, scope_id=OTHER_SCOPE), "ii3") == foreign
    with refused(registry.INCOMPATIBLE):
        await pc.put("ii2", checkpoint(1, 2, 1, compat_id=OTHER_COMPAT))
    with refused(registry.STALE_EPOCH):
        await pc.put("ii2", checkpoint(1, 2, 1))
    with refused(registry.CONFLICT):
        await pc.put("ii2", checkpoint(1, 4, 1))
    with refused(registry.FORBIDDEN):
        await pc.put("ii2", checkpoint(1, 3, 1))
    assert await pc.put("ii1", checkpoint(1, 3, 2), session_id(1).upper()) == (False, 3, 2)


async def _problem(pc: World, made: Any, name: str = "ii2") -> tuple[registry.ProblemType, str]:
    with pytest.raises(KvspError) as error:
        await pc.put(name, made)
    return error.value.problem, error.value.detail


@pytest.mark.spec("R-210", "D1", "R-094")
async def test_only_front_ends_assign_for_their_scopes(pc: World) -> None:
    await pc.report(status(A))
    for name in ("pc", "ii1", "h1", "is", "client", "nobody"):
        with refused(registry.FORBIDDEN):
            await pc.assign(name=name)
    with refused(registry.SCOPE_DENIED):
        await pc.assign(scope_id=OTHER_SCOPE)
    with refused(registry.BAD_REQUEST):  # the body before its scope
        await pc.assign(scope_id=OTHER_SCOPE, tokens=3)
    with refused(registry.UNAVAILABLE):  # ii1 may not have that scope, ii3 does not report
        await pc.assign(name="fe2", scope_id=OTHER_SCOPE)
    assert (await pc.assign()).binding.instance == A


@pytest.mark.spec("R-017")
async def test_with_descriptors_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "descriptor.json"
    path.write_text(
        '{"model":"m","model_digest":"sha-256:' + "0" * 64 + '","tokenizer_digest":"sha-256:' + "0" * 64 + '",'
        '"layers":4,"kv_heads":1,"head_dim":4,"kv_dtype":"fp32","positional":"rope","block_tokens":16,'
        '"layout":"kvsp-layout-1"}'
    )
    async with world(tmp_path, descriptors=(str(path),)) as pc:
        await pc.report(status(A))
        with refused(registry.INCOMPATIBLE):
            await pc.assign()
        with refused(registry.INCOMPATIBLE):
            await pc.put("ii1", checkpoint(1, 1, 1))


# --- assignment -----------------------------------------------------------------------


@pytest.mark.spec("R-119", "R-115", "R-128", "U-43")
async def test_a_request_goes_where_its_blocks_are(pc: World) -> None:
    await pc.report(status(A))
    await pc.report(status(B))
    for block in (0, 1):
        await pc.publish(block, B)
    reply = await pc.assign()
    assert (reply.binding.instance, reply.binding.epoch, reply.matched) == (B, 1, 2)
    assert reply.binding.session == session_id(1)
    assert reply.cost_us == 300
    first, second = reply.candidates
    assert (first.instance, first.fetch_us, first.recompute_all_us, first.cost_us) == (B, 0, 3_500, 300)
    assert (second.instance, second.cost_us) == (A, 3_500)
    assert reply.directive == ""


@pytest.mark.spec("R-125", "R-129", "R-051", "R-127")
async def test_blocks_are_on_their_way_before_the_request_is(tmp_path: Path) -> None:
    async with world(tmp_path, prefetch_deadline_ms=1, prefetch_lease_ms=777) as pc:
        await pc.report(status(A))
        for block in (0, 1):
            await pc.publish(block)
        pc.instances[A].gate.clear()
        reply = await pc.assign()  # does not wait for the instance
        assert pc.instances[A].directives == []
        pc.instances[A].gate.set()
        await pc.instances[A].until(lambda: pc.instances[A].asked)
        (directive,) = pc.instances[A].directives
        assert directive.directive == reply.directive
        assert [(each.block_key, each.sources) for each in directive.blocks] == [(key, [H1]) for key in keys(2)]
        assert (directive.scope_id, directive.compat_id) == (SCOPE, COMPAT)
        assert (directive.deadline_ms, directive.lease_ms, directive.request_ref) == (1, 777, session_id(1))


@pytest.mark.spec("R-088")
async def test_without_the_index_everything_is_computed(tmp_path: Path) -> None:
    made = World(tmp_path)
    async with made.serve() as pc:
        await pc.report(status(A))
        reply = await pc.assign()
        assert (reply.binding.instance, reply.matched, reply.cost_us) == (A, 0, 3_500)


@pytest.mark.spec("R-093", "U-41")
async def test_the_index_estimates_from_what_the_controller_feeds_it(pc: World) -> None:
    await pc.report(status(A))
    request = LookupRequest(SCOPE, COMPAT, keys(1))

    def estimated() -> Any:
        found = pc.index.lookup(
            bytes.fromhex(request.scope_id), bytes.fromhex(request.compat_id), [bytes(32)], 0, survey=True
        )
        return pc.index.estimate(found, A, 0).fetch_us

    await until(lambda: estimated() == 0)


@pytest.mark.spec("R-119")
async def test_a_command_starts_one_more_instance(tmp_path: Path) -> None:
    out = tmp_path / "wanted"
    script = f"import os; open({str(out)!r}, 'x').write(os.environ['KVSP_COMPAT_ID'])"
    async with world(tmp_path, want_instance=(sys.executable, "-c", script)) as pc:
        for n in range(3):
            with refused(registry.UNAVAILABLE):
                await pc.assign(n)
        await until(lambda: out.exists() and out.read_text())
        assert out.read_text() == COMPAT


async def test_a_command_that_does_not_exist_is_only_logged(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with world(tmp_path, want_instance=("/nonexistent",)) as pc:
            with refused(registry.UNAVAILABLE):
                await pc.assign()
            await until(lambda: any(line["log_level"] == "error" for line in logs))


# --- sessions -------------------------------------------------------------------------


@pytest.mark.spec("R-179", "R-180", "R-181", "R-173")
async def test_a_session_survives_its_instance(pc: World) -> None:
    await pc.report(status(A))
    await pc.assign()
    assert await pc.put("ii1", checkpoint(1, 1, 16)) == (True, 1, 16)
    follower = pc.follow()
    first = await follower.read()
    assert (first.instance, first.epoch) == (A, 1)
    await pc.report(status(B))
    await pc.report(status(A, state="failed"))
    second = await follower.read()
    assert (second.session, second.instance, second.epoch) == (session_id(1), B, 2)
    (request,) = pc.instances[B].resumes
    assert (request.epoch, request.checkpoint) == (2, checkpoint(1, 1, 16))
    with refused(registry.STALE_EPOCH):
        await pc.put("ii1", checkpoint(1, 1, 32))
    assert await pc.put("ii2", checkpoint(1, 2, 32)) == (False, 2, 32)
    await pc.end()
    assert not await follower.read()  # the stream has ended
    with refused(registry.STALE_EPOCH):
        await pc.put("ii2", checkpoint(1, 2, 48))


@pytest.mark.spec("R-101", "R-179")
async def test_expiry_is_noticed_without_anybody_asking(pc: World) -> None:
    await pc.report(status(A, ttl_ms=50))
    await pc.assign()
    await pc.report(status(B, ttl_ms=60_000))
    await pc.instances[B].until(lambda: pc.instances[B].resumes)


@pytest.mark.spec("R-179", "U-35")
async def test_other_instances_are_tried(pc: World) -> None:
    await pc.report(status(A))
    await pc.report(status(B, prefill_tokens_per_s=1))
    await pc.assign()
    pc.instances[A].refusals = [KvspError(registry.INVALID_STATE, "draining")]
    await pc.report(status(A, epoch=11))  # it restarts, is asked first, and refuses
    await pc.instances[B].until(lambda: pc.instances[B].resumes)
    assert pc.instances[B].resumes[0].epoch == 3
    assert pc.instances[A].resumes == []


@pytest.mark.spec("R-179")
async def test_a_session_waits_until_somebody_takes_it(pc: World) -> None:
    await pc.report(status(A))
    await pc.assign()
    pc.instances[A].refusals = [unavailable("no")]
    follower = pc.follow()
    assert (await follower.read()).epoch == 1
    await pc.report(status(A, epoch=11, ttl_ms=60_000))
    second = await follower.read()  # asked again after a while
    assert (second.instance, second.epoch) == (A, 3)


@pytest.mark.spec("D8", "R-210")
async def test_sessions_are_their_owners_alone(pc: World) -> None:
    await pc.report(status(A))
    await pc.assign()
    for session in (1, 2):
        error = from_rpc_error(await problem_of(pc.follow(session, "fe2")))
        assert (error.problem, error.detail) == (registry.NOT_FOUND, "no such session")
        with refused(registry.NOT_FOUND):
            await pc.end(session, "fe2")
    for name in ("ii1", "pc", "client"):
        assert from_rpc_error(await problem_of(pc.follow(1, name))).problem == registry.FORBIDDEN
        with refused(registry.FORBIDDEN):
            await pc.end(1, name)
    with refused(registry.BAD_REQUEST):
        await pc.call("EndSession", "fe", placement_pb2.SessionName(session="{x}"))
    await pc.end()
    with refused(registry.NOT_FOUND):
        await pc.end()


@pytest.mark.spec("D13")
async def test_followers_of_a_session_are_bounded(pc: World) -> None:
    await pc.report(status(A))
    await pc.assign()
    followers = [pc.follow() for _ in range(16)]
    for follower in followers:
        await follower.read()
    assert from_rpc_error(await problem_of(pc.follow())).problem == registry.TOO_MANY_REQUESTS
    followers[0].cancel()
    again = pc.follow()
    await until(lambda: again.done() is False)
    for follower in followers[1:]:
        follower.cancel()


# --- operators ------------------------------------------------------------------------


@pytest.mark.spec("R-107", "R-108", "U-36")
async def test_drain_and_wake(pc: World) -> None:
    await pc.report(status(A))
    assert await pc.order(A, "draining") == "draining"
    assert pc.instances[A].state == "draining"
    with refused(registry.UNAVAILABLE):
        await pc.assign()
    assert await pc.report(status(A, state="sleeping")) == "sleeping"
    assert await pc.order(A, "active") == "active"
    assert (await pc.assign()).binding.instance == A


@pytest.mark.spec("R-107", "U-36", "R-210")
async def test_orders_that_fail(pc: World) -> None:
    with refused(registry.NOT_FOUND):
        await pc.order(A, "draining")
    await pc.report(status(A))
    for name in ("fe", "ii1", "client", "is"):
        with refused(registry.FORBIDDEN):
            await pc.order(A, "draining", name)
    with refused(registry.BAD_REQUEST):
        await pc.order(A, "sleeping")
    pc.instances[A].refusals = [KvspError(registry.INVALID_STATE, "no")]
    with refused(registry.INVALID_STATE):
        await pc.order(A, "draining")
    assert (await pc.assign(1)).binding.instance == A
    pc.instances[A].refusals = [unavailable("no")]
    with refused(registry.UNAVAILABLE):
        await pc.order(A, "draining")
    assert await pc.report(status(A)) == "draining"  # it is told again
    await pc.instances[A].until(lambda: pc.instances[A].state == "draining")


@pytest.mark.spec("R-217")
async def test_what_an_operator_sees(pc: World) -> None:
    await pc.report(status(A, running=3))
    await pc.publish(0)
    await pc.assign()
    await pc.put("ii1", checkpoint(1, 1, 16))
    watching = pc.stream("Watch", "pc", placement_pb2.WatchRequest())
    seen = await watching.read()
    assert [(each.instance, each.state, each.running) for each in seen.instances] == [(A, "active", 3)]
    assert (seen.sessions, seen.assignments, seen.checkpoints) == (1, 1, 1)
    assert (seen.prompt_tokens, seen.matched_tokens) == (35, 16)
    watching.cancel()
    refused_call = pc.stream("Watch", "fe", placement_pb2.WatchRequest())
    assert from_rpc_error(await problem_of(refused_call)).problem == registry.FORBIDDEN
    shown = CollectorRegistry()
    shown.register(metrics.StateCollector(pc.controller.state))
    text = generate_latest(shown).decode()
    assert 'kvsp_placement_instances{state="active"} 1.0' in text
    assert "kvsp_placement_matched_tokens_total 16.0" in text
    assert session_id(1) not in text
    assert SCOPE not in text


@pytest.mark.spec("D12")
async def test_an_epoch_far_beyond_now_raises_an_alarm_and_counts(pc: World) -> None:
    with capture_logs() as logs:
        await pc.report(status(A, epoch=2**53 - 1))
        await pc.report(status(B, epoch=1_700_000_000_000))
    assert [line["instance"] for line in logs if line["event"] == "epoch far beyond now"] == [A]


@pytest.mark.spec("R-215", "R-201")
async def test_nothing_confidential_is_logged(pc: World) -> None:
    with capture_logs() as logs:
        await pc.report(status(A))
        await pc.report(status(B))
        await pc.publish(0)
        await pc.assign(prompt_tail=[987654321])
        await pc.put("ii1", checkpoint(1, 1, 2, generated=[987654321, 987654322]))
        await pc.report(status(A, state="failed"))
        await pc.instances[B].until(lambda: pc.instances[B].resumes)
        await until(lambda: any(line["event"] == "resumed" for line in logs))
    text = str(logs)
    assert "98765432" not in text
    assert keys(1)[0] not in text


# --- restart --------------------------------------------------------------------------


@pytest.mark.spec("R-103", "R-172", "R-179")
async def test_a_successor_goes_on_where_this_one_stopped(tmp_path: Path) -> None:
    async with world(tmp_path) as pc:
        await pc.report(status(A, epoch=12))
        await pc.report(status(B))
        await pc.assign(1)
        bound = pc.controller.state.binding("spiffe://t/fe", session_id(1))
        assert bound is not None
        owner = "ii1" if bound.instance == A else "ii2"
        await pc.put(owner, checkpoint(1, 1, 16))
    async with world(tmp_path) as pc:
        with refused(registry.STALE_EPOCH):
            await pc.report(status(A, epoch=11))
        assert await pc.report(status(A, epoch=12)) == "active"
        assert await pc.report(status(B)) == "active"
        again = await pc.follow(1).read()
        assert (again.epoch, again.instance) == (1, bound.instance)
        assert await pc.put(owner, checkpoint(1, 1, 8)) == (False, 1, 16)


@pytest.mark.spec("R-172")
async def test_a_disk_that_fails_ends_all_acknowledgement(tmp_path: Path) -> None:
    made = World(tmp_path)
    async with made.serve() as pc:
        await pc.report(status(A))
        pc.controller._journal._store.close()
        pc.controller._journal._store.commit = _fail  # type: ignore[method-assign]
        for offset in (1, 2):
            with refused(registry.UNAVAILABLE):
                await pc.put("ii1", checkpoint(1, 1, offset))
        await until(lambda: pc.failures)


def _fail(_rows: Any) -> None:
    raise StoreError("no space left")
