"""The gateway over a real Unix socket, one a module, and what its tests ask of it; the front end's fixtures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
import uvloop

from tests.services.gateway_harness import World
from tests.services.gateway_roles import Roles

if TYPE_CHECKING:  # tokenizers take seconds to import: only where they are used
    from services.frontend.tokenizer import Tokenizer
    from tests.services import frontend_harness

W = TypeVar("W", bound=World)

numbers = itertools.count(1)


@contextmanager
def running(kind: type[W], folder: Path) -> Iterator[W]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(kind.start(folder))
        made.runner = runner
        yield made
        runner.run(made.close())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(World, tmp_path_factory.mktemp("gw")) as made:
        yield made


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with running(Roles, tmp_path_factory.mktemp("gw")) as made:
        yield made


@pytest.fixture(params=["shm", "grpc"])
def scheme(request: pytest.FixtureRequest, world: World) -> Iterator[str]:
    world.holder.scheme = request.param
    yield request.param
    world.holder.scheme = "shm"


@pytest.fixture
def key() -> str:
    return f"{next(numbers):064x}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from services.frontend.tokenizer import Tokenizer
    from tests.services.frontend_harness import make_model

    return Tokenizer(make_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
async def fe(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[frontend_harness.World]:
    from tests.services import frontend_harness

    async with frontend_harness.world(tmp_path, tokenizer) as made:
        yield made
