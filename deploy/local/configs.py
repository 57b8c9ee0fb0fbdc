"""The processes of the dev stack, and the configuration file of each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deploy.local.envoy import Tuning
from deploy.local.layout import Layout, write_private
from deploy.local.model import BLOCK_TOKENS
from deploy.local.policy import PARTIES, SCOPES, identity_uri
from deploy.local.ports import free_ports
from deploy.local.toml import dumps

ARENA_OCTETS: Final = 512 << 20
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - that is where shared memory is
STATUS_TTL_MS: Final = 1500
"""How long an instance may be silent before its sessions go elsewhere."""

INSTANCES: Final = ("ii1", "ii2")
SPARE: Final = "ii3"
"""An instance that everybody knows of and that starts when asked for."""

ALL_INSTANCES: Final = (*INSTANCES, SPARE)

GROUPS: Final = {
    "tokens": 3_000,
    "prefill_tokens": 1_024,
    "decode_tokens": 1_024,
    "members_max": len(ALL_INSTANCES),
    "deadline_ms": 5_000,
}
"""Contexts that are sharded: of the demo's prompts the long one alone, which three instances compute."""


@dataclass(frozen=True, slots=True)
class Process:
    """One role. `party` is whose identity it has; programs of one `stage` stop together, the last stage first."""

    name: str
    role: str
    party: str
    stage: int
    is_engine: bool = False
    """It comes with a model."""

    @property
    def on_demand(self) -> bool:
        """It is not started with the stack."""
        return self.party == SPARE


PROCESSES: Final = (
    Process("index", "index", "is", 0),
    Process("placement", "placement", "pc", 0),
    Process("h1", "holder", "h1", 1),
    # An instance is an engine and, beside it, a holder of the same identity: its blocks outlive a crash of it.
    *(Process(f"{name}-blocks", "holder", name, 1, True) for name in ALL_INSTANCES),
    *(Process(name, "instance", name, 2, True) for name in ALL_INSTANCES),
    Process("frontend", "frontend", "fe", 3, True),
    Process("gateway", "gateway", "gateway", 4),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What may differ between one dev stack and another.

    `descriptors` are files of known Compatibility Descriptors, the first is the one in endpoints.json;
    `overrides` replaces keys of a process's configuration, by process name. `model` is the directory of the model
    that the instances run; None: a stack without instances and front end. `metrics`: every process shows its own.
    """

    descriptors: Sequence[Path] = ()
    tuning: Tuning = field(default_factory=Tuning)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: Path | None = None
    metrics: bool = False

    @property
    def processes(self) -> list[Process]:
        """Those that this stack has."""
        return [each for each in PROCESSES if self.model is not None or not each.is_engine]


def served_prefixes(processes: Iterable[Process] = PROCESSES) -> dict[str, str]:
    """Paths of the base URIs that Envoy routes to these processes, by party."""
    serving = {process.party for process in processes}
    return {each.name: f"/{each.prefix}/" for each in PARTIES if each.prefix is not None and each.name in serving}


def write_configs(layout: Layout, settings: Settings) -> None:
    """Write config/NAME.toml for every process."""
    processes = settings.processes
    ports = free_ports(len(processes)) if settings.metrics else []
    for stale in layout.config("x").parent.glob("*.toml"):  # of processes that this stack does not have
        stale.unlink()
    for at, process in enumerate(processes):
        layout.state(process.name).mkdir(mode=0o700, exist_ok=True)
        document = {
            "listen": _unix(layout, process.name),
            "principal": identity_uri(process.party),
            "log_level": "info",
            **({"admin": f"127.0.0.1:{ports[at]}"} if ports else {}),
            **_Documents(layout, settings).of(process),
        }
        text = dumps({**document, **settings.overrides.get(process.name, {})})
        write_private(layout.config(process.name), text.encode())


@dataclass(frozen=True, slots=True)
class _Documents:
    """What each role's file holds beside what every process needs."""

    layout: Layout
    settings: Settings

    def of(self, process: Process) -> dict[str, Any]:
        make = {
            "index": self._index,
            "placement": self._placement,
            "holder": self._holder,
            "instance": self._instance,
            "frontend": self._frontend,
            "gateway": self._gateway,
        }[process.role]
        shared = {} if process.role == "gateway" else {"policy": str(self.layout.policy)}
        return {**shared, **make(process)}

    def _index(self, _: Process) -> dict[str, Any]:
        return {"descriptors": self._descriptors}

    def _placement(self, process: Process) -> dict[str, Any]:
        return {
            "descriptors": self._descriptors,
            "state_dir": str(self.layout.state(process.name)),
            "index": self._peer("index"),
            "instances": self._instances,
            "scopes": self._scopes,
            "groups": GROUPS,
        }

    def _holder(self, process: Process) -> dict[str, Any]:
        return {
            "descriptors": self._descriptors,
            "base_uri": _base_uri(self.layout, process.party),
            "arena_octets": ARENA_OCTETS,
            "arena_dir": str(self._arena_directory(process)),
            "state_dir": str(self.layout.state(process.name)),
            "index": self._peer("index"),
        }

    def _instance(self, process: Process) -> dict[str, Any]:
        others = {name: f"{name}-blocks" for name in ALL_INSTANCES if name != process.party} | {"h1": "h1"}
        own = _base_uri(self.layout, process.party)
        return {
            **self._engine,
            "base_uri": own,
            "placement": {"base_uri": _base_uri(self.layout, "pc"), **self._peer("placement")},
            "index": self._peer("index"),
            "holder": self._peer(f"{process.party}-blocks"),
            "holders": [
                {"base_uri": _base_uri(self.layout, party), **self._peer(name)} for party, name in others.items()
            ],
            "durable": [_base_uri(self.layout, "h1")],
            "instances": [each for each in self._instances if each["base_uri"] != own],
            "state_dir": str(self.layout.state(process.name)),
            "status_ttl_ms": STATUS_TTL_MS,
            "threads": compute_threads(),
        }

    def _frontend(self, process: Process) -> dict[str, Any]:
        return {
            **self._engine,
            "base_uri": _base_uri(self.layout, process.party),
            "descriptor": self._descriptors[0],
            "placement": self._peer("placement"),
            "instances": self._instances,
            # One machine, one build of torch, engines whose sums do not depend on what else they compute: their
            # output is the same bits, greedy or seeded.
            "deterministic": True,
            "deterministic_sampling": True,
        }

    def _gateway(self, _: Process) -> dict[str, Any]:
        return {"roles": [self._served(each) for each in self.settings.processes if self._is_served(each)]}

    @staticmethod
    def _is_served(process: Process) -> bool:
        return process.role != "gateway" and not process.name.endswith("-blocks")

    def _served(self, process: Process) -> dict[str, Any]:
        entry = {
            "role": process.role,
            "base_uri": _base_uri(self.layout, process.party),
            "backend": self._peer(process.name),
        }
        if process.role == "instance":
            entry["blocks"] = self._peer(f"{process.name}-blocks")
        return entry

    @property
    def _descriptors(self) -> list[str]:
        return [str(path.absolute()) for path in self.settings.descriptors]

    @property
    def _engine(self) -> dict[str, Any]:
        """The model and the names of its blocks, which instances and front end compute."""
        return {
            "model": str(self.settings.model),
            "block_tokens": BLOCK_TOKENS,
            "scopes": self._scopes,
        }

    @property
    def _scopes(self) -> dict[str, str]:
        return {name: str(self.layout.scope_key(name)) for name in SCOPES}

    @property
    def _instances(self) -> list[dict[str, Any]]:
        return [{"base_uri": _base_uri(self.layout, name), **self._peer(name)} for name in ALL_INSTANCES]

    def _peer(self, name: str) -> dict[str, str]:
        return {"address": _unix(self.layout, name)}

    def _arena_directory(self, process: Process) -> Path:
        """Shared memory when it has room for the arenas; containers often give it 64 MiB, then the home."""
        arenas = sum(each.role == "holder" for each in self.settings.processes)
        try:
            roomy = shutil.disk_usage(SHARED_MEMORY).free > (arenas + 1) * ARENA_OCTETS
        except OSError:
            roomy = False
        return SHARED_MEMORY if roomy else self.layout.state(process.name)


def compute_threads() -> int:
    """Compute threads of each instance: the cores are shared, as the instances seldom compute at once."""
    return max(1, min(len(os.sched_getaffinity(0)) // len(INSTANCES), 8))


def _base_uri(layout: Layout, party: str) -> str:
    return layout.base_uri(next(each.prefix for each in PARTIES if each.name == party) or party)


def _unix(layout: Layout, name: str) -> str:
    return f"unix:{layout.socket(name)}"
