"""`kvspd up`, `kvspd demo` and `kvspd pki`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.local.layout import Layout, StackError

if TYPE_CHECKING:
    from deploy.local.stack import Stack

app = typer.Typer()

Descriptor = Annotated[
    Path | None, typer.Option(help="Compatibility Descriptor file to use instead of the demo model's")
]


@app.command()
def up(descriptor: Descriptor = None) -> None:
    """Run the dev stack in the foreground until ^C. KVSP_HOME, KVSP_PORT and KVSP_ADMIN_PORT say where."""
    with _one_line_errors():
        layout = Layout.from_env()
        files = _descriptors(layout, descriptor)
        stack = _prepare(layout, files)
        asyncio.run(_serve(stack))


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="directory of a Hugging Face causal language model")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run the main job: two engines with one model share KV through a fresh stack, then it stops."""
    with _one_line_errors():
        from deploy.local import demo as main_job  # needs torch
        from deploy.local.stack import running

        layout = Layout.from_env()
        files = main_job.prepare(layout, model)
        signal.signal(signal.SIGTERM, _exit)
        with running(_prepare(layout, files)) as background:
            code = main_job.run_demo(background.stack, model, json_out)
    raise typer.Exit(code)


@app.command()
def pki(
    issue: Annotated[str | None, typer.Option(metavar="NAME", help="also issue a client certificate")] = None,
) -> None:
    """Make the dev certificates, or renew those about to expire, without starting anything."""
    with _one_line_errors():
        from deploy.local import pki as authority

        layout = Layout.from_env()
        layout.make_directories()
        authority.ensure(layout)
        typer.echo(f"certificates are in {layout.pki}")
        if issue is not None:
            uri, certificate, key = authority.add_identity(layout, issue)
            typer.echo(f"{uri}\n  cert {certificate}\n  key  {key}\n  not in the policy until you add it there")


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _prepare(layout: Layout, descriptors: list[Path]) -> Stack:
    from deploy.local.configs import Settings
    from deploy.local.stack import prepare

    return prepare(layout, Settings(descriptors=descriptors), lambda line: typer.echo(line, err=True))


def _descriptors(layout: Layout, given: Path | None) -> list[Path]:
    if given is not None:
        if not given.is_file():
            raise StackError(f"{given}: no such file")
        return [given]
    if importlib.util.find_spec("torch") is not None:
        from deploy.local.model import ensure_model

        layout.make_directories()
        ensure_model(layout.home)
    return [layout.descriptor] if layout.descriptor.exists() else []


async def _serve(stack: Stack) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    starting = asyncio.create_task(stack.start())
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await starting
            typer.echo(_greeting(stack))
            await waiting
            typer.echo("stopping")
    finally:
        waiting.cancel()
        await stack.stop()


def _greeting(stack: Stack) -> str:
    roles: dict[str, Any] = stack.endpoints["roles"]
    client = stack.endpoints["identities"]["client-demo"]
    scope = stack.endpoints["scopes"]["demo"]["scope_id"]
    body = f'{{"scope_id":"{scope}","compat_id":"{"0" * 64}","block_keys":[]}}'
    return f"""kvsp is up (^C stops it)
  index   {roles["index"]}
  holder  {roles["holders"]["h1"]}
  envoy   {stack.endpoints["envoy_admin"]}
  all of it: {stack.layout.endpoints}, logs in {stack.layout.log("x").parent}

try:
  curl --cacert {stack.endpoints["ca"]} --cert {client["cert"]} --key {client["key"]} \\
    -H 'content-type: application/kvsp+json' -d '{body}' \\
    {roles["index"]}lookup
"""


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except StackError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        typer.echo(f"error: {error.name} is not installed; pip install 'kvsp[local,torch]'", err=True)
        raise typer.Exit(2) from None
