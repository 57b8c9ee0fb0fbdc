"""The peers that we measure beside ourselves: nginx over mTLS and Redis over TLS, on free loopback ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NGINX = """
daemon off; pid {dir}/nginx.pid; error_log {dir}/error.log; worker_processes 1; {user}
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fcgi;
  uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
  server {{
    {listen}
    root {root};
    default_type application/kvsp-block;
  }}
}}
"""
NGINX_TLS = """listen 127.0.0.1:{port} ssl http2;
    ssl_certificate {tls.cert}; ssl_certificate_key {tls.key}; ssl_client_certificate {tls.ca};
    ssl_verify_client on; ssl_protocols TLSv1.3;"""


@dataclass(frozen=True)
class Tls:
    """PEM files of the server and of the CA that signs both sides."""

    ca: Path
    cert: Path
    key: Path


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} did not start")


@contextmanager
def nginx(folder: Path, files: Path, tls: Tls) -> Iterator[str]:
    """Serve `files` over HTTPS with client certificates; yields the base URL."""
    port = free_port()
    with _process(_nginx(folder, files, NGINX_TLS.format(port=port, tls=tls)), port):
        yield f"https://localhost:{port}/"


def plain_nginx(folder: Path, files: Path, socket: Path) -> list[str]:
    """The command that serves `files` over plain HTTP on a Unix socket."""
    return _nginx(folder, files, f"listen unix:{socket};")


def _nginx(folder: Path, files: Path, listen: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nginx.conf"
    user = "user root;" if os.getuid() == 0 else ""
    config.write_text(NGINX.format(dir=folder, listen=listen, root=files, user=user))
    return [shutil.which("nginx") or "/usr/sbin/nginx", "-c", str(config), "-e", str(folder / "error.log")]


@contextmanager
def redis(folder: Path, tls: Tls) -> Iterator[int]:
    """A Redis without persistence over TLS with client certificates; yields its port."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "redis-server", "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1",
        "--tls-cert-file", str(tls.cert), "--tls-key-file", str(tls.key), "--tls-ca-cert-file", str(tls.ca),
        "--tls-auth-clients", "yes", "--tls-protocols", "TLSv1.3", "--save", "", "--appendonly", "no",
        "--dir", str(folder), "--proto-max-bulk-len", "1gb",
    ]  # fmt: skip
    with _process(command, port):
        yield port
