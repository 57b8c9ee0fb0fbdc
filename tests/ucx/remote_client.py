"""A reader and writer in a process, and a network namespace, of its own: what it did goes to stdout as JSON lines.

python -m tests.ucx.remote_client ADDRESS CA CERT KEY put|get|stall SCHEME,...
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from kvsp.bulk import holder as holder_module
from kvsp.bulk.holder import HolderClient
from kvsp.bulk.rates import SAMPLES_MIN
from kvsp.protocol.errors import KvspError
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import Tls
from tests.services.holder_harness import CLIENT, block, name
from ucx_transport import engine as engine_module

MADE = block(1, layers=8, section=256 << 10)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def put(client: HolderClient) -> None:
    reserved = await client.reserve(CLIENT, name(1), len(MADE))
    assert reserved is not None
    await reserved.write(MADE)
    await reserved.commit()
    say(put=reserved.scheme)


async def get(client: HolderClient) -> None:
    """As often as it takes to know the link, and no slower than it is: that would tell nothing of the link."""
    for _ in range(SAMPLES_MIN + 1):
        opened = await client.open(CLIENT, name(1))
        chosen = opened.scheme
        target = bytearray(opened.payload_octets)
        async for _ in opened.into(target):
            pass
        say(chosen=chosen, came=opened.scheme, same=opened.header + target == MADE)
        opened.close()
    link = client.link()
    assert link is not None
    say(mbit_per_s=link.mbit_per_s, rtt_us=link.rtt_us)


async def stall(client: HolderClient) -> None:
    """One read, in which the network goes away: an error in time, and the process ends."""
    engine_module.STALL_S, holder_module.OPEN_TIMEOUT_S = 1.0, 1.0  # type: ignore[misc]
    opened = await client.open(CLIENT, name(1))
    given = 0
    try:
        async for piece in opened.pieces():
            given += len(piece)
            say(moving=given)
    except KvspError as error:
        say(failed=error.status, short=given < opened.payload_octets)
    opened.close()


async def main(address: str, ca: str, cert: str, key: str, command: str, schemes: Sequence[str]) -> None:
    async with open_channel(address, Tls(ca=ca, cert=cert, key=key)) as channel:
        async with asyncio.timeout(20):
            await channel.channel_ready()
        client = HolderClient(channel, schemes, same_host=False)
        await {"put": put, "get": get, "stall": stall}[command](client)
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:6], sys.argv[6].split(",")))
