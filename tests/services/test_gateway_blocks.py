"""Block bodies through the gateway: GET, HEAD, 304, PUT, and what happens when either side stops half way."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from gateway import fields
from kvsp.protocol import container
from tests.services.gateway_harness import CLIENT, COMPAT, SCOPE, World, make_block, read_response

XFCC = ("x-forwarded-client-cert", f"URI={CLIENT}")
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        world = runner.run(World.start(tmp_path_factory.mktemp("gw")))
        world.runner = runner
        yield world
        runner.run(world.close())


@pytest.fixture(params=["shm", "grpc"])
def scheme(request: pytest.FixtureRequest, world: World) -> Iterator[str]:
    world.holder.scheme = request.param
    yield request.param
    world.holder.scheme = "shm"


@pytest.fixture
def key() -> str:
    return f"{next(_numbers):064x}"


def store(world: World, key: str, block: bytes) -> str:
    world.holder.blocks[COMPAT, SCOPE, key] = block
    return world.block_path(key)


def sha(octets: bytes) -> str:
    return base64.b64encode(hashlib.sha256(octets).digest()).decode()


# --- GET, HEAD (R-150 ... R-154, U-28 ... U-30) ---


@pytest.mark.spec("R-150", "R-153", "R-154", "U-28", "U-29", "U-30", "R-075")
def test_get_and_head(world: World, key: str, scheme: str) -> None:
    block = make_block(300_000)
    target = store(world, key, block)
    got = world.request("GET", target, headers={"range": "bytes=0-1", "accept-encoding": "gzip"})
    assert got.status == 200
    assert got.body == block
    digest = sha(block)
    assert got.headers == {
        "content-type": "application/kvsp-block",
        "content-length": str(len(block)),
        "repr-digest": f"sha-256=:{digest}:",
        "etag": '"' + digest.rstrip("=").translate(str.maketrans("+/", "-_")) + '"',
        "cache-control": "private, immutable, no-transform, max-age=7",
        "accept-ranges": "none",
    }
    head = world.request("HEAD", target)
    assert (head.status, head.headers, head.body) == (200, got.headers, b"")


@pytest.mark.spec("R-151", "R-153", "U-23")
def test_layer_ranges(world: World, key: str, scheme: str) -> None:
    block = make_block(400_000, layers=4)
    target = store(world, key, block)
    whole = container.parse_header(block)
    got = world.request("GET", target + "?layers=1-2&unknown=1&codec=1")
    part = container.parse_header(got.body)
    assert part.layers == (1, 2)
    start = whole.header_octets + whole.layer_span(1)[0]
    assert got.body[part.header_octets :] == block[start : start + part.payload_octets]
    assert got.headers["repr-digest"] == f"sha-256=:{sha(got.body)}:"
    head = world.request("HEAD", target + "?layers=1-2")
    assert head.headers == got.headers
    for query, status, suffix in (
        ("layers=3-4", 404, "kvsp-layers-unavailable"),
        ("codec=2", 404, "kvsp-not-found"),
    ):
        response = world.request("GET", f"{target}?{query}")
        assert (response.status, response.type) == (status, suffix)


@pytest.mark.spec("U-22", "U-23", "D6")
@pytest.mark.parametrize(
    "query",
    [
        "layers=0-4294967296", "layers=5-3", "layers=-1-2", "layers=0x0-1", "layers=+0-1", "layers=%200-1",
        "layers=%D9%A0-1", "layers=00-1", "layers=0-0&layers=0-0", "layers=", "layers", "layers=0-1%0a",
        "layers=1", "layers=0-99999999999", "layers=0-1,2-3", "codec=0", "codec=65536", "codec=01", "codec=x",
        "codec=1&codec=1", "codec=", "codec=+1", "codec=1_0", "codec=-1",
    ],
)  # fmt: skip
def test_bad_selections_are_400(world: World, key: str, query: str) -> None:
    response = world.request("GET", f"{world.block_path(key)}?{query}")
    assert (response.status, response.problem["type"]) == (400, "about:blank")
    assert world.request("HEAD", f"{world.block_path(key)}?{query}").status == 400


@pytest.mark.spec("U-23", "D6")
def test_largest_layer_range_is_only_unavailable(world: World, key: str) -> None:
    target = store(world, key, make_block())
    assert world.request("GET", target + "?layers=0-4294967295").type == "kvsp-layers-unavailable"


@pytest.mark.spec("U-30", "R-067")
def test_conditional_get(world: World, key: str) -> None:
    target = store(world, key, make_block())
    got = world.request("GET", target)
    tag = got.headers["etag"]
    closed = len(world.holder.closed)
    for value in (tag, f"W/{tag}", "*", f'"x", {tag}', f'"a,b",W/{tag}'):
        for method in ("GET", "HEAD"):
            response = world.request(method, target, headers={"if-none-match": value})
            assert (response.status, response.body) == (304, b"")
            assert response.headers == {"etag": tag, "cache-control": got.headers["cache-control"]}
    for value in ('"x"', tag[1:-1], "garbage", f'"{tag}'):
        assert world.request("GET", target, headers={"if-none-match": value}).status == 200
    assert world.request("GET", target + "?layers=0-0").headers["etag"] != tag
    missing = world.request("GET", world.block_path("ff" * 32), headers={"if-none-match": "*"})
    assert missing.status == 404
    assert len(world.holder.closed) > closed


@pytest.mark.spec("R-150", "R-067", "U-05")
def test_unknown_block_head_equals_get(world: World) -> None:
    got = world.request("GET", world.block_path("ee" * 32))
    assert (got.status, got.type) == (404, "kvsp-not-found")
    assert world.request("HEAD", world.block_path("ee" * 32)).head == got.head


# --- a GET that does not end well ---


async def wait_for(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def stalled(world: World, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that asks and does not read (its stream buffer is small, then the kernel's fills)."""
    reader, writer = await asyncio.open_unix_connection(str(world.folder / "gateway.sock"), limit=1024)
    writer.transport.pause_reading()
    writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\nx-forwarded-client-cert: URI={CLIENT}\r\n\r\n".encode())
    return reader, writer


async def drain(writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> bytes:
    writer.transport.resume_reading()
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.spec("D5", "R-034")
@pytest.mark.parametrize("octets", range(100_000, 600_000, 30_000))
def test_a_pin_outlives_every_queued_octet(world: World, key: str, octets: int) -> None:
    """The holder overwrites an extent the moment its pin is dropped; a stalled reader must not see it.

    The lengths step over what the kernel takes at once, so that for some of them a remainder shorter
    than any usual high-water mark stays queued in the transport.
    """
    assert_whole_after_a_stall(world, key, make_block(octets, layers=1))


@pytest.mark.spec("D5", "R-034")
@pytest.mark.parametrize("piece", range(200_000, 264_000, 4_000))
def test_a_short_last_piece_does_not_let_the_pin_go_early(
    world: World, key: str, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """The piece before it is a view of the arena too, and may be what is still queued."""
    monkeypatch.setattr("kvsp.bulk.shm.PIECE_OCTETS", piece)
    assert_whole_after_a_stall(world, key, make_block(piece + 100, layers=1))


def assert_whole_after_a_stall(world: World, key: str, block: bytes) -> None:
    target = store(world, key, block)

    async def scenario() -> bytes:
        loop, opens = asyncio.get_running_loop(), world.holder.opens
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            await loop.sock_connect(client, str(world.folder / "gateway.sock"))
            request = f"GET {target} HTTP/1.1\r\nhost: x\r\nx-forwarded-client-cert: URI={CLIENT}\r\n\r\n"
            await loop.sock_sendall(client, request.encode())
            await wait_for(lambda: world.holder.opens > opens)
            for _ in range(10):  # round trips through both, so that whatever was going to happen has
                await world._request("HEAD", target, None, [XFCC])
            got = b""
            while len(got.partition(b"\r\n\r\n")[2]) < len(block):
                got += await loop.sock_recv(client, 1 << 20)
        return got.partition(b"\r\n\r\n")[2]

    assert world.run(scenario()) == block


@pytest.mark.spec("D4", "R-154")
def test_pin_is_held_while_the_reader_stalls_and_dropped_when_it_goes(world: World, key: str) -> None:
    target = store(world, key, make_block(4_000_000))

    async def scenario() -> None:
        before = len(world.holder.pinned)
        _, writer = await stalled(world, target)
        await wait_for(lambda: len(world.holder.pinned) > before)
        pin = world.holder.pinned[-1]
        # Other requests are served meanwhile, and the pin stays.
        for _ in range(20):
            assert (await world._request("HEAD", target, None, [XFCC])).status == 200
        assert pin not in world.holder.closed
        writer.transport.abort()
        await wait_for(lambda: pin in world.holder.closed)

    world.run(scenario())


@pytest.mark.spec("D4")
def test_a_client_that_stalls_beyond_the_deadline_gets_a_reset(world: World, key: str) -> None:
    block = make_block(4_000_000)
    target = store(world, key, block)
    world.holder.deadline_ms = 1_050

    async def scenario() -> bytes:
        closed = len(world.holder.closed)
        reader, writer = await stalled(world, target)
        await wait_for(lambda: len(world.holder.closed) > closed)
        got = await drain(writer, reader)
        writer.close()
        return got

    got = world.run(scenario())
    world.holder.deadline_ms = 60_000
    assert len(got) < len(block)


@pytest.mark.spec("R-065", "R-155")
def test_a_fault_after_the_first_octet_resets_the_stream(world: World, key: str) -> None:
    target = store(world, key, make_block(1_000_000))
    world.holder.scheme, world.holder.break_after = "grpc", 200_000
    response = world.request("GET", target)
    world.holder.scheme, world.holder.break_after = "shm", None
    assert response.status == 200
    assert not response.complete
    assert len(response.body) < 1_000_000
    assert world.request("GET", target).complete


@pytest.mark.spec("R-034")
def test_many_blocks_on_one_connection(world: World, key: str) -> None:
    block = make_block(100_000)
    target = store(world, key, block)

    async def scenario() -> None:
        reader, writer = await world.connect()
        for _ in range(20):
            writer.write(
                f"GET {target} HTTP/1.1\r\nhost: x\r\nx-forwarded-client-cert: URI={CLIENT}\r\n\r\n".encode()
            )
            assert (await read_response(reader)).body == block
        writer.close()

    world.run(scenario())


# --- PUT (R-157 ... R-160) ---


@pytest.mark.spec("R-157", "R-160", "U-21", "U-32", "R-067")
def test_put_then_get_then_412(world: World, key: str, scheme: str) -> None:
    block = make_block(700_000)
    made = world.put(key, block, {"repr-digest": f"sha-256=:{sha(block)}:"})
    assert (made.status, made.body, made.headers) == (
        201,
        b"",
        {"cache-control": "no-store", "content-length": "0"},
    )
    assert world.request("GET", world.block_path(key)).body == block
    for again in (block, make_block(700_000, fill=5), b"nonsense"):
        response = world.put(key, again)
        assert (response.status, response.problem["title"]) == (412, "Precondition Failed")
    assert world.request("GET", world.block_path(key)).body == block


@pytest.mark.spec("U-21", "U-29", "U-27", "R-064", "R-073", "D4")
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"if-none-match": None}, 428),
        ({"if-none-match": '*, "x"'}, 400),
        ({"if-none-match": '"x"'}, 400),
        ({"content-type": "application/kvsp+json"}, 415),
        ({"content-type": None}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-range": "bytes 0-1/2"}, 400),
        ({"content-length": str((256 << 20) + 1)}, 413),
        ({"repr-digest": "sha-256=garbage"}, 400),
        ({"content-digest": "sha-256=:AAAA:"}, 400),
        ({"repr-digest": f"sha-256=:{'A' * 43}=:"}, 422),
        ({"content-digest": f"sha-512=:{'A' * 86}==:"}, 422),
        ({"repr-digest": "md5=:AAAA:"}, 201),
        ({"content-type": "application/kvsp-block; x=y"}, 201),
        # The first of two wrong things decides (order of checks).
        ({"if-none-match": None, "content-type": "text/plain", "content-range": "x"}, 428),
        ({"content-type": "text/plain", "content-length": str(1 << 40)}, 415),
    ],
)
def test_put_preconditions(world: World, key: str, changes: dict[str, str | None], status: int) -> None:
    base = {"if-none-match": "*", "content-type": "application/kvsp-block"}
    headers = {name: value for name, value in (base | changes).items() if value is not None}
    response = world.request("PUT", world.block_path(key), make_block(), headers)
    assert response.status == status
    if status == 422:
        assert response.type == "kvsp-digest-mismatch"
    if status != 201:
        assert response.problem["status"] == status
        assert world.request("GET", world.block_path(key)).status == 404
    if "content-encoding" in changes:
        assert response.headers["accept-encoding"] == "identity"


def head_of_put(world: World, key: str, *lines: str) -> bytes:
    text = "".join(f"{line}\r\n" for line in lines)
    return (
        f"PUT {world.block_path(key)} HTTP/1.1\r\nhost: x\r\nx-forwarded-client-cert: URI={CLIENT}\r\n"
        f"if-none-match: *\r\ncontent-type: application/kvsp-block\r\n{text}\r\n"
    ).encode()


def chunked(octets: bytes, size: int) -> bytes:
    pieces = [octets[at : at + size] for at in range(0, len(octets), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.spec("R-030", "D4", "D5")
@pytest.mark.parametrize(
    ("change", "size", "status"),
    [
        (lambda block: block, 1, 201),
        (lambda block: block, 7, 201),
        (lambda block: block, 100_000, 201),
        (lambda block: block[:-1], 1000, 400),
        (lambda block: block + b"x", 1000, 400),
        (lambda block: block[:30], 7, 400),
        (lambda block: block[:10], 7, 400),
        (lambda block: b"", 7, 400),
        (lambda block: b"X" + block[1:], 1000, 400),
        (
            lambda block: block[:12] + b"\xff" * 4 + block[16:],
            1000,
            400,
        ),  # 2^32-1 layers: refused before the table
        (lambda block: block[:20] + b"\xff" * 8 + block[28:], 1000, 400),  # a section of 2^64-1 octets
    ],
)
def test_put_without_a_declared_length(
    world: World, key: str, scheme: str, change: Any, size: int, status: int
) -> None:
    block = make_block(4096)

    async def scenario() -> int:
        reader, writer = await world.connect()
        writer.write(head_of_put(world, key, "transfer-encoding: chunked") + chunked(change(block), size))
        response = await read_response(reader)
        writer.close()
        return response.status

    assert world.run(scenario()) == status
    assert world.request("GET", world.block_path(key)).status == (200 if status == 201 else 404)
    assert world.put(key, block).status == (412 if status == 201 else 201)  # nothing stays reserved


@pytest.mark.spec("U-21", "D4", "R-158")
def test_expect_continue_is_answered_after_the_decision(world: World, key: str) -> None:
    block = make_block()

    async def scenario(target: str) -> tuple[bytes, int]:
        reader, writer = await world.connect()
        writer.write(head_of_put(world, target, f"content-length: {len(block)}", "expect: 100-continue"))
        first = await reader.readuntil(b"\r\n\r\n")
        if not first.startswith(b"HTTP/1.1 100 "):
            assert b"connection: close" in first
            await reader.read()
            writer.close()
            return first, 0
        writer.write(block)
        response = await read_response(reader)
        writer.close()
        return first, response.status

    assert world.run(scenario(key)) == (b"HTTP/1.1 100 Continue\r\n\r\n", 201)
    first, _ = world.run(scenario(key))
    assert first.startswith(b"HTTP/1.1 412 ")


@pytest.mark.spec("D4", "R-159")
@pytest.mark.parametrize("part", [0, 10, 3000])
@pytest.mark.parametrize("length", ["content-length: 4148", "transfer-encoding: chunked"])
def test_a_client_that_leaves_mid_upload_leaves_nothing(
    world: World, key: str, scheme: str, part: int, length: str
) -> None:
    block = make_block(4096)
    assert len(block) == 4148

    async def scenario() -> None:
        aborted = len(world.holder.aborted)
        _, writer = await world.connect()
        piece = block[:part]
        writer.write(head_of_put(world, key, length))
        writer.write(b"%x\r\n%s\r\n" % (part, piece) if "chunked" in length and part else piece)
        await writer.drain()
        reserved = part == 3000 or "chunked" not in length
        if reserved:
            await wait_for(lambda: world.holder._write)
        writer.close()
        if reserved:
            await wait_for(lambda: len(world.holder.aborted) > aborted)

    world.run(scenario())
    assert not world.holder._write
    assert world.put(key, block).status == 201


@pytest.mark.spec("R-159")
def test_of_two_uploads_one_wins(world: World, key: str) -> None:
    block = make_block(500_000)

    async def scenario() -> set[int]:
        puts = [world._request("PUT", world.block_path(key), block, fields_of_put()) for _ in range(2)]
        return {response.status for response in await asyncio.gather(*puts)}

    assert world.run(scenario()) == {201, 412}


def fields_of_put() -> list[tuple[str, str]]:
    return [XFCC, ("if-none-match", "*"), ("content-type", "application/kvsp-block")]


# --- pure parts ---


@pytest.mark.spec("U-30")
def test_entity_tag_is_strong_and_base64url() -> None:
    assert fields.entity_tag(b"\xfb" * 32) == '"' + "-_v7" * 10 + "-_s" + '"'


# --- PUT bodies that go straight from the parser into shared memory ---


def random_block(octets: int, seed: int = 1) -> bytes:
    """A container in which no octets are where others could be."""
    section = random.Random(seed).randbytes(octets // 2)
    return container.build(0, 16, [(section, section[::-1])])


@pytest.mark.spec("R-030", "R-159")
@pytest.mark.parametrize("cut", [700, 65_537, 1_000_003])
@pytest.mark.parametrize("expect", [(), ("expect: 100-continue",)])
def test_a_body_arrives_in_order_however_it_is_cut(
    world: World, key: str, scheme: str, cut: int, expect: tuple[str, ...]
) -> None:
    """Without `expect`, its beginning is there before the holder has given room."""
    block = random_block(150 * cut if cut < 1000 else 3_000_000)

    async def scenario() -> int:
        reader, writer = await world.connect()
        writer.write(head_of_put(world, key, f"content-length: {len(block)}", *expect))
        if expect:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        for at in range(0, len(block), cut):
            writer.write(block[at : at + cut])
            await writer.drain()
            await asyncio.sleep(0)  # the gateway runs on this loop
        status = (await read_response(reader)).status
        writer.close()
        return status

    assert world.run(scenario()) == 201
    assert world.request("GET", world.block_path(key)).body == block


@pytest.mark.spec("R-159")
def test_pipelined_bodies_go_each_to_its_own_block(world: World, scheme: str) -> None:
    keys = [f"{next(_numbers):064x}" for _ in range(3)]
    blocks = [random_block(octets, octets) for octets in (300_000, 5_000, 90_000)]

    async def scenario() -> list[int]:
        reader, writer = await world.connect()
        for key, block in zip(keys, blocks, strict=True):
            writer.write(head_of_put(world, key, f"content-length: {len(block)}") + block)
        statuses = [(await read_response(reader)).status for _ in keys]
        writer.close()
        return statuses

    assert world.run(scenario()) == [201] * 3
    assert [world.request("GET", world.block_path(key)).body for key in keys] == blocks


@pytest.mark.spec("D4", "R-159")
def test_a_transfer_that_lapses_mid_body_is_503_and_writes_no_more(world: World, key: str) -> None:
    """Past the deadline the room may be another's; the answer is ours, not the parser's."""
    block = random_block(100_000)
    world.holder.deadline_ms = 1_000

    async def scenario() -> tuple[int, bytes]:
        loop, aborted = asyncio.get_running_loop(), len(world.holder.aborted)
        reader, writer = await world.connect()
        writer.write(head_of_put(world, key, f"content-length: {len(block)}", "expect: 100-continue"))
        await reader.readuntil(b"\r\n\r\n")
        lapsed = loop.time() + 1
        [(_, _, offset, length)] = world.holder._write.values()
        await wait_for(lambda: loop.time() > lapsed)
        writer.write(block)
        response = await read_response(reader)
        await wait_for(lambda: len(world.holder.aborted) > aborted)
        writer.close()
        with world.holder.arena.open("rb") as file:
            file.seek(offset)
            return response.status, file.read(length)

    try:
        status, written = world.run(scenario())
    finally:
        world.holder.deadline_ms = 60_000
    assert status == 503
    assert not any(written)
    assert world.put(key, block).status == 201
