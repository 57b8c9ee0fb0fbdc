"""The operator's way to a placement controller: over its own socket, and as itself. Needs the `server` extra."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import grpc
from msgspec import Struct

from kvsp.protocol.errors import bad_request
from kvsp.protocol.records import ShardMap
from kvsp.rpc import config
from kvsp.rpc.channel import open_channel
from kvsp.rpc.convert_groups import shard_map_from_messages
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import placement_pb2, placement_pb2_grpc

TIMEOUT_S: Final = 10.0
RESIZE_TIMEOUT_S: Final = 60.0  # a step has a deadline of its own


class _Instance(Struct, frozen=True):
    base_uri: str


class ControllerFile(Struct, frozen=True):
    """What of a controller's file is needed here."""

    listen: str
    principal: str
    instances: list[_Instance]
    tls: config.Tls | None = None

    @classmethod
    def read(cls, path: Path) -> ControllerFile:
        """Read placement.toml. Raises KvspError (400)."""
        if not path.is_file():
            raise bad_request(f"{path}: no such file; name the controller's with --config")
        try:
            return config.load(path, cls)
        except config.ConfigError as error:
            raise bad_request(str(error)) from None

    def instance(self, name: str) -> str:
        """The base URI of an instance given by it, or by its last path segment. Raises KvspError (400)."""
        known = {instance_name(each.base_uri): each.base_uri for each in self.instances}
        if name in known.values():
            return name
        if name not in known:
            raise bad_request(f"unknown instance {name!r}; known are {', '.join(sorted(known)) or 'none'}")
        return known[name]


class Controller:
    """One placement controller. Methods raise KvspError: its problem, or 503 when it is away."""

    def __init__(self, file: ControllerFile, channel: grpc.aio.Channel) -> None:
        self._stub = placement_pb2_grpc.PlacementStub(channel)
        self._metadata = speak_for(file.principal)

    async def set_state(self, instance: str, state: str) -> str:
        """Drain ("draining") or wake ("active") an instance. Returns the state in effect."""
        request = placement_pb2.SetInstanceStateRequest(instance=instance, state=state)
        async with translated():
            reply = await self._stub.SetInstanceState(request, metadata=self._metadata, timeout=TIMEOUT_S)
        return reply.state

    async def resize_group(self, session: str, members: int) -> ShardMap:
        """Shard the context of a session over so many instances; the version in effect then.

        Raises KvspError: 404 without such a group, kvsp-plan-conflict when the step was not taken, 503 without
        enough instances.
        """
        request = placement_pb2.ResizeGroupRequest(session=session, members=members)
        async with translated():
            reply = await self._stub.ResizeGroup(request, metadata=self._metadata, timeout=RESIZE_TIMEOUT_S)
        return shard_map(reply)

    async def reset_epoch(self, instance: str) -> int:
        """Let the epochs of an instance begin anew. Returns the highest one so far."""
        request = placement_pb2.ResetInstanceEpochRequest(instance=instance)
        async with translated():
            reply = await self._stub.ResetInstanceEpoch(request, metadata=self._metadata, timeout=TIMEOUT_S)
        return reply.epoch

    async def watch(self) -> AsyncIterator[placement_pb2.Overview]:
        """What the controller sees: now, and then once a second."""
        async with translated():
            async for overview in self._stub.Watch(placement_pb2.WatchRequest(), metadata=self._metadata):
                yield overview


@asynccontextmanager
async def open_controller(file: ControllerFile) -> AsyncIterator[Controller]:
    """A connection to the controller with this file. Raises KvspError (400) when the file cannot be used."""
    try:
        channel = open_channel(file.listen, file.tls)
    except (ValueError, OSError) as error:
        raise bad_request(str(error)) from None
    async with channel:
        yield Controller(file, channel)


def shard_map(message: placement_pb2.ShardMapMessage) -> ShardMap:
    """A map as the controller tells of it. Raises KvspError (400)."""
    return shard_map_from_messages(message.map, message.version, message.shards)


def shards_text(shards: ShardMap) -> str:
    """A map in one line: its session, version, and who holds which tokens (half-open)."""
    held = (f"{instance_name(each.instance)} {each.tokens[0]}-{each.tokens[1]}" for each in shards.shards)
    return f"{shards.map} v{shards.version}: {', '.join(held)}"


def instance_name(base_uri: str) -> str:
    """The short name of an instance: the last segment of its base URI's path, else the host."""
    parts = urlsplit(base_uri)
    return parts.path.rstrip("/").rpartition("/")[2] or parts.netloc
