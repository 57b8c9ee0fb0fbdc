"""How `kvsp` speaks: results on stdout, everything else on stderr, and what its exit codes mean."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError, bad_request

P = ParamSpec("P")
R = TypeVar("R")

OK: Final = 0
MISS: Final = 1
USAGE: Final = 2
DENIED: Final = 3
UNAVAILABLE: Final = 4
MISMATCH: Final = 5
REFUSED: Final = 6

EXIT_CODES: Final = {
    OK: "done",
    MISS: "not found, or nothing matched",
    USAGE: "wrong usage or bad input",
    DENIED: "denied to this identity",
    UNAVAILABLE: "peer unavailable, too slow, or failing",
    MISMATCH: "octets do not match their digest",
    REFUSED: "refused: incompatible, in conflict, or over a quota",
}
EXIT_CODES_HELP: Final = "Exit codes: " + "; ".join(f"{code} {text}" for code, text in EXIT_CODES.items()) + "."

BAR_AFTER_S: Final = 1.0
_BY_STATUS: Final = {
    **dict.fromkeys((401, 403), DENIED),
    **dict.fromkeys((404, 410), MISS),
    **dict.fromkeys((409, 412, 429), REFUSED),
}


def exit_code(error: KvspError) -> int:
    """The exit code of a failure; unlisted statuses by class (R-066)."""
    if error.problem == registry.DIGEST_MISMATCH:
        return MISMATCH
    other = USAGE if 400 <= error.status < 500 else UNAVAILABLE
    return _BY_STATUS.get(error.status, other)


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turns a command's expected failures into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KvspError as error:
            reason, code = _reason(error), exit_code(error)
        except OSError as error:
            reason, code = f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "), USAGE
        except ValueError as error:
            reason, code = str(error), USAGE
        typer.echo(f"error: {' '.join(reason.split())}", err=True)
        raise typer.Exit(code)

    return run


def out() -> Console:
    """Where results go, as wide as they need when nobody watches."""
    watched = sys.stdout.isatty()
    return Console(highlight=False, markup=False, width=None if watched else 160)


def print_json(value: Any, *, err: bool = False) -> None:
    """One JSON document on stdout, or on stderr."""
    typer.echo(json.dumps(value, indent=2), err=err)


def print_pairs(pairs: dict[str, Any], *, err: bool = False) -> None:
    """Aligned names and values on stdout, or on stderr."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        typer.echo(f"{name:<{width}}  {value}", err=err)


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that shows once something took over a second.

    Yields the function to tell of octets done and in all (0: unknown).
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with_bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, started = with_bar.add_task(title, total=None), time.monotonic()

    def tell(done: int, total: int) -> None:
        if time.monotonic() - started >= BAR_AFTER_S:
            with_bar.start()
        with_bar.update(task, completed=done, total=total or None)

    try:
        yield tell
    finally:
        if with_bar.live.is_started:  # stopping what never showed would print an empty line
            with_bar.stop()


def read(path: Path) -> bytes:
    """The content of a file, or of stdin for `-`."""
    return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()


def read_text(path: Path) -> str:
    """UTF-8 text of a file, or of stdin for `-`. Raises KvspError (400)."""
    try:
        return read(path).decode()
    except UnicodeDecodeError:
        raise bad_request(f"{path} is not UTF-8 text") from None


def _reason(error: KvspError) -> str:
    # The title of a KVSP problem says more than its detail; that of a plain HTTP status only that there was HTTP,
    # and mostly there was none.
    plain = registry.PLAIN_PROBLEMS.get(error.status) == error.problem
    reason = f"{error.problem.title}: {error.detail}" if error.detail and not plain else str(error)
    return reason if error.retry_after_s is None else f"{reason} (retry after {error.retry_after_s} s)"
