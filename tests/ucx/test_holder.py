"""A holder in another process, over TCP with mutual TLS: blocks move over UCX beside it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from kvsp.bulk.holder import HolderClient
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.channel import open_channel
from tests.services.holder_harness import (
    BASE_URI,
    CLIENT,
    CLIENT2,
    HOLDER,
    POLICY_TEXT,
    Rig,
    block,
    name,
    rig,
    until,
)
from tests.services.test_rpc_identity import Pki

pytest.importorskip("ucxx", reason="the ucx extra is not installed")

GATEWAY = "spiffe://t/gateway"
CONFIG = """
listen = "localhost:{port}"
policy = "{folder}/policy.toml"
principal = "{holder}"
base_uri = "{base_uri}"
arena_octets = 67108864
arena_dir = "{folder}"
index = {{address = "unix:{folder}/none.sock"}}
tls = {{ca = "{tls.ca}", cert = "{tls.cert}", key = "{tls.key}"}}
log_level = "error"
[bulk.ucx]
listen = "127.0.0.1:0"
"""
RUN = "import pathlib, sys; from services.holder.server import run; sys.exit(run(pathlib.Path(sys.argv[1])))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def remote_holder(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    pki = Pki(folder)
    serving = pki.issue("h1", x509.UniformResourceIdentifier(HOLDER), x509.DNSName("localhost"))
    calling = pki.issue("gateway", x509.UniformResourceIdentifier(GATEWAY))
    (folder / "policy.toml").write_text(POLICY_TEXT + f'\n[identities."{GATEWAY}"]\nroles = ["gateway"]\n')
    port = free_port()
    text = CONFIG.format(folder=folder, port=port, holder=HOLDER, base_uri=BASE_URI, tls=serving)
    (folder / "holder.toml").write_text(text)
    with subprocess.Popen([sys.executable, "-c", RUN, str(folder / "holder.toml")]) as process:
        try:
            async with open_channel(f"localhost:{port}", calling) as channel:
                async with asyncio.timeout(20):
                    await channel.channel_ready()
                yield channel
        finally:
            process.kill()


def ucx_rig(folder: Path) -> AbstractAsyncContextManager[Rig]:
    """A holder on this host that is read and written over UCX all the same."""
    ucx = {"ucx": {"listen": "127.0.0.1:0"}}
    return rig(folder, schemes=("ucx",), with_index=False, arena_octets=32 << 20, bulk=ucx)


@pytest.mark.spec("D14")
async def test_blocks_go_to_a_remote_holder_and_come_back_over_ucx(tmp_path: Path) -> None:
    made = block(1, layers=8, section=1 << 20)
    async with remote_holder(tmp_path) as channel:
        client = HolderClient(channel, ("shm", "ucx", "grpc"), same_host=False)
        reserved = await client.reserve(CLIENT, name(1), len(made))
        assert reserved is not None
        assert reserved.scheme == "ucx"
        for at in range(0, len(made), 700_001):
            await reserved.write(made[at : at + 700_001])
        await reserved.commit()
        opened = await client.open(CLIENT, name(1))
        assert opened.scheme == "ucx"
        assert opened.header + b"".join([bytes(piece) async for piece in opened.pieces()]) == made
        opened.close()
        some = await client.open(CLIENT, name(1), layers=(2, 4))
        header = container.parse_header(made)
        start = header.header_octets + header.layer_span(2)[0]
        end = header.header_octets + sum(header.layer_span(4))
        assert b"".join([bytes(piece) async for piece in some.pieces()]) == made[start:end]
        some.close()
        await client.close()


@pytest.mark.spec("D14")
async def test_a_pin_that_is_dropped_takes_its_ticket_with_it(tmp_path: Path) -> None:
    async with ucx_rig(tmp_path) as holder:
        await holder.put(1, block(1, layers=4, section=1 << 20))
        opened = await holder.client.open(CLIENT, name(1))
        (ticket,) = [ticket for _, ticket in holder.host.offers._tickets.values()]
        assert ticket.sealed
        opened.close()
        again = await holder.client.open(CLIENT, name(1))  # the stream has handled the close by now
        assert len(holder.host.offers._tickets) == 1
        assert all(kept is not ticket for _, kept in holder.host.offers._tickets.values())
        assert sum([len(piece) async for piece in again.pieces()]) == again.payload_octets
        again.close()


async def test_a_holder_without_the_library_serves_by_other_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "nonesuch")
    async with rig(
        tmp_path, schemes=("ucx", "grpc"), with_index=False, bulk={"ucx": {"listen": "127.0.0.1:0"}}
    ) as holder:
        assert "ucx" not in holder.host.offers
        made = block(1)
        await holder.put(1, made)
        assert await holder.get(1) == made


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with ucx_rig(tmp_path) as holder:
        made = os.urandom(16 << 20)
        reserved = await holder.client.reserve(CLIENT, name(1), len(made))
        assert reserved is not None
        await reserved.write(made[: 9 << 20])
        with pytest.raises(KvspError) as caught:
            await reserved.commit()
        assert caught.value.problem is registry.BAD_REQUEST
        made = block(1)
        await holder.put(1, made)
        assert await holder.get(1) == made


async def test_a_transfer_that_is_ended_at_once_does_not_end_the_next(tmp_path: Path) -> None:
    """The holder hears that it is over, on the control channel, before it has noticed that all is sent."""
    made = block(1, layers=2, section=256 << 10)
    async with remote_holder(tmp_path) as channel:
        client = HolderClient(channel, ("ucx",), same_host=False)
        reserved = await client.reserve(CLIENT, name(1), len(made))
        assert reserved is not None
        await reserved.write(made)
        await reserved.commit()

        async def some() -> None:
            for _ in range(60):
                opened = await client.open(CLIENT, name(1))
                assert sum([len(piece) async for piece in opened.pieces()]) == opened.payload_octets
                opened.close()

        await asyncio.gather(*(some() for _ in range(4)))
        await client.close()


@pytest.mark.spec("D14")
async def test_tickets_are_void_once_their_principal_has_gone(tmp_path: Path) -> None:
    async with ucx_rig(tmp_path) as holder:
        await holder.put(1, block(1, layers=4, section=1 << 20))
        opened = await holder.client.open(CLIENT, name(1))
        other = await holder.client.open(CLIENT2, name(1))
        assert len(holder.host.offers._tickets) == 2
        holder.client._streams[CLIENT].close()
        await until(lambda: len(holder.host.offers._tickets) == 1)
        [grant] = opened._grants
        with pytest.raises(KvspError) as caught:
            [piece async for piece in grant.reader.pieces()]
        assert caught.value.problem is registry.UNAVAILABLE
        assert sum([len(piece) async for piece in other.pieces()]) == other.payload_octets
        other.close()
        opened.close()
