"""A stock `openai` client at the front end: nothing of ours but certificates and a base URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai
import pytest

from deploy.local.fleet import Fleet
from deploy.local.model import BLOCK_TOKENS
from tests.stack.harness import RunningStack

pytestmark = pytest.mark.stack

PROMPT = "A prompt of more than two blocks, " * 4
TOKENS = 40
MESSAGES = [
    {"role": "system", "content": "Answer from the document alone."},
    {"role": "user", "content": "How long was the lamp dark?"},
]


@contextlib.contextmanager
def _client(fleet: RunningStack, identity: str = "client-demo") -> Iterator[openai.OpenAI]:
    with openai.DefaultHttpxClient(verify=fleet.ssl_context(identity)) as http:
        yield openai.OpenAI(base_url=f"{fleet.frontend}v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def client(fleet: RunningStack) -> Iterator[openai.OpenAI]:
    with _client(fleet) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list()
    return served.id


def test_a_completion_streamed_or_not_is_the_same(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    whole = client.completions.create(**asked)
    choice = whole.choices[0]
    assert (len(choice.text), choice.finish_reason) == (TOKENS, "length")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), TOKENS)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(each.choices[0].text for each in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len(chunks) > 1


def test_a_repeated_prompt_is_cached_and_says_so(fleet: RunningStack, client: openai.OpenAI, model: str) -> None:
    prompt = "Cached: " + PROMPT
    asked = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**asked)
    assert first.usage is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    with Fleet(fleet.background) as opened:
        opened.wait_published(prompt)  # blocks are stored while the answer goes out, and a little longer
    again = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = again
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert "".join(each.choices[0].text for each in chunks) == first.choices[0].text


@pytest.mark.spec("R-024")
def test_scopes_share_no_cache_but_all_tokens(fleet: RunningStack, client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "Scoped: " + PROMPT, "max_tokens": TOKENS, "temperature": 0}
    own = client.completions.create(**asked)
    with _client(fleet, "client-other") as stranger:
        other = stranger.completions.create(**asked)
    assert other.usage is not None
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert other.choices[0].text == own.choices[0].text


def test_a_chat_streamed_or_not_is_the_same(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_completion_tokens": TOKENS, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content is not None
    assert len(message.content) == TOKENS
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == message.content


def test_a_seed_decides_the_sample(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str:
        asked = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.5, "top_p": 0.95}
        return client.completions.create(**asked, seed=seed).choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


@pytest.mark.spec("R-210")
def test_errors_are_those_of_the_api(fleet: RunningStack, client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=model, prompt="x" * 9000)
    with _client(fleet, "outsider") as outsider, pytest.raises(openai.PermissionDeniedError):
        outsider.completions.create(model=model, prompt="x")
