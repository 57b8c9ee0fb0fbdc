"""Layer, replica and representation digests (R-006, R-035 ... R-037, R-153, U-27)."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from kvsp.protocol import container
from kvsp.protocol.container import Buffer, Header
from kvsp.protocol.errors import bad_request
from kvsp.protocol.names import DIGEST_PREFIX, check_digest

if TYPE_CHECKING:
    from hashlib import _Hash

ALGORITHMS: Final = {"sha-256": ("sha256", 32), "sha-512": ("sha512", 64)}
"""Algorithm names of RFC 9530 that we verify: their hashlib name and digest octets."""

_ITEM: Final = (
    r"(?:-?[0-9]{1,15}(?:\.[0-9]{1,3})?|@-?[0-9]{1,15}|\?[01]"
    r"|%?\"(?:[ !#-\[\]-~]|\\[\"\\])*\"|:[A-Za-z0-9+/]*={0,2}:|[A-Za-z*][A-Za-z0-9!#$%&'*+.^_`|~:/-]*)"
)
_KEY: Final = r"[a-z*][a-z0-9_.*-]*"
_MEMBER: Final = re.compile(rf"({_KEY})=:([A-Za-z0-9+/]*={{0,2}}):(?:; *{_KEY}(?:={_ITEM})?)*")
_COMMA: Final = re.compile(r"[ \t]*,[ \t]*")


def layer_digest(*sections: Buffer) -> bytes:
    """SHA-256 of the K section followed by the V section of one layer; any cut into pieces is equal."""
    hasher = hashlib.sha256()
    for section in sections:
        hasher.update(section)
    return hasher.digest()


def replica_digest(layer_digests: Sequence[bytes]) -> bytes:
    """SHA-256 of the 32-octet layer digests of all layers, ascending (R-035)."""
    return hashlib.sha256(b"".join(layer_digests)).digest()


def format_digest(digest: bytes) -> str:
    """`sha-256:` and hex32, as records carry it."""
    return DIGEST_PREFIX + digest.hex()


def parse_digest(text: str) -> bytes:
    """The octets of a record's digest string. Raises KvspError (400)."""
    try:
        check_digest(text, "digest")
    except ValueError as error:
        raise bad_request(str(error)) from None
    return bytes.fromhex(text[len(DIGEST_PREFIX) :])


def repr_digest_field(sha256: bytes) -> str:
    """The value of a `Repr-Digest` or `Content-Digest` field (RFC 9530): `sha-256=:<base64>:`."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def parse_digest_field(text: str) -> dict[str, bytes]:
    """The digests of a `Repr-Digest` or `Content-Digest` field, by algorithm of ALGORITHMS.

    A Dictionary of Byte Sequences (RFC 9651): unknown algorithms are left out, of duplicates the last
    wins, parameters mean nothing, missing base64 padding is supplied. Anything malformed is a
    KvspError (400): the RFC lets us ignore the field, but we fail closed (U-27).
    """
    text = text.strip(" ")
    members: dict[str, str] = {}
    at = 0
    while at < len(text):
        member = _MEMBER.match(text, at)
        if member is None:
            raise bad_request("digest field is malformed")
        members[member[1]] = member[2]
        at = member.end()
        if at < len(text):
            comma = _COMMA.match(text, at)
            if comma is None or comma.end() == len(text):
                raise bad_request("digest field is malformed")
            at = comma.end()
    return {name: _decode(name, value) for name, value in members.items() if name in ALGORITHMS}


def _decode(algorithm: str, value: str) -> bytes:
    try:
        octets = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except ValueError:
        raise bad_request("digest field is malformed") from None
    if len(octets) != ALGORITHMS[algorithm][1]:
        raise bad_request(f"{algorithm} digest has a wrong length")
    return octets


class ContainerDigester:
    """Checks and hashes one container while it arrives, without keeping or copying its payload.

    Feed pieces of any size, then `finish`. Layer digests appear as each layer completes, so a reader
    can use layer l before the next one is there. With `full`, the SHA-256 of the whole container is
    computed too; `extra` names further ALGORITHMS to run over the whole container. Large updates
    release the GIL. After a KvspError the digester is of no more use.
    """

    def __init__(self, *, full: bool = False, extra: Iterable[str] = ()) -> None:
        names = {"sha-256", *extra} if full else set(extra)
        self._full: dict[str, _Hash] = {name: hashlib.new(ALGORITHMS[name][0]) for name in names}
        self._head = container.HeaderReader()
        self._layer: _Hash = hashlib.sha256()
        self._layer_left = 0
        self.octets = 0
        self.layer_digests: list[bytes] = []

    @property
    def header(self) -> Header | None:
        """The container header, once all of it came."""
        return self._head.header

    def feed(self, piece: Buffer) -> None:
        """Take the next octets. Raises KvspError (400) on bad framing or octets after the last layer."""
        view = memoryview(piece).cast("B")
        rest = self._head.feed(view)
        if self.header is not None:
            # "no trailing octets": refused before anything is hashed.
            if self.octets + len(view) > self.header.total_octets:
                raise bad_request("octets after the end of the container")
            self._feed_layers(rest)
        for hasher in self._full.values():
            hasher.update(view)
        self.octets += len(view)

    def finish(self) -> None:
        """The container ended here. Raises KvspError (400) when it is truncated."""
        if self.header is None or self.octets != self.header.total_octets:
            raise bad_request("container truncated")

    def digest(self, algorithm: str) -> bytes:
        """The digest of the octets fed, by an algorithm asked for at construction."""
        return self._full[algorithm].digest()

    def sha256(self) -> bytes:
        """The SHA-256 of the octets fed; needs `full`."""
        return self.digest("sha-256")

    def _feed_layers(self, view: memoryview) -> None:
        assert self.header is not None  # noqa: S101  (for the type checker; feed looked)
        while len(view) > 0:
            if self._layer_left == 0:
                self._layer_left = sum(self.header.sections[len(self.layer_digests)])
            part = view[: self._layer_left]
            self._layer.update(part)
            self._layer_left -= len(part)
            view = view[len(part) :]
            if self._layer_left == 0:
                self.layer_digests.append(self._layer.digest())
                self._layer = hashlib.sha256()
