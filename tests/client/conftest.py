from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvsp.client import Client, Credentials, Endpoints, Options
from tests.client.peers import Authority, Peer, Server, container_of


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="session")
def credentials(authority: Authority) -> Credentials:
    return authority.issue("client")


@pytest.fixture(scope="session")
def server_credentials(authority: Authority) -> Credentials:
    return authority.issue("server")


@pytest.fixture
def serve(server_credentials: Credentials) -> Iterator[Callable[..., Peer]]:
    """Start a peer: `serve(mode, octets=..., tls=..., server=credentials)`."""
    running: list[Server] = []

    def start(
        mode: str = "honest",
        octets: bytes = b"",
        tls: ssl.TLSVersion | None = None,
        server: Credentials | None = None,
    ) -> Peer:
        peer = Peer(mode, octets)
        running.append(Server(peer, server or server_credentials, tls))
        return peer

    yield start
    for one in running:
        one.stop()


@pytest.fixture
def connect(credentials: Credentials) -> Iterator[Callable[..., Client]]:
    """A client of these peers: `connect(index, holders, trusted=..., placement=..., instances=..., **options)`."""
    opened: list[Client] = []

    def open_client(
        index: Peer | None = None,
        *holders: Peer,
        trusted: Any = None,
        own: Credentials | None = None,
        placement: Peer | None = None,
        instances: Sequence[Peer] = (),
        **options: Any,
    ) -> Client:
        endpoints = Endpoints(
            index.base if index else None,
            frozenset(peer.base for peer in holders),
            trusted,
            placement.base if placement else None,
            frozenset(peer.base for peer in instances),
        )
        client = Client(own or credentials, endpoints, Options(**options))
        opened.append(client)
        return client

    yield open_client
    for client in opened:
        client.close()


@pytest.fixture
def octets() -> bytes:
    """A block of four layers of 256 KiB."""
    return container_of(4, 128 << 10)


@pytest.fixture
def index(serve: Callable[..., Peer]) -> Peer:
    """An index that takes every withdrawal."""
    peer = serve()
    peer.replies["DELETE replicas"] = (204, None)
    return peer


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
