"""A full arena, leases and their quotas, and two writers of one block, over HTTPS against the real stack."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from deploy.local.policy import ensure_scopes, identity_uri, write_policy
from kvsp.client import BlockUnavailable
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, holder_pb2, holder_pb2_grpc
from tests.stack.harness import RunningStack, free_port, start_stack, temporary_layout
from tests.stack.traffic import (
    Sample,
    assert_problem,
    block_of,
    chain,
    client_of,
    create_lease,
    eventually,
    get,
    half_put,
    look_up,
    matched,
    metric,
    put,
    store,
)

pytestmark = pytest.mark.stack

PAGE = 4096
ROOM = 16
"""Blocks of SMALL that the arena holds: each takes a page."""

QUOTAS = """
[identities."{uri}".quotas]
leased_octets = {octets}
leases = 3
lease_ttl_ms = 30000
"""


@pytest.fixture(scope="module")
def admin() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def tight(admin: str) -> Iterator[RunningStack]:
    """A holder with room for ROOM small blocks; `pc` may lease three of them, three times, for 30 s."""
    with temporary_layout() as layout:
        layout.make_directories()
        write_policy(layout, ensure_scopes(layout))
        policy = layout.home / "quotas.toml"
        quotas = QUOTAS.format(uri=identity_uri("pc"), octets=3 * PAGE)
        policy.write_text(layout.policy.read_text() + quotas)
        holder = {"arena_octets": ROOM * PAGE, "policy": str(policy), "admin": admin}
        with start_stack(layout, overrides={"h1": holder}) as started:
            yield started


def release(stack: RunningStack, lease: str, identity: str = "client-demo") -> None:
    assert stack.request("DELETE", f"{stack.holder}leases/{lease}", identity=identity).status == 204


def flood(stack: RunningStack, blocks: int = 2 * ROOM) -> list[Sample]:
    """So many new blocks that whatever may be evicted is."""
    fresh = chain(stack, blocks)
    store(stack, fresh)
    return fresh


@pytest.mark.spec("R-087", "R-141", "R-140", "U-32", "R-086")
def test_a_full_arena_of_leased_blocks(tight: RunningStack) -> None:
    kept, late = chain(tight, ROOM), chain(tight, 1)[0]
    store(tight, kept)
    eventually(lambda: matched(tight, kept) == ROOM, "not published")
    # No client may lease more than half of the arena; two together can.
    assert_problem(create_lease(tight, kept[: ROOM // 2 + 1], 60_000), 429, "kvsp-lease-quota")
    lease = create_lease(tight, kept[: ROOM // 2], 60_000)
    other = create_lease(tight, kept[ROOM // 2 :], 60_000, "ii1")
    assert (lease.status, other.status) == (201, 201)
    assert_problem(put(tight, late), 503, retry=True)
    for each in kept:
        assert get(tight, each).body == each.octets
    release(tight, lease.json()["lease"])
    release(tight, other.json()["lease"], "ii1")
    assert put(tight, late).status == 201
    assert get(tight, late).body == late.octets
    gone = [each for each in kept if get(tight, each).status == 404]
    assert len(gone) == 1
    # "A holder MUST withdraw a record with DELETE before or immediately after evicting the replica"
    eventually(lambda: look_up(tight, gone).json()["matched"] == 0, "evicted but not withdrawn")


@pytest.mark.spec("R-086", "R-088")
def test_the_index_lists_what_is_held(tight: RunningStack) -> None:
    fresh = flood(tight, 3 * ROOM)
    held = [get(tight, each).status == 200 for each in fresh]
    assert sum(held) == ROOM
    eventually(lambda: [matched(tight, [each]) == 1 for each in fresh] == held, "index and holder differ")


@pytest.mark.spec("R-141", "R-087", "R-140", "D13")
def test_a_renewed_lease_outlasts_a_flood(tight: RunningStack) -> None:
    kept = chain(tight, ROOM // 2)
    store(tight, kept)
    keys = [each.block_key for each in kept]
    with client_of(tight) as client:
        with client.lease(tight.holder, keys, 1500, scope_id=kept[0].scope_id) as lease:
            renewals = 0
            while renewals < 4:  # past the first term
                flood(tight, ROOM)
                renewals = lease.renewals
            lease.check()
            for each in kept:
                got = client.get_from(tight.holder, each.compat_id, each.scope_id, each.block_key)
                assert got.payload == each.payload
        flood(tight)
        for each in kept:
            with pytest.raises(BlockUnavailable):
                client.get_from(tight.holder, each.compat_id, each.scope_id, each.block_key)


@pytest.mark.spec("R-141", "R-140")
def test_a_lease_that_lapses_protects_no_more(tight: RunningStack) -> None:
    kept = chain(tight, ROOM)
    store(tight, kept)
    lease = create_lease(tight, kept[: ROOM // 2], 400)
    assert lease.status == 201
    assert create_lease(tight, kept[ROOM // 2 :], 400, "ii1").status == 201
    late = chain(tight, 1)[0]
    eventually(lambda: put(tight, late).status == 201, "the lease never lapsed")
    renewal = tight.request("PUT", f"{tight.holder}leases/{lease.json()['lease']}", {"ttl_ms": 400})
    assert_problem(renewal, 404, "kvsp-not-found")


@pytest.mark.spec("R-142", "R-214", "U-17", "D13")
def test_lease_quotas_are_each_clients_own(tight: RunningStack) -> None:
    blocks = chain(tight, 4)
    store(tight, blocks)
    assert_problem(create_lease(tight, blocks[:1], 30_001, "pc"), 429, "kvsp-lease-quota")
    first = create_lease(tight, blocks[:3], 30_000, "pc")
    assert first.status == 201
    assert_problem(create_lease(tight, blocks[3:], 30_000, "pc"), 429, "kvsp-lease-quota", retry=True)
    # The same blocks again take no more octets, but leases are counted too.
    more = [create_lease(tight, blocks[:1], 30_000, "pc") for _ in range(3)]
    assert [each.status for each in more] == [201, 201, 429]
    assert_problem(more[-1], 429, "kvsp-lease-quota")
    other = create_lease(tight, blocks, 60_000, "client-demo")
    assert other.status == 201
    for each in (first, *more[:2]):
        release(tight, each.json()["lease"], "pc")
    again = create_lease(tight, blocks[1:], 30_000, "pc")
    assert again.status == 201
    release(tight, again.json()["lease"], "pc")
    release(tight, other.json()["lease"])


def purge(stack: RunningStack, sample: Sample, principal: str) -> None:
    """The operator's path: the holder's internal socket, on the holder's own host."""
    identifiers = (sample.compat_id, sample.scope_id, sample.block_key)
    name = common_pb2.BlockName(
        **dict(zip(("compat_id", "scope_id", "block_key"), map(bytes.fromhex, identifiers), strict=True))
    )
    with grpc.insecure_channel(f"unix:{stack.layout.socket('h1')}") as channel:
        stub = holder_pb2_grpc.HolderStub(channel)
        stub.PurgeBlock(holder_pb2.PurgeBlockRequest(name=name), metadata=speak_for(identity_uri(principal)))


@pytest.mark.spec("R-143", "D11")
def test_an_operator_purges_a_leased_block(tight: RunningStack) -> None:
    bad, good = chain(tight, 1)[0], chain(tight, 1)[0]
    store(tight, [bad, good])
    eventually(lambda: matched(tight, [bad]) == 1, "not published")
    lease = create_lease(tight, [bad, good], 60_000)
    for stranger in ("client-demo", "pc"):
        with pytest.raises(grpc.RpcError):
            purge(tight, bad, stranger)
    assert get(tight, bad).status == 200
    with ThreadPoolExecutor(1) as pool:
        purged = pool.submit(purge, tight, bad, "h1")
        eventually(lambda: get(tight, bad).status == 404, "not purged")
        # "MUST first withdraw the affected replica records": whoever sees it gone finds it nowhere.
        assert matched(tight, [bad]) == 0
        purged.result()
    assert_problem(get(tight, bad), 404, "kvsp-not-found")
    assert get(tight, good).body == good.octets
    # The key can be written anew, with the right octets this time.
    assert put(tight, bad).status == 201
    release(tight, lease.json()["lease"])


@pytest.mark.spec("R-031", "U-10", "D4")
def test_a_block_that_can_never_fit_is_413(tight: RunningStack) -> None:
    assert_problem(put(tight, block_of(tight, ROOM * PAGE + 1)), 413)
    whole = block_of(tight, ROOM * PAGE)
    assert put(tight, whole).status == 201
    assert get(tight, whole).body == whole.octets


# --- two writers --------------------------------------------------------------------------


def rival(sample: Sample, other: Sample) -> Sample:
    """The same key with the octets of another."""
    return Sample(sample.compat_id, sample.scope_id, sample.block_key, other.octets)


@pytest.mark.spec("R-159", "R-157", "U-21")
@pytest.mark.parametrize("writers", [2, 5])
def test_parallel_writers_of_one_block(tight: RunningStack, writers: int) -> None:
    mine = chain(tight, 1)[0]
    versions = [rival(mine, chain(tight, 1)[0]) for _ in range(writers)]
    barrier = threading.Barrier(writers)

    def write(version: Sample) -> int:
        barrier.wait()
        return put(tight, version).status

    with ThreadPoolExecutor(writers) as pool:
        statuses = list(pool.map(write, versions))
    assert sorted(statuses) == [201] + [412] * (writers - 1)
    assert get(tight, mine).body == versions[statuses.index(201)].octets


@pytest.mark.spec("R-159", "R-157")
@pytest.mark.parametrize("outcome", ["finishes", "vanishes"])
def test_a_second_writer_waits_for_the_first(tight: RunningStack, admin: str, outcome: str) -> None:
    first = chain(tight, 1)[0]
    second = rival(first, chain(tight, 1)[0])

    def reservations() -> float:
        return metric(admin, "kvsp_holder_transfers_total", direction="in")

    before = reservations()
    slow = half_put(tight, first)
    eventually(lambda: reservations() == before + 1, "the first upload never began")
    assert get(tight, first).status == 404
    waiting = half_put(tight, second, len(second.octets))
    if outcome == "finishes":
        slow.send(first.octets[len(first.octets) // 2 :])
        assert slow.finish().status == 201
        assert_problem(waiting.finish(), 412)
        assert get(tight, first).body == first.octets
    else:
        slow.reset()
        assert waiting.finish().status == 201
        assert get(tight, first).body == second.octets


# --- memory -------------------------------------------------------------------------------

MIB = 1 << 20


def own_octets(stack: RunningStack) -> int:
    """Memory that is the gateway's own. Pages of the arena that it maps are the holder's, whoever touched them."""
    status = Path(f"/proc/{stack.pid('gateway')}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def move(stack: RunningStack, blocks: Sequence[Sample], sha256: bytes) -> None:
    """PUT and GET them all in parallel, compared octet for octet."""

    def one(block: Sample) -> None:
        where = (stack.holder, block.compat_id, block.scope_id, block.block_key)
        with client_of(stack, verify=False) as client:
            assert client.put(*where, block.octets, sha256=sha256)
            assert client.get_from(*where).payload == memoryview(block.octets)[36:]

    with ThreadPoolExecutor(len(blocks)) as pool:
        list(pool.map(one, blocks))


@pytest.mark.spec("R-075")
def test_the_gateways_memory_does_not_grow_with_blocks() -> None:
    """Eight blocks of 64 MiB at a time pass through, and all of them never take as much as one."""
    with temporary_layout() as layout, start_stack(layout, {"h1": {"arena_octets": 640 * MIB}}) as stack:
        before = own_octets(stack)
        big = block_of(stack, 64 * MIB)
        peak, done = 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.02):
                peak = max(peak, own_octets(stack))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            copies = [rival(block_of(stack, 64), big) for _ in range(8)]
            move(stack, copies, hashlib.sha256(big.octets).digest())
        finally:
            done.set()
            watcher.join()
        assert peak - before < 64 * MIB
