"""`kvspd purge`: the operator's way to remove a block (D11), over the holder's own socket and as the holder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from msgspec import Struct

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import check_hex16, check_hex32
from kvsp.rpc import config
from kvsp.rpc.channel import open_channel
from kvsp.rpc.convert import block_name
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, holder_pb2, holder_pb2_grpc

TIMEOUT_S: Final = 10.0


class UsageError(Exception):
    """The configuration or a name cannot be used."""


class RefusedError(Exception):
    """The block was not purged."""


class _Holder(Struct, frozen=True):
    """What of a holder's file is needed here."""

    listen: str
    principal: str
    tls: config.Tls | None = None


def purge(path: Path, compat: str, scope: str, key: str) -> None:
    """Purge a block of the holder with this configuration file. Raises UsageError, RefusedError."""
    try:
        holder = config.load(path, _Holder)
        check_hex32(compat, "COMPAT")
        check_hex16(scope, "SCOPE")
        check_hex32(key, "KEY")
        name = block_name(compat, scope, key)
    except (config.ConfigError, ValueError) as error:
        raise UsageError(str(error)) from None
    try:
        asyncio.run(_ask(holder, name))
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: {error}") from None
    except KvspError as error:
        if error.problem is registry.NOT_FOUND:
            raise RefusedError("the holder has no such block") from None
        raise RefusedError(f"the holder at {holder.listen}: {error}") from None


async def _ask(holder: _Holder, name: common_pb2.BlockName) -> None:
    async with open_channel(holder.listen, holder.tls) as channel, translated():
        await holder_pb2_grpc.HolderStub(channel).PurgeBlock(
            holder_pb2.PurgeBlockRequest(name=name), metadata=speak_for(holder.principal), timeout=TIMEOUT_S
        )
