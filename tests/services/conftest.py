"""The gateway over a real Unix socket, one a module, and what its tests ask of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
import uvloop

from tests.services.gateway_harness import World
from tests.services.gateway_roles import Roles

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        world = runner.run(World.start(tmp_path_factory.mktemp("gw")))
        world.runner = runner
        yield world
        runner.run(world.close())


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        roles = runner.run(Roles.start(tmp_path_factory.mktemp("gw")))
        roles.runner = runner
        yield roles
        runner.run(roles.close())


@pytest.fixture(params=["shm", "grpc"])
def scheme(request: pytest.FixtureRequest, world: World) -> Iterator[str]:
    world.holder.scheme = request.param
    yield request.param
    world.holder.scheme = "shm"


@pytest.fixture
def key() -> str:
    return f"{next(numbers):064x}"
