import copy
import hashlib
import hmac
import json
import pickle
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol.keys import ZERO, ScopeKey, block_keys, scope_id
from tests.protocol.vectors import INPUTS, text

SECRET = bytes.fromhex(INPUTS["scope_key"])
KEY = ScopeKey(SECRET)
COMPAT = bytes.fromhex(text("compat_id"))
TOKENS: list[int] = INPUTS["tokens"]


@pytest.mark.spec("R-021")
def test_scope_id_vector() -> None:
    assert scope_id(KEY).hex() == text("scope_id")


@pytest.mark.spec("R-022")
@pytest.mark.parametrize("tokens", [TOKENS, tuple(TOKENS), array("I", TOKENS)])
def test_block_key_vectors(tokens: list[int]) -> None:
    assert [key.hex() for key in block_keys(KEY, COMPAT, tokens, 4)] == [text("K0"), text("K1")]


@pytest.mark.spec("R-022", "R-023")
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_chain_against_the_formula(tokens: list[int], block: int) -> None:
    parent, expected = bytes(32), []
    for at in range(0, len(tokens) // block * block, block):
        words = b"".join(token.to_bytes(4, "big") for token in tokens[at : at + block])
        parent = hmac.new(SECRET, b"KVSP-BLOCK-1\0" + COMPAT + parent + words, hashlib.sha256).digest()
        expected.append(parent)
    assert block_keys(KEY, COMPAT, tokens, block) == expected


@pytest.mark.spec("R-022")
def test_chain_continues_from_a_parent() -> None:
    first, second = block_keys(KEY, COMPAT, TOKENS, 4)
    assert block_keys(KEY, COMPAT, TOKENS[4:], 4, parent=first) == [second]
    assert block_keys(KEY, COMPAT, TOKENS[:4], 4, parent=ZERO) == [first]


@pytest.mark.spec("R-022", "R-024")
def test_first_token_and_scope_reach_every_key() -> None:
    keys = block_keys(KEY, COMPAT, TOKENS, 4)
    changed = block_keys(KEY, COMPAT, [TOKENS[0] + 1, *TOKENS[1:]], 4)
    other = block_keys(ScopeKey(bytes(32)), COMPAT, TOKENS, 4)
    assert len({*keys, *changed, *other}) == 6


@pytest.mark.spec("R-023")
@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_complete_blocks(tokens: int, keys: int) -> None:
    assert len(block_keys(KEY, COMPAT, TOKENS[:tokens], 4)) == keys


@pytest.mark.spec("R-008")
@pytest.mark.parametrize("token", [2**32, -1, 2**64, 1.5, True, "1", None])
def test_tokens_are_unsigned_32_bit(token: object) -> None:
    with pytest.raises(ValueError):
        block_keys(KEY, COMPAT, [1, 2, 3, token], 4)  # type: ignore[list-item]
    with pytest.raises(ValueError):  # in the tail as well
        block_keys(KEY, COMPAT, [1, token], 4)  # type: ignore[list-item]


def test_bad_arguments() -> None:
    for compat, block, parent in [(COMPAT[1:], 4, ZERO), (COMPAT, 0, ZERO), (COMPAT, -4, ZERO), (COMPAT, 4, b"")]:
        with pytest.raises(ValueError):
            block_keys(KEY, compat, TOKENS, block, parent)


def test_tokens_are_left_alone() -> None:
    tokens = array("I", TOKENS)
    block_keys(KEY, COMPAT, tokens, 4)
    assert tokens.tolist() == TOKENS


@pytest.mark.spec("R-020")
def test_short_key_is_refused() -> None:
    with pytest.raises(ValueError):
        ScopeKey(SECRET[:31])
    assert ScopeKey(SECRET * 2).reveal() == SECRET * 2


@pytest.mark.spec("D15")
def test_key_is_never_shown_or_encoded() -> None:
    for shown in (repr(KEY), str(KEY), f"{KEY}", f"{[KEY]}"):
        assert SECRET.hex() not in shown
        assert repr(SECRET) not in shown
    for leak in (pickle.dumps, json.dumps, msgspec.json.encode, copy.deepcopy, vars):
        with pytest.raises(TypeError):
            leak(KEY)


def test_equality() -> None:
    assert ScopeKey(SECRET) == KEY
    assert ScopeKey(bytes(32)) != KEY
    assert KEY != SECRET
    assert len({KEY, ScopeKey(SECRET)}) == 1


@pytest.mark.spec("R-020")
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_parse_hexadecimal(end: bytes) -> None:
    assert ScopeKey.parse(SECRET.hex().encode() + end) == KEY
    assert ScopeKey.parse(SECRET.hex().upper().encode() + end) == KEY


@pytest.mark.spec("R-020")
def test_parse_raw() -> None:
    assert ScopeKey.parse(SECRET).reveal() == SECRET
    assert ScopeKey.parse(SECRET[:-1] + b"\n").reveal() == SECRET[:-1] + b"\n"


@pytest.mark.spec("R-020")
@pytest.mark.parametrize("octets", [b"", b"\n", SECRET[:31], b"a" * 62, b"a" * 65, b"a" * 40 + b"\n"])
def test_parse_refuses_weak_files(octets: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        ScopeKey.parse(octets)
    assert octets.decode("latin-1").strip() == "" or octets.decode("latin-1") not in str(caught.value)
