"""Where epochs, sessions and checkpoints survive (R-103, design: state and scale)."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from kvsp.protocol.records import SessionCheckpoint
from services.placement.groups import ForgetMap, MapRow
from services.placement.instructions import Forget, InstanceRow, Row, SessionRow

_SCHEMA: Final = (
    """
CREATE TABLE instances (instance TEXT PRIMARY KEY, epoch INTEGER NOT NULL, ttl_ms INTEGER NOT NULL) STRICT;
CREATE TABLE sessions (
    session TEXT PRIMARY KEY, epoch INTEGER NOT NULL, instance TEXT NOT NULL, instance_epoch INTEGER NOT NULL,
    bound INTEGER NOT NULL, owner TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, block_tokens INTEGER NOT NULL,
    checkpoint BLOB
) STRICT
""",
    """
ALTER TABLE instances ADD COLUMN wanted TEXT NOT NULL DEFAULT '';
ALTER TABLE instances ADD COLUMN resets INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN scope_id TEXT NOT NULL DEFAULT '';
CREATE TABLE maps (map TEXT PRIMARY KEY, version INTEGER NOT NULL, octets BLOB NOT NULL) STRICT
""",
)
"""What each version has added: a file of an earlier one gets what it lacks. Earlier programs refuse it then."""

# An epoch never goes back, whatever is asked, unless an operator has reset it.
_PUT_INSTANCE: Final = """
INSERT INTO instances VALUES (?, ?, ?, ?, ?)
ON CONFLICT (instance) DO UPDATE SET
    epoch = excluded.epoch, ttl_ms = excluded.ttl_ms, wanted = excluded.wanted, resets = excluded.resets
WHERE (excluded.resets, excluded.epoch) >= (instances.resets, instances.epoch)
"""
_PUT_SESSION: Final = """
INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (session) DO UPDATE SET
    epoch = excluded.epoch, instance = excluded.instance, instance_epoch = excluded.instance_epoch,
    bound = excluded.bound, owner = excluded.owner, prompt_tokens = excluded.prompt_tokens,
    block_tokens = excluded.block_tokens, checkpoint = excluded.checkpoint, scope_id = excluded.scope_id
WHERE excluded.epoch >= sessions.epoch
"""
_FORGET: Final = "DELETE FROM sessions WHERE session = ?"
# Nor does the authoritative version of a map.
_PUT_MAP: Final = """
INSERT INTO maps VALUES (?, ?, ?)
ON CONFLICT (map) DO UPDATE SET version = excluded.version, octets = excluded.octets
WHERE excluded.version >= maps.version
"""
_FORGET_MAP: Final = "DELETE FROM maps WHERE map = ?"


class StoreError(Exception):
    """The store cannot be used, or could not be written: nothing may be acknowledged any more."""


class Store(Protocol):
    """Keeps the last row of each key. One process at a time has it; it is used from one thread at a time."""

    def load(self) -> list[Row]:
        """Every row. Raises StoreError."""

    def commit(self, rows: Sequence[Row]) -> None:
        """All rows in order, or none; on disk when it returns. No lower epoch is taken. Raises StoreError."""

    def close(self) -> None:
        """Give it to the next process."""


class SqliteStore:
    """The default: one SQLite file that only its owner may read, as checkpoints are as confidential as prompts.

    In WAL mode with synchronous=FULL a commit is one write and one fsync. Raises StoreError.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):  # SQLite keeps what it finds
                if (file := path.with_name(name)).exists():
                    file.chmod(0o600)
            # The writer's thread is not the one that opens it.
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path}: {error}") from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._db.close()
            raise StoreError(f"{path}: {error}") from None

    def _prepare(self) -> None:
        # Two controllers on one file would hand out epochs twice: the lock is kept from the first write on.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA secure_delete = ON")  # an ended session's tokens are not left in free pages
        self._db.execute("BEGIN IMMEDIATE")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > len(_SCHEMA):
            raise sqlite3.DatabaseError(f"is of version {version}, not {len(_SCHEMA)}")
        for step in _SCHEMA[version:]:
            for statement in step.split(";"):
                self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version = {len(_SCHEMA)}")
        self._db.execute("COMMIT")

    def load(self) -> list[Row]:
        """See Store."""
        try:
            rows: list[Row] = [InstanceRow(*row) for row in self._db.execute("SELECT * FROM instances")]
            rows += [_session(row) for row in self._db.execute("SELECT * FROM sessions")]
            maps = self._db.execute("SELECT octets FROM maps")
            rows += [msgspec.msgpack.decode(octets, type=MapRow) for (octets,) in maps]
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            raise StoreError(f"cannot be read: {type(error).__name__}") from None
        return rows

    def commit(self, rows: Sequence[Row]) -> None:
        """See Store."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            with closing(self._db.cursor()) as cursor:
                for row in rows:
                    _put(cursor, row)
            self._db.execute("COMMIT")
        except (sqlite3.Error, OverflowError) as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise StoreError(f"cannot be written: {error}") from None

    def close(self) -> None:
        """See Store."""
        self._db.close()


def _put(cursor: sqlite3.Cursor, row: Row) -> None:
    match row:
        case InstanceRow():
            cursor.execute(_PUT_INSTANCE, (row.instance, row.epoch, row.ttl_ms, row.wanted, row.resets))
        case SessionRow():
            octets = None if row.checkpoint is None else msgspec.msgpack.encode(row.checkpoint)
            cursor.execute(
                _PUT_SESSION,
                (
                    row.session, row.epoch, row.instance, row.instance_epoch, row.bound, row.owner,
                    row.prompt_tokens, row.block_tokens, octets, row.scope_id,
                ),
            )  # fmt: skip
        case Forget():
            cursor.execute(_FORGET, (row.session,))
        case MapRow():
            cursor.execute(_PUT_MAP, (row.map.map, row.map.version, msgspec.msgpack.encode(row)))
        case ForgetMap():
            cursor.execute(_FORGET_MAP, (row.map,))


def _session(columns: tuple[Any, ...]) -> SessionRow:
    session, epoch, instance, instance_epoch, bound, owner, prompt_tokens, block_tokens, octets, scope_id = columns
    checkpoint = None if octets is None else msgspec.msgpack.decode(octets, type=SessionCheckpoint)
    return SessionRow(
        session, epoch, instance, instance_epoch, bool(bound), owner, prompt_tokens, block_tokens, checkpoint,
        scope_id,
    )  # fmt: skip
