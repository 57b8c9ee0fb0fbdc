"""Buffers: those that callers bring, and those that are used again."""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np

IDLE_OCTETS_MAX: Final = 128 << 20
"""Freed buffers kept for the next transfer: fresh memory costs a page fault every 4 KiB."""
_SMALLEST: Final = 1 << 16


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


def octets_of(target: Any) -> memoryview:
    """The memory of a buffer or of a CPU tensor, as octets. Raises ValueError unless contiguous and writable."""
    if hasattr(target, "data_ptr"):
        import torch

        if target.device.type != "cpu":
            raise ValueError("this UCX reaches host memory only")
        target = target.detach().view(torch.uint8).numpy() if target.is_contiguous() else None
    view = memoryview(target) if target is not None else None
    if view is None or view.readonly or not view.c_contiguous:
        raise ValueError("the target must be contiguous and writable")
    return view.cast("B")
