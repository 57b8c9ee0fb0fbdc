"""Checkpoints, directives and reshard steps survive the way through protobuf, and are checked on it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kvsp.protocol import jsonio, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.estimate import Run, Source
from kvsp.protocol.records import (
    DIRECTIVE_STATES,
    DirectiveBlock,
    DirectiveStatus,
    PrefetchDirective,
    ReshardFetch,
    ReshardRequest,
    Sampler,
    SessionCheckpoint,
)
from kvsp.rpc import convert
from kvsp.v1 import common_pb2, index_pb2, instance_pb2
from tests.services.test_rpc_convert import hex16, hex32

tokens = st.integers(0, limits.TOKEN_MAX)
uints = st.integers(0, limits.INT_MAX)
positives = st.integers(1, limits.INT_MAX)
uuids = st.uuids().map(str)
sources = st.sampled_from(["https://h1.example/kvsp/", "https://h2.example/", "moqt://relay.example/"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
params = st.dictionaries(
    texts,
    st.none() | st.booleans() | st.integers(-limits.INT_MAX, limits.INT_MAX)
    | st.floats(allow_nan=False, allow_infinity=False) | texts | st.lists(tokens, max_size=3),
    max_size=4,
)  # fmt: skip
samplers = st.builds(
    Sampler,
    method=texts,
    params=params,
    seed=st.integers(-limits.INT_MAX, limits.INT_MAX),
    step=uints,
    deterministic=st.booleans(),
)


@st.composite
def checkpoints(draw: st.DrawFn) -> SessionCheckpoint:
    generated = draw(st.lists(tokens, max_size=8))
    return SessionCheckpoint(
        session=draw(uuids),
        epoch=draw(uints),
        compat_id=draw(hex32),
        scope_id=draw(hex16),
        prompt_blocks=draw(st.lists(hex32, max_size=3)),
        prompt_tail=draw(st.lists(tokens, max_size=4)),
        generated=generated,
        output_offset=len(generated),
        sampler=draw(samplers),
    )


directives = st.builds(
    PrefetchDirective,
    directive=uuids,
    scope_id=hex16,
    compat_id=hex32,
    blocks=st.lists(
        st.builds(DirectiveBlock, block_key=hex32, sources=st.lists(sources, min_size=1, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    deadline_ms=positives,
    lease_ms=positives,
    request_ref=texts | st.just(UNSET),
)


@st.composite
def reshards(draw: st.DrawFn) -> ReshardRequest:
    step = draw(st.sampled_from(["plan", "commit", "abort"]))
    if step != "plan":
        return ReshardRequest("m", **{step: draw(uints)})
    old = draw(st.integers(0, limits.INT_MAX - 1))
    edges = sorted(draw(st.sets(uints, min_size=4, max_size=4)))
    retain, fetch, release = pairwise(edges)
    fetches = [ReshardFetch(fetch, "https://ii2.example/")]
    return ReshardRequest(draw(texts), old, old + 1, draw(positives), [retain], fetches, [release])


@pytest.mark.spec("R-047", "R-048", "R-008")
@given(checkpoints())
def test_checkpoints_round_trip(checkpoint: SessionCheckpoint) -> None:
    octets = convert.checkpoint_to_message(checkpoint).SerializeToString()
    assert convert.checkpoint_from_message(common_pb2.SessionCheckpoint.FromString(octets)) == checkpoint
    # What comes from JSON gives the same message as what comes from a message.
    assert jsonio.decode(jsonio.encode(checkpoint), SessionCheckpoint) == checkpoint


@pytest.mark.spec("R-047")
@given(samplers)
def test_samplers_round_trip(sampler: Sampler) -> None:
    octets = convert.sampler_to_message(sampler).SerializeToString()
    assert convert.sampler_from_message(common_pb2.Sampler.FromString(octets)) == sampler


@pytest.mark.spec("R-051", "R-132")
@given(directives)
def test_directives_round_trip(directive: PrefetchDirective) -> None:
    octets = convert.directive_to_message(directive).SerializeToString()
    assert convert.directive_from_message(instance_pb2.PrefetchDirective.FromString(octets)) == directive


@pytest.mark.spec("R-052", "U-18")
@given(uuids, st.sampled_from(sorted(DIRECTIVE_STATES)), st.lists(hex32, max_size=3))
def test_directive_statuses_round_trip(directive: str, state: str, loaded: list[str]) -> None:
    status = DirectiveStatus(directive, state, loaded)
    octets = convert.directive_status_to_message(status).SerializeToString()
    assert convert.directive_status_from_message(instance_pb2.DirectiveStatus.FromString(octets)) == status


@pytest.mark.spec("R-055")
@given(reshards())
def test_reshard_steps_round_trip(request: ReshardRequest) -> None:
    octets = convert.reshard_to_message(request).SerializeToString()
    assert convert.reshard_from_message(instance_pb2.ReshardRequest.FromString(octets)) == request


rates = st.floats(min_value=1e-6, max_value=1e18) | st.just(math.inf)
surveyed = st.builds(
    Source,
    holder=sources,
    layer_count=st.integers(1, 100),
    layer_bits=st.floats(1, 1e12),
    tiers=st.lists(st.tuples(st.just(0), st.integers(1, 100), rates), min_size=1, max_size=2).map(tuple),
)


@pytest.mark.spec("R-115", "R-118")
@given(st.lists(st.tuples(st.lists(surveyed, max_size=2).map(tuple), st.integers(1, 8192)), max_size=3))
def test_surveys_round_trip(runs: list[Run]) -> None:
    message = index_pb2.SurveyReply.FromString(convert.survey_to_message(runs).SerializeToString())
    assert message.matched == sum(blocks for _, blocks in runs)
    assert convert.survey_from_message(message) == runs


# --- messages of another maker ---

SESSION = "0f0e0d0c-0b0a-4908-8706-050403020100"
CHECKPOINT = SessionCheckpoint(
    SESSION, 1, "c0" * 32, "5c" * 16, ["4b" * 32], [1], [2, 3], 2, Sampler("greedy", {}, 0, 2, deterministic=True)
)  # fmt: skip
DIRECTIVE = PrefetchDirective(
    SESSION, "5c" * 16, "c0" * 32, [DirectiveBlock("4b" * 32, ["https://h1.example/"])], 1, 1
)
PLAN = ReshardRequest("m", 1, 2, 5, [(0, 1)], [ReshardFetch((1, 2), "https://ii2.example/")], [(2, 3)])

BAD_CHECKPOINTS: dict[str, Any] = {
    "session": lambda m: setattr(m, "session", "{" + SESSION + "}"),
    "no session": lambda m: m.ClearField("session"),
    "epoch beyond 2^53-1": lambda m: setattr(m, "epoch", 2**53),
    "short compat": lambda m: setattr(m, "compat_id", b"x" * 31),
    "no scope": lambda m: m.ClearField("scope_id"),
    "cut key": lambda m: setattr(m, "prompt_blocks", b"x" * 33),
    "token missing": lambda m: m.generated.pop(),
    "offset": lambda m: setattr(m, "output_offset", 3),
    "params no JSON": lambda m: setattr(m.sampler, "params_json", b"{"),
    "params no object": lambda m: setattr(m.sampler, "params_json", b"[]"),
    "params twice": lambda m: setattr(m.sampler, "params_json", b'{"k":1,"k":2}'),
    "params deep": lambda m: setattr(m.sampler, "params_json", b'{"k":' + b"[" * 40 + b"]" * 40 + b"}"),
    "params NaN": lambda m: setattr(m.sampler, "params_json", b'{"k":NaN}'),
    "seed": lambda m: setattr(m.sampler, "seed", 2**53),
    "step": lambda m: setattr(m.sampler, "step", 2**53),
    "method": lambda m: setattr(m.sampler, "method", "x" * (limits.NAME_OCTETS_MAX + 1)),
}
BAD_DIRECTIVES: dict[str, Any] = {
    "id": lambda m: setattr(m, "directive", "x"),
    "no blocks": lambda m: m.ClearField("blocks"),
    "no sources": lambda m: m.blocks[0].ClearField("sources"),
    "source": lambda m: m.blocks[0].sources.append("http://h1.example/"),
    "key": lambda m: setattr(m.blocks[0], "block_key", b"x"),
    "deadline": lambda m: setattr(m, "deadline_ms", 0),
    "lease": lambda m: m.ClearField("lease_ms"),
    "order": lambda m: setattr(m, "layer_order", "descending"),
    "no order": lambda m: m.ClearField("layer_order"),
    "reference": lambda m: setattr(m, "request_ref", "x" * (limits.NAME_OCTETS_MAX + 1)),
}
BAD_STEPS: dict[str, Any] = {
    "none": lambda m: m.ClearField("step"),
    "skips a version": lambda m: setattr(m.plan, "to", 3),
    "empty range": lambda m: m.plan.retain.add(first=5, end=5),
    "overlap": lambda m: m.plan.release.add(first=0, end=1),
    "from": lambda m: setattr(m.plan.fetch[0], "from", "https://II2.example/"),
    "deadline": lambda m: m.plan.ClearField("deadline_ms"),
    "commit beyond 2^53-1": lambda m: setattr(m, "commit", 2**53),
}


def is_refused(read: Any, message: Any) -> bool:
    with pytest.raises(KvspError) as caught:
        read(message)
    return caught.value.problem is registry.BAD_REQUEST


@pytest.mark.spec("R-047", "R-048", "U-33", "D7", "U-06")
@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_a_checkpoint_message_is_checked_like_json(name: str) -> None:
    message = convert.checkpoint_to_message(CHECKPOINT)
    BAD_CHECKPOINTS[name](message)
    assert is_refused(convert.checkpoint_from_message, message)


@pytest.mark.spec("R-051", "U-08")
@pytest.mark.parametrize("name", BAD_DIRECTIVES)
def test_a_directive_message_is_checked_like_json(name: str) -> None:
    message = convert.directive_to_message(DIRECTIVE)
    BAD_DIRECTIVES[name](message)
    assert is_refused(convert.directive_from_message, message)


@pytest.mark.spec("R-055", "U-38", "D6")
@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_reshard_message_is_checked_like_json(name: str) -> None:
    message = convert.reshard_to_message(PLAN)
    BAD_STEPS[name](message)
    assert is_refused(convert.reshard_from_message, message)


@pytest.mark.spec("R-052", "U-18")
@pytest.mark.parametrize(
    "message",
    [
        instance_pb2.DirectiveStatus(),
        instance_pb2.DirectiveStatus(directive=SESSION, state="done"),
        instance_pb2.DirectiveStatus(directive=SESSION, state="partial", loaded=b"x" * 31),
        instance_pb2.DirectiveStatus(directive="x", state="partial"),
    ],
)
def test_a_directive_status_is_checked_like_json(message: instance_pb2.DirectiveStatus) -> None:
    assert is_refused(convert.directive_status_from_message, message)
