"""What the demo says of transports: counters of several processes, some of which are killed and started again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from deploy.local.moved import Moved, line
from kvsp.protocol import access

BLOCK = access.GET_BLOCK.path


class Process:
    """What a holder, or the gateway, shows of itself."""

    def __init__(self, started: float) -> None:
        self.registry = CollectorRegistry()
        Gauge("process_start_time_seconds", "", registry=self.registry).set(started)
        self.transfers = Counter(
            "kvsp_holder_transfers_total", "", ["direction", "scheme"], registry=self.registry
        )
        self.requests = Counter(
            "kvsp_gateway_requests_total", "", ["role", "method", "route", "status"], registry=self.registry
        )


@contextmanager
def shown(process: Process, config: Path) -> Iterator[None]:
    server, thread = start_http_server(0, "127.0.0.1", process.registry)
    config.write_text(f'admin = "127.0.0.1:{server.server_port}"')
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_blocks_are_counted_by_transport_and_each_once(tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    (tmp_path / "silent.toml").write_text("")
    holder, gateway = Process(1), Process(1)
    with shown(gateway, tmp_path / "gateway.toml"):
        with shown(holder, tmp_path / "h1.toml"):
            holder.transfers.labels("in", "shm").inc(3)
            holder.transfers.labels("out", "shm").inc(4)
            holder.transfers.labels("out", "grpc").inc()
            gateway.requests.labels("holder", "GET", BLOCK, "200").inc(2)
            gateway.requests.labels("instance", "PUT", BLOCK, "201").inc()
            gateway.requests.labels("holder", "GET", BLOCK, "404").inc(9)
            gateway.requests.labels("index", "POST", "lookup", "200").inc(9)
            assert moved.since() == {"shm": 7, "ucx": 0, "grpc": 1, "https": 3}
            assert not any(moved.since().values())
            holder.transfers.labels("out", "ucx").inc(5)
            moved.look()
        again = Process(2)  # it counts from nothing
        with shown(again, tmp_path / "h1.toml"):
            again.transfers.labels("out", "shm").inc(20)
            told = moved.since()
    assert told == {"shm": 20, "ucx": 5, "grpc": 0, "https": 0}
    assert line(told) == "Blocks moved: shm 20, ucx 5, grpc 0, https 0"
