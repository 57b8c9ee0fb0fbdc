"""Text out of tokens: whole characters, as soon as they are, and nothing of a stop string."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol.errors import KvspError
from services.frontend.text import CONTEXT, UNKNOWN, WINDOW_MAX, Decode, Detokenizer, Stops
from services.frontend.tokenizer import PLAIN_TEMPLATE, Tokenizer
from tests.services.frontend_harness import CONTEXT as CONTEXT_TOKENS
from tests.services.frontend_harness import make_model


def octets(tokens: Sequence[int]) -> str:
    """A byte-level decoder: token t is octet t."""
    return bytes(tokens).decode(errors="replace")


def spaced(tokens: Sequence[int]) -> str:
    """A decoder like SentencePiece's: the space before a word is not shown before the first."""
    return "".join(f" w{token}" for token in tokens).removeprefix(" ")


def fallback(tokens: Sequence[int]) -> str:
    """Like its byte fallback: octets that are no text show as one U+FFFD each."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return UNKNOWN * len(tokens)


ANY_TOKENS = st.lists(st.integers(0, 255) | st.sampled_from(list("€😀é".encode())), max_size=300)


@given(ANY_TOKENS)
def test_the_pieces_joined_are_the_whole(tokens: list[int]) -> None:
    text = Detokenizer(octets)
    assert "".join(map(text.push, tokens)) + text.flush() == octets(tokens)
    assert text.flush() == ""


@pytest.mark.parametrize("decode", [octets, fallback])
@given(st.text(max_size=100))
def test_text_never_shows_half_a_character(decode: Decode, said: str) -> None:
    text = Detokenizer(decode)
    so_far = ""
    for token in said.encode():
        so_far += text.push(token)
        assert said.startswith(so_far)
    assert so_far + text.flush() == said


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300))
def test_the_space_between_words_is_kept(tokens: list[int]) -> None:
    text = Detokenizer(spaced)
    assert "".join(map(text.push, tokens)) + text.flush() == spaced(tokens)


def test_the_work_for_a_token_does_not_grow() -> None:
    lengths: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return octets(tokens)

    text = Detokenizer(decode)
    for token in [0xFF] * 2000 + [0x41] * 2000 + list("😀".encode()) * 500:
        text.push(token)
    assert max(lengths) <= WINDOW_MAX + CONTEXT


def test_a_real_tokenizer(tokenizer: Tokenizer) -> None:
    said = "Grüße, 世界! 👩‍👩‍👧 done"
    tokens = tokenizer._tokenizer(said)["input_ids"]
    text = Detokenizer(tokenizer.decode)
    pieces = [text.push(token) for token in [0, *tokens, 1]] + [text.flush()]
    assert "".join(pieces) == said
    assert not any(UNKNOWN in piece for piece in pieces)


# --- stop strings ---

SIZES = st.lists(st.integers(0, 5), max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.text("abc", max_size=40), STOPS, SIZES)
def test_text_is_cut_at_the_first_complete_stop_string(said: str, strings: list[str], sizes: list[int]) -> None:
    ends_at = next((end for end in range(len(said) + 1) if said[:end].endswith(tuple(strings))), len(said))
    ended_by = [len(each) for each in strings if said[:ends_at].endswith(each)]
    at = ends_at - max(ended_by) if ended_by else None
    stops = Stops(strings)
    given_out = ""
    ends = [*itertools.accumulate(sizes), len(said)]
    for start, end in itertools.pairwise([0, *ends]):
        given_out += stops.push(said[start:end])
        assert said[:at].startswith(given_out), "nothing of a stop string is given out"
    given_out += stops.flush()
    assert stops.hit == (at is not None)
    assert given_out == said[:at]


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    stops = Stops(["END"])
    assert stops.push("the E") == "the "
    assert stops.push("N") == ""
    assert stops.push("T") == "ENT"
    assert stops.push("EN") == ""
    assert stops.push("D of it") == ""
    assert stops.hit
    assert (stops.push("more"), stops.flush()) == ("", "")


def test_without_stop_strings_text_passes() -> None:
    stops = Stops([])
    assert stops.push("as it is") == "as it is"
    assert (stops.hit, stops.flush()) == (False, "")


# --- tokenizer ---


def test_what_the_model_says_of_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocabulary, tokenizer.context_tokens) == (258, CONTEXT_TOKENS)
    assert tokenizer.stop_tokens == {1}


async def test_text_to_tokens_and_back(tokenizer: Tokenizer) -> None:
    tokens = await tokenizer.encode("naïve")
    assert len(tokens) == len("naïve".encode())
    assert tokenizer.decode(tokens) == "naïve"
    assert tokenizer.decode([0, *tokens, 1]) == "naïve"
    assert tokenizer.least_tokens(["naïve", "!"]) <= len(tokens) + 1


async def test_the_chat_template_of_the_model(tokenizer: Tokenizer) -> None:
    tokens = await tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokens) == "[user]\nhi\n\n[assistant]\n"


async def test_a_model_without_chat_template_gets_a_plain_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "bare")
    (model / "chat_template.jinja").unlink()
    bare = Tokenizer(model)
    tokens = await bare.encode_chat([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
    assert bare._template == PLAIN_TEMPLATE
    assert tokens[0] == 0
    assert bare.decode(tokens) == "[system]\nbe\n\n[user]\nhi\n\n[assistant]\n"


async def test_a_template_may_refuse_messages(tmp_path: Path) -> None:
    model = make_model(tmp_path / "picky")
    (model / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(KvspError, match="refuses these messages: roles must alternate"):
        await Tokenizer(model).encode_chat([{"role": "user", "content": "SECRET"}])
    (model / "chat_template.jinja").write_text("{{ messages[0].content.missing.member }}")
    with pytest.raises(KvspError) as refused:
        await Tokenizer(model).encode_chat([{"role": "user", "content": "SECRET"}])
    assert refused.value.detail == "the model's chat template refuses these messages"


def test_every_stop_token_of_the_model_counts(tmp_path: Path) -> None:
    model = make_model(tmp_path / "stops")
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert Tokenizer(model).stop_tokens == {1, 7}


def test_no_model_is_taken_from_a_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        Tokenizer(tmp_path / "org" / "name")
