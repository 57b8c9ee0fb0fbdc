"""Remembers across restarts what was published, so that a holder that lost its blocks can withdraw them (U-51)."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

import structlog

from kvsp.rpc.config import ConfigError

log = structlog.get_logger()


class Journal:
    """Block keys in SQLite under `folder`; None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        path = ":memory:" if folder is None else str(folder / "published.sqlite")
        try:
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = _open(path)
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigError(f"state_dir {folder}: {error}") from None
        except sqlite3.DatabaseError:
            # It only saves 404s until records expire: not worth refusing to start.
            log.warning("journal unreadable, starting anew")
            Path(path).unlink()
            self._db = _open(path)

    def remembered(self) -> list[bytes]:
        """Keys published and not withdrawn since."""
        return [key for (key,) in self._db.execute("SELECT key FROM published")]

    def remember(self, block_key: bytes) -> None:
        """About to be published."""
        self._db.execute("INSERT OR IGNORE INTO published VALUES (?)", (block_key,))

    def forget(self, block_key: bytes) -> None:
        """The index lists it no more."""
        self._db.execute("DELETE FROM published WHERE key = ?", (block_key,))

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._db.close()


def _open(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("CREATE TABLE IF NOT EXISTS published (key BLOB PRIMARY KEY) WITHOUT ROWID")
    return db
