"""`kvsp`: look into containers, compute names, talk to an index, holders and a controller from a shell."""

from __future__ import annotations

import typer

from kvsp.cli import fleet, local, remote
from kvsp.cli.report import EXIT_CODES_HELP

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.command("inspect")(local.inspect)
app.command("keys")(local.keys)
app.command("compat-id")(local.compat_id)
app.command("lookup")(remote.lookup)
app.command("get")(remote.get)
app.command("put")(remote.put)
app.command("top")(fleet.top)
app.add_typer(fleet.instance, name="instance")
app.add_typer(fleet.group, name="group")


_HELP = "Look into KV-cache blocks, name them, find, fetch and store them; watch instances."


@app.callback(help=f"{_HELP}\n\n{EXIT_CODES_HELP}")
def _root() -> None:
    """The help is given above."""


def main() -> None:
    """Entry point of `kvsp`."""
    app()


if __name__ == "__main__":
    main()
