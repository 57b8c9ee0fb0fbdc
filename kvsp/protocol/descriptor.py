"""The Compatibility Descriptor and its identity (R-010 ... R-018).

Unknown members are an error. "Unknown members MUST be ignored" is said of the objects in requests and
responses; a descriptor travels in neither (A2). Ignoring one here would let `adapter` misspelled for
`adapters` yield the identity of the bare model, and hashing it would cover what we do not understand.
So the identity covers exactly the members below, and every accepted file says nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Final

import msgspec
import rfc8785
from msgspec import UNSET, Meta, Struct, UnsetType

from kvsp.protocol import jsonio, limits, registry
from kvsp.protocol.errors import KvspError, bad_request
from kvsp.protocol.names import HEX32_CHARS, check_digest, is_hex

COMPAT_LABEL: Final = b"KVSP-COMPAT-1\0"

_Count = Annotated[int, Meta(ge=1, le=limits.INT_MAX)]
_Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_OCTETS_MAX)]


class Descriptor(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that affects the stored tensors (R-010). Raises ValueError on a bad member."""

    model: _Name
    model_digest: str
    tokenizer_digest: str
    layers: _Count
    kv_heads: _Count
    head_dim: _Count
    kv_dtype: str
    positional: str
    block_tokens: _Count
    layout: str
    adapters: list[str] | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_digest(self.model_digest, "model_digest")
        check_digest(self.tokenizer_digest, "tokenizer_digest")
        if not isinstance(self.adapters, UnsetType):
            # "The member MUST be absent when no adapter is applied; an empty array is not allowed."
            if not self.adapters:
                raise ValueError("adapters is empty: leave it out when no adapter is applied")
            for adapter in self.adapters:
                check_digest(adapter, "adapters item")
        # Sections cannot be measured without these rows, so unregistered values are refused.
        if self.kv_dtype not in registry.ELEMENT_TYPES:
            raise ValueError("kv_dtype is not a registered element type")
        if self.layout not in registry.LAYOUTS:
            raise ValueError("layout is not registered")
        _check_positional(self.positional)

    @property
    def section_octets(self) -> int:
        """Octets of one raw K or V section of a full block (R-033)."""
        element = registry.ELEMENT_TYPES[self.kv_dtype].octets
        return self.block_tokens * self.kv_heads * self.head_dim * element

    @property
    def payload_octets(self) -> int:
        """Octets of all raw K and V sections of a full block, without the header (U-26)."""
        return 2 * self.layers * self.section_octets


def load(octets: bytes) -> Descriptor:
    """Read a descriptor file. Raises KvspError (400) for anything but strict I-JSON (U-03, R-016)."""
    return jsonio.decode(octets, Descriptor)


def canonical(descriptor: Descriptor) -> bytes:
    """JCS(descriptor), the RFC 8785 octets that the identity covers."""
    return rfc8785.dumps(msgspec.to_builtins(descriptor))


def compat_id(descriptor: Descriptor) -> bytes:
    """The 32 octets of SHA-256("KVSP-COMPAT-1" || 0x00 || JCS(descriptor)) (R-015)."""
    return hashlib.sha256(COMPAT_LABEL + canonical(descriptor)).digest()


def check_claimed(descriptor: Descriptor, claimed_hex: str) -> None:
    """Verify an id that came with a descriptor at hand (R-018).

    Raises KvspError: 400 when `claimed_hex` is not hex32, kvsp-incompatible when it differs.
    """
    if not is_hex(claimed_hex, HEX32_CHARS):
        raise bad_request("compat_id is not hex32")
    # "MUST compute the Compatibility ID from the descriptor rather than accept it from a peer"
    if not hmac.compare_digest(compat_id(descriptor), bytes.fromhex(claimed_hex)):
        raise KvspError(registry.INCOMPATIBLE, "compat_id is not that of the descriptor")


def _check_positional(text: str) -> None:
    """A registered name, then optionally ';' and parameters in the registered syntax (R-014)."""
    name, separator, parameters = text.partition(";")
    row = registry.POSITIONAL_ENCODINGS.get(name)
    if row is None:
        raise ValueError("positional is not a registered encoding")
    if separator and (row.parameters is None or not row.parameters.fullmatch(parameters)):
        raise ValueError("positional parameters are not in the registered syntax")
