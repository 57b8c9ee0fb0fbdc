"""The Index Service over a real Unix socket, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from structlog.testing import capture_logs

from kvsp.protocol import jsonio, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.protocol.records import LookupReply, ReplicaRecord
from kvsp.rpc.convert import replica_to_message, status_to_message
from kvsp.rpc.errors import from_message, translated
from kvsp.rpc.identity import speak_for
from kvsp.rpc.interceptors import CALLS
from kvsp.v1 import common_pb2, common_pb2_grpc, index_pb2, index_pb2_grpc
from services.index.config import IndexConfig
from services.index.metrics import TallyCollector
from services.index.server import IndexServicer, register
from services.index.state import IndexState
from tests.services.index_records import COMPAT, H1, H2, NO_SCOPE, OTHER_SCOPE, SCOPE, key, record, status
from tests.services.rpc import connected

II7, II9 = "https://ii7.example/kvsp/", "https://ii9.example/kvsp/"
BARE = "https://bare.example/kvsp/"  # a holder that no scope trusts

POLICY = Policy.load(f"""
[identities."spiffe://t/is"]
roles = ["index"]
[identities."spiffe://t/h1"]
roles = ["holder"]
base_uris = ["{H1}"]
scopes = ["{SCOPE}"]
[identities."spiffe://t/h1".quotas]
records = 5
[identities."spiffe://t/h2"]
roles = ["holder"]
base_uris = ["{H2}"]
scopes = ["{OTHER_SCOPE}"]
[identities."spiffe://t/ii7"]
roles = ["instance"]
base_uris = ["{II7}"]
scopes = ["{SCOPE}"]
[identities."spiffe://t/bare"]
roles = ["holder"]
base_uris = ["{BARE}"]
[identities."spiffe://t/pc"]
roles = ["placement"]
scopes = ["{SCOPE}", "{OTHER_SCOPE}"]
publish_for = "*"
withdraw_for = "*"
[identities."spiffe://t/fe"]
roles = ["frontend"]
scopes = ["{SCOPE}"]
[identities."spiffe://t/client"]
roles = ["client"]
scopes = ["{SCOPE}"]
[identities."spiffe://t/reporter"]
roles = ["client"]
scopes = ["{SCOPE}"]
withdraw_for = ["{H1}"]
""")


@dataclass
class Index:
    """An index behind a socket; methods speak for a named identity and raise KvspError."""

    stub: index_pb2_grpc.IndexStub
    authority: common_pb2_grpc.AuthorityStub
    state: IndexState
    now_ms: int = 0

    async def put(self, name: str, made: ReplicaRecord, **path: Any) -> tuple[bool, int]:
        request = index_pb2.PutReplicaRequest(
            holder_id=path.get("holder_id", party_id(made.holder)),
            block_key=path.get("block_key", bytes.fromhex(made.block_key)),
            record=replica_to_message(made),
        )
        async with translated():
            reply = await self.stub.PutReplica(request, metadata=speak_for(f"spiffe://t/{name}"), timeout=5)
        return reply.created, reply.ttl_ms

    async def delete(self, name: str, holder: str, block_key: bytes) -> None:
        request = index_pb2.DeleteReplicaRequest(holder_id=party_id(holder), block_key=block_key)
        async with translated():
            await self.stub.DeleteReplica(request, metadata=speak_for(f"spiffe://t/{name}"), timeout=5)

    async def lookup(self, name: str, keys: list[bytes], scope: str = SCOPE, **members: Any) -> LookupReply:
        request = index_pb2.LookupRequest(
            scope_id=bytes.fromhex(scope), compat_id=bytes.fromhex(COMPAT), block_keys=b"".join(keys), **members
        )
        async with translated():
            call = self.stub.Lookup(request, metadata=speak_for(f"spiffe://t/{name}"), timeout=5)
            parts = [part async for part in call]
        head, text = parts[0].head, b"".join(part.json for part in parts[1:])
        assert all(part.HasField("json") for part in parts[1:])
        assert all(len(part.json) <= 2 * limits.GRPC_CHUNK_OCTETS for part in parts)
        assert head.json_octets == len(text)
        reply = jsonio.decode(text, LookupReply)
        assert head.matched == reply.matched
        return reply

    async def publish(self, name: str, items: list[index_pb2.PublishRequest]) -> list[index_pb2.PublishReply]:
        async with translated():
            call = self.stub.Publish(iter(items), metadata=speak_for(f"spiffe://t/{name}"), timeout=5)
            return [reply async for reply in call]

    async def feed(self, name: str, *statuses: Any) -> None:
        async with translated():
            await self.stub.Feed(
                iter([status_to_message(each) for each in statuses]),
                metadata=speak_for(f"spiffe://t/{name}"),
                timeout=5,
            )


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[Index]:
    config = IndexConfig(
        listen="", policy="", principal="", lookup_keys_max=1024, lookup_targets_max=4, records_per_holder_max=1000
    )
    state = IndexState(block_tokens={bytes.fromhex(COMPAT): 16})
    holder: list[Index] = []
    servicer = IndexServicer(config, POLICY, state, lambda: holder[0].now_ms)
    async with connected(tmp_path, lambda target: register(target, servicer, POLICY)) as opened:
        made = Index(index_pb2_grpc.IndexStub(opened), common_pb2_grpc.AuthorityStub(opened), state)
        holder.append(made)
        yield made


async def refused(call: Any) -> KvspError:
    with pytest.raises(KvspError) as caught:
        await call
    return caught.value


async def problem(call: Any) -> registry.ProblemType:
    return (await refused(call)).problem


@pytest.mark.spec("R-080", "R-083", "R-086", "R-090", "U-11", "U-12")
async def test_publish_look_up_withdraw(index: Index) -> None:
    assert await index.put("h1", record(0)) == (True, 600_000)
    assert await index.put("h1", record(0)) == (False, 600_000)
    index.now_ms = 1000
    assert await index.lookup("client", [key(0), key(1)]) == LookupReply(1, [[record(0, ttl_ms=599_000)]])
    await index.delete("h1", H1, key(0))
    assert await problem(index.delete("h1", H1, key(0))) is registry.NOT_FOUND
    assert await index.lookup("client", [key(0)]) == LookupReply(0, [])


@pytest.mark.spec("R-090", "D14")
async def test_a_long_reply_comes_in_chunks(index: Index) -> None:
    for i in range(1000):
        await index.put("ii7", record(i, II7, layers=32))
    reply = await index.lookup("client", [key(i) for i in range(1000)])
    assert reply.replicas == [[record(i, II7, layers=32)] for i in range(1000)]


@pytest.mark.spec("R-080")
async def test_the_path_must_be_the_records(index: Index) -> None:
    assert await problem(index.put("h1", record(0), block_key=key(1))) is registry.BAD_REQUEST
    # authorized for the path's holder, but the record names another
    assert await problem(index.put("h1", record(0, H2), holder_id=party_id(H1))) is registry.BAD_REQUEST
    assert await problem(index.put("h1", record(0), holder_id=party_id(H2))) is registry.FORBIDDEN


@pytest.mark.spec("R-081", "R-082", "R-210", "R-211", "D1")
@pytest.mark.parametrize(
    ("name", "holder", "scope", "expected"),
    [
        ("h1", H1, SCOPE, None),
        ("h1", H2, SCOPE, registry.FORBIDDEN),
        ("h1", H1, OTHER_SCOPE, registry.SCOPE_DENIED),
        ("h1", H1, NO_SCOPE, registry.SCOPE_DENIED),
        ("h2", H1, SCOPE, registry.FORBIDDEN),
        ("ii7", II7, SCOPE, None),
        ("ii7", H1, SCOPE, registry.FORBIDDEN),
        ("ii7", II7, OTHER_SCOPE, registry.SCOPE_DENIED),
        ("pc", H1, SCOPE, None),
        ("pc", H2, OTHER_SCOPE, None),
        ("pc", H1, NO_SCOPE, registry.SCOPE_DENIED),
        ("pc", H1, OTHER_SCOPE, registry.SCOPE_DENIED),  # the holder is not trusted for it
        ("pc", BARE, SCOPE, registry.SCOPE_DENIED),
        ("pc", "https://unregistered.example/", SCOPE, registry.SCOPE_DENIED),
        ("bare", BARE, SCOPE, registry.SCOPE_DENIED),
        ("client", H1, SCOPE, registry.FORBIDDEN),
        ("fe", H1, SCOPE, registry.FORBIDDEN),
        ("is", H1, SCOPE, registry.FORBIDDEN),
        ("nobody", H1, SCOPE, registry.FORBIDDEN),
    ],
)
async def test_who_may_publish(index: Index, name: str, holder: str, scope: str, expected: Any) -> None:
    made = record(0, holder, scope_id=scope)
    if expected is None:
        assert await index.put(name, made) == (True, 600_000)
    else:
        assert await problem(index.put(name, made)) is expected
        assert len(index.state.table) == 0


@pytest.mark.spec("R-089", "U-47", "D1", "D8")
@pytest.mark.parametrize(
    ("name", "holder", "expected"),
    [
        ("h1", H1, None),
        ("h2", H1, registry.FORBIDDEN),
        ("ii7", H1, registry.FORBIDDEN),
        ("ii7", II7, None),
        ("pc", H1, None),
        ("pc", II7, None),
        ("reporter", H1, None),
        ("reporter", II7, registry.FORBIDDEN),
        ("reporter", H2, registry.FORBIDDEN),
        ("client", H1, registry.FORBIDDEN),
        ("fe", H1, registry.FORBIDDEN),
        ("is", H1, registry.FORBIDDEN),
        ("nobody", H1, registry.FORBIDDEN),
    ],
)
async def test_who_may_withdraw(index: Index, name: str, holder: str, expected: Any) -> None:
    await index.put("pc", record(0, holder, scope_id=OTHER_SCOPE if holder == H2 else SCOPE))
    if expected is None:
        await index.delete(name, holder, key(0))
        assert len(index.state.table) == 0
    else:
        error = await refused(index.delete(name, holder, key(0)))
        absent = await refused(index.delete(name, holder, key(1)))
        assert error.problem is expected
        assert error.to_problem() == absent.to_problem()
        assert len(index.state.table) == 1


@pytest.mark.spec("R-094", "R-210", "D1", "D8")
@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        ("pc", {SCOPE, OTHER_SCOPE}),
        ("h1", {SCOPE}),
        ("h2", {OTHER_SCOPE}),
        ("ii7", {SCOPE}),
        ("fe", {SCOPE}),
        ("client", {SCOPE}),
        ("is", None),
        ("nobody", None),
    ],
)
async def test_who_may_look_up(index: Index, name: str, scopes: set[str] | None) -> None:
    await index.put("h1", record(0))
    await index.put("h2", record(0, H2, scope_id=OTHER_SCOPE))
    refusals = []
    for scope in (SCOPE, OTHER_SCOPE, NO_SCOPE):
        if scopes is not None and scope in scopes:
            assert (await index.lookup(name, [key(0)], scope)).matched == 1
            continue
        error = await refused(index.lookup(name, [key(0)], scope))
        assert error.problem is (registry.FORBIDDEN if scopes is None else registry.SCOPE_DENIED)
        refusals.append(json.dumps(error.to_problem()))
    assert len(set(refusals)) == 1, "foreign and nonexistent scopes are indistinguishable"


@pytest.mark.spec("R-095", "U-10", "R-214")
async def test_lookups_are_bounded_before_the_scope_is_looked_at(index: Index) -> None:
    keys = [key(0)] * 1024
    assert (await index.lookup("client", keys, targets=[II7] * 4)).matched == 0
    for scope in (SCOPE, NO_SCOPE):
        assert await problem(index.lookup("client", [*keys, key(0)], scope)) is registry.CONTENT_TOO_LARGE
        assert await problem(index.lookup("client", [], scope, targets=[II7] * 5)) is registry.CONTENT_TOO_LARGE
    assert await problem(index.lookup("is", [*keys, key(0)])) is registry.FORBIDDEN


@pytest.mark.spec("R-050")
async def test_malformed_lookups_are_400(index: Index) -> None:
    assert await problem(index.lookup("client", [b"x" * 31])) is registry.BAD_REQUEST
    assert await problem(index.lookup("client", [], "aa" * 15)) is registry.BAD_REQUEST
    assert await problem(index.lookup("client", [], targets=["http://ii7.example/"])) is registry.BAD_REQUEST


@pytest.mark.spec("U-13", "U-24", "D13")
async def test_what_the_state_refuses_crosses_the_socket(index: Index) -> None:
    for i in range(5):
        await index.put("h1", record(i))
    error = await refused(index.put("h1", record(5)))
    assert error.problem is registry.TOO_MANY_REQUESTS
    assert error.retry_after_s
    await index.put("pc", record(5))  # the bound is the publisher's own
    assert await problem(index.put("h1", record(0, compat_id="22" * 32))) is registry.INCOMPATIBLE
    wrong = record(0, layer_digests=record(1).layer_digests)
    assert await problem(index.put("h1", wrong)) is registry.DIGEST_MISMATCH


@pytest.mark.spec("U-47", "R-215")
async def test_a_withdrawal_on_behalf_is_logged_without_the_key(index: Index) -> None:
    await index.put("h1", record(0))
    await index.put("h1", record(1))
    with capture_logs() as logs:
        await index.delete("h1", H1, key(1))
        await index.delete("reporter", H1, key(0))
    (event,) = logs
    assert event["identity"] == "spiffe://t/reporter"
    assert (event["holder"], event["scope_id"]) == (H1, SCOPE)
    assert key(0).hex() not in str(event)
    assert str(key(0)) not in str(event)


@pytest.mark.spec("R-080", "R-086", "D14", "R-210")
async def test_a_bad_item_does_not_end_a_publish_stream(index: Index) -> None:
    def put(seq: int, made: ReplicaRecord) -> index_pb2.PublishRequest:
        return index_pb2.PublishRequest(seq=seq, put=replica_to_message(made))

    def withdraw(seq: int, holder: str, i: int) -> index_pb2.PublishRequest:
        name = index_pb2.DeleteReplicaRequest(holder_id=party_id(holder), block_key=key(i))
        return index_pb2.PublishRequest(seq=seq, withdraw=name)

    cut = put(5, record(2))
    cut.put.name.block_key = b"x"
    replies = await index.publish(
        "h1",
        [
            put(1, record(0)),
            put(2, record(0, H2)),
            put(3, record(1, scope_id=NO_SCOPE)),
            put(4, record(1, layer_digests=record(2).layer_digests)),
            cut,
            index_pb2.PublishRequest(seq=6),
            withdraw(7, H1, 9),
            withdraw(8, H2, 0),
            put(9, record(0)),
            put(10, record(1)),
            withdraw(11, H1, 0),
        ],
    )
    assert [reply.seq for reply in replies] == list(range(1, 12))
    outcomes = [
        from_message(reply.problem).problem if reply.HasField("problem") else reply.WhichOneof("result")
        for reply in replies
    ]
    assert outcomes == [
        "put", registry.FORBIDDEN, registry.SCOPE_DENIED, registry.DIGEST_MISMATCH, registry.BAD_REQUEST,
        registry.BAD_REQUEST, registry.NOT_FOUND, registry.FORBIDDEN, "put", "put", "withdrawn",
    ]  # fmt: skip
    assert [replies[i].put.created for i in (0, 8, 9)] == [True, False, True]
    assert (await index.lookup("client", [key(1)])).matched == 1
    assert (await index.lookup("client", [key(0)])).matched == 0


async def test_a_cancelled_stream_leaves_the_service_well(index: Index) -> None:
    more = asyncio.Event()

    async def items() -> AsyncIterator[index_pb2.PublishRequest]:
        yield index_pb2.PublishRequest(seq=1, put=replica_to_message(record(0)))
        await more.wait()

    def ended() -> float:
        # to a handler that waits for requests, a cancelled call looks like one that was closed
        return sum(CALLS.labels("kvsp.v1.Index/Publish", each)._value.get() for each in ("200", "cancelled"))

    before = ended()
    call = index.stub.Publish(items(), metadata=speak_for("spiffe://t/h1"), timeout=30)
    assert (await call.read()).put.created
    call.cancel()
    async with asyncio.timeout(30):
        while ended() == before:
            assert (await index.lookup("client", [key(0)])).matched == 1


async def test_a_publish_stream_needs_an_identity(index: Index) -> None:
    assert await problem(index.publish("nobody", [])) is registry.FORBIDDEN


@pytest.mark.spec("R-093", "U-11", "U-41", "R-115", "R-116")
async def test_estimates_follow_the_feed(index: Index) -> None:
    await index.put("h1", record(0))
    await index.feed("pc", status(II7, {H1: (200_000, 12)}), status(II7, {}, epoch=11))

    async def targets(*asked: str, **members: Any) -> Any:
        reply = await index.lookup("client", [key(0)], targets=asked, **members)
        return json.loads(jsonio.encode(reply)).get("targets")

    known = {"instance": II7, "fetch_us": 96, "recompute_us": 381}
    assert await targets(II9, II7, II9) == [{"instance": II9}, known, {"instance": II9}]
    assert await targets() is None
    assert await targets(want_targets=True) == []
    index.now_ms = 3000
    assert await targets(II7) == [{"instance": II7}]


@pytest.mark.spec("U-41", "R-210")
@pytest.mark.parametrize("name", ["h1", "ii7", "client", "is", "nobody"])
async def test_only_the_placement_side_feeds(index: Index, name: str) -> None:
    assert await problem(index.feed(name, status(II7, {}))) is registry.FORBIDDEN


@pytest.mark.spec("R-217", "R-215", "D8")
async def test_metrics_are_per_scope_and_reveal_no_key(index: Index) -> None:
    await index.put("h1", record(0))
    await index.put("h2", record(0, H2, scope_id=OTHER_SCOPE))
    await index.lookup("client", [key(0), key(1)])
    metrics = CollectorRegistry()
    metrics.register(TallyCollector(index.state.table.tallies))
    text = generate_latest(metrics).decode()
    assert f'kvsp_index_replicas{{scope="{OTHER_SCOPE}"}} 1.0' in text
    assert f'kvsp_index_looked_up_keys_total{{scope="{SCOPE}"}} 2.0' in text
    assert f'kvsp_index_matched_keys_total{{scope="{SCOPE}"}} 1.0' in text
    assert key(0).hex() not in text


@pytest.mark.spec("R-210", "D8")
async def test_the_role_answers_authority(index: Index) -> None:
    def ask(name: str, scope: str) -> grpc.aio.UnaryUnaryCall[Any, Any]:
        request = common_pb2.AuthorizeRequest(method="POST", path="lookup", scope_id=bytes.fromhex(scope))
        return index.authority.Authorize(request, metadata=speak_for(f"spiffe://t/{name}"), timeout=5)

    await ask("client", SCOPE)
    with pytest.raises(grpc.aio.AioRpcError):
        await ask("client", NO_SCOPE)
    with pytest.raises(grpc.aio.AioRpcError):
        await ask("is", SCOPE)


@pytest.mark.spec("R-086")
async def test_an_index_that_stops_ends_its_kept_streams(tmp_path: Path) -> None:
    config = IndexConfig(listen="", policy="", principal="")
    servicer = IndexServicer(config, POLICY, IndexState(block_tokens={}))

    async def endless(first: Any) -> AsyncIterator[Any]:
        yield first
        await asyncio.Event().wait()

    async with connected(tmp_path, lambda target: register(target, servicer, POLICY)) as opened:
        stub = index_pb2_grpc.IndexStub(opened)
        put = index_pb2.PublishRequest(seq=1, put=replica_to_message(record(0)))
        publishing = stub.Publish(endless(put), metadata=speak_for("spiffe://t/h1"), timeout=30)
        assert (await publishing.read()).seq == 1
        feeding = stub.Feed(
            endless(status_to_message(status(II7, {}))), metadata=speak_for("spiffe://t/pc"), timeout=30
        )
        await servicer.drain()
        assert await publishing.read() is grpc.aio.EOF
        await feeding
