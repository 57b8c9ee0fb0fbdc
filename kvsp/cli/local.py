"""Commands that need no network: `inspect`, `keys`, `compat-id`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from kvsp.cli import report
from kvsp.protocol import container, descriptor, digests, limits, registry
from kvsp.protocol.container import Header
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.digests import ContainerDigester
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.keys import ScopeKey, block_keys, scope_id

READ_OCTETS: Final = 4 << 20
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document")]
DescriptorFile = Annotated[Path | None, typer.Option("--descriptor", help="Compatibility Descriptor (JSON file)")]


@report.reported
def inspect(
    file: Annotated[Path, typer.Argument(help="a KV Block Container")],
    descriptor_file: DescriptorFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what a container holds: header, layers, sizes, digests.

    With --descriptor, also check that its sections fit that geometry. Exits with 2 when it is malformed and
    with 6 when it does not fit.
    """
    digester = _digest(file)
    header = digester.header
    assert header is not None  # noqa: S101  (for the type checker; finish looked)
    facts = _facts(header, digester)
    if descriptor_file is not None:
        geometry = load_descriptor(descriptor_file)
        container.check_sections(header, geometry)
        facts["compat_id"] = descriptor.compat_id(geometry).hex()
        facts["whole_block"] = header.layers == (0, geometry.layers - 1)
    if as_json:
        report.print_json(facts)
        return
    report.print_pairs({name: value for name, value in facts.items() if name != "layers"})
    report.out().print(_table(facts["layers"]))


@report.reported
def keys(
    scope_key_file: Annotated[Path, typer.Option(help="file with the scope key, raw or hexadecimal")],
    descriptor_file: Annotated[Path, typer.Option("--descriptor", help="Compatibility Descriptor (JSON file)")],
    tokens: Annotated[Path, typer.Option(help="token ids, a JSON array or separated by spaces; - for stdin")],
    as_json: AsJson = False,
) -> None:
    """Compute the keys of the complete blocks of a token sequence, one a line."""
    secret = ScopeKey.parse(scope_key_file.read_bytes())
    geometry = load_descriptor(descriptor_file)
    compat, ids = descriptor.compat_id(geometry), _tokens(report.read_text(tokens))
    found = [key.hex() for key in block_keys(secret, compat, ids, geometry.block_tokens)]
    facts = {
        "scope_id": scope_id(secret).hex(),
        "compat_id": compat.hex(),
        "block_tokens": geometry.block_tokens,
        "tail_tokens": len(ids) - len(found) * geometry.block_tokens,
    }
    if as_json:
        report.print_json(facts | {"block_keys": found})
        return
    # Names go to stderr, so that stdout can be piped into `kvsp lookup -`.
    for name, value in facts.items():
        typer.echo(f"{name:<12}  {value}", err=True)
    for key in found:
        typer.echo(key)


@report.reported
def compat_id(
    descriptor_file: Annotated[Path | None, typer.Argument(help="Compatibility Descriptor (JSON file)")] = None,
    *,
    model: Annotated[Path | None, typer.Option(help="describe this Hugging Face model directory instead")] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="tokens per block, with --model")] = 16,
    name: Annotated[str | None, typer.Option(help="model name all parties use, with --model")] = None,
    write: Annotated[Path | None, typer.Option(help="write the canonical descriptor to this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the Compatibility ID of a descriptor, or of a model directory (hashes its weights)."""
    if (descriptor_file is None) == (model is None):
        raise bad_request("give either a descriptor file or --model")
    if descriptor_file is not None:
        found = load_descriptor(descriptor_file)
    else:
        assert model is not None  # noqa: S101  (for the type checker)
        found = _describe(model, block_tokens, name)
    if write is not None:
        write.write_bytes(descriptor.canonical(found))
    identity = descriptor.compat_id(found).hex()
    if as_json:
        report.print_json({"compat_id": identity, "descriptor": json.loads(descriptor.canonical(found))})
    else:
        typer.echo(identity)


def load_descriptor(path: Path) -> Descriptor:
    """Read a descriptor file. Raises KvspError (400), naming the file."""
    try:
        return descriptor.load(report.read(path))
    except KvspError as error:
        raise bad_request(f"{path}: {error}") from None


def _describe(model: Path, block_tokens: int, name: str | None) -> Descriptor:
    if not model.is_dir():
        raise bad_request(f"{model} is not a directory")
    with Console(stderr=True).status(f"hashing {model.name}"):
        try:
            from kvsp.connectors.describe import describe
        except ModuleNotFoundError as error:
            raise bad_request(f"{error.name} is not installed: pip install 'kvsp[torch]'") from None
        return describe(model, block_tokens=block_tokens, model=name)


def _digest(file: Path) -> ContainerDigester:
    """Hash a container from a file, never holding more than a piece of it."""
    digester = ContainerDigester(full=True)
    total = file.stat().st_size
    with file.open("rb") as source, report.bar(f"hashing {file.name}") as tell:
        while piece := source.read(READ_OCTETS):
            digester.feed(piece)
            tell(digester.octets, total)
    digester.finish()
    return digester


def _facts(header: Header, digester: ContainerDigester) -> dict[str, Any]:
    codec = registry.CODECS.get(header.codec)
    private = "private" if header.codec >= registry.CODEC_PRIVATE_FIRST else "unregistered"
    layers = [
        {"layer": header.first_layer + at, "k_octets": k, "v_octets": v, "digest": digest.hex()}
        for at, ((k, v), digest) in enumerate(zip(header.sections, digester.layer_digests, strict=True))
    ]
    facts: dict[str, Any] = {
        "version": container.VERSION,
        "codec": header.codec,
        "codec_name": codec.name if codec else private,
        "first_layer": header.first_layer,
        "layer_count": header.layer_count,
        "token_count": header.token_count,
        "header_octets": header.header_octets,
        "payload_octets": header.payload_octets,
        "total_octets": header.total_octets,
        "repr_digest": digests.repr_digest_field(digester.sha256()),
    }
    if header.first_layer == 0:
        # The digest of a replica is over all layers: of a range that starts later it means nothing.
        facts["digest"] = digests.format_digest(digests.replica_digest(digester.layer_digests))
    return facts | {"layers": layers}


def _table(layers: list[dict[str, Any]]) -> Table:
    table = Table("layer", "K octets", "V octets", "digest", box=None, pad_edge=False)
    for row in layers:
        table.add_row(str(row["layer"]), f"{row['k_octets']:,}", f"{row['v_octets']:,}", row["digest"])
    return table


def _tokens(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    if words == [""]:
        return []
    # isdigit alone takes other scripts' digits, int alone takes '1_0' and '+1' (D7)
    if not all(word.isascii() and word.isdigit() and len(word) <= len(str(limits.TOKEN_MAX)) for word in words):
        raise bad_request("tokens are unsigned integers")
    return list(map(int, words))
