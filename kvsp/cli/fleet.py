"""Operator commands over a placement controller: `instance drain`, `wake` and `reset-epoch`, `group`, `top`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsp.cli import report
from kvsp.protocol.errors import bad_request

Config = Annotated[
    Path | None,
    typer.Option("--config", help="placement.toml [default: $KVSP_HOME or .kvsp, config/placement.toml]"),
]
Name = Annotated[str, typer.Argument(help="its base URI, or the last part of that, such as ii1")]

instance = typer.Typer(
    no_args_is_help=True, help="Drain, wake or take back an inference instance, as an operator."
)


@instance.command()
@report.reported
def drain(name: Name, *, config: Config = None) -> None:
    """Give an instance no more requests; when its sessions are done, it sleeps."""
    _set_state(name, "draining", config)


@instance.command()
@report.reported
def wake(name: Name, *, config: Config = None) -> None:
    """Let an instance take requests again."""
    _set_state(name, "active", config)


@instance.command()
@report.reported
def reset_epoch(name: Name, *, config: Config = None) -> None:
    """Take an instance back whose reports are refused as stale, after a record with an absurd epoch."""
    path = _path(config)
    epoch = _with_server_extra(lambda: _reset_epoch(path, name))
    typer.echo(f"{name}: epoch {epoch} forgotten")


group = typer.Typer(no_args_is_help=True, help="See and resize contexts sharded over instances, as an operator.")


@group.command("list")
@report.reported
def list_groups(*, config: Config = None) -> None:
    """Show which instance holds which tokens of which session."""
    path = _path(config)
    for line in _with_server_extra(lambda: _list(path)):
        typer.echo(line)


@group.command()
@report.reported
def resize(
    session: Annotated[str, typer.Argument(help="its id")],
    members: Annotated[int, typer.Argument(min=1, help="how many instances are to hold its context")],
    *,
    config: Config = None,
) -> None:
    """Shard the context of a session over so many instances, until it ends."""
    path = _path(config)
    typer.echo(_with_server_extra(lambda: _resize(path, session, members)))


@report.reported
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="print one frame and end")] = False,
    config: Config = None,
) -> None:
    """Watch instances, sessions, hits and migrations live, until ^C.

    Fetched and recomputed tokens and leases come from the metrics of processes configured beside the controller.
    """
    path = _path(config)
    with contextlib.suppress(KeyboardInterrupt):
        _with_server_extra(lambda: _view(path, once=once))


def _set_state(name: str, state: str, config: Path | None) -> None:
    path = _path(config)
    effective = _with_server_extra(lambda: _change(path, name, state))
    typer.echo(f"{name}: {effective}")


async def _change(path: Path, name: str, state: str) -> str:
    from kvsp.cli.controller import ControllerFile, open_controller

    file = ControllerFile.read(path)
    async with open_controller(file) as controller:
        return await controller.set_state(file.instance(name), state)


async def _reset_epoch(path: Path, name: str) -> int:
    from kvsp.cli.controller import ControllerFile, open_controller

    file = ControllerFile.read(path)
    async with open_controller(file) as controller:
        return await controller.reset_epoch(file.instance(name))


async def _list(path: Path) -> list[str]:
    from kvsp.cli.controller import ControllerFile, open_controller, shard_map, shards_text

    async with open_controller(ControllerFile.read(path)) as controller:
        async for overview in controller.watch():
            return [shards_text(shard_map(each)) for each in overview.groups]
    return []


async def _resize(path: Path, session: str, members: int) -> str:
    from kvsp.cli.controller import ControllerFile, open_controller, shards_text

    async with open_controller(ControllerFile.read(path)) as controller:
        return shards_text(await controller.resize_group(session, members))


async def _view(path: Path, *, once: bool) -> None:
    from kvsp.cli import top as live
    from kvsp.cli.controller import ControllerFile, open_controller

    async with open_controller(ControllerFile.read(path)) as controller:
        await live.show(controller, path, report.out(), once=once)


def _with_server_extra(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine that speaks gRPC. Raises KvspError (400) where the extra is missing."""
    try:
        return asyncio.run(work())
    except ModuleNotFoundError as error:
        raise bad_request(f"{error.name} is not installed: pip install 'kvsp[server]'") from None


def _path(config: Path | None) -> Path:
    return config or Path(os.environ.get("KVSP_HOME", ".kvsp")) / "config" / "placement.toml"
