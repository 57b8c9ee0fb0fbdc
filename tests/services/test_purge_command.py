"""`kvspd purge` against a real holder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvsp.cli.daemon import app
from kvsp.protocol import registry
from tests.services.holder_harness import HOLDER, describe, name, refused, rig, until


async def purge(folder: Path, *arguments: str) -> tuple[int, str]:
    config = folder / "h1.toml"
    config.write_text(f'listen = "unix:{folder}/h1.sock"\nprincipal = "{HOLDER}"\nbase_uri = "not looked at"\n')
    result = await asyncio.to_thread(CliRunner().invoke, app, ["purge", "--config", str(config), *arguments])
    return result.exit_code, result.output


@pytest.mark.spec("D11", "R-143")
async def test_the_operator_purges_a_block_by_name(tmp_path: Path) -> None:
    block = name(1)
    arguments = [each.hex() for each in (block.compat_id, block.scope_id, block.block_key)]
    async with rig(tmp_path) as holder:
        await holder.put(1)
        await until(lambda: holder.listed(1))
        code, output = await purge(tmp_path, *arguments)
        assert (code, output.count("\n")) == (0, 1)
        assert "purged" in output
        assert not holder.listed(1)
        await refused(registry.NOT_FOUND, describe(holder, 1))
        code, output = await purge(tmp_path, *arguments)
        assert code == 1
        assert output == "error: the holder has no such block\n"
    code, output = await purge(tmp_path, *arguments)
    assert code == 1
    assert output.startswith(f"error: the holder at unix:{tmp_path}/h1.sock: ")
    code, output = await purge(tmp_path, "xyz", *arguments[1:])
    assert (code, output.count("\n")) == (2, 1)
