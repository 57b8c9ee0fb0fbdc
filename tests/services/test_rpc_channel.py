"""Channels to peers that are slow to answer, or not there yet."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvsp.rpc.channel import open_channel
from tests.services.rpc import problem_of, served

BUSY_S = 0.5
"""Several times the first pause between attempts to connect."""

SERVER = """
import asyncio, sys
from kvsp.rpc.config import ServiceConfig
from kvsp.rpc.server import make_server

async def main():
    made = make_server(ServiceConfig(listen=sys.argv[1], policy="", principal=""), ())
    await made.grpc.start()
    print("there", flush=True)
    await made.grpc.wait_for_termination()

asyncio.run(main())
"""

SERVING = health_pb2.HealthCheckResponse.SERVING


def _check(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryCall:  # type: ignore[type-arg]
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)


async def test_a_busy_peer_has_time_for_the_handshake(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/busy.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(BUSY_S, os.kill, process.pid, signal.SIGCONT)
        async with open_channel(address) as channel:
            assert (await _check(channel)).status == SERVING
    finally:
        process.kill()
        await process.wait()


async def test_nobody_is_known_at_once_and_found_when_he_comes(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/late.sock"
    async with open_channel(address) as channel:
        assert (await problem_of(_check(channel))).code() is grpc.StatusCode.UNAVAILABLE
        async with served(address, lambda _: None):
            await channel.channel_ready()
            assert (await _check(channel)).status == SERVING
