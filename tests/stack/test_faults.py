"""Clients and servers that are killed, reset or slow, over HTTPS against the real stack."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvsp.client import BlockUnavailable, Client, Credentials, Endpoints, Options
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReplicaRecord
from tests.client.peers import Peer, Server
from tests.stack.harness import RunningStack, free_port, start_stack, temporary_layout
from tests.stack.traffic import (
    Sample,
    arenas,
    assert_problem,
    block_of,
    chain,
    client_of,
    create_lease,
    eventually,
    get,
    half_get,
    half_put,
    look_up,
    matched,
    metric,
    published,
    put,
    store,
)

pytestmark = pytest.mark.stack

MIB = 1 << 20
ARENA = 48 * MIB
BIG = 32 * MIB
"""Only one such block fits, and no kernel or proxy buffers a good part of it."""


@pytest.fixture(scope="module")
def admin() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def frail(admin: str) -> Iterator[RunningStack]:
    """Records live for a minute, so what vanishes from the index sooner was withdrawn."""
    holder = {"arena_octets": ARENA, "publish_ttl_ms": 60_000, "admin": admin}
    with temporary_layout() as layout, start_stack(layout, {"h1": holder}) as started:
        yield started


def takes_whole_arena(stack: RunningStack) -> None:
    """Nothing is pinned, reserved or leased: one block may take it all."""
    whole = block_of(stack, ARENA)
    eventually(lambda: put(stack, whole).status == 201, "something still holds a part of the arena")


# --- clients ------------------------------------------------------------------------------

HANG = """
import sys
from pathlib import Path
from kvsp.client import load_stack, Client

method, endpoints, file, *where = sys.argv[1:]
party = load_stack(Path(endpoints), "client-demo")

def stand_still(done, total):
    if done:
        print("moving", flush=True)
        sys.stdin.read()

with Client(party.credentials, party.endpoints) as client:
    if method == "GET":
        client.get_from(*where, progress=stand_still)
    else:
        client.put(*where, Path(file).read_bytes(), progress=stand_still)
"""


@contextlib.contextmanager
def client_process(stack: RunningStack, method: str, sample: Sample, folder: Path) -> Iterator[None]:
    """An SDK client that stops in the middle of a transfer, and is killed with SIGKILL at exit."""
    (folder / "block").write_bytes(sample.octets)
    where = [stack.holder, sample.compat_id, sample.scope_id, sample.block_key]
    argv = [sys.executable, "-c", HANG, method, str(stack.layout.endpoints), str(folder / "block"), *where]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"moving\n"
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def connection_that_breaks(stack: RunningStack, method: str, sample: Sample, folder: Path) -> Iterator[None]:
    """A plain connection in the middle of a transfer, reset at exit."""
    request = half_get(stack, sample) if method == "GET" else half_put(stack, sample)
    try:
        yield
    finally:
        request.reset()


WAYS = pytest.mark.parametrize("leaving", [client_process, connection_that_breaks], ids=["killed", "reset"])


@pytest.mark.spec("D4", "R-160", "R-087")
@WAYS
def test_a_client_that_dies_while_it_reads(frail: RunningStack, leaving: Any, tmp_path: Path) -> None:
    read, rival = block_of(frail, BIG), block_of(frail, BIG)
    takes_whole_arena(frail)
    assert put(frail, read).status == 201
    with leaving(frail, "GET", read, tmp_path):
        assert_problem(put(frail, rival), 503, retry=True)  # the reader's octets stay where they are
        assert get(frail, read).status == 200
    eventually(lambda: put(frail, rival).status == 201, "the pin of a dead client is still held")
    assert get(frail, rival).body == rival.octets


@pytest.mark.spec("D4", "R-160")
@WAYS
def test_a_client_that_dies_while_it_writes(frail: RunningStack, leaving: Any, tmp_path: Path) -> None:
    written, rival = block_of(frail, BIG), block_of(frail, BIG)
    takes_whole_arena(frail)
    with leaving(frail, "PUT", written, tmp_path):
        assert_problem(put(frail, rival), 503, retry=True)
        assert_problem(get(frail, written), 404, "kvsp-not-found")
    eventually(lambda: put(frail, rival).status == 201, "the room of a dead client is still taken")
    assert_problem(get(frail, written), 404, "kvsp-not-found")
    assert put(frail, written).status == 201
    assert get(frail, written).body == written.octets
    with client_of(frail) as client:
        assert client.lookup(written.scope_id, written.compat_id, [rival.block_key]).matched == 0


@pytest.mark.spec("D4")
def test_slow_clients_hold_nobody_up(frail: RunningStack) -> None:
    big, quick = block_of(frail, BIG), chain(frail, 20)
    takes_whole_arena(frail)
    assert put(frail, big).status == 201
    readers = [half_get(frail, big) for _ in range(8)]
    uploads = chain(frail, 8)
    writers = [half_put(frail, each) for each in uploads]
    with client_of(frail, stall_s=10, total_s=20) as client:
        for each in quick:
            where = (frail.holder, each.compat_id, each.scope_id, each.block_key)
            assert client.put(*where, each.octets)
            assert client.get_from(*where).payload == each.payload
        published(frail, client, quick)
    for writer, each in zip(writers, uploads, strict=True):
        writer.send(each.octets[len(each.octets) // 2 :])
        assert writer.finish().status == 201
        assert get(frail, each).body == each.octets
    for reader in readers:
        reader.reset()


# --- servers ------------------------------------------------------------------------------


class Load:
    """Threads that read blocks over and over, as engines do: every delivery is compared, every miss counted."""

    def __init__(
        self, client: Client, replicas: Sequence[Sequence[ReplicaRecord]], samples: Sequence[Sample]
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self._work = [*zip(replicas, samples, strict=True)]
        self._client = client
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(3)
        self._runs: list[Future[None]] = []

    def __enter__(self) -> Load:
        self._runs = [self._pool.submit(self._read) for _ in range(3)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for run in self._runs:
            run.result()  # anything but BlockUnavailable fails the test
        # Nothing torn, nothing refused: it was there, or it was not.
        assert not [each for each in self.outcomes if each.startswith("failed")]

    def _read(self) -> None:
        while not self._stop.is_set():
            for replicas, sample in self._work:
                try:
                    block = self._client.get(replicas)
                except BlockUnavailable as missed:
                    self.outcomes["recomputed" if missed.status in {404, 503} else f"failed: {missed}"] += 1
                else:
                    assert block.payload == sample.payload
                    self.outcomes[block.holder] += 1

    def wait(self, outcome: str, more: int) -> None:
        """Until so many more have come out that way."""
        enough = self.outcomes[outcome] + more
        for run in self._runs:
            assert not run.done(), run.exception()
        eventually(lambda: self.outcomes[outcome] >= enough, f"{outcome} only {self.outcomes[outcome]} times")


@pytest.fixture
def spare(frail: RunningStack) -> Iterator[Callable[[Sample], Peer]]:
    """A second holder, with one block, and a certificate of the stack's authority."""
    pki = frail.layout.pki
    running: list[Server] = []

    def serve(sample: Sample) -> Peer:
        peer = Peer("honest", sample.octets)
        running.append(Server(peer, Credentials(pki / "ca.pem", pki / "envoy.pem", pki / "envoy-key.pem"), None))
        return peer

    yield serve
    for server in running:
        server.stop()


@pytest.mark.spec("R-088", "R-161", "U-51", "U-27", "R-155")
def test_a_holder_that_is_killed_under_load(
    frail: RunningStack, spare: Callable[[Sample], Peer], tmp_path: Path
) -> None:
    takes_whole_arena(frail)
    samples, big = chain(frail, 24), block_of(frail, BIG)
    assert put(frail, big).status == 201
    store(frail, samples)
    peer = spare(samples[0])
    with client_of(frail) as finder:
        replicas = published(frail, finder, samples).replicas
    # The first block has a second replica, the others have not.
    replicas[0].append(structs.replace(replicas[0][0], holder=peer.base))
    lease = create_lease(frail, samples, 60_000).json()["lease"]
    before = arenas(frail)
    assert len(before) == 1
    holders = frozenset({frail.holder, peer.base})
    credentials = Credentials(Path(frail.ca), *map(Path, frail.identity("client-demo")))
    with (
        Client(credentials, Endpoints(None, holders), Options(total_s=20)) as client,
        Load(client, replicas, samples) as load,
    ):
        load.wait(frail.holder, 48)
        reader = half_get(frail, big)
        frail.kill("h1")
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert reader.finish().body == big.octets  # all of it, or a break that shows
        load.wait(peer.base, 3)
        load.wait("recomputed", 48)
        frail.start("h1")
        # "DELETE those it remembers": well before their TTL of a minute ends
        eventually(lambda: not any(matched(frail, [each]) for each in samples), "lost but still listed")
        load.wait("recomputed", 48)
        eventually(lambda: put(frail, samples[0]).status == 201, "the holder takes no blocks")
        store(frail, samples[1:])
        load.wait(frail.holder, 48)
    after = arenas(frail)
    assert len(after) == 1
    assert after != before
    assert_problem(frail.request("PUT", f"{frail.holder}leases/{lease}", {"ttl_ms": 1000}), 404, "kvsp-not-found")
    takes_whole_arena(frail)


@pytest.mark.spec("D9", "R-065", "R-067", "R-088", "D4")
def test_a_gateway_that_is_killed_under_load(frail: RunningStack) -> None:
    takes_whole_arena(frail)
    samples = chain(frail, 12)
    big = block_of(frail, BIG)
    upload = block_of(frail, 8 * MIB)
    assert put(frail, big).status == 201
    store(frail, samples)
    with client_of(frail, total_s=20) as client:
        replicas = published(frail, client, samples).replicas
        reader, writer = half_get(frail, big), half_put(frail, upload)
        with Load(client, replicas, samples) as load:
            load.wait(frail.holder, 24)
            frail.kill("gateway")
            for attempt in (get(frail, big), look_up(frail, samples)):
                assert_problem(attempt, 503, retry=True)
            load.wait("recomputed", 24)
            frail.start("gateway")
            load.wait(frail.holder, 24)
    with pytest.raises((http.client.HTTPException, OSError)):
        reader.finish()
    with contextlib.suppress(http.client.HTTPException, OSError):
        assert writer.finish().status == 503
    assert get(frail, upload).status == 404
    for each in samples:
        assert get(frail, each).body == each.octets
    takes_whole_arena(frail)  # "holder dropped the pins of the dead gateway"


@pytest.mark.spec("R-066", "R-161", "D9")
def test_an_envoy_that_is_killed_under_load(frail: RunningStack) -> None:
    samples = chain(frail, 12)
    takes_whole_arena(frail)
    store(frail, samples)
    with client_of(frail, total_s=20) as client:
        replicas = published(frail, client, samples).replicas
        with Load(client, replicas, samples) as load:
            load.wait(frail.holder, 24)
            frail.kill("envoy")
            load.wait("recomputed", 24)
            with pytest.raises(KvspError) as refused:
                client.lookup(samples[0].scope_id, samples[0].compat_id, [])
            assert refused.value.status == 503
            frail.start("envoy")
            load.wait(frail.holder, 24)
        assert client.lookup(samples[0].scope_id, samples[0].compat_id, []).matched == 0
    takes_whole_arena(frail)


@pytest.mark.spec("R-217")
def test_what_was_used_is_accounted_for(frail: RunningStack, admin: str) -> None:
    """After all the above: nothing is in use but the blocks that are held."""
    takes_whole_arena(frail)
    eventually(
        lambda: (
            metric(admin, "kvsp_holder_blocks") == 1
            and metric(admin, "kvsp_holder_leases") == 0
            and metric(admin, "kvsp_holder_arena_used_octets") == ARENA
        ),
        "the metrics do not agree",
    )
