"""`kvspd`: runs a role (`serve`), and what installed packages add to it (`up`, `demo`, `pki` of the dev stack).

Exit codes: 0 done or stopped on request; 1 it failed while running, or the block to purge is not held or the
holder did not answer; 2 wrong usage or a configuration that cannot be used.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

ROLES = "kvsp.roles"
COMMANDS = "kvsp.commands"

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def _root() -> None:
    """Keeps `serve` a subcommand where it is the only one."""


@app.command()
def serve(
    role: Annotated[str, typer.Argument(help="which role to run, such as index, holder or gateway")],
    config: Annotated[Path, typer.Option(help="the role's TOML file")],
) -> None:
    """Run one role in the foreground until SIGTERM or SIGINT."""
    roles = {each.name: each for each in entry_points(group=ROLES)}
    if role not in roles:
        fail(f"unknown role {role!r}; installed: {', '.join(sorted(roles)) or 'none'}", 2)
    if not config.is_file():
        fail(f"{config}: no such file", 2)
    run = _load(roles[role])
    raise typer.Exit(run(config))


@app.command()
def purge(
    compat: Annotated[str, typer.Argument(help="the block's compatibility id, in hex")],
    scope: Annotated[str, typer.Argument(help="its scope id, in hex")],
    key: Annotated[str, typer.Argument(help="its block key, in hex")],
    config: Annotated[Path, typer.Option(help="the holder's TOML file")],
) -> None:
    """Withdraw a block and drop it, leased or not, as the holder itself: for one that was stored wrong."""
    from kvsp.cli import purging

    try:
        purging.purge(config, compat, scope, key)
    except purging.UsageError as error:
        fail(str(error), 2)
    except purging.RefusedError as error:
        fail(str(error))
    typer.echo("purged: the index lists the block no more, and the holder has dropped it")


def fail(reason: str, code: int = 1) -> NoReturn:
    """Say why on stderr and exit."""
    typer.echo(f"error: {reason}", err=True)
    raise SystemExit(code)


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        fail(f"{point.name}: {error.name} is not installed; pip install 'kvsp[server]'", 2)


def main() -> None:
    """Entry point of `kvspd`."""
    # A role starts without the dev stack's imports: `serve` is on the path of every restart.
    if sys.argv[1:2] != ["serve"]:
        for point in entry_points(group=COMMANDS):
            app.add_typer(_load(point))
    app()


if __name__ == "__main__":
    main()
