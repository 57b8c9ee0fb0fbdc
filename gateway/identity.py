"""Who the client is, as Envoy says (D2, R-062).

Envoy ends TLS and, with SANITIZE_SET, replaces whatever a client sent by one `X-Forwarded-Client-Cert`
element about the certificate it verified. Anything else on this socket is no identity. `Client-Cert`
(RFC 9440) does not fail safe when a client injects it, so it is never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError

XFCC: Final = b"x-forwarded-client-cert"
# `Key=value` or `Key="value"`; Envoy writes URIs bare, so a bare value may hold '='.
_PAIR: Final = re.compile(r'(by|hash|cert|chain|subject|uri|dns)=("(?:[^"\\]|\\.)*"|[^",;]*)(;|$)', re.IGNORECASE)
_ESCAPE: Final = re.compile(r"\\(.)")
_URI: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:[!-~]+")


def principal(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The single URI SAN of the client certificate (U-39). Raises KvspError (403) without exactly one."""
    lines = [value for name, value in headers if name == XFCC]
    if len(lines) != 1:
        raise _no_identity()
    uris = [value for key, value in _pairs(lines[0].decode("latin-1")) if key == "uri"]
    if len(uris) != 1 or len(uris[0]) > limits.BASE_URI_OCTETS_MAX or not _URI.fullmatch(uris[0]):
        raise _no_identity()
    return uris[0]


def _pairs(element: str) -> Iterable[tuple[str, str]]:
    """The pairs of one element; a comma outside quotes would begin a second element and matches nothing."""
    at = 0
    while at < len(element):
        pair = _PAIR.match(element, at)
        if pair is None:
            raise _no_identity()
        key, value, _ = pair.groups()
        yield key.lower(), _ESCAPE.sub(r"\1", value[1:-1]) if value.startswith('"') else value
        at = pair.end()


def _no_identity() -> KvspError:
    return KvspError(registry.FORBIDDEN, "the client certificate needs exactly one URI SAN")
