"""docs/openapi.json says what the gateway does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvsp.protocol.routes import ROUTES
from tools.openapi import render


def references(value: Any) -> set[str]:
    return set(re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', json.dumps(value)))


@pytest.mark.spec("R-069", "R-072")
def test_every_route_and_no_other() -> None:
    document = json.loads(render())
    listed = {(method.upper(), path[1:]) for path, item in document["paths"].items() for method in item}
    expected = {(route.method, route.path) for route in ROUTES}
    assert listed == expected | {("HEAD", path) for method, path in expected if method == "GET"}
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.spec("R-064", "R-065")
def test_references_resolve_and_media_types_are_ours() -> None:
    document = json.loads(render())
    assert references(document) <= set(document["components"]["schemas"])
    lookup = document["paths"]["/lookup"]["post"]
    assert list(lookup["requestBody"]["content"]) == ["application/kvsp+json"]
    assert list(lookup["responses"]["default"]["content"]) == ["application/problem+json"]
    block = document["paths"]["/blocks/{compat}/{scope}/{block_key}"]
    assert [parameter["name"] for parameter in block["get"]["parameters"]][3:] == [
        "layers",
        "codec",
        "If-None-Match",
    ]


def test_rendering_is_stable() -> None:
    assert render() == render()
