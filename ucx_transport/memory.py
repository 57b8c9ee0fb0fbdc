"""Buffers: those that callers bring, and those that are used again."""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np

IDLE_OCTETS_MAX: Final = 128 << 20
"""Freed buffers kept for the next transfer: fresh memory costs a page fault every 4 KiB."""
_SMALLEST: Final = 1 << 16

Octets = Any
"""A memoryview of octets, or a tensor of them on a CUDA device. Either can be cut, and has a length."""


class Buffers:
    """Memory for transfers. A buffer comes back by itself when the last view of it is gone, never before."""

    def __init__(self) -> None:
        self._idle: dict[int, list[Any]] = {}
        self._idle_octets = 0

    @property
    def idle_octets(self) -> int:
        """Kept for the next transfers."""
        return self._idle_octets

    def take(self, octets: int) -> memoryview:
        """Writable memory of undefined content."""
        size = max(_SMALLEST, 1 << (octets - 1).bit_length()) if octets else _SMALLEST
        idle = self._idle.get(size)
        if idle:
            whole = idle.pop()
            self._idle_octets -= size
        else:
            whole = np.empty(size, dtype=np.uint8)
        part = whole[:octets]
        weakref.finalize(part, self._give_back, whole).atexit = False
        return memoryview(part)

    def _give_back(self, whole: Any) -> None:
        if self._idle_octets + whole.nbytes <= IDLE_OCTETS_MAX:
            self._idle.setdefault(whole.nbytes, []).append(whole)
            self._idle_octets += whole.nbytes


def octets_of(target: Any, *, cuda: bool = False) -> Octets:
    """The memory of a buffer or tensor, as octets; with `cuda` of a tensor on a CUDA device, too.

    Raises ValueError unless it can be reached, is contiguous and writable.
    """
    if hasattr(target, "data_ptr"):
        return _of_tensor(target, cuda)
    view = memoryview(target)
    if view.readonly or not view.c_contiguous:
        raise ValueError("the target must be contiguous and writable")
    return view.cast("B")


def _of_tensor(tensor: Any, cuda: bool) -> Octets:
    import torch

    if not tensor.is_contiguous():
        raise ValueError("the target must be contiguous and writable")
    octets = tensor.detach().view(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        return memoryview(octets.numpy())
    if tensor.device.type != "cuda" or not cuda:
        raise ValueError(f"this UCX does not reach memory of {tensor.device.type}")
    torch.cuda.synchronize(tensor.device)  # UCX knows nothing of kernels that still use it
    return octets


def is_host(octets: Octets) -> bool:
    """Whether this process's CPU can look at them."""
    return isinstance(octets, memoryview)


def put(octets: bytearray | memoryview, into: Octets) -> None:
    """Copy; when this returns they are there, on a device too."""
    if isinstance(into, memoryview):
        into[:] = octets
        return
    import torch

    into.copy_(torch.frombuffer(octets, dtype=torch.uint8))
    if into.is_cuda:
        torch.cuda.synchronize(into.device)


def get(octets: Octets) -> bytes:
    """A copy of them on the host."""
    return bytes(octets) if isinstance(octets, memoryview) else octets.cpu().numpy().tobytes()
