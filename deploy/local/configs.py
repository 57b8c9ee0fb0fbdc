"""The configuration file of each process of the dev stack."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deploy.local.envoy import Tuning
from deploy.local.layout import Layout, write_private
from deploy.local.policy import PARTIES, identity_uri
from deploy.local.toml import dumps

ARENA_OCTETS: Final = 512 << 20
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - that is where shared memory is

SERVED: Final = ("is", "h1")
"""Parties with a process behind the gateway."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What may differ between one dev stack and another.

    `descriptors` are files of known Compatibility Descriptors, the first is the one in endpoints.json;
    `overrides` replaces keys of a process's configuration, by process name.
    """

    descriptors: Sequence[Path] = ()
    tuning: Tuning = field(default_factory=Tuning)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def served_prefixes() -> dict[str, str]:
    """Paths of the base URIs that Envoy routes, by party."""
    return {name: f"/{_prefix(name)}/" for name in SERVED}


def write_configs(layout: Layout, settings: Settings) -> None:
    """Write config/{index,h1,gateway}.toml."""
    descriptors = [str(path.absolute()) for path in settings.descriptors]
    known = {"policy": str(layout.policy), "log_level": "info", "descriptors": descriptors}
    documents: dict[str, dict[str, Any]] = {
        "index": {"listen": _unix(layout, "index"), "principal": identity_uri("is"), **known},
        "h1": {
            "listen": _unix(layout, "h1"),
            "principal": identity_uri("h1"),
            **known,
            "base_uri": layout.base_uri("h1"),
            "arena_octets": ARENA_OCTETS,
            "arena_dir": str(_arena_directory(layout)),
            "state_dir": str(layout.state("h1")),
            "index": {"address": _unix(layout, "index")},
        },
        "gateway": {
            "listen": _unix(layout, "gateway"),
            "principal": identity_uri("gateway"),
            "log_level": "info",
            "roles": [
                {
                    "role": role,
                    "base_uri": layout.base_uri(_prefix(party)),
                    "backend": {"address": _unix(layout, name)},
                }
                for role, party, name in (("index", "is", "index"), ("holder", "h1", "h1"))
            ],
        },
    }
    layout.state("h1").mkdir(mode=0o700, exist_ok=True)
    for name, document in documents.items():
        text = dumps({**document, **settings.overrides.get(name, {})})
        write_private(layout.config(name), text.encode())


def _arena_directory(layout: Layout) -> Path:
    """Shared memory when it has room for the arena; containers often give it 64 MiB, then a file in the home."""
    try:
        roomy = shutil.disk_usage(SHARED_MEMORY).free > 2 * ARENA_OCTETS
    except OSError:
        roomy = False
    return SHARED_MEMORY if roomy else layout.state("h1")


def _prefix(party: str) -> str:
    return next(each.prefix for each in PARTIES if each.name == party) or party


def _unix(layout: Layout, name: str) -> str:
    return f"unix:{layout.socket(name)}"
