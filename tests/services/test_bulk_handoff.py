"""Long messages through shared memory: read once, by their own user, and gone afterwards."""

from pathlib import Path

import pytest

from kvsp.bulk import handoff


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outbox(tmp_path: Path, clock: Clock) -> handoff.Outbox:
    return handoff.Outbox("unix:/run/index.sock", tmp_path, clock)


def test_a_message_is_read_once_and_then_gone(outbox: handoff.Outbox, tmp_path: Path) -> None:
    path = outbox.put([b"abc", b"", b"def" * 100_000])
    assert bytes(handoff.take(path, 300_003)) == b"abc" + b"def" * 100_000
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        handoff.take(path, 300_003)


@pytest.mark.spec("R-215")
def test_a_message_is_for_its_own_user_alone(outbox: handoff.Outbox) -> None:
    path = Path(outbox.put([b"confidential"]))
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_length_is_refused(outbox: handoff.Outbox) -> None:
    with pytest.raises(OSError, match="another length"):
        handoff.take(outbox.put([b"abc"]), 4)


def test_what_nobody_took_is_removed_in_time(outbox: handoff.Outbox, clock: Clock, tmp_path: Path) -> None:
    outbox.put([b"old"])
    clock.now = handoff.KEEP_S - 1
    outbox.sweep()
    assert len(list(tmp_path.iterdir())) == 1
    outbox.put([b"new"])
    clock.now = handoff.KEEP_S
    outbox.sweep()
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"new"]


@pytest.mark.spec("R-214")
def test_what_waits_for_readers_is_bounded(outbox: handoff.Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "OUTSTANDING_OCTETS_MAX", 250)
    paths = [outbox.put([bytes(100)]) for _ in range(2)]
    with pytest.raises(OSError, match="wait"):
        outbox.put([bytes(100)])
    handoff.take(paths[0], 100)
    outbox.put([bytes(100)])
    with pytest.raises(OSError, match="wait"):
        outbox.put([bytes(100)])


@pytest.mark.spec("D14")
def test_a_name_that_another_user_took_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handoff.Outbox("unix:/a.sock", tmp_path).put([b"x"])

    def unlink(*_: object, **__: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)  # what a sticky directory says
        handoff.Outbox("unix:/a.sock", tmp_path)


def test_a_successor_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    handoff.Outbox("unix:/a.sock", tmp_path).put([b"left behind"])
    kept = handoff.Outbox("unix:/b.sock", tmp_path).put([b"another's"])
    handoff.Outbox("unix:/a.sock", tmp_path)
    assert [str(each) for each in tmp_path.iterdir()] == [kept]
