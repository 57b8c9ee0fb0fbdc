"""The one place that touches ucxx.

Its low-level classes are used and not `ucxx.core`: that keeps one context per process in a module global
and waits by spinning the event loop (docs/adr/0009-ucx.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from kvsp.bulk.source import SourceUnavailableError

TCP_SEGMENT: Final = "512K"
DEFAULTS: Final = {
    # The holder's own host is the business of shared memory, which has no peer failure handling in UCX.
    "TLS": "^sm",
    # Measured on loopback: the stock 8 KiB segments waste more than half of the speed.
    "TCP_TX_SEG_SIZE": TCP_SEGMENT,
    "TCP_RX_SEG_SIZE": TCP_SEGMENT,
    # A holder that starts again gets its port although connections of the one before it linger.
    "TCP_CM_REUSEADDR": "y",
}
WITHOUT_RDMA: Final = {
    # A rendezvous lets a device move octets without copies. TCP copies anyway, and it costs a round trip a frame:
    # up to a third of the speed, measured on loopback.
    "RNDV_THRESH": "inf",
}
RDMA_TRANSPORTS: Final = ("rc", "dc", "ud", "srd")
"""What UCX calls its InfiniBand, RoCE and EFA transports begins with one of these."""


def load() -> Any:
    """The bindings. Raises SourceUnavailableError when they are missing or do not load."""
    try:
        # ucxx sets a variable for UCX that this build does not know; UCX would complain in every process.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        import ucxx._lib.libucxx as bindings
    except (ImportError, OSError) as error:
        raise SourceUnavailableError(f"ucx: {error}") from error
    return bindings


def array(buffer: Any) -> Any:
    """What ucxx takes for memory; keeps `buffer` alive."""
    return _array_type()(buffer)


@cache
def _array_type() -> Any:
    from ucxx._lib.arr import Array

    return Array


def open_context(options: Mapping[str, str]) -> Any:
    """A UCX context. `options` by their names without "UCX_"; the environment gives what they leave out.

    Only tag matching and streams are enabled: no remote memory access. Raises SourceUnavailableError.
    """
    bindings = load()
    feature = bindings.Feature

    def made(defaults: Mapping[str, str]) -> Any:
        missing = {name: value for name, value in defaults.items() if f"UCX_{name}" not in os.environ}
        return bindings.UCXContext(missing | dict(options), (feature.TAG, feature.STREAM, feature.WAKEUP))

    try:
        context = made(DEFAULTS | WITHOUT_RDMA)
        return made(DEFAULTS) if has_rdma(context) else context
    except bindings.UCXError as error:
        raise SourceUnavailableError(f"ucx: {error}") from error


def transports(context: Any) -> list[str]:
    """What the context may use, as "transport/device", such as "tcp/eth0" or "rc_mlx5/mlx5_0:1"."""
    lines = [line for line in context.info.splitlines() if "resource" in line and "--" in line]
    return [line.rpartition("--")[2].strip() for line in lines]


def has_rdma(context: Any) -> bool:
    """True when an RDMA device is there for this context to use."""
    return any(each.startswith(RDMA_TRANSPORTS) for each in transports(context))


def has_cuda(context: Any) -> bool:
    """True when UCX can reach CUDA memory: the build knows how and there is a device."""
    return bool(context.cuda_support) and any(each.startswith("cuda") for each in transports(context))
