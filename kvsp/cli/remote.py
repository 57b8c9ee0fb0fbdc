"""Commands that talk to an index and holders: `lookup`, `get`, `put`."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import UnsetType
from rich.table import Table

from kvsp.cli import report
from kvsp.cli.local import AsJson, DescriptorFile, load_descriptor
from kvsp.client import Block, Client, Options, Stack, load_stack
from kvsp.client.block import Layers
from kvsp.protocol import descriptor, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.names import HEX16_CHARS, is_hex
from kvsp.protocol.records import LookupReply, ReplicaRecord

EndpointsFile = Annotated[
    Path | None, typer.Option("--endpoints", help="endpoints.json [default: $KVSP_HOME or .kvsp, endpoints.json]")
]
Identity = Annotated[str, typer.Option("--as", help="identity in endpoints.json to act as")]
Scope = Annotated[str, typer.Option(help="scope name in endpoints.json, or scope id")]
Compat = Annotated[str | None, typer.Option(help="Compatibility ID [default: that of the descriptor]")]
Holder = Annotated[str | None, typer.Option(help="holder or instance name in endpoints.json, or its base URI")]
_RANGE = re.compile(r"([0-9]{1,10})-([0-9]{1,10})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """What the common options say."""

    stack: Stack
    scope_id: str
    compat_id: str
    descriptor: Descriptor | None

    def holder(self, name: str) -> str:
        """The base URI of a holder given by name or base URI."""
        return self.stack.holders.get(name, name)


@report.reported
def lookup(
    keys: Annotated[list[str], typer.Argument(help="block keys in prefix order; - reads them from stdin")],
    *,
    target: Annotated[list[str] | None, typer.Option(help="instance to estimate for; repeatable")] = None,
    scope: Scope = "demo",
    compat: Compat = None,
    descriptor_file: DescriptorFile = None,
    endpoints: EndpointsFile = None,
    identity: Identity = "client-demo",
    as_json: AsJson = False,
) -> None:
    """Find the longest prefix of blocks that is held somewhere. Exits with 1 when nothing matched."""
    where = _target(endpoints, identity, scope, compat, descriptor_file)
    wanted = report.read_text(Path("-")).split() if keys == ["-"] else keys
    with _client(where) as client:
        targets = [where.holder(name) for name in target] if target else None
        reply = client.lookup(where.scope_id, where.compat_id, wanted, targets)
    if as_json:
        report.print_json(msgspec.to_builtins(reply))
    else:
        _print_lookup(reply, len(wanted))
    if wanted and reply.matched == 0:
        raise typer.Exit(report.MISS)


@report.reported
def get(
    key: Annotated[str, typer.Argument(help="block key")],
    file: Annotated[Path, typer.Argument(help="where to write the container; - for stdout")],
    *,
    layers: Annotated[str | None, typer.Option(help="first-last, inclusive [default: all]")] = None,
    codec: Annotated[int | None, typer.Option(min=1, max=registry.CODEC_MAX, help="ask for this codec")] = None,
    verify: Annotated[bool, typer.Option(help="verify all digests before writing")] = True,
    holder: Holder = None,
    scope: Scope = "demo",
    compat: Compat = None,
    descriptor_file: DescriptorFile = None,
    endpoints: EndpointsFile = None,
    identity: Identity = "client-demo",
    as_json: AsJson = False,
) -> None:
    """Fetch a block from whichever replica delivers it, verified, into a file.

    With --holder the index is not asked: then only Repr-Digest can be verified.
    """
    where = _target(endpoints, identity, scope, compat, descriptor_file)
    span = _layers(layers)
    asked: dict[str, Any] = {"layers": span, "codec": codec, "descriptor": where.descriptor}
    with _client(where, verify=verify) as client, report.bar("fetching") as tell:
        if holder is not None:
            at = where.holder(holder)
            block = client.get_from(at, where.compat_id, where.scope_id, key, **asked, progress=tell)
        else:
            found = client.lookup(where.scope_id, where.compat_id, [key])
            if found.matched == 0:
                raise KvspError(registry.NOT_FOUND, "no replica of this block is known")
            block = client.get(found.replicas[0], **asked, progress=tell)
    _write(file, block)
    facts = {
        "holder": block.holder,
        "layers": list(block.header.layers),
        "octets": block.header.total_octets,
        "verified": block.verified,
    }
    _tell(facts, as_json=as_json, err=str(file) == "-")  # stdout may carry the container


@report.reported
def put(
    file: Annotated[Path, typer.Argument(help="a container; - for stdin")],
    key: Annotated[str, typer.Argument(help="block key")],
    *,
    holder: Annotated[str, typer.Option(help="holder or instance name in endpoints.json, or its base URI")],
    scope: Scope = "demo",
    compat: Compat = None,
    descriptor_file: DescriptorFile = None,
    endpoints: EndpointsFile = None,
    identity: Identity = "client-demo",
    as_json: AsJson = False,
) -> None:
    """Store a container at a holder. A block the holder already has is kept as it is: `stored` is false."""
    where = _target(endpoints, identity, scope, compat, descriptor_file)
    octets = report.read(file)
    with _client(where) as client, report.bar("storing") as tell:
        at = where.holder(holder)
        stored = client.put(at, where.compat_id, where.scope_id, key, octets, progress=tell)
    _tell({"holder": at, "octets": len(octets), "stored": stored}, as_json=as_json)


def _target(
    endpoints: Path | None, identity: str, scope: str, compat: str | None, descriptor_file: Path | None
) -> Target:
    path = endpoints or Path(os.environ.get("KVSP_HOME", ".kvsp")) / "endpoints.json"
    stack = load_stack(path, identity)
    scope_id = stack.scopes.get(scope, scope)
    if not is_hex(scope_id, HEX16_CHARS):
        raise bad_request(f"no scope {scope!r} in {path}")
    # The stack's descriptor is not that of another Compatibility ID.
    file = descriptor_file or (stack.descriptor if compat is None else None)
    if file is None:
        if compat is None:
            raise bad_request("give --compat or --descriptor")
        return Target(stack, scope_id, compat, None)
    shape = load_descriptor(file)
    if compat is not None:
        descriptor.check_claimed(shape, compat)
    return Target(stack, scope_id, descriptor.compat_id(shape).hex(), shape)


def _client(where: Target, *, verify: bool = True) -> Client:
    return Client(where.stack.credentials, where.stack.endpoints, Options(pool_size=1, verify=verify))


def _layers(text: str | None) -> Layers | None:
    if text is None:
        return None
    matched = _RANGE.fullmatch(text)
    if matched is None or int(matched[1]) > int(matched[2]):
        raise bad_request("--layers takes first-last, such as 0-3")
    return int(matched[1]), int(matched[2])


def _write(file: Path, block: Block) -> None:
    if str(file) == "-":
        sys.stdout.buffer.write(block.header.encode())
        sys.stdout.buffer.write(block.payload)
        return
    with file.open("wb") as target:
        target.write(block.header.encode())
        target.write(block.payload)


def _tell(facts: dict[str, Any], *, as_json: bool, err: bool = False) -> None:
    if as_json:
        report.print_json(facts, err=err)
    else:
        report.print_pairs(facts, err=err)


def _print_lookup(reply: LookupReply, asked: int) -> None:
    typer.echo(f"matched {reply.matched} of {asked}")
    table = Table("block key", "holder", "codec", "octets", "residency", "ttl s", box=None, pad_edge=False)
    for records in reply.replicas:
        for record in records:
            table.add_row(*_row(record))
    if reply.matched:
        report.out().print(table)
    if isinstance(reply.targets, UnsetType):
        return
    for estimate in reply.targets:
        known = {"fetch": estimate.fetch_us, "recompute": estimate.recompute_us}
        shown = [f"{name} {us} us" for name, us in known.items() if not isinstance(us, UnsetType)]
        typer.echo(f"{estimate.instance}  {', '.join(shown) or 'no estimate'}")


def _row(record: ReplicaRecord) -> tuple[str, ...]:
    where = ", ".join(f"{part.tier} {part.layers[0]}-{part.layers[1]}" for part in record.residency)
    return (
        record.block_key,
        record.holder,
        str(record.codec),
        f"{record.size:,}",
        where,
        str(record.ttl_ms // 1000),
    )
