"""Writes TOML: top-level values, tables and arrays of tables, which is all that our files need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dumps(document: Mapping[str, Any]) -> str:
    """The document as TOML: plain values first, then tables."""
    lines: list[str] = []
    _table(lines, "", document)
    return "\n".join(lines).strip() + "\n"


def _table(lines: list[str], path: str, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if not _is_table(value):
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in table.items():
        if not _is_table(value):
            continue
        name = f"{path}.{_key(key)}" if path else _key(key)
        for heading, each in (
            [(f"[{name}]", value)] if isinstance(value, Mapping) else [(f"[[{name}]]", item) for item in value]
        ):
            lines += ["", heading]
            _table(lines, name, each)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    )


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    # A TOML basic string escapes as JSON does, as long as nothing lies outside the BMP.
    return json.dumps(value, ensure_ascii=False)
