"""index.toml, read strictly, and what it refuses."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from kvsp.protocol import limits
from kvsp.rpc.config import ConfigError, ServiceConfig, load

_SECRETS: Final = ("scope_key", "scope_keys", "key_file", "key_files")


class IndexConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`index.toml`: ServiceConfig and the bounds of the index, each at most the protocol's.

    `descriptors` are paths of Compatibility Descriptors, which tell the block length behind a
    compat_id; without one, lookups carry no `recompute_us` (U-41).
    """

    replica_ttl_ms_max: Annotated[int, Meta(ge=1, le=limits.REPLICA_TTL_MS_MAX)] = limits.REPLICA_TTL_MS_MAX
    records_per_holder_max: Annotated[int, Meta(ge=1, le=limits.RECORDS_PER_HOLDER_MAX)] = (
        limits.RECORDS_PER_HOLDER_MAX
    )
    lookup_keys_max: Annotated[int, Meta(ge=1, le=limits.LOOKUP_KEYS_MAX)] = limits.LOOKUP_KEYS_MAX
    lookup_targets_max: Annotated[int, Meta(ge=1, le=limits.LOOKUP_TARGETS_MAX)] = limits.LOOKUP_TARGETS_MAX
    descriptors: tuple[str, ...] = ()


def load_config(path: Path) -> IndexConfig:
    """Read index.toml. Raises ConfigError, above all when it offers a scope key."""
    try:
        names = set(_names(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    # "The Scope Key MUST NOT be disclosed to the IS."
    for secret in names.intersection(_SECRETS):
        raise ConfigError(f"{path}: {secret}: the index must never hold a scope key; remove it (R-025)")
    return load(path, IndexConfig)


def _names(value: Any) -> Iterator[str]:
    """Every key of a TOML document, in the spelling of our own."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name.lower().replace("-", "_")
            yield from _names(inner)
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
