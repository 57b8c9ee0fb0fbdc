"""Syntax of the scalars: hex ids, digests, UUIDs, base URIs, the MOQT namespace (A1, A5, U-05 ... U-08).

Checkers return nothing and raise ValueError. Python's own converters accept far more than the
protocol (D7), so every pattern is matched whole and nothing is normalised silently but UUID case.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from kvsp.protocol import limits
from kvsp.protocol.registry import TOKEN

HEX: Final = "0123456789abcdef"
HEX32_CHARS: Final = 64
HEX16_CHARS: Final = 32
DIGEST_PREFIX: Final = "sha-256:"
PARTY_ID: Final = re.compile(r"[A-Za-z0-9_-]{43}")
UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HOST: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_PATH: Final = re.compile(r"/([A-Za-z0-9._~!$&'()*+,;=:@-]+/)*")
_MOQT_PATH: Final = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@/-]*)?")
_MOQT_FIELDS: Final = 5


def is_hex(text: str, chars: int) -> bool:
    """True for exactly `chars` lowercase hexadecimal characters (R-002)."""
    return len(text) == chars and not text.strip(HEX)


def check_hex32(text: str, name: str) -> None:
    """32 octets as 64 lowercase hexadecimal characters."""
    if not is_hex(text, HEX32_CHARS):
        raise ValueError(f"{name} is not hex32")


def check_hex16(text: str, name: str) -> None:
    """16 octets as 32 lowercase hexadecimal characters."""
    if not is_hex(text, HEX16_CHARS):
        raise ValueError(f"{name} is not hex16")


def check_hex32_list(texts: list[str], name: str) -> None:
    """Every item hex32; checked in bulk, as a pattern per item costs twenty times as much."""
    if not texts:
        return
    rest = "".join(texts).encode().translate(None, HEX.encode())
    if rest or set(map(len, texts)) != {HEX32_CHARS}:
        raise ValueError(f"{name} holds an item that is not hex32")


def check_digest(text: str, name: str) -> None:
    """`sha-256:` and hex32 (R-006)."""
    if not text.startswith(DIGEST_PREFIX) or not is_hex(text[len(DIGEST_PREFIX) :], HEX32_CHARS):
        raise ValueError(f"{name} is not a sha-256 digest")


def check_token(text: str, name: str) -> None:
    """A registry name, registered or not (U-08)."""
    if not TOKEN.fullmatch(text):
        raise ValueError(f"{name} is not a lowercase name")


def normal_uuid(text: str) -> str:
    """The UUID in lower case; 8-4-4-4-12 only (U-06)."""
    if not text.isascii() or not UUID.fullmatch(text.lower()):
        raise ValueError("not a UUID")
    return text.lower()


def party_id(base_uri: str) -> str:
    """{holder-id} or {instance-id}: base64url without padding of SHA-256 of the base URI (R-070)."""
    return base64.urlsafe_b64encode(hashlib.sha256(base_uri.encode()).digest()).rstrip(b"=").decode()


@lru_cache(maxsize=1024)  # the few of a fleet are checked over and over; a bad one is an error each time
def check_base_uri(uri: str) -> None:
    """A normalised https base URI ending in '/' (U-07)."""
    _check_uri(uri, "https", 443, _PATH)


@lru_cache(maxsize=1024)
def check_holder_uri(uri: str) -> None:
    """An https base URI, or the moqt URI of a publishing endpoint or relay (R-045)."""
    if uri.startswith("moqt:"):
        _check_uri(uri, "moqt", 443, _MOQT_PATH)
    else:
        check_base_uri(uri)


def _check_uri(uri: str, scheme: str, default_port: int, path: re.Pattern[str]) -> None:
    if len(uri) > limits.BASE_URI_OCTETS_MAX or not uri.isascii():
        raise ValueError("URI too long or not ASCII")
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:
        raise ValueError("malformed URI") from None
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    netloc = shown if port is None else f"{shown}:{port}"
    # Rebuilding catches what urlsplit forgives: user info, '?', '#', upper case, odd ports.
    if uri != f"{scheme}://{netloc}{parts.path}" or port in (default_port, 0):
        raise ValueError("URI is not normalised")
    if not (_is_ip6(host) if ":" in host else _HOST.fullmatch(host)):
        raise ValueError("URI host is malformed")
    if not path.fullmatch(parts.path) or {".", ".."} & set(parts.path.split("/")):
        raise ValueError("URI path is not normalised or lacks its final '/'")


def _is_ip6(host: str) -> bool:
    try:  # a zone is local to one node and no part of a name that others share
        return "%" not in host and ipaddress.IPv6Address(host).compressed == host
    except ValueError:
        return False


def check_moqt_namespace(text: str) -> None:
    """base64url without padding of exactly five fields, each preceded by its length as one octet (R-045)."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise ValueError("moqt_namespace is not base64url without padding")
    try:
        octets = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise ValueError("moqt_namespace is not base64url without padding") from None
    if base64.urlsafe_b64encode(octets).rstrip(b"=").decode() != text:
        raise ValueError("moqt_namespace has nonzero pad bits")
    at = 0
    for _ in range(_MOQT_FIELDS):
        if at >= len(octets) or octets[at] == 0:
            raise ValueError("moqt_namespace field missing or empty")
        at += 1 + octets[at]
    if at != len(octets):
        raise ValueError("moqt_namespace does not hold exactly five fields")
