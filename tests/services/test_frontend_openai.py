"""Requests of the OpenAI API: what is read, and what is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from services.frontend import openai
from services.frontend.errors import ApiError, of_fleet
from services.frontend.openai import AskedChat, AskedCompletion
from tests.services.frontend_harness import asked, chat

VOCABULARY = 258


def completion(**members: Any) -> AskedCompletion:
    return openai.parse(json.dumps(asked(**members)).encode(), AskedCompletion)


def conversation(**members: Any) -> AskedChat:
    return openai.parse(json.dumps(chat("hi", **members)).encode(), AskedChat)


def refused(make: Any, **members: Any) -> tuple[int, str | None, str | None, str]:
    with pytest.raises(ApiError) as error:
        make(**members)
    detail = error.value.body.error
    assert detail.type == "invalid_request_error"
    return error.value.status, detail.param, detail.code, detail.message


BAD = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "5"),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.01),
    ("top_k", -2), ("n", 0), ("n", 9), ("seed", 1.5), ("seed", "x"), ("stream", 1),
    ("stream_options", True), ("kvsp_scope", 5),
    ("stop", ["a"] * 5), ("stop", ""), ("stop", ["a", ""]), ("stop", 5), ("stop", "x" * 1025), ("model", 5),
]  # fmt: skip


@pytest.mark.parametrize("make", [completion, conversation])
@pytest.mark.parametrize(("member", "value"), BAD)
def test_a_bad_member_is_named(make: Any, member: str, value: Any) -> None:
    status, param, _, message = refused(make, **{member: value})
    assert (status, param) == (400, member)
    assert message


REFUSED = [
    (completion, "echo", True), (completion, "logprobs", 0), (completion, "logprobs", 5),
    (completion, "best_of", 2), (completion, "suffix", "end"),
    (conversation, "logprobs", True), (conversation, "top_logprobs", 3),
    (conversation, "tools", [{"type": "function"}]), (conversation, "tool_choice", "required"),
    (conversation, "functions", [{}]), (conversation, "function_call", {"name": "f"}),
    (conversation, "response_format", {"type": "json_object"}), (conversation, "modalities", ["text", "audio"]),
    (conversation, "audio", {"voice": "x"}), (completion, "presence_penalty", 0.5),
    (conversation, "frequency_penalty", -1), (completion, "logit_bias", {"50256": -100}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "member", "value"), REFUSED)
def test_what_would_change_the_answer_is_refused_not_ignored(make: Any, member: str, value: Any) -> None:
    assert refused(make, **{member: value})[:3] == (400, member, "unsupported_parameter")


def test_what_changes_nothing_is_taken() -> None:
    completion(echo=False, logprobs=None, best_of=1, suffix=None, presence_penalty=0, frequency_penalty=0.0,
               logit_bias={}, user="u-1", unheard_of={"x": [1]})  # fmt: skip
    conversation(logprobs=False, top_logprobs=0, tools=[], tool_choice="auto", response_format={"type": "text"},
                 modalities=["text"], store=False, metadata={}, service_tier="auto")  # fmt: skip


@pytest.mark.parametrize("member", ["model", "prompt"])
def test_a_missing_member_is_named(member: str) -> None:
    body = asked()
    del body[member]
    with pytest.raises(ApiError) as error:
        openai.parse(json.dumps(body).encode(), AskedCompletion)
    assert (error.value.status, error.value.body.error.param) == (400, member)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"model":"m","model":"m","prompt":"x"}', b'{"model":"m","prompt":"\\ud800"}', b"\xff{}",
     b'{"model":"m","prompt":"x","temperature":1e400}', b"[" * 100_000],
)  # fmt: skip
def test_malformed_bodies(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        openai.parse(body, AskedCompletion)
    assert error.value.status == 400


def test_bodies_are_bounded() -> None:
    body = json.dumps(asked(prompt="x" * limits.JSON_OCTETS_MAX)).encode()
    with pytest.raises(ApiError) as error:
        openai.parse(body, AskedCompletion)
    assert error.value.status == 413
    many = json.dumps(chat(*["x"] * (limits.JSON_OBJECTS_MAX + 1))).encode()
    with pytest.raises(ApiError) as error:
        openai.parse(many, AskedChat)
    assert error.value.status == 413


NAMES = st.sampled_from(["prompt", "messages", "stop", "n", "seed", "x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner))
BODIES = st.dictionaries(NAMES, VALUES).map(lambda members: json.dumps(asked(**members)).encode())


@given(st.binary(max_size=200) | BODIES)
def test_every_body_is_read_or_refused(body: bytes) -> None:
    """Nothing but ApiError comes out."""
    for kind in (AskedCompletion, AskedChat):
        with suppress(ApiError):
            read = openai.parse(body, kind)
            openai.sampling(read, VOCABULARY)
            if isinstance(read, AskedCompletion):
                openai.prompts(read, VOCABULARY)
            else:
                openai.messages(read)


# --- sampling ---


@pytest.mark.parametrize(
    ("members", "method", "params"),
    [
        ({"temperature": 0}, "greedy", {}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 9}, "greedy", {}),
        ({"temperature": 1e-9}, "greedy", {}),
        ({"temperature": 1, "top_k": 1}, "greedy", {}),
        ({"temperature": None}, "top-p", {"p": 1.0, "temperature": 1.0}),
        ({"temperature": 0.7, "top_p": 0.9}, "top-p", {"p": 0.9, "temperature": 0.7}),
        ({"temperature": 0.7, "top_k": 40}, "top-k", {"k": 40, "temperature": 0.7}),
        ({"temperature": 0.7, "top_k": 40, "top_p": 1}, "top-k", {"k": 40, "temperature": 0.7}),
        ({"temperature": 0.7, "top_k": -1}, "top-p", {"p": 1.0, "temperature": 0.7}),
        ({"temperature": 0.7, "top_k": VOCABULARY}, "top-p", {"p": 1.0, "temperature": 0.7}),
    ],
)
def test_samplers(members: dict[str, Any], method: str, params: dict[str, Any]) -> None:
    sampling = openai.sampling(completion(**members), VOCABULARY)
    assert (sampling.method, dict(sampling.params)) == (method, params)


def test_top_k_and_top_p_together_have_no_sampler() -> None:
    _, param, _, message = refused(
        lambda: openai.sampling(completion(temperature=1, top_k=5, top_p=0.5), VOCABULARY)
    )
    assert param == "top_k"
    assert "cannot be combined" in message


def test_a_checkpoint_alone_says_when_to_stop() -> None:
    sampling = openai.sampling(completion(temperature=0.5, top_k=3, seed=7), VOCABULARY)
    sampler = sampling.sampler(7, 20, [1, 2], deterministic=True)
    assert sampler.params == {"k": 3, "temperature": 0.5, "max_tokens": 20, "stop_tokens": [1, 2]}
    assert (sampler.seed, sampler.step, sampler.deterministic) == (7, 0, True)


# --- prompts and messages ---


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_prompts_as_text_and_as_tokens(prompt: Any, prompts: list[Any]) -> None:
    assert openai.prompts(completion(prompt=prompt), VOCABULARY) == prompts


@pytest.mark.parametrize("prompt", [["a", 5], [5, [6]], ["x"] * 17, [VOCABULARY], [[0], [VOCABULARY]]])
def test_bad_prompts(prompt: Any) -> None:
    assert refused(lambda: openai.prompts(completion(prompt=prompt), VOCABULARY))[1] == "prompt"


@pytest.mark.parametrize("prompt", [[-1], [2**32], [True], {}, None, [[["x"]]], 5])
def test_malformed_prompts(prompt: Any) -> None:
    status, param, _, _ = refused(completion, prompt=prompt)
    assert status == 400
    assert param is not None
    assert param.startswith("prompt")


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts, "name": "u"}]
    body = json.dumps({"model": "m", "messages": said}).encode()
    assert openai.messages(openai.parse(body, AskedChat)) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
    ],
)
def test_messages_that_cannot_be_rendered(message: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "m", "messages": [message]}).encode()
    assert refused(lambda: openai.messages(openai.parse(body, AskedChat)))[1] == param


def test_an_empty_conversation() -> None:
    assert refused(conversation, messages=[])[1] == "messages"


# --- failures of the fleet ---


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (registry.UNAVAILABLE, 503), (registry.GATEWAY_TIMEOUT, 503), (registry.INVALID_STATE, 503),
        (registry.SCOPE_DENIED, 500), (registry.BAD_REQUEST, 500), (registry.INTERNAL, 500),
    ],
)  # fmt: skip
def test_what_a_client_is_told_of_the_fleet(problem: registry.ProblemType, status: int) -> None:
    error = of_fleet(KvspError(problem, "no room", retry_after_s=7))
    detail = error.body.error
    assert (error.status, detail.type) == (status, "server_error")
    if status == 503:
        assert (detail.code, detail.message, detail.retry_after_s) == ("unavailable", "no room", 7)
    else:
        assert detail.message == "internal error"
