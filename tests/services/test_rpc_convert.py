"""Records and errors survive the way through protobuf and a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import DIGEST_PREFIX
from kvsp.protocol.records import InstanceStatus, Link, ReplicaRecord, Residency
from kvsp.rpc import convert, errors
from kvsp.rpc.channel import open_channel
from kvsp.v1 import common_pb2, common_pb2_grpc
from tests.services.rpc import connected, problem_of

hex32 = st.binary(min_size=32, max_size=32).map(bytes.hex)
hex16 = st.binary(min_size=16, max_size=16).map(bytes.hex)
tiers = st.sampled_from([*sorted(registry.TIERS), "tape"])
rates = st.floats(min_value=1e-6, max_value=1e18) | st.just(UNSET)
MOQT = "AWEBYgFjAWQBZQ"  # five fields of one octet


@st.composite
def replicas(draw: st.DrawFn) -> ReplicaRecord:
    edges = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=5)))
    residency = [
        Residency(tier=draw(tiers), layers=(first, end - 1), read_mbit_per_s=draw(rates))
        for first, end in pairwise(edges)
    ]
    layer_digests: Any = draw(st.lists(hex32, min_size=edges[-1], max_size=edges[-1] + 2))
    if edges[0] == 0 and draw(st.booleans()):
        layer_digests = UNSET
    moqt = draw(st.booleans())
    return ReplicaRecord(
        block_key=draw(hex32),
        compat_id=draw(hex32),
        scope_id=draw(hex16),
        holder="moqt://relay.example/" if moqt else "https://h1.example/kvsp/",
        codec=draw(st.integers(1, registry.CODEC_MAX)),
        size=draw(st.integers(1, limits.INT_MAX)),
        digest=DIGEST_PREFIX + draw(hex32),
        residency=residency,
        layer_digests=layer_digests,
        moqt_namespace=MOQT if moqt else UNSET,
        ttl_ms=draw(st.integers(1, limits.INT_MAX)),
    )


statuses = st.builds(
    InstanceStatus,
    instance=st.just("https://ii7.example/kvsp/"),
    epoch=st.integers(0, limits.INT_MAX),
    state=st.sampled_from(["active", "draining", "hibernating"]),
    running=st.integers(0, 10**6),
    queued=st.integers(0, limits.INT_MAX),
    batch_size=st.integers(0, 10**6),
    kv_utilization=st.floats(0, 1),
    prefill_tokens_per_s=st.floats(0, 1e18),
    decode_tokens_per_s=st.floats(0, 1e18),
    links=st.lists(
        st.builds(
            Link,
            holder=st.sampled_from(["https://h1.example/kvsp/", "moqt://r.example/"]),
            mbit_per_s=st.floats(min_value=1e-6, max_value=1e18),
            rtt_us=st.floats(0, 1e18),
        ),
        max_size=3,
    ),
    requested_state=st.none() | st.just("sleeping"),
    ttl_ms=st.integers(1, limits.INT_MAX),
)


@pytest.mark.spec("R-040", "R-044", "R-045")
@given(replicas())
def test_replica_records_round_trip(record: ReplicaRecord) -> None:
    octets = convert.replica_to_message(record).SerializeToString()
    assert convert.replica_from_message(common_pb2.ReplicaRecord.FromString(octets)) == record


@pytest.mark.spec("R-046")
@given(statuses)
def test_status_records_round_trip(status: InstanceStatus) -> None:
    octets = convert.status_to_message(status).SerializeToString()
    assert convert.status_from_message(common_pb2.InstanceStatus.FromString(octets)) == status


BAD: dict[str, Any] = {
    "short key": lambda m: setattr(m.name, "block_key", b"x" * 31),
    "no key": lambda m: m.name.ClearField("block_key"),
    "long scope": lambda m: setattr(m.name, "scope_id", b"x" * 17),
    "short digest": lambda m: setattr(m, "digest", b"x" * 31),
    "cut layer digests": lambda m: setattr(m, "layer_digests", b"x" * 65),
    "codec 0": lambda m: setattr(m, "codec", 0),
    "codec beyond 16 bits": lambda m: setattr(m, "codec", 65536),
    "size 0": lambda m: setattr(m, "size", 0),
    "ttl 0": lambda m: setattr(m, "ttl_ms", 0),
    "ttl beyond 2^53-1": lambda m: setattr(m, "ttl_ms", 2**53),
    "holder": lambda m: setattr(m, "holder", "http://h1.example/"),
    "no residency": lambda m: m.ClearField("residency"),
    "overlap": lambda m: m.residency.add(tier="host", layers=common_pb2.LayerRange(first=0, last=0)),
    "bad tier": lambda m: setattr(m.residency[0], "tier", "Host"),
    "NaN rate": lambda m: setattr(m.residency[0], "read_mbit_per_s", float("nan")),
    "infinite rate": lambda m: setattr(m.residency[0], "read_mbit_per_s", float("inf")),
    "namespace without moqt": lambda m: setattr(m, "moqt_namespace", MOQT),
}


@pytest.mark.spec("R-040", "R-041", "R-045")
@pytest.mark.parametrize("name", BAD)
def test_a_message_is_checked_like_json(name: str) -> None:
    record = ReplicaRecord(
        block_key="0" * 64, compat_id="1" * 64, scope_id="2" * 32, holder="https://h1.example/", codec=1,
        size=1, digest=DIGEST_PREFIX + "3" * 64, residency=[Residency("host", (0, 1))],
        layer_digests=["4" * 64] * 2, ttl_ms=1,
    )  # fmt: skip
    message = convert.replica_to_message(record)
    BAD[name](message)
    with pytest.raises(KvspError) as caught:
        convert.replica_from_message(message)
    assert caught.value.problem is registry.BAD_REQUEST


class Raiser(common_pb2_grpc.AuthorityServicer):
    """Fails each call as it is told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.entered = asyncio.Event()

    async def Authorize(self, request: Any, context: Any) -> common_pb2.AuthorizeReply:
        self.entered.set()
        if self.error is None:
            await asyncio.Event().wait()
        raise self.error or AssertionError


@pytest.fixture
def raiser() -> Raiser:
    return Raiser()


@pytest.fixture
async def opened(tmp_path: Path, raiser: Raiser) -> AsyncIterator[grpc.aio.Channel]:
    def register(target: grpc.aio.Server) -> None:
        common_pb2_grpc.add_AuthorityServicer_to_server(raiser, target)

    async with connected(tmp_path, register) as channel:
        yield channel


async def raised(
    raiser: Raiser, opened: grpc.aio.Channel, error: Exception | None, timeout: float = 5
) -> KvspError:
    raiser.error = error
    stub = common_pb2_grpc.AuthorityStub(opened)
    try:
        async with errors.translated():
            await stub.Authorize(common_pb2.AuthorizeRequest(), timeout=timeout)
    except KvspError as translated:
        return translated
    raise AssertionError("no error")


def assert_same(one: KvspError, other: KvspError) -> None:
    assert one.problem is other.problem
    assert (one.detail, dict(one.extensions), one.retry_after_s) == (
        other.detail,
        dict(other.extensions),
        other.retry_after_s,
    )


ROWS = [*registry.PROBLEMS.values(), *registry.PLAIN_PROBLEMS.values()]


@pytest.mark.spec("U-52", "R-200")
@pytest.mark.parametrize("problem", ROWS, ids=lambda row: row.suffix or str(row.status))
async def test_every_problem_crosses_a_socket(
    problem: registry.ProblemType, raiser: Raiser, opened: grpc.aio.Channel
) -> None:
    for error in (
        KvspError(problem),
        KvspError(problem, "because …", {"block_keys": ["ab" * 32], "n": 1, "x": {"y": [True, None]}}, 0),
        KvspError(problem, retry_after_s=7),
    ):
        received = await raised(raiser, opened, error)
        assert_same(received, error)
        raiser.error = error
        stub = common_pb2_grpc.AuthorityStub(opened)
        bare = await problem_of(stub.Authorize(common_pb2.AuthorizeRequest(), timeout=5))
        assert bare.code() is grpc.StatusCode[problem.grpc_code]


@pytest.mark.spec("U-16", "U-52")
async def test_the_longest_extension_crosses_too(raiser: Raiser, opened: grpc.aio.Channel) -> None:
    error = KvspError(registry.NOT_FOUND, "", {"block_keys": ["ab" * 32] * limits.LEASE_KEYS_MAX})
    for _ in range(20):
        assert_same(await raised(raiser, opened, error), error)


@pytest.mark.spec("R-201", "R-215")
async def test_what_is_unexpected_is_a_bare_500(
    raiser: Raiser, opened: grpc.aio.Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    structlog.reset_defaults()  # a service that another test ran here may have led the log elsewhere
    received = await raised(raiser, opened, KeyError("seeded-block-key"))
    assert_same(received, KvspError(registry.INTERNAL))
    shown = capsys.readouterr()
    assert "KeyError" in shown.out + shown.err
    assert "seeded-block-key" not in shown.out + shown.err


@pytest.mark.spec("U-52", "D14")
async def test_failures_of_the_transport_have_a_problem(
    raiser: Raiser, opened: grpc.aio.Channel, tmp_path: Path
) -> None:
    late = await raised(raiser, opened, None, timeout=0.05)
    assert late.problem is registry.GATEWAY_TIMEOUT
    async with open_channel(f"unix:{tmp_path}/nobody.sock") as nowhere:
        gone = await raised(raiser, nowhere, None)
    assert gone.problem is registry.UNAVAILABLE
    assert gone.retry_after_s


@pytest.mark.spec("U-52")
async def test_a_server_that_stops_is_unavailable(tmp_path: Path, raiser: Raiser) -> None:
    running: list[grpc.aio.Server] = []

    def register(target: grpc.aio.Server) -> None:
        running.append(target)
        common_pb2_grpc.add_AuthorityServicer_to_server(raiser, target)

    async with connected(tmp_path, register) as opened:
        call = asyncio.create_task(raised(raiser, opened, None))
        await raiser.entered.wait()
        await running[0].stop(0)
        assert (await call).problem is registry.UNAVAILABLE


@pytest.mark.spec("U-52")
@pytest.mark.parametrize(
    "message",
    [
        common_pb2.Problem(suffix="kvsp-new-thing", status=418),
        common_pb2.Problem(status=418),
        common_pb2.Problem(status=400, extensions_json="{"),
        common_pb2.Problem(status=400, extensions_json="[1]"),
    ],
)
def test_a_peer_of_another_version_never_breaks_the_reader(message: common_pb2.Problem) -> None:
    error = errors.from_message(message)
    assert error.problem in (registry.INTERNAL, registry.BAD_REQUEST)
    msgspec.json.encode(error.to_problem())
