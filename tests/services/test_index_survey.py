"""`Index.Survey`: a lookup reduced to what placement decides on."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import estimate, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import Residency
from kvsp.rpc.convert import survey_from_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import index_pb2, index_pb2_grpc
from services.index.config import IndexConfig
from services.index.server import IndexServicer, register
from services.index.state import IndexState
from tests.services.index_records import COMPAT, H1, H2, NO_SCOPE, OTHER_SCOPE, SCOPE, key, record
from tests.services.rpc import connected
from tests.services.test_index_server import POLICY

RESIDENCIES = ([Residency("host", (0, 3))], [Residency("device", (0, 1)), Residency("host", (2, 3), 400_000)])


@pytest.fixture
def state() -> IndexState:
    return IndexState(block_tokens={})


@pytest.fixture
async def channel(state: IndexState, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    config = IndexConfig(listen="", policy="", principal="", lookup_keys_max=8)
    servicer = IndexServicer(config, POLICY, state, lambda: 0)
    async with connected(tmp_path, lambda target: register(target, servicer, POLICY)) as opened:
        yield opened


async def survey(
    channel: grpc.aio.Channel, keys: list[bytes], name: str = "pc", scope: str = SCOPE, compat: str = COMPAT
) -> index_pb2.SurveyReply:
    request = index_pb2.LookupRequest(
        scope_id=bytes.fromhex(scope), compat_id=bytes.fromhex(compat), block_keys=b"".join(keys)
    )
    async with translated():
        return await index_pb2_grpc.IndexStub(channel).Survey(
            request, metadata=speak_for(f"spiffe://t/{name}"), timeout=5
        )


@pytest.mark.spec("R-090", "R-091", "R-092", "R-118")
async def test_it_tells_who_holds_which_layers(state: IndexState, channel: grpc.aio.Channel) -> None:
    for block, holder, residency in ((0, H1, 0), (1, H1, 0), (1, H2, 1), (2, H2, 1), (2, H1, 0), (4, H1, 0)):
        state.publish(record(block, holder, residency=RESIDENCIES[residency]), 100, 0)
    reply = await survey(channel, [key(block) for block in range(5)])
    assert (reply.matched, len(reply.sources)) == (3, 2)
    one, both = survey_from_message(reply)
    assert [(source.holder, source.tiers) for source in one[0]] == [(H1, ((0, 4, float("inf")),))]
    assert [source.holder for source in both[0]] == [H1, H2]
    assert both[0][1].tiers == ((0, 2, float("inf")), (2, 4, 400_000.0))
    assert (one[1], both[1]) == (1, 2)
    assert (await survey(channel, [])).matched == 0
    assert (await survey(channel, [key(3)])).matched == 0


@pytest.mark.spec("R-210", "R-094", "R-095", "D8")
async def test_it_is_placements_alone_and_checked_like_a_lookup(channel: grpc.aio.Channel) -> None:
    for name in ("h1", "ii7", "fe", "client", "is", "nobody"):
        with pytest.raises(KvspError) as error:
            await survey(channel, [key(0)] * 9, name, NO_SCOPE)
        assert error.value.problem == registry.FORBIDDEN
    problems = {
        registry.CONTENT_TOO_LARGE: survey(channel, [key(0)] * 9, scope=NO_SCOPE),
        registry.BAD_REQUEST: survey(channel, [b"cut"], scope=NO_SCOPE),
        registry.SCOPE_DENIED: survey(channel, [key(0)], scope=NO_SCOPE),
    }
    for problem, call in problems.items():
        with pytest.raises(KvspError) as error:
            await call
        assert error.value.problem == problem
    assert (await survey(channel, [key(0)], scope=OTHER_SCOPE)).matched == 0


@pytest.mark.spec("R-115", "R-044")
@given(
    st.lists(st.lists(st.tuples(st.sampled_from([H1, H2]), st.sampled_from([0, 1])), max_size=3), max_size=8),
    st.randoms(),
)
def test_it_equals_a_survey_of_the_records(blocks: list[list[tuple[str, int]]], draw: random.Random) -> None:
    """Also after a block was published anew with another residency."""
    state = IndexState(block_tokens={})
    table: dict[int, dict[str, object]] = {}
    published = [(block, holder, kind) for block, rows in enumerate(blocks) for holder, kind in rows]
    draw.shuffle(published)
    for block, holder, kind in published:
        made = record(block, holder, residency=RESIDENCIES[kind])
        state.publish(made, 100, 0)
        table.setdefault(block, {})[holder] = made
    matched = []
    for block in range(len(blocks)):
        if block not in table:
            break
        matched.append(list(table[block].values()))
    runs = state.survey(
        bytes.fromhex(SCOPE), bytes.fromhex(COMPAT), [key(block) for block in range(len(blocks))], 0
    )
    assert runs == estimate.survey(matched)  # type: ignore[arg-type]
