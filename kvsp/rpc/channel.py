"""Channels to other roles, and the deadline that each hop passes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from kvsp.protocol import limits
from kvsp.rpc.config import Tls

HOP_S = 0.02  # each hop keeps this much, so that the inner service names what timed out
DEFAULT_TIMEOUT_S = 10.0

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", limits.GRPC_MESSAGE_OCTETS_MAX),
    ("grpc.max_send_message_length", limits.GRPC_MESSAGE_OCTETS_MAX),
    # A refused lease names every unknown key in its problem (U-16), in base64 of hex.
    ("grpc.max_metadata_size", 2 * limits.LEASE_KEYS_MAX * 67),
)

# A role that restarts is found again within a second.
_RECONNECT: tuple[tuple[str, Any], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `unix:/path` or, with mutual TLS, to `host:port`."""
    options = OPTIONS + _RECONNECT
    if address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    if tls is None:
        raise ValueError(f"{address}: a channel that is no Unix socket needs [tls]")
    credentials = grpc.ssl_channel_credentials(
        Path(tls.ca).read_bytes(), Path(tls.key).read_bytes(), Path(tls.cert).read_bytes()
    )
    return grpc.aio.secure_channel(address, credentials, options=options)


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Seconds that a call made on behalf of `context` may take."""
    left = context.time_remaining()
    return default_s if left is None else max(left - HOP_S, 0.001)
