"""Block bodies through the gateway: GET, HEAD, 304, PUT, and what happens when either side stops half way."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway import fields
from gateway.protocol import HELD_OCTETS_MIN, Corkable
from kvsp.protocol import container
from tests.services.gateway_harness import CLIENT, World, make_block, read_response, sha, store, wait_for

XFCC = ("x-forwarded-client-cert", f"URI={CLIENT}")


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


@pytest.mark.parametrize("octets", [64, 300_000])
def test_a_kept_connection_serves_the_next_get(world: World, key: str, scheme: str, octets: int) -> None:
    block = make_block(octets)
    request = f"GET {store(world, key, block)} HTTP/1.1\r\nhost: x\r\n{XFCC[0]}: {XFCC[1]}\r\n\r\n"

    async def three() -> None:
        reader, writer = await world.connect()
        for _ in range(3):
            writer.write(request.encode())
            got = await read_response(reader)
            assert (got.status, got.body) == (200, block)
        writer.close()

    world.run(three())


class _Calls:
    """What a transport is called for."""

    def __init__(self) -> None:
        self.made: list[list[bytes]] = []

    def write(self, octets: bytes) -> None:
        self.made.append([octets])

    def writelines(self, octets: list[bytes]) -> None:
        self.made.append(octets)


def test_what_is_corked_leaves_with_what_follows_and_nothing_stays() -> None:
    calls, much = _Calls(), bytes(HELD_OCTETS_MIN)
    transport = Corkable(calls)  # type: ignore[arg-type]
    transport.write(b"1")
    transport.cork()
    for each in (b"2", b"3", much, b"4"):
        transport.write(each)
    assert calls.made == [[b"1"], [b"2", b"3", much], [b"4"]]
    transport.cork()
    transport.write(b"5")
    transport.uncork()
    transport.uncork()
    assert calls.made[3:] == [[b"5"]]


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


# --- pure parts ---


@pytest.mark.spec("U-30")
def test_entity_tag_is_strong_and_base64url() -> None:
    assert fields.entity_tag(b"\xfb" * 32) == '"' + "-_v7" * 10 + "-_s" + '"'
