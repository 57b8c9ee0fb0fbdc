"""Block bodies into the gateway: PUT, and what happens when either side stops half way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvsp.protocol import container
from tests.services.conftest import numbers
from tests.services.gateway_harness import CLIENT, World, make_block, read_response, sha, wait_for

XFCC = ("x-forwarded-client-cert", f"URI={CLIENT}")


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
    keys = [f"{next(numbers):064x}" for _ in range(3)]
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
