"""What the index lists follows what the holder holds, through restarts of either."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvsp.protocol import jsonio
from kvsp.protocol.digests import format_digest, replica_digest
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.records import ReplicaRecord
from services.holder.journal import Journal
from services.index.server import monotonic_ms
from services.index.state import IndexState
from tests.services.holder_harness import BASE_URI, CLIENT, OTHER, block, index_at, name, rig, until


@pytest.mark.spec("R-080", "R-086", "U-26", "U-32")
async def test_blocks_are_listed_until_they_are_evicted(tmp_path: Path) -> None:
    async with rig(tmp_path, arena_octets=3 * 8192) as holder:
        for i in range(3):
            await holder.put(i)
        await until(lambda: all(map(holder.listed, range(3))))
        [stored] = [each for each in holder.host.state.store.all() if each.name.block_key == name(0).block_key]
        found = holder.index.table.find(party_id(BASE_URI), name(0).block_key, monotonic_ms())
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
            await holder.host.withdraw_all(5)
            assert not holder.listed(0)
        assert Journal(Path(state_dir)).remembered() == []


@pytest.mark.spec("R-215")
async def test_a_refused_publication_is_reported_without_naming_the_block(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with rig(tmp_path) as holder:
            await holder.put(1)
            await until(lambda: holder.listed(1))
            # the same key under another scope: the index has one record for (holder, key) (U-13)
            await holder.put(1, principal="spiffe://t/other", scope=OTHER)
            await until(lambda: any(entry["event"] == "publication refused" for entry in logs))
            assert await holder.get(1) == block(1)
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
