"""TCP ports of this machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_FIRST: Final = 15_000
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_FIRST: Final = 32_768


def free_ports(count: int) -> list[int]:
    """Different ports that nobody uses now.

    They lie below those that the kernel gives to outgoing connections, so that none of those takes one before it
    is listened on.
    """
    try:
        end = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        end = _EPHEMERAL_FIRST
    candidates = range(_FIRST, end) if end > 2 * _FIRST else range(_EPHEMERAL_FIRST - _FIRST, _EPHEMERAL_FIRST)
    found: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    return found


def is_free(port: int) -> bool:
    """Can it be listened on?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
