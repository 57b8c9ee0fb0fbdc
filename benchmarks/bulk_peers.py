"""What moves the same octets beside us: memcpy, raw TCP sockets (sealed, too), a bare ucxx loop, Redis, Mooncake.

Each gives `Run`: move `count` blocks of `size`, `at_once` in flight, into memory that is there before.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.peers import _process as process
from benchmarks.peers import free_port
from benchmarks.ucx_probe import bare_client, serve_bare
from ucx_transport import library
from ucx_transport.session import SEAL_OCTETS

Run = Callable[[int, int, int], float]
"""Returns seconds."""

PERFTEST_RATE = 5
"""Which number of its line is MiB a second over the whole run."""
PERFTEST_TRIES = 5
SEALED_OCTETS = 512 << 10
"""Sealed at a time: measured, a sender is slower with 256 KiB and, within the noise, no faster with 2 MiB."""
CIPHER, NONCE = AESGCM(bytes(32)), bytes(12)  # a peer to be timed; nothing is kept secret

SPAWN = multiprocessing.get_context("spawn")


def in_threads(at_once: int, count: int, make: Callable[[int], Callable[[], Any]]) -> float:
    """`make(i)` gives what thread i calls until `count` calls are made in all. Returns seconds."""
    calls = [make(i) for i in range(at_once)]
    shares = [count // at_once + (i < count % at_once) for i in range(at_once)]

    def work(call: Callable[[], Any], times: int) -> None:
        for _ in range(times):
            call()

    began = time.perf_counter()
    if at_once == 1:
        work(calls[0], count)
    else:
        threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, shares, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return time.perf_counter() - began


def memcpy(size: int, at_once: int, count: int) -> float:
    """From one buffer to another, for each in flight."""

    def make(_: int) -> Callable[[], None]:
        source, target = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size))

        def copy() -> None:
            target[:] = source

        copy()
        return copy

    return in_threads(at_once, count, make)


def _serve_tcp(pipe: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    blocks: dict[int, memoryview] = {}
    sealed = memoryview(bytearray(SEALED_OCTETS))
    while asked := peer.recv(9, socket.MSG_WAITALL):
        size = int.from_bytes(asked[1:])
        if size not in blocks:
            blocks[size] = memoryview(os.urandom(size))
        if not asked[0]:
            peer.sendall(blocks[size])
            continue
        for part, room in _frames(blocks[size], sealed):
            CIPHER.encrypt_into(NONCE, part, None, room)
            peer.sendall(room)


@contextmanager
def raw_tcp(*, seal: bool = False) -> Iterator[Run]:
    """One connection per block in flight: ask, and recv_into. `seal`: and AES-256-GCM at both ends."""
    with _spawned(_serve_tcp) as port, ExitStack() as stack:
        peers: list[socket.socket] = []

        def run(size: int, at_once: int, count: int) -> float:
            while len(peers) < at_once:
                peers.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
                peers[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def make(i: int) -> Callable[[], None]:
                target = memoryview(bytearray(size))
                sealed = memoryview(bytearray(SEALED_OCTETS))

                def fetch() -> None:
                    peers[i].sendall(bytes((seal,)) + size.to_bytes(8))
                    if not seal:
                        _receive(peers[i], target)
                        return
                    for part, room in _frames(target, sealed):
                        _receive(peers[i], room)
                        CIPHER.decrypt_into(NONCE, room, None, part)

                fetch()
                return fetch

            return in_threads(at_once, count, make)

        yield run


def _frames(octets: memoryview, sealed: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    """What is sealed at a time, and the room for it sealed, always the same."""
    step = SEALED_OCTETS - SEAL_OCTETS
    for at in range(0, len(octets), step):
        part = octets[at : at + step]
        yield part, sealed[: len(part) + SEAL_OCTETS]


def _receive(peer: socket.socket, target: memoryview) -> None:
    got = 0
    while got < len(target):
        got += peer.recv_into(target[got:])


@contextmanager
def bare_ucxx() -> Iterator[Run]:
    """Tag send and receive on one connection: what UCX gives by itself here."""
    with _spawned(serve_bare) as port:
        yield bare_client(port)


def perftest(size: int, at_once: int, count: int) -> float:
    """UCX's own bandwidth test, from the same wheel and with the settings that we give UCX."""
    home = Path(next(iter(importlib.import_module("libucx").__path__)))
    settings = {f"UCX_{name}": value for name, value in (library.DEFAULTS | library.WITHOUT_RDMA).items()}
    environment = {**os.environ, **settings, "LD_LIBRARY_PATH": str(home / "lib")}
    asked = ["-t", "tag_bw", "-s", str(size), "-n", str(count), "-w", str(at_once), "-O", str(at_once), "-f"]
    for _ in range(PERFTEST_TRIES):
        command = [str(home / "bin" / "ucx_perftest"), "-p", str(free_port())]
        # It serves once, also who came too early and failed.
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as server:
            time.sleep(0.2)
            done = subprocess.run(
                [*command, "127.0.0.1", *asked], env=environment, capture_output=True, text=True, check=False
            )
            server.terminate()
        if not done.returncode:
            figures = done.stdout.strip().splitlines()[-1].split()
            return size * count / (float(figures[PERFTEST_RATE]) * (1 << 20))
    raise RuntimeError(done.stderr or done.stdout)


@contextmanager
def _spawned(serve: Callable[[Any], None]) -> Iterator[Any]:
    """A process that says something once it serves; that is yielded."""
    here, there = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(there,), daemon=True)
    server.start()
    try:
        yield here.recv()
    finally:
        server.kill()
        server.join()


@contextmanager
def redis(folder: Path) -> Iterator[Run]:
    """GET over plain TCP, with hiredis."""
    import redis as client

    port = free_port()
    command = [
        "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
        "--dir", str(folder), "--proto-max-bulk-len", "1gb",
    ]  # fmt: skip
    with process(command, port):
        connections: list[client.Redis] = []
        known: set[int] = set()

        def run(size: int, at_once: int, count: int) -> float:
            while len(connections) < at_once:
                connections.append(client.Redis(port=port))
            if size not in known:
                connections[0].set(str(size), os.urandom(size))
                known.add(size)

            def make(i: int) -> Callable[[], object]:
                connections[i].get(str(size))
                return lambda: connections[i].get(str(size))

            return in_threads(at_once, count, make)

        yield run


@contextmanager
def mooncake(python: Path) -> Iterator[Run]:
    """Mooncake's store over TCP: get_into from another process. `python` is of an environment that has it."""
    master = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        binary = next(python.parent.parent.glob("lib/python*/site-packages/mooncake/mooncake_master"))
        port = master.rpartition(":")[2]
        command = [str(binary), f"--rpc_port={port}", f"--metrics_port={free_port()}"]
        stack.enter_context(process(command, int(port)))
        script = str(Path(__file__).with_name("bulk_mooncake.py"))

        def start(role: str) -> subprocess.Popen[str]:
            return stack.enter_context(_talking([str(python), script, role, master, f"127.0.0.1:{free_port()}"]))

        owner, client = start("owner"), start("client")
        assert owner.stdout is not None

        def run(size: int, at_once: int, count: int) -> float:
            return float(_ask(owner, f"{size}") and _ask(client, f"{size} {at_once} {count}"))

        yield run


@contextmanager
def _talking(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield made
    finally:
        with suppress(BrokenPipeError):
            made.communicate("\n", timeout=10)


def _ask(peer: subprocess.Popen[str], words: str) -> str:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(words + "\n")
    peer.stdin.flush()
    answer = peer.stdout.readline().strip()
    if not answer:
        raise RuntimeError(f"{peer.args!r} said nothing")
    return answer
