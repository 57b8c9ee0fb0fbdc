"""Octets are given out once the digest of their layer matched."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.bulk import verified as verified_module
from kvsp.bulk.holder import HolderClient
from kvsp.bulk.source import Piece
from kvsp.bulk.verified import verified
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError
from services.holder.local import local_peers
from tests.services.holder_harness import CLIENT, Rig, block, name, rig, until

LAYERS, SECTION = 6, 300_000


def layer_digests(made: bytes) -> list[bytes]:
    header = container.parse_header(made)
    payload = made[header.header_octets :]
    spans = [header.layer_span(layer) for layer in range(header.layer_count)]
    return [hashlib.sha256(payload[at : at + octets]).digest() for at, octets in spans]


async def cut(octets: bytes, sizes: Sequence[int]) -> AsyncIterator[Piece]:
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(octets):
            return
        yield octets[at : at + size]
        at += size


async def collect(pieces: AsyncIterator[Piece], into: bytearray) -> None:
    async for piece in pieces:
        into += piece


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[bytes], list[int], int]:
    layers = draw(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8))
    return layers, draw(st.lists(st.integers(1, 400), min_size=1, max_size=5)), draw(st.integers(1, 600))


@pytest.mark.spec("R-042", "U-54")
@given(cases())
async def test_any_cut_gives_the_same_octets(case: tuple[list[bytes], list[int], int]) -> None:
    layers, sizes, verified_module.JOB_OCTETS = case  # type: ignore[misc]
    expected = [(len(layer), hashlib.sha256(layer).digest()) for layer in layers]
    got = bytearray()
    await collect(verified(cut(b"".join(layers), sizes), expected), got)
    assert got == b"".join(layers)


@pytest.mark.spec("R-042", "U-54")
@given(cases(), st.data())
async def test_nothing_of_a_layer_that_does_not_match_is_given_out(
    case: tuple[list[bytes], list[int], int], data: st.DataObject
) -> None:
    layers, sizes, verified_module.JOB_OCTETS = case  # type: ignore[misc]
    expected = [(len(layer), hashlib.sha256(layer).digest()) for layer in layers]
    bad = data.draw(st.integers(0, len(layers) - 1))
    at = data.draw(st.integers(0, len(layers[bad]) - 1))
    wrong = bytearray(layers[bad])
    wrong[at] ^= 1 << data.draw(st.integers(0, 7))
    sent = b"".join([*layers[:bad], bytes(wrong), *layers[bad + 1 :]])
    got = bytearray()
    with pytest.raises(KvspError) as caught:
        await collect(verified(cut(sent, sizes), expected), got)
    assert caught.value.problem is registry.DIGEST_MISMATCH
    assert len(got) <= sum(map(len, layers[:bad]))
    assert b"".join(layers).startswith(got)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_module, "JOB_OCTETS", verified_module.JOB_OCTETS)


@pytest.mark.parametrize("change", [-1, 1])
async def test_another_length_is_refused(change: int) -> None:
    octets = bytes(1000)
    expected = [(1000 + change, hashlib.sha256(octets).digest())]
    with pytest.raises(KvspError) as caught:
        await collect(verified(cut(octets, [100]), expected), bytearray())
    assert caught.value.problem in (registry.UNAVAILABLE, registry.DIGEST_MISMATCH)


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with (
        rig(tmp_path, with_index=False, schemes=("grpc",), arena_octets=16 << 20) as made,
        local_peers(made.host, tmp_path / "c"),
    ):
        await made.put(1, block(1, LAYERS, SECTION))
        yield made


@pytest.mark.spec("R-042", "U-54")
@pytest.mark.parametrize("schemes", [("grpc",), ("shm",)])
async def test_a_verified_read(holder: Rig, schemes: tuple[str, ...]) -> None:
    made = block(1, LAYERS, SECTION)
    expected = layer_digests(made)
    client = HolderClient(holder.channel, schemes, local=holder.folder / "c")
    opened = await client.open(CLIENT, name(1), digests=expected)
    got = bytearray(opened.header)
    await collect(opened.pieces(), got)
    opened.close()
    assert got == made
    opened = await client.open(CLIENT, name(1), digests=expected)
    target = bytearray(opened.payload_octets)
    assert [end async for end in opened.into(target)][-1] == len(target)
    opened.close()
    assert opened.header + bytes(target) == made
    some = await client.open(CLIENT, name(1), layers=(2, 4), digests=expected[2:5])
    got = bytearray()
    await collect(some.pieces(), got)
    some.close()
    assert got == made[len(opened.header) + 4 * SECTION : len(opened.header) + 10 * SECTION]
    with pytest.raises(KvspError) as caught:
        await client.open(CLIENT, name(1), digests=expected[1:])
    assert caught.value.problem is registry.DIGEST_MISMATCH
    wrong = [*expected[:3], bytes(32), *expected[4:]]
    opened = await client.open(CLIENT, name(1), digests=wrong)
    got = bytearray()
    with pytest.raises(KvspError) as caught:
        await collect(opened.pieces(), got)
    assert caught.value.problem is registry.DIGEST_MISMATCH
    assert len(got) <= 3 * 2 * SECTION
    opened.close()
    await client.close()


async def test_a_holder_that_takes_what_was_not_offered_is_not_asked_for_ever(
    holder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def grpc_always(offered: Sequence[str], *, same_host: bool) -> str:
        asked.append(list(offered))
        return "grpc"

    monkeypatch.setattr(holder.host, "scheme", grpc_always)
    client = HolderClient(holder.channel, ("grpc", "shm"))
    opened = await client.open(CLIENT, name(1), digests=[bytes(32)] * LAYERS)
    with pytest.raises(KvspError) as caught:
        [piece async for piece in opened.pieces()]
    assert caught.value.problem is registry.DIGEST_MISMATCH
    assert len(asked) == 2
    opened.close()
    await client.close()


async def test_a_header_that_tells_of_other_octets_than_come_is_refused(
    holder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader would have made room for what the header says."""
    made = block(1, LAYERS, SECTION)
    opened, other = holder.host.open, block(1, LAYERS, SECTION // 2)
    header = other[: container.parse_header(other).header_octets]

    async def lying(*arguments: Any) -> tuple[Any, bytes, bytes]:
        pin, _, sha256 = await opened(*arguments)
        return pin, header, sha256

    monkeypatch.setattr(holder.host, "open", lying)
    with pytest.raises(KvspError) as caught:
        await holder.client.open(CLIENT, name(1), digests=layer_digests(made))
    assert caught.value.problem is registry.DIGEST_MISMATCH
    await until(lambda: holder.pins(1) == 0)
