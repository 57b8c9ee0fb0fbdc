"""`kvspd up`, `kvspd demo` and `kvspd pki`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.local.layout import Layout, StackError
from kvsp.protocol.errors import KvspError

if TYPE_CHECKING:
    from deploy.local.configs import Settings
    from deploy.local.stack import Stack

app = typer.Typer()

Model = Annotated[Path | None, typer.Option(help="directory of a Hugging Face causal language model to serve")]


@app.command()
def up(
    model: Model = None,
    engines: Annotated[bool, typer.Option("--engines/--no-engines", help="with instances and front end")] = True,
    descriptor: Annotated[
        Path | None, typer.Option(help="with --no-engines: the Compatibility Descriptor to know of")
    ] = None,
) -> None:
    """Run the dev stack in the foreground until ^C. KVSP_HOME, KVSP_PORT and KVSP_ADMIN_PORT say where."""
    with _one_line_errors():
        if engines and descriptor is not None:
            raise StackError("--descriptor goes with --no-engines: engines have that of their model")
        if model is not None and not engines:
            raise StackError("--model does not go with --no-engines")
        layout = Layout.from_env()
        settings = _with_engines(layout, model) if engines else _without_engines(layout, descriptor)
        asyncio.run(_serve(_prepare(layout, settings)))


@app.command()
def demo(
    model: Model = None,
    json_out: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run the main job on a fresh stack, which then stops: reuse, prefetch, and an instance that is killed."""
    with _one_line_errors():
        from deploy.local import demo as main_job
        from deploy.local.stack import running

        layout = Layout.from_env()
        settings = _with_engines(layout, model)
        signal.signal(signal.SIGTERM, _exit)
        with running(_prepare(layout, settings)) as background:
            code = main_job.run_demo(background, json_out)
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


def _prepare(layout: Layout, settings: Settings) -> Stack:
    from deploy.local.stack import prepare

    return prepare(layout, settings, lambda line: typer.echo(line, err=True))


def _with_engines(layout: Layout, model: Path | None) -> Settings:
    from deploy.local.configs import Settings
    from deploy.local.model import describe_given, ensure_model

    layout.make_directories()
    if model is None:
        directory, descriptor = ensure_model(layout.home)[0], layout.descriptor
    else:
        directory, descriptor = model.absolute(), describe_given(layout.home, model)
    return Settings([descriptor], model=directory, metrics=True)


def _without_engines(layout: Layout, descriptor: Path | None) -> Settings:
    from deploy.local.configs import Settings

    if descriptor is not None and not descriptor.is_file():
        raise StackError(f"{descriptor}: no such file")
    known = descriptor or layout.descriptor
    return Settings([known] if known.is_file() else [], metrics=True)


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
    from deploy.local.configs import INSTANCES

    roles: dict[str, Any] = stack.endpoints["roles"]
    places = {"index": roles["index"], "holder": roles["holders"]["h1"], "placement": roles["placement"]}
    if stack.model is not None:
        places |= {name: roles["instances"][name] for name in INSTANCES}
        places |= {"OpenAI API": roles["frontend"] + "v1"}
    places |= {"envoy": stack.endpoints["envoy_admin"]}
    listed = "\n".join(f"  {name:<11} {place}" for name, place in places.items())
    client = stack.endpoints["identities"]["client-demo"]
    return f"""kvsp is up (^C stops it)
{listed}
  all of it: {stack.layout.endpoints}, logs in {stack.layout.log("x").parent}

try:
  curl --cacert {stack.endpoints["ca"]} --cert {client["cert"]} --key {client["key"]} \\
    {_example(stack)}
"""


def _example(stack: Stack) -> str:
    """What a curl command goes on with."""
    if stack.model is not None:
        body = f'{{"model":"{stack.model.name}","prompt":"Once","max_tokens":32}}'
        url = stack.endpoints["roles"]["frontend"] + "v1/completions"
        return f"-H 'content-type: application/json' -d '{body}' \\\n    {url}"
    scope = stack.endpoints["scopes"]["demo"]["scope_id"]
    body = f'{{"scope_id":"{scope}","compat_id":"{"0" * 64}","block_keys":[]}}'
    url = stack.endpoints["roles"]["index"] + "lookup"
    return f"-H 'content-type: application/kvsp+json' -d '{body}' \\\n    {url}"


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (StackError, KvspError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        typer.echo(f"error: {error.name} is not installed; pip install 'kvsp[local,torch]'", err=True)
        raise typer.Exit(2) from None
