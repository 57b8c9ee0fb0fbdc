"""Holder states of a few pages, and blocks for them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvsp.protocol import container, registry
from kvsp.protocol.container import Header
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity, Quotas
from services.holder.allocator import ALIGN
from services.holder.blocks import Block, Digested, Name
from services.holder.state import HolderState

COMPAT, SCOPE, OTHER = b"\x11" * 32, b"\xaa" * 16, b"\xbb" * 16
TTL = 600_000


def identity(uri: str = "spiffe://t/a", scopes: tuple[bytes, ...] = (SCOPE,), **quotas: Any) -> Identity:
    scope_ids = frozenset(each.hex() for each in scopes)
    return Identity(
        uri, frozenset({"client"}), (), scope_ids, frozenset(), frozenset(), Quotas(**quotas), frozenset()
    )


A, B = identity(), identity("spiffe://t/b")


def name(i: int, scope: bytes = SCOPE, compat: bytes = COMPAT) -> Name:
    return Name(compat, scope, hashlib.sha256(b"%d" % i).digest())


def digested(i: int, pages: int = 1, **members: Any) -> Digested:
    """A container that takes `pages` pages, less one octet."""
    layers = members.pop("layers", 2)
    octets = pages * ALIGN - 1 - container.FIXED_OCTETS - 16 * layers
    section, rest = divmod(octets, 2 * layers)
    sections = [(section, section)] * (layers - 1) + [(section, section + rest)]
    header = Header(**({"codec": 1, "first_layer": 0, "token_count": 16, "sections": tuple(sections)} | members))
    each = tuple(hashlib.sha256(b"%d %d" % (i, layer)).digest() for layer in range(layers))
    return Digested(header, each, hashlib.sha256(b"all %d" % i).digest())


def put(state: HolderState, i: int, pages: int = 1, now: int = 0, stream: int = 1, **where: bytes) -> Block:
    made = digested(i, pages)
    reservation = state.reserve(stream, A, name(i, **where), made.header.total_octets, now)
    assert reservation is not None
    return state.commit(reservation, made)


def state_of(pages: int, **options: Any) -> HolderState:
    return HolderState(pages * ALIGN, **({"publish_ttl_ms": TTL} | options))


def refused(problem: registry.ProblemType, call: Any, *args: Any, **options: Any) -> KvspError:
    with pytest.raises(KvspError) as caught:
        call(*args, **options)
    assert caught.value.problem is problem
    return caught.value


def kinds(state: HolderState) -> list[type]:
    return [type(each) for each in state.instructions()]
