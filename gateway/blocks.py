"""Block bodies as raw streams: GET, HEAD and PUT of blocks/{compat}/{scope}/{block_key}."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from prometheus_client import Counter

from gateway.backend import Call
from gateway.exchange import Disconnected, Exchange
from gateway.fields import entity_tag, none_match, parse_selection, require_create_only
from gateway.problems import Fields
from gateway.protocol import QUEUED_OCTETS_MAX
from kvsp.bulk.holder import OpenedTransfer, ReservedTransfer
from kvsp.protocol import container, digests, limits
from kvsp.protocol.errors import bad_request, unavailable
from kvsp.protocol.registry import MEDIA_BLOCK
from kvsp.rpc import convert
from kvsp.v1 import common_pb2

OCTETS: Final = Counter("kvsp_gateway_block_octets_total", "Octets of block bodies", ["direction"])
_SENT: Final = OCTETS.labels("out")
_RECEIVED: Final = OCTETS.labels("in")
TAIL_OCTETS: Final = 2 * QUEUED_OCTETS_MAX
PIN_MARGIN_S: Final = 1.0  # the holder began to count before its reply arrived here


def _name(call: Call) -> common_pb2.BlockName:
    return convert.block_name(call.segments["compat"], call.segments["scope"], call.segments["block_key"])


async def get_block(call: Call) -> None:
    """GET and HEAD (R-150 ... R-154, U-30)."""
    exchange = call.exchange
    async with call.checking():
        layers, codec = parse_selection(exchange.query)
    with_body = exchange.method == "GET"
    opened = await call.backend.blocks.open(call.principal, _name(call), layers=layers, codec=codec, pin=with_body)
    try:
        tag = entity_tag(opened.sha256)
        # "private, immutable" as the text has it; no-transform, as a coded body would have another digest.
        lifetime = f"private, immutable, no-transform, max-age={opened.max_age_s}"
        cached = [(b"etag", tag.encode()), (b"cache-control", lifetime.encode())]
        if none_match(exchange.value(b"if-none-match"), tag):
            await exchange.reply(304, cached)
        elif with_body:
            await _send(exchange, opened, _fields(opened) + cached)
        else:
            await exchange.reply(200, _fields(opened) + cached)
    finally:
        opened.close()


def _fields(opened: OpenedTransfer) -> Fields:
    return [
        (b"content-type", MEDIA_BLOCK.encode()),
        (b"content-length", b"%d" % opened.total_octets),
        (b"repr-digest", digests.repr_digest_field(opened.sha256).encode()),
        (b"accept-ranges", b"none"),
    ]


async def _send(exchange: Exchange, opened: OpenedTransfer, fields: Fields) -> None:
    """The body. On return or raise nothing of the pinned memory is queued in the transport any more."""
    connection = exchange.connection
    # The pin lapses at its deadline whatever we do; a client that stalls beyond it gets a reset.
    timer = asyncio.get_running_loop().call_at(opened.deadline - PIN_MARGIN_S, connection.abort)
    try:
        connection.cork()
        await exchange.start(200, fields)
        await exchange.write(opened.header)
        left = opened.payload_octets
        async for piece in opened.pieces():
            if connection.closing:
                raise Disconnected
            left -= len(piece)
            if left >= TAIL_OCTETS:
                await exchange.write(piece)
            else:  # from here on the rest of the body is in the copied tail, or this piece ends it
                await exchange.write(piece[:-TAIL_OCTETS])
                tail = bytes(piece[-TAIL_OCTETS:])
                opened.check()  # without its end a body is never taken for whole
                await exchange.write(tail)
        connection.uncork()
        # Waits until at most QUEUED_OCTETS_MAX are queued: those of the copied tail, and none of the arena.
        await exchange.finish()
        _SENT.inc(opened.total_octets)
    except BaseException:
        await connection.reset()
        raise
    finally:
        timer.cancel()


async def put_block(call: Call) -> None:
    """PUT (R-157 ... R-160, U-21, U-25, U-27): everything but the octets is decided before they are read."""
    exchange = call.exchange
    async with call.checking():
        require_create_only(exchange.value(b"if-none-match"))
        exchange.check_content(MEDIA_BLOCK, limits.BLOCK_OCTETS_MAX)
        if exchange.value(b"content-range") is not None:
            raise bad_request("Content-Range is not supported")  # U-29
        declared = _declared_digests(exchange)
    length = exchange.content_length() or 0
    reserved = await call.backend.blocks.reserve(call.principal, _name(call), length)
    head = b""
    if reserved is None:
        head, length = await _read_header(exchange.pieces())
        reserved = await call.backend.blocks.reserve(call.principal, _name(call), length)
        if reserved is None:
            raise bad_request("container is empty")
    try:
        # A client too slow for the room that it holds, or stalled, holds it no longer (D4).
        async with asyncio.timeout_at(reserved.deadline):
            await _receive(exchange, reserved, head)
        await reserved.commit(declared)
    except TimeoutError:
        reserved.abort()
        raise unavailable("the upload took too long") from None
    except BaseException:
        reserved.abort()
        raise
    _RECEIVED.inc(length)
    await exchange.empty(201)


def _declared_digests(exchange: Exchange) -> list[tuple[str, bytes]]:
    """The digests of both fields; all are compared."""
    values = (exchange.value(name) for name in (b"repr-digest", b"content-digest"))
    return [pair for value in values if value is not None for pair in digests.parse_digest_field(value).items()]


async def _read_header(pieces: AsyncIterator[bytes]) -> tuple[bytes, int]:
    """What has been read up to the end of the container header, and the octets of the whole container."""
    reader = container.HeaderReader()
    async for piece in pieces:
        rest = reader.feed(piece)
        if reader.header is not None:
            return b"".join((reader.octets, rest)), reader.header.total_octets
    raise bad_request("container truncated in its header")


async def _receive(exchange: Exchange, reserved: ReservedTransfer, head: bytes) -> None:
    """Pass the body on as it arrives. Raises KvspError (400) when it is not exactly the reserved length."""
    await reserved.write(head)
    if reserved.put is not None:
        await exchange.pour(reserved.put)
    else:
        async for piece in exchange.pieces():
            await reserved.write(piece)
    if reserved.written != reserved.length:
        raise bad_request("container truncated")
