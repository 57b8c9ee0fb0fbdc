"""One suite for every store of epochs, sessions and checkpoints."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvsp.protocol import limits
from services.placement.instructions import Forget, InstanceRow, Row, SessionRow, key_of
from services.placement.store import SqliteStore, Store, StoreError
from tests.services.placement_records import SCOPE, A, B, checkpoint, session_id

Open = Callable[[], Store]


@pytest.fixture(params=["sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again, after closing it."""
    backends: dict[str, Callable[[Path], Store]] = {
        "sqlite": lambda folder: SqliteStore(folder / "deep" / "s.sqlite")
    }
    opened: list[Store] = []

    def make() -> Store:
        if opened:
            opened.pop().close()
        opened.append(backends[request.param](tmp_path))
        return opened[0]

    yield make
    opened[0].close()


def row(n: int = 1, epoch: int = 1, offset: int = 0, instance: str = A, **changes: object) -> SessionRow:
    members: dict[str, object] = {
        "instance_epoch": 10, "bound": True, "owner": "spiffe://t/fe", "prompt_tokens": 35, "block_tokens": 16,
        "checkpoint": checkpoint(n, max(0, epoch - 1), offset),
    }  # fmt: skip
    return SessionRow(session_id(n), epoch, instance, **(members | changes))  # type: ignore[arg-type]


def loaded(store: Store) -> dict[tuple[str, str], Row]:
    return {key_of(each): each for each in store.load()}


@pytest.mark.spec("R-103", "R-172")
def test_what_is_committed_comes_back_whole(reopen: Open) -> None:
    rows: list[Row] = [
        InstanceRow(A, limits.INT_MAX, 3_000),
        InstanceRow(B, 0, 1, "draining", 3),
        row(1, 7, 129, scope_id=SCOPE),
        row(2, 1, bound=False, instance="", instance_epoch=-1, owner="", block_tokens=0),
        row(3, limits.INT_MAX, checkpoint=None, scope_id=SCOPE),
    ]
    store = reopen()
    assert store.load() == []
    store.commit(rows)
    assert sorted(map(str, store.load())) == sorted(map(str, rows))
    assert loaded(reopen()) == {key_of(each): each for each in rows}


@pytest.mark.spec("R-103", "R-172")
def test_the_last_row_of_a_key_counts(reopen: Open) -> None:
    store = reopen()
    store.commit([InstanceRow(A, 1, 1), row(1, 1, 0), row(1, 1, 16)])
    store.commit([InstanceRow(A, 2, 5), row(1, 2, 64, instance=B, bound=False)])
    assert loaded(reopen()) == {("instance", A): InstanceRow(A, 2, 5), ("session", session_id(1)): row(
        1, 2, 64, instance=B, bound=False
    )}  # fmt: skip


@pytest.mark.spec("R-103", "R-173")
def test_an_epoch_never_goes_back(reopen: Open) -> None:
    store = reopen()
    store.commit([InstanceRow(A, 12, 3_000), row(1, 4, 64)])
    store.commit([InstanceRow(A, 11, 1_000), row(1, 3, 128)])
    assert loaded(reopen()) == {
        ("instance", A): InstanceRow(A, 12, 3_000),
        ("session", session_id(1)): row(1, 4, 64),
    }


@pytest.mark.spec("D12", "R-103")
def test_an_operators_reset_is_no_going_back(reopen: Open) -> None:
    """Also when the first report after it is written in the same commit, as the last row of a key counts."""
    store = reopen()
    store.commit([InstanceRow(A, limits.INT_MAX, 1), InstanceRow(B, limits.INT_MAX, 1)])
    store.commit([InstanceRow(A, -1, 1, "", 1), InstanceRow(B, 12, 1, "", 1)])
    store.commit([InstanceRow(A, 12, 1, "", 1), InstanceRow(B, limits.INT_MAX, 1, "", 0)])
    store.commit([InstanceRow(A, 11, 1, "", 1)])
    assert loaded(reopen()) == {
        ("instance", A): InstanceRow(A, 12, 1, "", 1), ("instance", B): InstanceRow(B, 12, 1, "", 1),
    }  # fmt: skip


def test_forgetting(reopen: Open) -> None:
    store = reopen()
    store.commit([row(1), row(2)])
    store.commit([Forget(session_id(1)), Forget(session_id(9))])
    assert list(loaded(reopen())) == [("session", session_id(2))]
    store = reopen()
    store.commit([row(1, 1)])  # after that it may come back
    assert len(store.load()) == 2


def test_a_commit_is_all_or_nothing(reopen: Open) -> None:
    store = reopen()
    store.commit([row(1, 1, 16)])
    with pytest.raises(StoreError):
        store.commit([row(1, 2, 32), row(2), InstanceRow(A, 1 << 70, 1)])  # more than it can hold
    assert loaded(store) == loaded(reopen()) == {("session", session_id(1)): row(1, 1, 16)}
    reopen().commit([row(1, 2, 32)])


rows = st.one_of(
    st.builds(
        InstanceRow,
        st.sampled_from([A, B]),
        st.integers(0, 4),
        st.integers(1, 9),
        st.sampled_from(["", "draining"]),
        st.integers(0, 1),
    ),
    st.builds(row, st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.sampled_from([A, B])),
    st.builds(lambda n, epoch: row(n, epoch, checkpoint=None), st.integers(1, 3), st.integers(1, 4)),
    st.builds(lambda n: Forget(session_id(n)), st.integers(1, 3)),
)


@pytest.mark.spec("R-103", "R-172")
@given(st.lists(st.tuples(st.lists(rows, max_size=4), st.booleans()), max_size=6))
def test_against_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[list[Row], bool]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "s.sqlite"
    model: dict[tuple[str, str], Row] = {}
    store = SqliteStore(path)
    try:
        for batch, again in steps:
            store.commit(batch)
            _apply(model, batch)
            if again:
                store.close()
                store = SqliteStore(path)
            assert loaded(store) == model
    finally:
        store.close()


def _apply(model: dict[tuple[str, str], Row], batch: Sequence[Row]) -> None:
    for each in batch:
        known = model.get(key_of(each))
        if isinstance(each, Forget):
            model.pop(key_of(each), None)
        elif known is None or isinstance(known, Forget) or _age(each) >= _age(known):
            model[key_of(each)] = each


def _age(each: InstanceRow | SessionRow) -> tuple[int, int]:
    return (each.resets if isinstance(each, InstanceRow) else 0), each.epoch


# --- SQLite alone ---------------------------------------------------------------------


@pytest.mark.spec("R-103")
def test_two_controllers_cannot_have_one_file(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "s.sqlite")
    with pytest.raises(StoreError):
        SqliteStore(tmp_path / "s.sqlite")
    first.close()
    SqliteStore(tmp_path / "s.sqlite").close()


@pytest.mark.spec("R-215")
def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state" / "s.sqlite")
    store.commit([row()])
    for path in (tmp_path / "state").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    store.close()


@pytest.mark.spec("R-215")
def test_nobody_else_may_read_what_an_earlier_program_left_open(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    SqliteStore(path).close()
    left = [path, path.with_name("s.sqlite-wal"), path.with_name("s.sqlite-shm")]
    for each in left:
        each.touch()
        each.chmod(0o644)
    store = SqliteStore(path)
    assert {stat.S_IMODE(each.stat().st_mode) for each in left if each.exists()} == {0o600}
    store.close()


@pytest.mark.spec("R-215")
def test_nothing_is_left_of_a_session_that_is_forgotten(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    secret = "5ec7e7" * 10 + "0000"
    made = structs.replace(checkpoint(1, 0, 5_000), prompt_blocks=[secret] * 100)
    store.commit([row(1, checkpoint=made), row(2)])
    store.close()
    assert secret.encode() in (tmp_path / "s.sqlite").read_bytes()
    store = SqliteStore(tmp_path / "s.sqlite")
    store.commit([row(1, checkpoint=None)])
    store.commit([Forget(session_id(1))])
    store.close()
    assert secret.encode() not in (tmp_path / "s.sqlite").read_bytes()


VERSION_1 = """
CREATE TABLE instances (instance TEXT PRIMARY KEY, epoch INTEGER NOT NULL, ttl_ms INTEGER NOT NULL) STRICT;
CREATE TABLE sessions (
    session TEXT PRIMARY KEY, epoch INTEGER NOT NULL, instance TEXT NOT NULL, instance_epoch INTEGER NOT NULL,
    bound INTEGER NOT NULL, owner TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, block_tokens INTEGER NOT NULL,
    checkpoint BLOB
) STRICT;
PRAGMA user_version = 1;
"""


@pytest.mark.spec("R-103", "R-172")
def test_a_file_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    live, over = row(1, 7, 16), row(2, 3, checkpoint=None)
    with sqlite3.connect(tmp_path / "s.sqlite") as before:
        before.executescript(VERSION_1)
        before.execute("INSERT INTO instances VALUES (?, ?, ?)", (A, 12, 3_000))
        for each in (live, over):
            octets = None if each.checkpoint is None else msgspec.msgpack.encode(each.checkpoint)
            columns = (each.session, each.epoch, each.instance, each.instance_epoch, each.bound, each.owner)
            before.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*columns, each.prompt_tokens, each.block_tokens, octets),
            )
    before.close()
    for _ in range(2):
        store = SqliteStore(tmp_path / "s.sqlite")
        assert store.load() == [InstanceRow(A, 12, 3_000), live, over]
        store.close()
    store = SqliteStore(tmp_path / "s.sqlite")
    store.commit([InstanceRow(A, 11, 1, "draining"), InstanceRow(B, 1, 1, "draining")])
    assert loaded(store)["instance", A] == InstanceRow(A, 12, 3_000)
    assert loaded(store)["instance", B] == InstanceRow(B, 1, 1, "draining")
    store.close()


def test_what_is_no_store_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError):
        SqliteStore(tmp_path / "junk")
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(StoreError, match="version"):
        SqliteStore(tmp_path / "other")
    with pytest.raises(StoreError):
        SqliteStore(Path("/proc/nowhere/s.sqlite"))


def test_a_spoilt_checkpoint_is_an_error_that_does_not_quote_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    store.commit([row()])
    store.close()
    with sqlite3.connect(tmp_path / "s.sqlite") as spoilt:
        spoilt.execute("UPDATE sessions SET checkpoint = ?", (b"\xc1secret",))
    spoilt.close()
    store = SqliteStore(tmp_path / "s.sqlite")
    with pytest.raises(StoreError, match="cannot be read") as error:
        store.load()
    assert "secret" not in str(error.value)
    store.close()
