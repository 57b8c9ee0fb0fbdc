"""What the index lists follows what the holder holds, through restarts of either."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvsp.protocol import jsonio, registry
from kvsp.protocol.digests import ContainerDigester, format_digest, replica_digest
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import ReplicaRecord
from kvsp.rpc.clock import now_ms
from services.holder.blocks import Block, Digested
from services.holder.journal import Journal
from services.holder.publisher import replica_record
from services.holder.stream import name_of
from services.index.state import IndexState
from tests.services.holder_harness import (
    BASE_URI,
    CLIENT,
    OTHER,
    OTHER_CLIENT,
    SCOPE,
    Rig,
    block,
    index_at,
    name,
    refused,
    rig,
    until,
)  # fmt: skip


@pytest.mark.spec("R-080", "R-086", "U-26", "U-32")
async def test_blocks_are_listed_until_they_are_evicted(tmp_path: Path) -> None:
    async with rig(tmp_path, arena_octets=3 * 8192) as holder:
        for i in range(3):
            await holder.put(i)
        await until(lambda: all(map(holder.listed, range(3))))
        [stored] = [each for each in holder.host.state.store.all() if each.name.block_key == name(0).block_key]
        found = holder.index.table.find(party_id(BASE_URI), name(0).block_key, now_ms())
        assert found is not None
        record = jsonio.decode(found.text + b"1}", ReplicaRecord)  # the index keeps it cut before the TTL
        each = stored.digested.layer_digests
        assert record.size == 8000
        assert record.digest == format_digest(replica_digest(each))
        assert record.layer_digests == [digest.hex() for digest in each]
        assert [(entry.tier, entry.layers) for entry in record.residency] == [("host", (0, 3))]
        await until(lambda: stored.published_until_ms is not None)
        await holder.put(3)
        await until(lambda: holder.listed(3) and not holder.listed(0))


@pytest.mark.spec("R-085", "R-218", "R-154")
async def test_records_are_refreshed(tmp_path: Path) -> None:
    async with rig(tmp_path, publish_ttl_ms=600) as holder:
        await holder.put(1)
        [stored] = holder.host.state.store.all()
        await until(lambda: stored.published_until_ms is not None)
        first = stored.published_until_ms
        assert first is not None
        await until(lambda: (stored.published_until_ms or 0) > first)
        opened = await holder.client.open(CLIENT, name(1), pin=False)
        assert opened.max_age_s == 0


@pytest.mark.spec("R-085", "U-31")
async def test_a_new_index_is_told_everything(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False) as holder:
        for i in range(20):
            await holder.put(i)
        async with index_at(tmp_path, holder.index):
            await until(lambda: all(map(holder.listed, range(20))))
        await holder.put(20)
        holder.index = IndexState(block_tokens={})
        async with index_at(tmp_path, holder.index):
            await until(lambda: all(map(holder.listed, range(21))))


@pytest.mark.spec("U-51", "U-12")
async def test_a_restarted_holder_withdraws_what_it_has_lost(tmp_path: Path) -> None:
    index = IndexState(block_tokens={})
    state_dir = str(tmp_path / "state")
    async with index_at(tmp_path, index):
        async with rig(tmp_path, with_index=False, state_dir=state_dir) as holder:
            holder.index = index
            for i in range(3):
                await holder.put(i)
            await until(lambda: all(map(holder.listed, range(3))))
        # gone without a goodbye: the index still lists everything
        async with rig(tmp_path, with_index=False, state_dir=state_dir) as holder:
            holder.index = index
            assert holder.listed(2)
            await holder.put(0)
            await until(lambda: not holder.listed(1) and not holder.listed(2) and holder.listed(0))
            with pytest.raises(KvspError):
                await holder.get(1)
            await holder.host.drain()
            assert not holder.listed(0)
        assert Journal(Path(state_dir)).remembered() == []


def _list_elsewhere(holder: Rig, i: int) -> None:
    stale = digested_block(i, OTHER)
    holder.index.publish(replica_record(stale, BASE_URI, 600_000), 10, now_ms())


def digested_block(i: int, scope: bytes) -> Block:
    """What the holder would hold under another scope."""
    digester = ContainerDigester()
    digester.feed(block(i))
    digester.finish()
    assert digester.header is not None
    digested = Digested(digester.header, tuple(digester.layer_digests), bytes(32))
    return Block(name_of(name(i, scope)), 0, digested)


def _scope_listed(holder: Rig, i: int) -> str | None:
    found = holder.index.table.find(party_id(BASE_URI), name(i).block_key, now_ms())
    return None if found is None else found.table.scope_id.hex()


@pytest.mark.spec("U-15", "U-13", "R-090")
async def test_a_key_squatted_under_another_scope_does_not_unlist_the_first(tmp_path: Path) -> None:
    async with rig(tmp_path) as holder:
        await holder.put(1)
        await until(lambda: holder.listed(1))
        await holder.put(1, principal=OTHER_CLIENT, scope=OTHER)
        await holder.host.purge(name_of(name(1, OTHER)))
        assert _scope_listed(holder, 1) == SCOPE.hex()
        await holder.put(1, principal=OTHER_CLIENT, scope=OTHER)
        await holder.host.purge(name_of(name(1)))
        await until(lambda: _scope_listed(holder, 1) == OTHER.hex())  # what is left is listed in its turn


@pytest.mark.spec("U-13", "U-15", "R-086")
async def test_a_record_of_an_earlier_block_of_the_key_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.holder.publisher.RETRY_S", 0.0)
    async with rig(tmp_path) as holder:
        _list_elsewhere(holder, 1)
        await holder.put(1)
        await until(lambda: _scope_listed(holder, 1) == SCOPE.hex())


@pytest.mark.spec("R-086", "R-087")
async def test_a_holder_that_stops_withdraws_first_and_then_ends_its_streams(tmp_path: Path) -> None:
    async with rig(tmp_path) as holder:
        await holder.put(1)
        await until(lambda: holder.listed(1))
        opened = await holder.client.open(CLIENT, name(1))
        reserved = await holder.client.reserve(CLIENT, name(2), len(block(2)))
        assert reserved is not None
        draining = asyncio.create_task(holder.host.drain())
        await until(lambda: not holder.listed(1) and holder.host.draining.is_set())
        await refused(registry.UNAVAILABLE, holder.client.open(CLIENT, name(1)))
        await refused(registry.UNAVAILABLE, holder.client.reserve(CLIENT, name(3), 100))
        assert opened.header + b"".join([bytes(piece) async for piece in opened.pieces()]) == block(1)
        await reserved.write(block(2))
        await reserved.commit()
        assert not draining.done()
        opened.close()
        await draining
        assert not holder.listed(2)


@pytest.mark.spec("R-215")
async def test_a_refused_publication_is_reported_without_naming_the_block(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with rig(tmp_path) as holder:
            await holder.put(1)
            await until(lambda: holder.listed(1))
            # the index has the key under another scope, from an earlier life of this holder (U-13)
            _list_elsewhere(holder, 2)
            await holder.put(2)
            await until(lambda: any(entry["event"] == "publication refused" for entry in logs))
            assert await holder.get(2) == block(2)
    text = str(logs)
    for secret in (name(1).block_key.hex(), name(1).scope_id.hex(), str(name(1).block_key)):
        assert secret not in text


def test_the_journal_forgets_and_survives_damage(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.remember(b"a")
    journal.remember(b"a")
    journal.remember(b"b")
    journal.forget(b"a")
    journal.close()
    journal = Journal(tmp_path)
    assert journal.remembered() == [b"b"]
    journal.close()
    for path in tmp_path.iterdir():
        path.write_bytes(b"no database" * 1000)
    journal = Journal(tmp_path)
    assert journal.remembered() == []
    journal.close()
