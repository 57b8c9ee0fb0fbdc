"""Shared memory: who may see and write what, and that nobody takes one block's octets for another's."""

from __future__ import annotations

import array
import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from kvsp.bulk import descriptors
from kvsp.bulk.holder import HolderClient
from kvsp.bulk.shm import Layout, ShmSource
from kvsp.bulk.source import SourceUnavailableError
from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.rpc.config import ConfigError
from services.holder.arena import Arena, huge_octets
from services.holder.local import local_peers
from tests.services.holder_harness import BASE_URI, CLIENT, Rig, block, name, rig, until

LARGE = 600_000


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    """A holder whose client uses the control socket."""
    async with (
        rig(tmp_path, with_index=False, arena_octets=4 << 20) as made,
        local_peers(made.host, tmp_path / "c"),
    ):
        kept, made.client = made.client, HolderClient(made.channel, ("shm",), local=tmp_path / "c")
        yield made
        await made.client.close()
        made.client = kept


async def test_the_arena_needs_no_name_on_the_control_socket(holder: Rig) -> None:
    holder.host.arena.path.rename(holder.folder / "elsewhere")
    await holder.put(1)
    assert await holder.get(1) == block(1)
    [arena] = holder.client._chooser.source("shm")._arenas  # type: ignore[attr-defined]
    assert arena == holder.host.arena.path.name


@pytest.mark.spec("D14")
async def test_what_is_passed_can_be_read_or_written_but_not_both(holder: Rig) -> None:
    files = await descriptors.ask(holder.folder / "c")
    octets = os.fstat(files.read).st_size
    mmap.mmap(files.read, octets, mmap.MAP_SHARED, mmap.PROT_READ).close()
    for fd in (files.read, files.write):
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, octets, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file"):
        os.pwrite(files.read, b"x", 0)
    with pytest.raises(OSError, match="Bad file"):
        os.pread(files.write, 1, 0)
    files.close()
    files.close()


async def test_descriptors_are_asked_for_once_and_given_back(holder: Rig) -> None:
    await holder.put(1)
    await holder.get(1)
    before = psutil.Process().num_fds()
    for _ in range(50):
        await holder.get(1)
        with pytest.raises(KvspError):
            await holder.put(1)
    assert psutil.Process().num_fds() == before
    await holder.client.close()
    assert psutil.Process().num_fds() < before


async def test_a_restarted_holder_has_another_arena(tmp_path: Path) -> None:
    async with rig(tmp_path, with_index=False) as made, local_peers(made.host, tmp_path / "c"):
        client = HolderClient(made.channel, ("shm",), local=tmp_path / "c")
        await client.reserve(CLIENT, name(1), 100)
        client._streams[CLIENT].close()
        source = client._chooser.source("shm")
        first = made.host.arena.files.name
    async with rig(tmp_path, with_index=False) as made, local_peers(made.host, tmp_path / "c"):
        made.client, kept = client, made.client
        client._channel = made.channel
        await made.put(1)
        assert await made.get(1) == block(1)
        assert isinstance(source, ShmSource)
        assert set(source._arenas) == {made.host.arena.files.name}
        with pytest.raises(SourceUnavailableError, match="another one"):
            await source.admit(first, tmp_path / "c")
        await client.close()
        made.client = kept


@pytest.mark.spec("D14")
@pytest.mark.parametrize("given", [0, 1, 2])
async def test_a_control_socket_that_gives_something_else_is_refused(tmp_path: Path, given: int) -> None:
    """No descriptors, one, or two of which one is no arena."""
    files = [os.open(tmp_path / f"f{i}", os.O_RDWR | os.O_CREAT) for i in range(given)]
    for fd in files:
        os.write(fd, bytes(8192))
    before = psutil.Process().num_fds()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4 + len(descriptors.WANTED))
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as own:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
            own.sendmsg([b"\0\0\0\1a"], ancillary)
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "c"):
        with pytest.raises(SourceUnavailableError):
            await ShmSource().admit("a", tmp_path / "c")
    await until(lambda: psutil.Process().num_fds() == before)
    for fd in files:
        os.close(fd)


async def test_nobody_there_or_silent_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceUnavailableError):
        await descriptors.ask(tmp_path / "nothing")
    monkeypatch.setattr(descriptors, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "c"))
        silent.listen()
        with pytest.raises(SourceUnavailableError, match="no answer"):
            await descriptors.ask(tmp_path / "c")


async def test_room_that_went_to_another_block_is_noticed_after_the_read(
    holder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is held up past its deadline, and whose clock did not tell it."""
    await holder.put(1, block(1, 2, LARGE))
    monkeypatch.setattr(limits, "transfer_ms", lambda octets: 50)
    opened = await holder.client.open(CLIENT, name(1))
    opened.deadline = float("inf")
    pieces, ends = opened.pieces(), opened.into(bytearray(opened.payload_octets))
    piece = memoryview(await anext(pieces))
    await anext(ends)
    opened.check()
    await until(lambda: holder.pins(1) == 0)
    monkeypatch.undo()
    stored = holder.stored(1)
    assert stored is not None
    await holder.host.purge(stored.name)
    opened.check()  # free, but nobody has written there yet
    await holder.put(2, block(2, 2, LARGE))
    assert piece != block(1, 2, LARGE)[-2 * LARGE * 2 :][: len(piece)]
    with pytest.raises(KvspError, match="another block") as caught:
        opened.check()
    assert caught.value.problem is registry.UNAVAILABLE
    with pytest.raises(KvspError, match="another block"):
        [piece async for piece in pieces]
    with pytest.raises(KvspError, match="another block"):
        [end async for end in ends]
    opened.close()
    assert await holder.get(2) == block(2, 2, LARGE)


async def test_other_blocks_that_come_and_go_are_not_taken_for_it(holder: Rig) -> None:
    await holder.put(1)
    opened = await holder.client.open(CLIENT, name(1))
    pieces = opened.pieces()
    await anext(pieces)
    for i in range(2, 6):
        await holder.put(i)
        stored = holder.stored(i)
        assert stored is not None
        await holder.host.purge(stored.name)
    assert [piece async for piece in pieces] == []
    opened.close()


READER = """
import asyncio, sys
from pathlib import Path
from kvsp.bulk.holder import HolderClient
from kvsp.rpc.channel import open_channel
from tests.services.holder_harness import CLIENT, name
async def main():
    async with open_channel(sys.argv[1]) as channel:
        client = HolderClient(channel, ("shm",), local=Path(sys.argv[2]))
        opened = await client.open(CLIENT, name(1))
        got = b""
        async for piece in opened.pieces():
            got += piece
            if len(got) == len(piece):
                print("first", flush=True)
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        print("all", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_reader_that_dies_or_stalls_loses_its_pin(
    holder: Rig, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    await holder.put(1, block(1, 2, LARGE))
    monkeypatch.setattr(limits, "transfer_ms", lambda octets: 1500 if fault == signal.SIGSTOP else 60_000)
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, holder.config.listen, str(holder.folder / "c"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert reader.stdout is not None
        assert await reader.stdout.readline() == b"first\n"
        assert holder.pins(1) == 1
        reader.send_signal(fault)
        await until(lambda: holder.pins(1) == 0)
        if fault == signal.SIGSTOP:  # it comes back, and does not deliver what is another's by now
            stored = holder.stored(1)
            assert stored is not None
            await holder.host.purge(stored.name)
            await holder.put(2, block(2, 2, LARGE))
            reader.send_signal(signal.SIGCONT)
            out, err = await reader.communicate(b"\n")
            assert (out, reader.returncode) == (b"", 1)
            assert b"KvspError" in err
    finally:
        if reader.returncode is None:
            reader.kill()
        await reader.communicate()


def test_an_arena_of_any_size_is_laid_out_so_that_it_can_be_told(tmp_path: Path) -> None:
    for octets in (1, 4095, 4096, 4097, 1 << 20):
        arena = Arena.create(tmp_path, BASE_URI, octets)
        whole = memoryview(arena.path.read_bytes())
        assert (len(arena.view), Layout.of(whole)) == (octets, Layout(octets))
        arena.renew(0, octets)
        arena.close()
        for bad in (whole[:-1], whole[1:], b"", bytes(len(whole))):
            with pytest.raises(SourceUnavailableError):
                Layout.of(memoryview(bad))


@pytest.fixture(params=["advise", "never"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """Shared memory of its own, and whether it has huge pages for who asks."""
    options = f"huge={request.param},size=32m"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no mount of our own: {mounted.stderr.strip()}")
    yield tmp_path, request.param == "advise"
    subprocess.run(["umount", tmp_path], check=True)


def test_huge_pages_are_used_or_their_lack_is_said(memory: tuple[Path, bool]) -> None:
    folder, has_them = memory
    with capture_logs() as logs:
        arena = Arena.create(folder, BASE_URI, 8 << 20, {"huge_pages": True})
    try:
        assert huge_octets(arena.path) == (8 << 20 if has_them else 0)
        assert [entry["event"] for entry in logs] == ([] if has_them else ["arena without huge pages"])
        arena.view[:] = b"x" * len(arena.view)
        assert arena.path.stat().st_size == Layout(8 << 20).octets
        with pytest.raises(ConfigError, match="free"):
            Arena.create(folder, BASE_URI + "other", 64 << 20, {"huge_pages": True})
    finally:
        arena.close()


@pytest.mark.parametrize("table", [{"huge_pages": 1}, {"other": True}])
def test_a_bad_table_is_refused(tmp_path: Path, table: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"bulk\.shm"):
        Arena.create(tmp_path, BASE_URI, 4096, table)
