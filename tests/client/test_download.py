from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsp.client import Block, download
from kvsp.client.block import Expectation
from kvsp.client.download import Download
from kvsp.protocol import digests, registry
from kvsp.protocol.errors import KvspError
from tests.client.peers import container_of, record_of

OCTETS = container_of(3, 40)
RECORD = record_of("https://h.example/", OCTETS)
EXPECT = Expectation.of_record(RECORD, None, None)
CUTS = st.lists(st.integers(0, len(OCTETS)), max_size=12)


@pytest.fixture(scope="module")
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def receive(octets: bytes, cuts: list[int], workers: ThreadPoolExecutor, promised: bytes | None = None) -> Block:
    sink = Download(EXPECT, workers, verify=True)
    digest = hashlib.sha256(octets if promised is None else promised).digest()
    try:
        sink.begin({"content-type": "application/kvsp-block", "repr-digest": digests.repr_digest_field(digest)})
        edges = [0, *sorted(cuts), len(octets)]
        for start, end in itertools.pairwise(edges):
            sink.write(octets[start:end])
        return sink.finish("https://h.example/")
    finally:
        sink.close()


@pytest.mark.spec("R-155", "R-030")
@given(cuts=CUTS)
def test_pieces_of_any_size_make_the_same_block(cuts: list[int], workers: ThreadPoolExecutor) -> None:
    block = receive(OCTETS, cuts, workers)
    assert block.header.encode() + bytes(block.payload) == OCTETS


@pytest.mark.spec("R-155")
def test_octets_that_come_one_by_one_are_verified(workers: ThreadPoolExecutor) -> None:
    assert receive(OCTETS, list(range(len(OCTETS))), workers).verified


@pytest.mark.spec("R-155", "R-161", "R-031", "D5")
@settings(max_examples=200)
@given(cuts=CUTS, at=st.integers(0, len(OCTETS) - 1), flip=st.integers(1, 255), honest=st.booleans())
def test_no_altered_octet_gets_through(
    cuts: list[int], at: int, flip: int, honest: bool, workers: ThreadPoolExecutor
) -> None:
    """Whether or not Repr-Digest matches what was sent. Only the token count is covered by Repr-Digest alone."""
    bad = OCTETS[:at] + bytes([OCTETS[at] ^ flip]) + OCTETS[at + 1 :]
    if honest and at in range(16, 20):
        return
    with pytest.raises(KvspError):
        receive(bad, cuts, workers, promised=bad if honest else OCTETS)


@pytest.mark.spec("R-155")
@given(cuts=CUTS, octets=st.integers(0, len(OCTETS) - 1))
def test_no_part_is_taken_for_the_whole(cuts: list[int], octets: int, workers: ThreadPoolExecutor) -> None:
    with pytest.raises(KvspError):
        receive(OCTETS[:octets], [cut for cut in cuts if cut <= octets], workers)


@pytest.mark.spec("D5")
def test_nothing_is_kept_of_what_is_longer_than_expected(workers: ThreadPoolExecutor) -> None:
    for length in (EXPECT.octets_max + 1, 2**62, 0, 19):
        sink = Download(EXPECT, workers, verify=True)
        with pytest.raises(KvspError) as caught:
            sink.begin({"content-type": "application/kvsp-block", "content-length": str(length)})
        assert caught.value.problem == registry.DIGEST_MISMATCH
        assert len(sink.payload) == 0


def test_the_worker_sees_the_octets_in_order(workers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "HASH_STEP", 16)
    assert receive(OCTETS, list(range(0, len(OCTETS), 7)), workers).verified
