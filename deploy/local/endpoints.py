"""endpoints.json: what a client needs to know of the running stack."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.local.layout import Layout, write_private
from deploy.local.policy import PARTIES, Party


def describe(layout: Layout, scopes: Mapping[str, str], descriptors: Sequence[Path]) -> dict[str, Any]:
    """The document; paths are absolute, so that it can be read from anywhere on this machine."""
    return {
        "ca": str(layout.pki / "ca.pem"),
        "envoy_admin": layout.admin_url,
        "roles": {
            "index": _base_uris(layout, "index")["is"],
            "placement": _base_uris(layout, "placement")["pc"],
            "holders": _base_uris(layout, "holder"),
            "instances": _base_uris(layout, "instance"),
            "frontend": _base_uris(layout, "frontend")["fe"],
        },
        "identities": {party.name: _identity(layout, party) for party in PARTIES},
        "scopes": {
            name: {"scope_id": scope_id, "key_file": str(layout.scope_key(name))}
            for name, scope_id in scopes.items()
        },
        "descriptor": str(descriptors[0].absolute()) if descriptors else None,
    }


def write_endpoints(layout: Layout, document: Mapping[str, Any]) -> None:
    """Write endpoints.json."""
    write_private(layout.endpoints, json.dumps(document, indent=2).encode() + b"\n")


def _identity(layout: Layout, party: Party) -> dict[str, str]:
    return {
        "uri": party.uri,
        "cert": str(layout.pki / f"{party.name}.pem"),
        "key": str(layout.pki / f"{party.name}-key.pem"),
    }


def _base_uris(layout: Layout, role: str) -> dict[str, str]:
    return {
        party.name: layout.base_uri(party.prefix)
        for party in PARTIES
        if party.role == role and party.prefix is not None
    }
