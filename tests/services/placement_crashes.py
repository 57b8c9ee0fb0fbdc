"""A controller that dies between two of its steps, and lives on from what it had written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar


class CrashError(Exception):
    pass


class Mortal(ABC):
    """What the world knows of a controller, of which each step is announced by `boundary`."""

    steps_left = -1
    """Until the crash; negative: there is none."""

    def boundary(self) -> None:
        if self.steps_left == 0:
            raise CrashError
        self.steps_left -= 1

    @abstractmethod
    def restart(self) -> None:
        """After a crash, of which there is no second: go on from what is on disk."""


M = TypeVar("M", bound=Mortal)


def is_crashed(world: M, life: Iterable[Callable[[M], None]], steps: int) -> bool:
    """A life with a crash after so many steps, whose event is repeated then. False: it has not that many."""
    world.steps_left = steps
    crashed = False
    for event in life:
        try:
            event(world)
        except CrashError:
            crashed = True
            world.steps_left = -1
            world.restart()
            event(world)
    return crashed
