"""Channels to other roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from kvsp.protocol import limits
from kvsp.rpc.config import ConfigError, Peer, Tls

DEFAULT_TIMEOUT_S = 10.0

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", limits.GRPC_MESSAGE_OCTETS_MAX),
    ("grpc.max_send_message_length", limits.GRPC_MESSAGE_OCTETS_MAX),
    # A refused lease names every unknown key in its problem (U-16), in base64 of hex.
    ("grpc.max_metadata_size", 2 * limits.LEASE_KEYS_MAX * 67),
)

# Between hosts a peer can vanish without a word; its streams, and what they hold, must not stay for ever.
KEEPALIVE: tuple[tuple[str, Any], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

# A role that restarts is found again within a second. "min_reconnect_backoff" is no pause but how long an attempt
# may take at least: who is busy or far away needs time to answer the handshake.
_RECONNECT: tuple[tuple[str, Any], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
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
    return grpc.aio.secure_channel(address, credentials, options=options + KEEPALIVE)


def channel_to(name: str, peer: Peer) -> grpc.aio.Channel:
    """The channel to a configured peer. Raises ConfigError, which begins with `name`."""
    try:
        return open_channel(peer.address, peer.tls)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{name}: {error}") from None
