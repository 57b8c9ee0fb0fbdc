"""Starts the processes of the dev stack, watches them, and stops them: none outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deploy.local.layout import StackError

READY_TIMEOUT_S: Final = 90.0  # an engine loads a model, all of them at once
POLL_S: Final = 0.02
STOP_TIMEOUT_S: Final = 8.0  # a role drains for 5 s
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 10.0
STEADY_S: Final = 30.0  # a process that lived this long starts again without extra delay
LAST_LINES: Final = 12
TETHER: Final = Path(__file__).with_name("tether.py")


@dataclass(frozen=True, slots=True)
class Program:
    """What to start, where its output goes, and how to see that it serves.

    Programs of one `stage` stop together, after all of higher stages. `environment` is added to our own. One
    `on_demand` waits for `start_again`.
    """

    name: str
    argv: Sequence[str]
    log: Path
    is_ready: Callable[[], Awaitable[bool]]
    stage: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    started: float  # time.monotonic()


@dataclass(slots=True)
class Supervisor:
    """Runs programs. `report` gets one line for whatever a person should see.

    With `restart`, a program that ends by itself is started again, with growing delay; without, it stays down
    until `start_again`.
    """

    programs: Sequence[Program]
    report: Callable[[str], None]
    restart: bool = True
    _running: dict[str, _Running] = field(default_factory=dict)
    _watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self) -> None:
        """Start all but what is on demand. Raises StackError, then nothing is left running.

        All start at once: each role finds the others when they come, as it must after a restart. When it returns,
        all of them serve.
        """
        programs = [program for program in self.programs if not program.on_demand]
        try:
            for program in programs:
                await self._spawn(program)
            for program in programs:
                await self._wait_ready(program)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop stage by stage, the last first: Envoy, so that no client sees half a stack."""
        for stage in sorted({program.stage for program in self.programs}, reverse=True):
            await asyncio.gather(*(self.stop_one(each.name) for each in self.programs if each.stage == stage))

    async def stop_one(self, name: str, number: int = signal.SIGTERM) -> None:
        """Send the signal, and SIGKILL when the process is still there after a while."""
        if watcher := self._watchers.pop(name, None):
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        running = self._running.pop(name, None)
        if running is None or running.process.returncode is not None:
            return
        running.process.send_signal(number)
        try:
            await asyncio.wait_for(running.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.report(f"{name}: did not stop in {STOP_TIMEOUT_S:.0f} s, killed")
            running.process.kill()
            await running.process.wait()

    async def kill(self, *names: str) -> None:
        """SIGKILL these programs at once; they stay down until `start_again`."""
        await asyncio.gather(*(self.stop_one(name, signal.SIGKILL) for name in names))

    async def start_again(self, *names: str) -> None:
        """Stop these programs if they run, start them and wait until they serve. Raises StackError."""
        programs = [program for program in self.programs if program.name in names]
        await asyncio.gather(*(self.stop_one(program.name) for program in programs))
        for program in programs:
            await self._spawn(program)
        for program in programs:
            await self._wait_ready(program)

    def pid(self, name: str) -> int:
        """The process id of a program that was started."""
        return self._running[name].process.pid

    async def _spawn(self, program: Program) -> None:
        self._running[program.name] = await _execute(program)
        if self.restart and program.name not in self._watchers:
            self._watchers[program.name] = asyncio.create_task(self._watch(program))

    async def _wait_ready(self, program: Program) -> None:
        running = self._running[program.name]
        while not await program.is_ready():
            if running.process.returncode is not None:
                raise StackError(f"{program.name} {_how(running.process.returncode)}\n{last_lines(program.log)}")
            if time.monotonic() > running.started + READY_TIMEOUT_S:
                raise StackError(f"{program.name}: not ready in {READY_TIMEOUT_S:.0f} s, see {program.log}")
            await asyncio.sleep(POLL_S)

    async def _watch(self, program: Program) -> None:
        delay = BACKOFF_FIRST_S
        while True:
            running = self._running[program.name]
            code = await running.process.wait()
            if time.monotonic() - running.started > STEADY_S:
                delay = BACKOFF_FIRST_S
            self.report(f"{program.name} {_how(code)}, starts again in {delay:g} s\n{last_lines(program.log)}")
            await asyncio.sleep(delay)
            delay = min(2 * delay, BACKOFF_MAX_S)
            await self._spawn(program)


async def _execute(program: Program) -> _Running:
    with program.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), *program.argv),
            env={**os.environ, **program.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # ^C is for the supervisor, which stops the rest in order
        )
    return _Running(process, time.monotonic())


def last_lines(log: Path) -> str:
    """The end of a log, indented."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
