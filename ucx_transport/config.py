"""`[bulk.ucx]` of holder.toml."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvsp.rpc.config import ConfigError

PORT_MAX = 0xFFFF


class UcxConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a holder offers blocks over UCX.

    `listen` is `host:port`: the address that tickets name (port 0: any free one). `fabric`: "sealed" encrypts
    all octets of blocks, "trusted" relies on the network. The rest is UCX's own, empty or 0 leaves it to UCX:
    `transports` (UCX_TLS), `devices` (UCX_NET_DEVICES), `tcp_segment_octets`, `tcp_ports` ("first-last"),
    `rendezvous_octets` (UCX_RNDV_THRESH), `rails` (UCX_MAX_RNDV_RAILS).
    """

    listen: str
    fabric: Literal["sealed", "trusted"] = "sealed"
    transports: str = ""
    devices: str = ""
    tcp_segment_octets: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    tcp_ports: Annotated[str, Meta(pattern=r"^([0-9]+-[0-9]+)?$")] = ""
    rendezvous_octets: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    rails: Annotated[int, Meta(ge=0, le=64)] = 0

    @classmethod
    def of(cls, table: Any) -> UcxConfig:
        """From a TOML table. Raises ConfigError."""
        try:
            config = msgspec.convert(table, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"bulk.ucx: {error}") from None
        _ = config.address
        return config

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`. Raises ConfigError."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > PORT_MAX or host == "0.0.0.0":  # noqa: S104
            raise ConfigError("bulk.ucx: listen is the host:port that peers connect to")
        return host, int(port)

    @property
    def options(self) -> dict[str, str]:
        """As UCX takes them."""
        segment = str(self.tcp_segment_octets or "")
        named = {
            "TLS": self.transports,
            "NET_DEVICES": self.devices,
            "TCP_TX_SEG_SIZE": segment,
            "TCP_RX_SEG_SIZE": segment,
            "TCP_PORT_RANGE": self.tcp_ports,
            "RNDV_THRESH": str(self.rendezvous_octets or ""),
            "MAX_RNDV_RAILS": str(self.rails or ""),
        }
        return {name: value for name, value in named.items() if value}
