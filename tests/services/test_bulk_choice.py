"""Which source comes first: by ability, then by what was measured."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backend import Backend
from gateway.config import RoleConfig
from kvsp.bulk import chooser as chooser_module
from kvsp.bulk.chooser import PROBE_EVERY, SLOWER, Chooser
from kvsp.bulk.rates import ANSWERS_KEPT, SAMPLE_OCTETS_MIN, SAMPLES_MIN, Rates
from kvsp.bulk.source import BlockReader, BlockSource, BlockWriter, Capabilities, Transfer
from kvsp.rpc.config import Peer
from services.instance.peers import InternalHolder
from tests.services.holder_harness import BASE_URI, CLIENT, Rig, block, name, rig
from tests.services.instance_rig import loader, world

MIB = 1 << 20
ABILITIES = {
    "grpc": Capabilities(),
    "ucx": Capabilities(direct=True),
    "rdma": Capabilities(direct=True, rdma=True),
    "shm": Capabilities(same_host_only=True, zero_copy=True, direct=True),
}


class Listed:
    """A source that is only looked at."""

    scheme = "listed"

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.closed = False

    def reader(self, transfer: Transfer) -> BlockReader:
        raise NotImplementedError

    def writer(self, transfer: Transfer) -> BlockWriter:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _abilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking is about what sources say of themselves, whichever this machine has."""

    def load(scheme: str) -> BlockSource:
        return Listed(ABILITIES[scheme])

    monkeypatch.setattr(chooser_module, "load_source", load)


@pytest.fixture
async def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.undo()
    async with rig(tmp_path, with_index=False, schemes=("grpc",), arena_octets=16 << 20) as made:
        yield made


def measured(chooser: Chooser, scheme: str, rate: float) -> None:
    for _ in range(3 * SAMPLES_MIN):
        chooser.rates.moved(scheme, MIB, MIB / rate)


@pytest.mark.parametrize("listed", [["grpc", "ucx", "rdma", "shm"], ["shm", "rdma", "ucx", "grpc"]])
def test_ability_decides_before_anything_is_measured(listed: list[str]) -> None:
    assert Chooser(listed, same_host=True).ranked() == ["shm", "rdma", "ucx", "grpc"]
    assert Chooser(listed, same_host=False).ranked() == ["rdma", "ucx", "grpc"]


def test_a_clearly_slower_scheme_loses_its_place_and_gets_it_back() -> None:
    chooser = Chooser(["ucx", "grpc"], same_host=False)
    measured(chooser, "ucx", 1e9)
    assert chooser.ranked() == ["ucx", "grpc"]
    measured(chooser, "grpc", 1e9 * (SLOWER - 0.1))
    assert chooser.ranked() == ["ucx", "grpc"]
    measured(chooser, "grpc", 1e9 * (SLOWER + 0.3))
    assert chooser.ranked() == ["grpc", "ucx"]
    measured(chooser, "ucx", 2e9)
    assert chooser.ranked() == ["ucx", "grpc"]


def test_a_few_samples_decide_nothing() -> None:
    chooser = Chooser(["ucx", "grpc"], same_host=False)
    measured(chooser, "grpc", 1e9)
    for _ in range(SAMPLES_MIN - 1):
        chooser.rates.moved("ucx", MIB, 1.0)
    assert chooser.ranked() == ["ucx", "grpc"]
    chooser.rates.moved("ucx", MIB, 1.0)
    assert chooser.ranked() == ["grpc", "ucx"]


def test_shared_memory_keeps_its_place_and_is_not_probed_around() -> None:
    chooser = Chooser(["shm", "ucx", "grpc"], same_host=True)
    measured(chooser, "shm", 1e6)
    measured(chooser, "ucx", 1e9)
    assert {chooser.offer()[0] for _ in range(3 * PROBE_EVERY)} == {"shm"}


def test_now_and_then_the_scheme_measured_longest_ago_goes_first() -> None:
    chooser = Chooser(["rdma", "ucx", "grpc"], same_host=False)
    measured(chooser, "ucx", 1e9)
    measured(chooser, "rdma", 1e9)
    first = [chooser.offer()[0] for _ in range(PROBE_EVERY)]
    assert first == ["rdma"] * (PROBE_EVERY - 1) + ["grpc"]
    measured(chooser, "grpc", 1e9)
    assert [chooser.offer()[0] for _ in range(PROBE_EVERY)][-1] == "ucx"
    assert chooser.offer({"rdma"}) == ["ucx", "grpc"]


def test_the_link_is_the_best_way_measured() -> None:
    chooser = Chooser(["ucx", "grpc"], same_host=False)
    assert chooser.link() is None
    measured(chooser, "grpc", 1e9)
    chooser.rates.answered(0.5)
    chooser.rates.answered(0.001)
    link = chooser.link()
    assert link is not None
    assert (round(link.mbit_per_s), round(link.rtt_us)) == (8000, 1000)


def test_closing_closes_every_source() -> None:
    chooser = Chooser(["ucx", "grpc"], same_host=False)
    sources = [chooser.source(scheme) for scheme in chooser.ranked()]
    chooser.close()
    assert all(isinstance(source, Listed) and source.closed for source in sources)


@given(st.lists(st.floats(1e3, 1e12), min_size=SAMPLES_MIN, max_size=50))
def test_an_average_lies_within_its_samples(samples: list[float]) -> None:
    rates = Rates()
    for sample in samples:
        rates.moved("x", SAMPLE_OCTETS_MIN, SAMPLE_OCTETS_MIN / sample)
    rate = rates.rate("x")
    assert rate is not None
    assert min(samples) * 0.999 <= rate <= max(samples) * 1.001


def test_small_transfers_are_no_samples_and_old_answers_are_forgotten() -> None:
    rates = Rates()
    for _ in range(10):
        rates.moved("x", SAMPLE_OCTETS_MIN - 1, 1.0)
    assert (rates.rate("x"), rates.rtt_s) == (None, None)
    rates.answered(0.001)
    for _ in range(ANSWERS_KEPT):
        rates.answered(0.5)
    assert rates.rtt_s == 0.5


async def test_reads_are_measured(holder: Rig) -> None:
    await holder.put(1, block(1, section=MIB))
    assert holder.client.rate("grpc") is None
    for _ in range(SAMPLES_MIN):
        await holder.get(1)
    rate, link = holder.client.rate("grpc"), holder.client.link()
    assert rate is not None
    assert link is not None
    assert link.mbit_per_s == rate * 8 / 1e6
    assert 0 < link.rtt_us < 10e6


async def test_a_slow_consumer_is_not_taken_for_a_slow_transport(holder: Rig) -> None:
    await holder.put(1, block(1, section=MIB))
    clock = holder.client._chooser.rates
    opened = await holder.client.open(CLIENT, name(1))
    opened._now = lambda: 0.0  # type: ignore[method-assign]
    opened.deadline = 1.0
    ticks = iter(range(10**6))
    async for _ in opened.pieces():
        opened._now = lambda: next(ticks) / 1e6  # type: ignore[method-assign]
        for _ in range(1000):  # time passes here, and not in the transport
            opened._now()
    opened.close()
    assert clock.age("grpc") == 0


async def test_gateway_and_instance_offer_what_they_are_configured_to(holder: Rig, tmp_path: Path) -> None:
    backend = Backend(RoleConfig("holder", BASE_URI, Peer(f"unix:{tmp_path}/h1.sock")), ("grpc",))
    assert backend.blocks._chooser.offer() == ["grpc"]
    await backend.close()
    (tmp_path / "ii").mkdir()
    async with world(tmp_path / "ii", "ii1", "h1") as made, loader(made, "h1", schemes=("grpc",)) as loading:
        for each in (loading.holders.own, *loading.holders.others.values()):
            assert isinstance(each, InternalHolder)
            assert each._client._chooser.offer() == ["grpc"]
