"""What every block source must do, by the one that goes through Envoy and the gateway as any client does."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from kvsp.bulk.source import PIECE_OCTETS, BlockSource, SourceUnavailableError, Transfer, load_source
from kvsp.client import AsyncClient, Options, load_stack
from kvsp.client.source import HttpsEndpoint
from kvsp.protocol import container, digests, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import ReplicaRecord, Residency
from tests.stack.conftest import stack  # noqa: F401 - a fixture
from tests.stack.harness import RunningStack

pytestmark = pytest.mark.stack
COMPAT = "c0" * 32  # of no known descriptor: any structure will do
LAYERS = 2


@dataclass
class Side:
    client: AsyncClient
    holder: str
    scope: str

    def transfer(self, made: bytes, key: str, length: int, layers: tuple[int, int] | None = None) -> Transfer:
        return Transfer(1, length, endpoint=HttpsEndpoint(self.client, self.record(made, key), layers))

    def record(self, made: bytes, key: str) -> ReplicaRecord:
        header = container.parse_header(made)
        each = layer_digests(made)
        return ReplicaRecord(
            block_key=key,
            holder=self.holder,
            residency=[Residency(tier="host", layers=(0, header.layer_count - 1))],
            codec=registry.RAW.value,
            size=header.payload_octets,
            digest=digests.format_digest(digests.replica_digest(each)),
            layer_digests=[digest.hex() for digest in each],
            compat_id=COMPAT,
            scope_id=self.scope,
            ttl_ms=60_000,
        )

    async def put(self, source: BlockSource, made: bytes, key: str, cut: int = 70_001) -> None:
        writer = source.writer(self.transfer(made, key, len(made)))
        await writer.write(b"")
        for at in range(0, len(made), cut):
            await writer.write(memoryview(made)[at : at + cut])
        await writer.finish()
        writer.close()
        writer.close()


@pytest.fixture
async def side(stack: RunningStack) -> AsyncIterator[Side]:  # noqa: F811
    demo = load_stack(stack.layout.endpoints, "client-demo")
    async with AsyncClient(demo.credentials, demo.endpoints, Options(total_s=30)) as client:
        yield Side(client, stack.holder, stack.scope_id())


@pytest.fixture
def source() -> BlockSource:
    return load_source("https")


def block(section: int) -> bytes:
    return container.build(
        0, 16, [(secrets.token_bytes(section), secrets.token_bytes(section)) for _ in range(LAYERS)]
    )


def payload(made: bytes) -> bytes:
    return made[container.parse_header(made).header_octets :]


def layer_digests(made: bytes) -> Sequence[bytes]:
    header = container.parse_header(made)
    spans = (header.layer_span(layer) for layer in range(header.layer_count))
    return [hashlib.sha256(payload(made)[at : at + octets]).digest() for at, octets in spans]


@pytest.mark.parametrize("section", [2, 2048, PIECE_OCTETS // 2, PIECE_OCTETS + 4])
async def test_what_a_writer_writes_a_reader_gives_in_order_and_no_more(
    side: Side, source: BlockSource, section: int
) -> None:
    made, key = block(section), secrets.token_hex(32)
    await side.put(source, made, key)
    reader = source.reader(side.transfer(made, key, len(payload(made))))
    pieces = [bytes(piece) async for piece in reader.pieces()]
    reader.close()
    reader.close()
    assert all(0 < len(piece) <= PIECE_OCTETS for piece in pieces)
    assert b"".join(pieces) == payload(made)
    reader = source.reader(side.transfer(made, key, 2 * section, (1, 1)))
    assert b"".join([bytes(piece) async for piece in reader.pieces()]) == payload(made)[2 * section :]


async def test_both_may_be_closed_halfway_and_leave_nothing(side: Side, source: BlockSource) -> None:
    made, key, other = block(600_000), secrets.token_hex(32), secrets.token_hex(32)
    await side.put(source, made, key)
    reader = source.reader(side.transfer(made, key, len(payload(made))))
    async with aclosing(reader.pieces()) as pieces:  # type: ignore[type-var]
        assert len(await anext(pieces)) > 0
    reader.close()
    source.reader(side.transfer(made, key, len(payload(made)))).close()
    writer = source.writer(side.transfer(made, other, len(made)))
    await writer.write(made[:500_000])
    writer.close()
    with pytest.raises(KvspError) as caught:
        await side.client.head(side.holder, COMPAT, side.scope, other)
    assert caught.value.status == 404


async def test_transfers_of_one_source_do_not_disturb_each_other(side: Side, source: BlockSource) -> None:
    made = {secrets.token_hex(32): block(400_000) for _ in range(3)}
    await asyncio.gather(*(side.put(source, octets, key) for key, octets in made.items()))

    async def read(key: str, octets: bytes) -> bytes:
        reader = source.reader(side.transfer(octets, key, len(payload(octets))))
        return b"".join([bytes(piece) async for piece in reader.pieces()])

    got = await asyncio.gather(*(read(key, octets) for key, octets in made.items()))
    assert got == [payload(octets) for octets in made.values()]


def test_a_transfer_that_was_agreed_elsewhere_needs_another_source(source: BlockSource) -> None:
    assert load_source("https").capabilities == source.capabilities
    for begin in (source.reader, source.writer):
        with pytest.raises(SourceUnavailableError):
            begin(Transfer(1, 5))
    source.close()
