"""The epoch of this start of the instance (R-102)."""

from __future__ import annotations

import os
from pathlib import Path

from kvsp.protocol import limits
from kvsp.rpc.config import ConfigError

FILE = "epoch"


def next_epoch(state_dir: Path, unix_ms: int) -> int:
    """A greater one than at any start before, on disk before it is returned. Raises ConfigError.

    "The start time of the instance in milliseconds since the Unix epoch satisfies this ... provided that the
    instance's clock does not move backward across restarts; otherwise the instance persists a counter": both, so
    that neither a clock set back nor a lost file alone makes it fall.
    """
    path = state_dir / FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = int(path.read_text()) if path.exists() else 0
        epoch = max(unix_ms, before + 1)
        if not 0 < epoch <= limits.INT_MAX:
            raise ConfigError(f"{path}: the epoch is out of bounds")
        _write(path, str(epoch))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return epoch


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole, and have it on disk."""
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
