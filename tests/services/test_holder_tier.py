"""Split residency: what the engine beside a holder keeps in its own memory is published; nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import jsonio, registry
from kvsp.protocol.names import party_id
from kvsp.protocol.records import ReplicaRecord
from kvsp.rpc.clock import now_ms
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, holder_pb2
from services.holder.blocks import Block, Kept
from services.holder.publisher import replica_record
from services.holder.state import Publish, Withdraw
from tests.services.holder_harness import (
    BASE_URI,
    CLIENT,
    CLIENT2,
    HOLDER,
    Rig,
    name,
    refused,
    rig,
    until,
)
from tests.services.holder_harness import block as container_of
from tests.services.holder_states import TTL, A, digested, put, state_of
from tests.services.holder_states import name as name_in_state

DEVICE = Kept("device", 0, 1)


def block_of(layers: int) -> Block:
    return Block(name_in_state(1), 0, digested(1, layers=layers))


# --- the rules ---


@pytest.mark.spec("R-044", "R-041", "R-043")
@given(layers=st.integers(1, 40), first=st.integers(0, 50), span=st.integers(0, 50))
def test_residency_names_every_layer_once(layers: int, first: int, span: int) -> None:
    block = block_of(layers)
    kept = range(first, min(first + span, layers - 1) + 1)
    assert block.keep(Kept("device", first, first + span)) == bool(kept)
    record = replica_record(block, BASE_URI, TTL)  # a valid record: without overlap, within its layer digests
    tiers = {}
    for entry in record.residency:
        for layer in range(entry.layers[0], entry.layers[1] + 1):
            assert layer not in tiers
            tiers[layer] = entry.tier
    assert tiers == {layer: "device" if layer in kept else "host" for layer in range(layers)}
    assert record.size == block.digested.header.payload_octets  # all of it is here (U-26)
    assert block.keep(None) == bool(kept)
    assert [tier for tier, _ in block.residency] == ["host"]


@pytest.mark.spec("R-044", "R-085")
def test_only_what_changes_is_published_again() -> None:
    state = state_of(8)
    first, second = put(state, 1), put(state, 2)
    state.instructions()
    state.set_tier(DEVICE, [first.name, first.name, name_in_state(9)])
    assert state.instructions() == [Publish(first)]
    state.set_tier(DEVICE)
    assert state.instructions() == [Publish(second)]
    state.set_tier(DEVICE)
    state.set_tier(Kept("device", 0, 99))  # of two layers these are the same
    assert state.instructions() == []
    state.set_tier(Kept("device", 1, 1), [second.name])
    state.set_tier(Kept("remote-memory", 1, 1), [second.name])  # another tier takes its place
    assert state.instructions() == [Publish(second), Publish(second)]
    assert second.residency == [("remote-memory", (1, 1)), ("host", (0, 0))]
    state.set_tier(None)
    assert state.instructions() == [Publish(first), Publish(second)]
    third = put(state, 3)
    assert third.kept is None


@pytest.mark.spec("R-086", "R-087", "U-15")
def test_what_is_not_listed_is_not_published() -> None:
    state = state_of(8)
    first, squatter = put(state, 1), put(state, 1, scope=b"\xbb" * 16)
    state.instructions()
    state.set_tier(DEVICE)
    assert state.instructions() == [Publish(first)]
    assert squatter.kept == DEVICE  # it is told when its turn to be listed comes
    state.withdraw(first)
    assert state.instructions() == [Withdraw(first)]
    state.set_tier(None, [first.name])
    assert state.instructions() == []
    state.drain()
    state.instructions()
    state.set_tier(Kept("device", 0, 0))
    assert state.instructions() == []


@pytest.mark.spec("R-087", "R-141")
def test_eviction_takes_no_notice() -> None:
    state = state_of(2)
    first, second = put(state, 1), put(state, 2)
    state.set_tier(DEVICE, [first.name])
    put(state, 3)
    assert first.gone  # the least recently used, as it would have been
    assert not second.gone
    pin = state.open(1, A, second.name, 0)
    state.set_tier(DEVICE)
    assert pin.header == second.digested.header  # all layers are read from here


# --- over sockets ---


async def set_tier(holder: Rig, tier: str, *names: int, principal: str = HOLDER, **layers: int) -> None:
    request = holder_pb2.SetTierRequest(tier=tier, names=[name(i) for i in names])
    if layers:
        request.layers.CopyFrom(common_pb2.LayerRange(**layers))
    async with translated():
        await holder.stub.SetTier(request, metadata=speak_for(principal))


def listed_residency(holder: Rig, i: int) -> list[tuple[str, tuple[int, int]]]:
    found = holder.index.table.find(party_id(BASE_URI), name(i).block_key, now_ms())
    assert found is not None
    record = jsonio.decode(found.text + b"1}", ReplicaRecord)  # the index keeps it cut before the TTL
    return [(entry.tier, entry.layers) for entry in record.residency]


@pytest.mark.spec("R-044", "U-49")
async def test_split_residency_is_in_the_index_until_it_is_cleared(tmp_path: Path) -> None:
    async with rig(tmp_path) as holder:
        for i in range(3):
            await holder.put(i)
        await until(lambda: all(map(holder.listed, range(3))))
        await set_tier(holder, "device", 0, 7, first=0, last=1)
        await until(lambda: listed_residency(holder, 0) == [("device", (0, 1)), ("host", (2, 3))])
        assert listed_residency(holder, 1) == [("host", (0, 3))]
        await set_tier(holder, "device", first=1, last=2)
        split = [("device", (1, 2)), ("host", (0, 0)), ("host", (3, 3))]
        await until(lambda: all(listed_residency(holder, i) == split for i in range(3)))
        assert await holder.get(0) == container_of(0)
        await set_tier(holder, "device")  # "on entering sleep"
        await until(lambda: all(listed_residency(holder, i) == [("host", (0, 3))] for i in range(3)))


@pytest.mark.spec("R-081", "R-210", "D1")
async def test_only_the_holder_itself_may(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False) as holder:
        await holder.put(1)
        for principal in (CLIENT, CLIENT2, "spiffe://t/is", "spiffe://t/nobody"):
            # Nor is anybody else told what is wrong with the request.
            await refused(registry.FORBIDDEN, set_tier(holder, "device", 1, principal=principal, first=0, last=0))
            await refused(registry.FORBIDDEN, set_tier(holder, "Device", principal=principal))
        stored = holder.stored(1)
        assert stored is not None
        assert stored.kept is None


@pytest.mark.spec("R-043", "R-005")
@pytest.mark.parametrize(
    ("tier", "layers"),
    [
        ("host", {}),
        ("", {}),
        ("Device", {}),
        ("device", {"first": 2, "last": 1}),
        ("host", {"first": 0, "last": 0}),
    ],
)
async def test_malformed_requests_are_400(tmp_path: Path, tier: str, layers: dict[str, int]) -> None:
    async with rig(tmp_path, with_index=False) as holder:
        await refused(registry.BAD_REQUEST, set_tier(holder, tier, **layers))


async def test_a_malformed_name_is_400(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False) as holder:
        request = holder_pb2.SetTierRequest(tier="device", names=[common_pb2.BlockName(block_key=b"short")])

        async def send() -> None:
            async with translated():
                await holder.stub.SetTier(request, metadata=speak_for(HOLDER))

        await refused(registry.BAD_REQUEST, send())
