from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET

from kvsp.client import BlockUnavailable, Client
from kvsp.protocol import container, digests, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import Residency
from tests.client.peers import COMPAT, GEOMETRY, KEY, SCOPE, Peer, container_of, record_of, select

Serve = Callable[..., Peer]
Connect = Callable[..., Client]


@pytest.mark.spec("R-155", "R-150", "R-035")
def test_a_block_arrives_verified(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve(octets=octets)
    block = connect(None, holder).get(record_of(holder.base, octets))
    header = container.parse_header(octets)
    assert (block.header, block.holder, block.verified) == (header, holder.base, True)
    assert block.payload == octets[header.header_octets :]
    number, k, v = block.layer(2)
    start, _ = header.layer_span(2)
    assert number == 2
    assert bytes(k) + bytes(v) == octets[header.header_octets + start :][: len(k) + len(v)]


@pytest.mark.spec("R-151", "R-155")
def test_a_layer_range_fills_the_callers_buffer_and_no_more(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve(octets=octets)
    room = bytearray(b"\xee" * (1 << 20))
    block = connect(None, holder).get(record_of(holder.base, octets), layers=(1, 2), into=room)
    part = select(octets, 1, 2)
    header = container.parse_header(part)
    assert block.header.layers == (1, 2)
    assert room[: header.payload_octets] == part[header.header_octets :]
    assert set(room[header.payload_octets :]) == {0xEE}
    assert holder.seen[-1][1].endswith("?layers=1-2")


@pytest.mark.spec("D5")
def test_a_buffer_known_to_be_too_small_is_refused_before_anything_is_sent(
    serve: Serve, connect: Connect, octets: bytes
) -> None:
    holder = serve(octets=octets)
    client, record = connect(None, holder), record_of(holder.base, octets)
    for layers, size in ((None, 1 << 20), ((1, 2), 1 << 19)):
        with pytest.raises(ValueError, match=f"buffer holds {size - 1} octets"):
            client.get(record, layers=layers, descriptor=GEOMETRY, into=bytearray(size - 1))
        assert len(client.get(record, layers=layers, descriptor=GEOMETRY, into=bytearray(size)).payload) == size
    assert holder.count("GET") == 2


@pytest.mark.spec("R-033", "R-155", "R-161", "D5", "U-54")
@pytest.mark.parametrize("layers", [None, (1, 3)])
@pytest.mark.parametrize("mode", ["shifted", "retokened", "overlong"])
def test_what_no_digest_covers_is_held_against_the_descriptor(
    mode: str, layers: tuple[int, int] | None, serve: Serve, connect: Connect, index: Peer, octets: bytes
) -> None:
    liar, honest = serve(mode, octets), serve(octets=octets)
    replicas = [record_of(liar.base, octets), record_of(honest.base, octets)]
    client = connect(index, liar, honest)
    room = bytearray((4 if layers is None else 3) << 18)
    block = client.get(replicas, layers=layers, descriptor=GEOMETRY, into=room)
    assert (block.holder, len(block.payload)) == (honest.base, len(room))
    given = [layer.number for layer in client.get_layers(replicas, layers=layers, descriptor=GEOMETRY, into=room)]
    assert given == list(range(4))[slice(*((0, 4) if layers is None else (1, 4)))]
    with pytest.raises(BlockUnavailable) as caught:
        client.get_from(liar.base, COMPAT, SCOPE, KEY, layers=layers, codec=1, descriptor=GEOMETRY)
    assert caught.value.problem == registry.DIGEST_MISMATCH
    assert index.count("DELETE") == 3


@pytest.mark.spec("R-161")
def test_a_payload_beyond_the_buffer_is_passed_over_unreported(
    serve: Serve, connect: Connect, index: Peer, octets: bytes
) -> None:
    """Without a descriptor it may as well be the caller's fault."""
    small = container_of(4, 1000)
    large, fitting = serve(octets=octets), serve(octets=small)
    replicas = [record_of(large.base, octets), record_of(fitting.base, small)]
    client = connect(index, large, fitting)
    assert client.get(replicas, into=bytearray(8000)).holder == fitting.base
    with pytest.raises(BlockUnavailable, match="buffer holds 8000"):
        client.get(replicas[0], into=bytearray(8000))
    assert index.seen == []


MISMATCHES = (
    "flipped corrupt misdigested undigested malformed giant_table oversized endless shortened other_layers coded"
)
FAILURES = "truncated reset stalled redirected missing denied busy mistyped"


@pytest.mark.parametrize("mode", MISMATCHES.split())
@pytest.mark.spec("R-155", "R-161", "R-162", "R-031", "D5", "D11")
def test_a_lying_holder_is_discarded_and_reported(
    mode: str, serve: Serve, connect: Connect, index: Peer, octets: bytes
) -> None:
    liar, honest = serve(mode, octets), serve(octets=octets)
    replicas = [record_of(liar.base, octets), record_of(honest.base, octets)]
    block = connect(index, liar, honest).get(replicas)
    assert block.holder == honest.base
    assert block.payload == octets[block.header.header_octets :]
    assert [method for method, _ in index.seen] == ["DELETE"]
    assert index.seen[0][1].endswith(f"/{KEY}")


@pytest.mark.parametrize("mode", FAILURES.split())
@pytest.mark.spec("R-088", "R-161", "U-46")
def test_a_failing_holder_is_passed_over_unreported(
    mode: str, serve: Serve, connect: Connect, index: Peer, octets: bytes
) -> None:
    failing, honest = serve(mode, octets), serve(octets=octets)
    replicas = [record_of(failing.base, octets), record_of(honest.base, octets)]
    assert connect(index, failing, honest, stall_s=0.5).get(replicas).holder == honest.base
    assert failing.count("GET") == 1
    assert index.seen == []


@pytest.mark.spec("R-162")
def test_a_refused_report_is_no_failure(serve: Serve, connect: Connect, octets: bytes) -> None:
    index, liar, honest = serve(), serve("corrupt", octets), serve(octets=octets)
    index.replies["DELETE replicas"] = (403, {"type": "about:blank", "status": 403})
    replicas = [record_of(liar.base, octets), record_of(honest.base, octets)]
    assert connect(index, liar, honest).get(replicas).holder == honest.base
    assert index.count("DELETE") == 1
    assert connect(index, liar, honest, report_mismatch=False).get(replicas).holder == honest.base
    assert index.count("DELETE") == 1


@pytest.mark.spec("R-088", "R-161", "R-215")
def test_when_no_replica_delivers_every_cause_is_told(serve: Serve, connect: Connect, octets: bytes) -> None:
    missing, liar = serve("missing", octets), serve("corrupt", octets)
    client = connect(None, missing, liar)
    with pytest.raises(BlockUnavailable) as caught:
        client.get([record_of(missing.base, octets), record_of(liar.base, octets)])
    found = [(holder, cause.problem) for holder, cause in caught.value.causes]
    assert found == [(missing.base, registry.NOT_FOUND), (liar.base, registry.DIGEST_MISMATCH)]
    assert caught.value.problem == registry.UNAVAILABLE
    assert KEY not in str(caught.value)
    with pytest.raises(BlockUnavailable) as missed:
        client.get(record_of(missing.base, octets))
    assert missed.value.problem == registry.NOT_FOUND
    with pytest.raises(BlockUnavailable):
        client.get([])


@pytest.mark.spec("R-156")
def test_transcoded_octets_rest_on_repr_digest_alone(serve: Serve, connect: Connect) -> None:
    stored, private = container_of(2, 1000), 0xFF01
    header = container.parse_header(stored)
    transcoded = container.Header(private, 0, header.token_count, header.sections).encode() + bytes(4000)
    holder = serve(octets=transcoded)
    record = record_of(holder.base, stored)
    client = connect(None, holder)
    assert client.get(record, codec=private).header.codec == private
    with pytest.raises(BlockUnavailable) as caught:
        client.get(record)  # asked for as published: another codec is not that
    assert caught.value.problem == registry.DIGEST_MISMATCH


@pytest.mark.spec("R-155")
def test_without_layer_digests_the_replica_digest_decides(serve: Serve, connect: Connect, octets: bytes) -> None:
    flipped, honest = serve("flipped", octets), serve(octets=octets)
    replicas = [record_of(peer.base, octets, layer_digests=UNSET) for peer in (flipped, honest)]
    client = connect(None, flipped, honest)
    assert client.get(replicas).holder == honest.base
    assert [layer.number for layer in client.get_layers(replicas)] == [0, 1, 2, 3]


@pytest.mark.spec("R-155", "R-042", "D11")
def test_without_layer_digests_no_layer_range_is_taken_on_the_holders_word(
    serve: Serve, connect: Connect, index: Peer, octets: bytes
) -> None:
    flipped, honest = serve("flipped", octets), serve(octets=octets)
    bare, full = record_of(flipped.base, octets, layer_digests=UNSET), record_of(honest.base, octets)
    client = connect(index, flipped, honest)
    assert client.get([bare, full], layers=(3, 3)).holder == honest.base
    assert client.get([bare, full], layers=(3, 3), codec=bare.codec).holder == honest.base
    assert [layer.number for layer in client.get_layers([bare, full], layers=(2, 3))] == [2, 3]
    assert (flipped.seen, index.seen) == ([], [])
    assert client.get(record_of(honest.base, octets, layer_digests=UNSET), layers=(0, 3)).verified
    with pytest.raises(BlockUnavailable):
        client.get(bare, layers=(0, 3))


@pytest.mark.spec("R-036", "D11")
def test_a_record_that_contradicts_itself_is_not_fetched(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve(octets=octets)
    good = record_of(holder.base, octets)
    assert isinstance(good.layer_digests, list)
    altered = record_of(holder.base, octets, layer_digests=["00" * 32, *good.layer_digests[1:]])
    with pytest.raises(BlockUnavailable) as caught:
        connect(None, holder).get(altered, layers=(1, 1))
    assert caught.value.problem == registry.DIGEST_MISMATCH
    assert holder.seen == []


@pytest.mark.spec("R-211", "D10")
def test_only_holders_trusted_for_the_scope_are_contacted(serve: Serve, connect: Connect, octets: bytes) -> None:
    stranger, honest = serve(octets=octets), serve(octets=octets)
    replicas = [record_of(stranger.base, octets), record_of(honest.base, octets)]
    assert connect(None, honest).get(replicas).holder == honest.base
    trusted = {SCOPE: frozenset({honest.base})}
    client = connect(None, stranger, honest, trusted=trusted)
    assert client.get(replicas).holder == honest.base
    for call in (
        lambda: client.put(stranger.base, COMPAT, SCOPE, KEY, octets),
        lambda: client.head(stranger.base, COMPAT, SCOPE, KEY),
        lambda: client.get_from(stranger.base, COMPAT, SCOPE, KEY),
        lambda: client.lease(stranger.base, [KEY], 1000, scope_id=SCOPE),
        lambda: client.get_from(honest.base, COMPAT, "00" * 16, KEY),
    ):
        with pytest.raises(KvspError) as caught:
            call()
        assert caught.value.problem == registry.FORBIDDEN
    assert stranger.seen == []


@pytest.mark.spec("R-045", "R-075")
def test_a_moqt_replica_is_passed_over(serve: Serve, connect: Connect, octets: bytes) -> None:
    honest = serve(octets=octets)
    moqt = record_of("moqt://relay.example/", octets, moqt_namespace="AWEBYgFjAWQBZQ")
    assert connect(None, honest).get([moqt, record_of(honest.base, octets)]).holder == honest.base


@pytest.mark.spec("R-212")
def test_only_the_pinned_producers_bytes_are_accepted(serve: Serve, connect: Connect, octets: bytes) -> None:
    other = container_of(4, 128 << 10, seed=9)
    first, producer = serve(octets=other), serve(octets=octets)
    replicas = [record_of(first.base, other), record_of(producer.base, octets)]
    client = connect(None, first, producer, pinned={KEY: replicas[1].digest})
    assert client.get(replicas).holder == producer.base
    assert first.seen == []
    assert client.get_from(producer.base, COMPAT, SCOPE, KEY).holder == producer.base
    with pytest.raises(BlockUnavailable):
        client.get_from(first.base, COMPAT, SCOPE, KEY)


@pytest.mark.spec("R-212", "R-156")
def test_a_pinned_block_is_not_taken_in_a_form_that_its_digest_does_not_cover(
    serve: Serve, connect: Connect, octets: bytes
) -> None:
    holder = serve(octets=octets)
    record = record_of(holder.base, octets)
    client = connect(None, holder, pinned={KEY: record.digest})
    for call in (
        lambda: client.get(record, codec=0xFF01),
        lambda: client.get(record_of(holder.base, octets, layer_digests=UNSET), layers=(1, 1)),
        lambda: client.get_from(holder.base, COMPAT, SCOPE, KEY, codec=0xFF01),
        lambda: client.get_from(holder.base, COMPAT, SCOPE, KEY, layers=(1, 1)),
    ):
        with pytest.raises(KvspError) as caught:
            call()
        assert caught.value.problem == registry.DIGEST_MISMATCH
    assert holder.seen == []
    assert client.get(record, layers=(1, 1)).verified


@pytest.mark.parametrize(("status", "outcome"), [(299, 200), (471, 471), (599, 599)])
@pytest.mark.spec("R-066")
def test_unlisted_statuses_are_read_by_class(
    status: int, outcome: int, serve: Serve, connect: Connect, index: Peer
) -> None:
    index.replies["POST lookup"] = (status, {"matched": 0, "replicas": []})
    client = connect(index)
    if outcome == 200:
        assert client.lookup(SCOPE, COMPAT, [KEY]).matched == 0
        return
    with pytest.raises(KvspError) as caught:
        client.lookup(SCOPE, COMPAT, [KEY])
    assert caught.value.status == outcome


@pytest.mark.spec("R-153")
def test_without_a_record_repr_digest_is_verified(serve: Serve, connect: Connect, octets: bytes) -> None:
    honest, corrupt = serve(octets=octets), serve("corrupt", octets)
    client = connect(None, honest, corrupt)
    assert client.get_from(honest.base, COMPAT, SCOPE, KEY, layers=(3, 3)).header.layers == (3, 3)
    with pytest.raises(BlockUnavailable):
        client.get_from(corrupt.base, COMPAT, SCOPE, KEY)
    with pytest.raises(KvspError) as caught:
        client.get_from(honest.base, COMPAT.upper(), SCOPE, KEY)
    assert caught.value.status == 400


def test_unverified_is_said_so(serve: Serve, connect: Connect, octets: bytes) -> None:
    corrupt = serve("corrupt", octets)
    block = connect(None, corrupt, verify=False).get(record_of(corrupt.base, octets))
    assert not block.verified


@pytest.mark.spec("U-54", "R-034")
def test_a_layer_is_given_out_while_the_next_is_still_away(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve("gated", octets)
    layers = connect(None, holder).get_layers(record_of(holder.base, octets))
    first = next(layers)
    assert not holder.gate.is_set()
    start = container.parse_header(octets).header_octets
    assert bytes(first.k) == octets[start : start + len(first.k)]
    holder.gate.set()
    assert [layer.number for layer in layers] == [1, 2, 3]


@pytest.mark.spec("U-54")
def test_a_final_mismatch_is_raised_after_the_layers(
    serve: Serve, connect: Connect, index: Peer, octets: bytes
) -> None:
    holder, spare = serve("misdigested", octets), serve(octets=octets)
    replicas = [record_of(holder.base, octets), record_of(spare.base, octets)]
    given: list[int] = []
    with pytest.raises(KvspError) as caught:
        given.extend(layer.number for layer in connect(index, holder, spare).get_layers(replicas))
    assert caught.value.problem == registry.DIGEST_MISMATCH
    assert index.count("DELETE") == 1
    assert spare.seen == []


@pytest.mark.spec("U-54", "R-161")
def test_layers_fail_over_until_the_first_was_used(serve: Serve, connect: Connect, octets: bytes) -> None:
    missing, honest = serve("missing", octets), serve(octets=octets)
    replicas = [record_of(missing.base, octets), record_of(honest.base, octets)]
    client = connect(None, missing, honest)
    assert [layer.number for layer in client.get_layers(replicas, layers=(1, 3))] == [1, 2, 3]
    with pytest.raises(BlockUnavailable):
        list(client.get_layers(replicas[:1]))


def test_leaving_the_loop_stops_the_transfer(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve("gated", octets)
    layers = connect(None, holder).get_layers(record_of(holder.base, octets))
    assert next(layers).number == 0
    layers.close()
    assert not holder.gate.is_set()


def test_head_tells_size_digest_and_age(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve(octets=octets)
    info = connect(None, holder).head(holder.base, COMPAT, SCOPE, KEY)
    assert (info.octets, info.sha256, info.max_age_s) == (len(octets), hashlib.sha256(octets).digest(), 7)


@pytest.mark.spec("R-042", "R-151")
def test_a_partial_replica_serves_the_layers_it_has(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve(octets=octets)
    half = container.parse_header(octets).payload_octets // 2
    record = record_of(holder.base, octets, residency=[Residency("host", (2, 3))], size=half)
    assert connect(None, holder).get(record, layers=(2, 3)).header.layers == (2, 3)
    with pytest.raises(BlockUnavailable):
        connect(None, holder).get(record)  # more octets than the record says it has


def test_progress_is_told(serve: Serve, connect: Connect, octets: bytes) -> None:
    holder = serve(octets=octets)
    told: list[Any] = []
    connect(None, holder).get(record_of(holder.base, octets), progress=lambda *moved: told.append(moved))
    assert told[-1] == (len(octets), len(octets))


@pytest.mark.spec("R-035")
def test_the_record_helper_is_right(octets: bytes) -> None:
    record = record_of("https://h.example/", octets)
    assert isinstance(record.layer_digests, list)
    assert record.digest == digests.format_digest(
        digests.replica_digest([bytes.fromhex(item) for item in record.layer_digests])
    )
