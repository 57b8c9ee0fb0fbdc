"""Memory of a sharded context: pieces, their release, who may read what when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import container
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.reshard import Range, merged, without
from services.instance.shard_store import PIECE_BLOCKS, NotHeld, ShardStore
from services.instance.sharded import attend_local
from tests.connectors.driver import DIGEST
from tests.services.instance_engine import B

PIECE = PIECE_BLOCKS * B


def descriptor(layers: int = 3, kv_dtype: str = "fp32", head_dim: int = 4, block_tokens: int = B) -> Descriptor:
    return Descriptor(
        model="small", model_digest=DIGEST, tokenizer_digest=DIGEST, layers=layers, kv_heads=2, head_dim=head_dim,
        kv_dtype=kv_dtype, positional="rope", block_tokens=block_tokens, layout="kvsp-layout-1",
    )  # fmt: skip


DESCRIPTOR = descriptor()


def store(pieces: int = 8) -> ShardStore:
    return ShardStore(DESCRIPTOR, pieces * PIECE_BLOCKS * DESCRIPTOR.payload_octets)


def states_of(tokens: Range, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [head, token, dim] that say where they belong."""
    at = torch.arange(*tokens).float() * 10 + layer
    keys = at.view(1, -1, 1) + torch.linspace(0, 1, 8).view(2, 1, 4)
    return keys, -keys


def fill(made: ShardStore, tokens: Range) -> None:
    for layer in range(DESCRIPTOR.layers):
        made.write(layer, tokens[0], *states_of(tokens, layer))
        made.advance(tokens, layer + 1)


def assert_holds(made: ShardStore, tokens: Range) -> None:
    for layer in range(DESCRIPTOR.layers):
        views = made.views(layer, tokens)
        for which, expected in enumerate(states_of(tokens, layer)):
            assert torch.equal(torch.cat([view[which] for view in views], dim=1), expected)


block_ranges = st.tuples(st.integers(0, 60), st.integers(1, 40)).map(lambda each: (each[0] * B, sum(each) * B))


@pytest.mark.spec("R-191", "R-196")
@given(st.lists(st.tuples(st.booleans(), block_ranges), max_size=25))
def test_what_stays_keeps_its_place_and_its_states(steps: list[tuple[bool, Range]]) -> None:
    made, held = store(pieces=20), list[Range]()
    addresses: dict[int, int] = {}
    for take, tokens in steps:
        if take:
            for missing in without([tokens], held):
                made.reserve(missing)
                fill(made, missing)
            held = merged([*held, *without([tokens], held)])
        else:
            made.release(tokens)
            held = without(held, [tokens])
        blocks = {block for a, b in held for block in range(a // B, b // B)}
        assert made.ranges() == held
        addresses = {block: at for block, at in addresses.items() if block in blocks}
        for block in blocks:
            assert made.address(block) == addresses.setdefault(block, made.address(block))
        for each in held:
            assert_holds(made, each)
        pieces = {block // PIECE_BLOCKS for block in blocks}
        assert made.octets == len(pieces) * PIECE_BLOCKS * DESCRIPTOR.payload_octets
    assert len(set(addresses.values())) == len(addresses)


def resident() -> int:
    """Octets of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.spec("R-196")
def test_release_gives_memory_back_to_the_system() -> None:
    made = ShardStore(descriptor(layers=4, head_dim=128, block_tokens=16), 1 << 30)
    whole, half = (0, 32 * 256), (0, 16 * 256)  # 32 pieces of 2 MiB, 64 MiB
    made.reserve(whole)
    for layer in range(4):
        ones = torch.ones(2, 1, 128).expand(2, whole[1], 128)
        made.write(layer, 0, ones, ones)
    made.advance(whole, 4)
    full = resident()
    assert made.octets == made.octets_of(whole) == 64 << 20
    made.release(half)
    assert made.octets == 32 << 20
    assert resident() < full - (31 << 20)
    assert float(made.views(3, (half[1], whole[1]))[0][0].min()) == 1


def test_a_reader_keeps_what_it_looks_at() -> None:
    made = store()
    made.reserve((0, PIECE))
    fill(made, (0, PIECE))
    [(keys, _)] = made.views(1, (0, PIECE))
    made.release((0, PIECE))
    assert made.octets == 0
    assert torch.equal(keys, states_of((0, PIECE), 1)[0])


@pytest.mark.spec("R-033")
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8-e4m3"])
def test_blocks_travel_octet_by_octet(kv_dtype: str) -> None:
    shape = descriptor(kv_dtype=kv_dtype)
    source, target = (ShardStore(shape, 1 << 24) for _ in range(2))
    source.reserve((0, 4 * B))
    target.reserve((2 * B, 4 * B))
    section = shape.section_octets
    for block in range(4):
        for layer in range(3):
            for which, rows in enumerate(source.rows(layer, block)):
                rows[:] = bytes([block, layer, which, 7]) * (section // 4)
    octets = source.export(3)
    header = container.parse_header(octets)
    container.check_geometry(header, shape)
    assert octets[header.header_octets + 3 * section :][:4] == bytes([3, 1, 1, 7])
    at = header.header_octets
    for layer in range(3):
        for rows in target.rows(layer, 3):
            rows[:] = octets[at : at + section]
            at += section
    assert target.export(3) == octets


def test_the_bound_is_kept_before_anything_is_allocated() -> None:
    made = store(pieces=2)
    made.reserve((0, PIECE + B))
    with pytest.raises(KvspError) as full:
        made.reserve((PIECE + B, 2 * PIECE + B))
    assert full.value.status == 503
    assert made.ranges() == [(0, PIECE + B)]
    assert made.octets == made.octets_max
    with pytest.raises(KvspError):
        made.reserve((1 << 40, 1 << 50))
    made.reserve((PIECE + B, 2 * PIECE))
    for wrong in ((0, B), (5, 5), (9, 3)):
        with pytest.raises(ValueError):
            made.reserve(wrong)


@pytest.mark.parametrize(
    "use",
    [
        lambda made: made.rows(0, 2),
        lambda made: made.address(2),
        lambda made: made.export(2),
        lambda made: made.views(0, (B, 3 * B)),
        lambda made: made.write(0, 2 * B, *states_of((2 * B, 3 * B), 0)),
        lambda made: made.ready(0, [(0, 3 * B)]),
        lambda made: attend_local(made, [(0, 3 * B)], 0, torch.ones(2, 1, 4), 3 * B, scale=1.0),
    ],
)
def test_what_is_not_held_cannot_be_used(use: Callable[[ShardStore], object]) -> None:
    made = store()
    made.reserve((0, 3 * B))
    made.release((2 * B, 3 * B))
    with pytest.raises(NotHeld):
        use(made)


def test_who_watches_is_told_when_more_layers_are_there() -> None:
    made, told = store(), list[bool]()
    made.reserve((0, 4 * B))
    made.reserve((6 * B, 8 * B))
    made.watch(lambda: told.append(made.ready(1, [(0, B), (6 * B, 7 * B)])))
    assert not made.ready(0, [(3 * B, 4 * B)])
    made.advance((0, 8 * B), 1)
    assert made.ready(0, [(0, B), (6 * B, 7 * B)])
    made.advance((0, 4 * B), 3)
    made.advance((6 * B, 8 * B), 2)
    assert told == [False, False, True]
    assert made.ready(2, [(0, 4 * B)])
    assert not made.ready(2, [(0, 4 * B), (6 * B, 8 * B)])


def test_who_watches_is_told_of_what_is_released() -> None:
    made, held = store(), list[list[Range]]()
    made.reserve((0, 4 * B))
    made.watch(lambda: held.append(made.ranges()))
    made.release((B, 2 * B))
    assert held == [[(0, B), (2 * B, 4 * B)]]
    with pytest.raises(NotHeld):
        made.ready(0, [(0, 4 * B)])
    assert not made.ready(0, [(2 * B, 4 * B)])  # it is on its way still
    made.advance((0, 4 * B), 3)
    assert made.ready(2, [(0, B), (2 * B, 4 * B)])


def test_only_older_tokens_are_attended() -> None:
    made = store()
    made.reserve((0, 2 * PIECE))
    fill(made, (0, 2 * PIECE))
    queries = torch.randn(4, 3, 4) / 100
    ranges = [(0, B), (3 * B, PIECE + 3 * B)]
    cut = attend_local(made, ranges, 1, queries, PIECE + B, scale=0.5)
    expected = attend_local(made, [(0, B), (3 * B, PIECE + B)], 1, queries, 2 * PIECE, scale=0.5)
    assert torch.equal(cut.output, expected.output)
    assert torch.equal(cut.log_sum, expected.log_sum)
    nothing = attend_local(made, ranges, 1, queries, 0, scale=0.5)
    assert torch.isneginf(nothing.log_sum).all()
    assert not nothing.output.any()
