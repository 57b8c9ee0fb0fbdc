"""docs/openapi.json: the normative resources, generated from the route table and the records.

Bounds that span members (residency without overlap, exactly one of plan, commit and abort) are not
expressible here; the records check them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from kvsp.protocol import registry
from kvsp.protocol.registry import MEDIA_BLOCK, MEDIA_JSON, MEDIA_PROBLEM
from kvsp.protocol.routes import ROUTES, SEGMENTS, Route

_QUERY = {
    "layers": {"type": "string", "pattern": "^(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})$"},
    "codec": {"type": "integer", "minimum": 1, "maximum": registry.CODEC_MAX},
}
_DIGEST_FIELDS = ("Repr-Digest", "Content-Digest")
_PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


def render() -> str:
    """The JSON text, ending in a newline."""
    kinds = sorted(
        {kind for route in ROUTES for kind in (route.request, route.reply) if kind is not None},
        key=lambda kind: kind.__name__,
    )
    refs, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        item = paths.setdefault("/" + route.path, {})
        item[route.method.lower()] = _operation(route, route.method, by_kind)
        if route.method == "GET":
            item["head"] = _operation(route, "HEAD", by_kind)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "KV Cache Storage Protocol",
            "version": "1",
            "description": "Paths are relative to the base URI of a role (tags). Clients have certificates.",
        },
        "servers": [{"url": "https://{base}", "variables": {"base": {"default": "localhost:8443/is"}}}],
        "security": [{"mutualTLS": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Problem": _PROBLEM_SCHEMA},
            "securitySchemes": {"mutualTLS": {"type": "mutualTLS"}},
        },
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _operation(route: Route, method: str, by_kind: dict[type, Any]) -> dict[str, Any]:
    name = re.sub(r"[{}]", "", route.path).replace("/", "-")
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}-{name}",
        "summary": route.summary,
        "tags": sorted(route.roles),
        "parameters": _parameters(route),
        "responses": _responses(route, method, by_kind),
    }
    if route.request_media is not None:
        schema = by_kind[route.request] if route.request is not None else {}
        operation["requestBody"] = {"required": True, "content": {route.request_media: {"schema": schema}}}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {
            "name": part[1:-1],
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": f"^{SEGMENTS[part].pattern}$"},
        }
        for part in route.path.split("/")
        if part in SEGMENTS
    ]
    parameters += [{"name": name, "in": "query", "schema": _QUERY[name]} for name in route.query]
    if route.request_media == MEDIA_BLOCK:
        only_create = {"type": "string", "const": "*"}
        parameters.append({"name": "If-None-Match", "in": "header", "required": True, "schema": only_create})
        parameters += [{"name": name, "in": "header", "schema": {"type": "string"}} for name in _DIGEST_FIELDS]
    elif route.reply_media == MEDIA_BLOCK:
        parameters.append({"name": "If-None-Match", "in": "header", "schema": {"type": "string"}})
    return parameters


def _responses(route: Route, method: str, by_kind: dict[type, Any]) -> dict[str, Any]:
    responses = {str(status): _success(route, status, method, by_kind) for status in route.statuses}
    for status in sorted({problem.status for problem in route.problems}):
        names = ", ".join(problem.suffix for problem in route.problems if problem.status == status)
        responses[str(status)] = _problem(names)
    responses["default"] = _problem("about:blank with the HTTP status")
    return responses


def _problem(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {MEDIA_PROBLEM: {"schema": schema}}}


def _success(route: Route, status: int, method: str, by_kind: dict[type, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": "Not modified" if status == 304 else route.summary}
    if method == "HEAD" or status == 304:
        return response
    if route.reply is not None:
        response["content"] = {MEDIA_JSON: {"schema": by_kind[route.reply]}}
    elif route.reply_media is not None:
        response["content"] = {route.reply_media: {}}
    return response
