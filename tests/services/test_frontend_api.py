"""The OpenAI API over real sockets: answers, errors, and who may ask for what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvsp.protocol import jsonio, keys, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.v1 import frontend_pb2, instance_pb2
from services.frontend.tokenizer import Tokenizer
from tests.services.frontend_harness import (
    BLOCK_TOKENS,
    COMPAT,
    CONTEXT,
    IDS,
    II1,
    II2,
    MODEL,
    PROMPT,
    SCOPES,
    World,
    asked,
    chat,
    finished,
    tokens,
    world,
)

SAID = "The ansẅer is 42, my friend."
CHAT = "v1/chat/completions"


# --- answers ---


async def test_a_whole_completion(fe: World) -> None:
    fe.ii1.cached = 12
    answer = (await fe.ask(asked())).json
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": SAID, "logprobs": None, "finish_reason": "stop"}]
    output = len(fe.ii1.output)
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": output,
        "total_tokens": len(PROMPT) + output,
        "prompt_tokens_details": {"cached_tokens": 12},
    }


async def test_a_whole_chat_completion(fe: World) -> None:
    answer = (await fe.ask(chat("hi"), CHAT)).json
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SAID, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert fe.tokenizer.decode(list(fe.ii1.requests[0].prompt)) == "[user]\nhi\n\n[assistant]\n"


async def test_a_streamed_completion(fe: World) -> None:
    reply = await fe.ask(asked(stream=True))
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert reply.text == SAID
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(SAID) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    assert max(map(len, (chunk["choices"][0]["text"] for chunk in chunks))) == 1, "as they came"


async def test_a_streamed_chat_with_usage(fe: World) -> None:
    reply = await fe.ask(chat("hi", stream=True, stream_options={"include_usage": True}), CHAT)
    first, *middle, last, usage, done = reply.events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == SAID
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(fe.ii1.output)
    assert {chunk["usage"] for chunk in (first, *middle, last)} == {None}
    assert done == "[DONE]"


async def test_length_is_a_reason_to_finish(fe: World) -> None:
    answer = (await fe.ask(asked(max_tokens=7))).json
    assert answer["choices"][0] == {"index": 0, "text": "The ans", "logprobs": None, "finish_reason": "length"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_session(fe: World, stream: bool) -> None:
    fe.ii1.hold_at = 20
    reply = await fe.ask(asked(stop=["zzz", "42"], stream=stream, stream_options=None))
    if stream:
        *_, last, done = reply.events
        assert (reply.text, last["choices"][0]["finish_reason"], done) == ("The ansẅer is ", "stop", "[DONE]")
    else:
        assert reply.json["choices"][0]["text"] == "The ansẅer is "
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert reply.json["usage"]["completion_tokens"] == len("The ansẅer is 42".encode())
    await fe.ended()
    await fe.placement.told(lambda: fe.ii1.ended == fe.placement.ended)


async def test_what_was_sampled_behind_a_stop_string_does_not_count(fe: World) -> None:
    async def script(request: instance_pb2.GenerateRequest) -> AsyncIterator[instance_pb2.GenerateEvent]:
        yield tokens(1, 0, *fe.encode("one END two"))
        yield finished(1, "length", 11)

    fe.ii1.scripts.append(script)
    answer = (await fe.ask(asked(stop="END"))).json
    assert answer["choices"][0]["text"] == "one "
    assert answer["usage"]["completion_tokens"] == len("one END")


async def test_text_held_back_for_a_stop_string_comes_at_the_end(fe: World) -> None:
    reply = await fe.ask(asked(stop="friend.!", stream=True))
    assert reply.text == SAID


async def test_every_choice_is_a_session_of_its_own(fe: World) -> None:
    fe.ii1.cached = 8
    answer = (await fe.ask(asked(n=3, temperature=1, seed=5))).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in answer["choices"]} == {SAID}
    assert sorted(request.sampler.seed for request in fe.ii1.requests) == [5, 6, 7]
    assert len({request.session for request in fe.ii1.requests}) == 3
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (len(PROMPT), 8)
    assert usage["completion_tokens"] == 3 * len(fe.ii1.output)
    await fe.ended(3)


async def test_several_prompts_and_choices_in_one_stream(fe: World) -> None:
    reply = await fe.ask(asked(prompt=["one", "two"], n=2, stream=True))
    texts = dict.fromkeys(range(4), "")
    for event in reply.events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert set(texts.values()) == {SAID}
    asked_for = sorted(fe.tokenizer.decode(list(request.prompt)) for request in fe.ii1.requests)
    assert asked_for == ["one", "one", "two", "two"]


async def test_prompts_may_be_tokens(fe: World) -> None:
    await fe.ask(asked(prompt=[70, 71, 72]))
    assert list(fe.ii1.requests[0].prompt) == [70, 71, 72]


async def test_what_an_instance_is_asked_for(fe: World) -> None:
    await fe.ask(asked(max_tokens=9, temperature=0.5, top_k=7, seed=-3))
    (request,), (assignment,) = fe.ii1.requests, fe.placement.assigned
    prompt = fe.encode(PROMPT)
    assert (request.epoch, request.from_index, list(request.prompt)) == (1, 0, prompt)
    assert (request.scope_id.hex(), request.compat_id) == (IDS["demo"], COMPAT)
    assert jsonio.decode(request.sampler.params_json, dict[str, Any]) == {
        "k": 7, "temperature": 0.5, "max_tokens": 9, "stop_tokens": [1],
    }  # fmt: skip
    assert (request.sampler.method, request.sampler.seed, request.sampler.step) == ("top-k", -3, 0)
    start = assignment.start
    assert (start.session, start.epoch, start.output_offset, list(start.generated)) == (request.session, 0, 0, [])
    names = keys.block_keys(SCOPES["demo"], COMPAT, prompt, BLOCK_TOKENS)
    assert (start.prompt_blocks, list(start.prompt_tail)) == (b"".join(names), prompt[-1:])
    assert (start.sampler, assignment.prompt_tokens) == (request.sampler, len(prompt))


async def test_seeds_are_random_unless_asked_for(fe: World) -> None:
    for _ in range(3):
        await fe.ask(asked(temperature=1))
    assert len({request.sampler.seed for request in fe.ii1.requests}) == 3


async def test_a_model_may_be_told_not_to_stop(fe: World) -> None:
    await fe.ask(asked(ignore_eos=True))
    assert jsonio.decode(fe.ii1.requests[0].sampler.params_json, dict[str, Any])["stop_tokens"] == []


@pytest.mark.spec("R-049")
@pytest.mark.parametrize(
    ("asserted", "greedy", "sampled"),
    [({}, False, False), ({"deterministic": True}, True, False), ({"deterministic_sampling": True}, False, True)],
)
async def test_determinism_is_asserted_by_the_operator_alone(
    tmp_path: Path, tokenizer: Tokenizer, asserted: dict[str, bool], greedy: bool, sampled: bool
) -> None:
    async with world(tmp_path, tokenizer, **asserted) as fe:
        await fe.ask(asked())
        await fe.ask(asked(temperature=1, seed=1, deterministic=True))
        assert [request.sampler.deterministic for request in fe.ii1.requests] == [greedy, sampled]


async def test_defaults(fe: World) -> None:
    body = asked()
    del body["max_tokens"]
    await fe.ask(body)
    body = chat("hi")
    del body["max_tokens"]
    await fe.ask(body, CHAT)
    await fe.ask(chat("hi", max_completion_tokens=3), CHAT)
    wanted = [jsonio.decode(each.sampler.params_json, dict[str, Any])["max_tokens"] for each in fe.ii1.requests]
    assert wanted == [16, CONTEXT - len(fe.ii1.requests[1].prompt), 3]


@pytest.mark.spec("R-117")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_may_ask_where_and_why_there(fe: World, stream: bool) -> None:
    reply = await fe.ask(asked(kvsp_explain=True, stream=stream))
    bodies = [each for each in reply.events if each != "[DONE]" and "kvsp" in each] if stream else [reply.json]
    ((told,),) = (body["kvsp"] for body in bodies)
    session = fe.placement.assigned[0].start.session
    assert (told["choice"], told["session"], told["instance"], told["epoch"]) == (0, session, II1, 1)
    assert (told["matched_blocks"], told["cost_us"], told["directive"]) == (3, 700, "d-1")
    assert told["candidates"] == [
        {"instance": II1, "wait_us": 0, "fetch_us": 200, "recompute_all_us": 900, "cost_us": 700},
        {"instance": II2, "wait_us": 5},
    ]
    assert "kvsp" not in (await fe.ask(asked())).json


async def test_models(fe: World) -> None:
    model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "kvsp"}
    assert (await fe.ask(b"", "v1/models", method="GET")).json == {"object": "list", "data": [model]}
    assert (await fe.ask(b"", f"v1/models/{MODEL}", method="GET")).json == model
    reply = await fe.ask(b"", "v1/models/other", method="GET")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


# --- refusals ---


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("v1/embeddings", "POST", 404, "unknown_url"), ("", "GET", 404, "unknown_url"),
        ("v1/completions", "GET", 405, "method_not_allowed"), ("v1/models", "POST", 405, "method_not_allowed"),
    ],
)  # fmt: skip
async def test_paths_and_methods(fe: World, path: str, method: str, status: int, code: str) -> None:
    reply = await fe.ask(asked(), path, method=method)
    assert (reply.status, reply.error["code"]) == (status, code)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("members", "status", "param", "code"),
    [
        ({"n": 9}, 400, "n", None),
        ({"echo": True}, 400, "echo", "unsupported_parameter"),
        ({"model": "gpt"}, 404, "model", "model_not_found"),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": "x" * 500, "max_tokens": 13}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * CONTEXT, "max_tokens": None}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 50 * CONTEXT}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": ["x", "x" * CONTEXT]}, 400, "prompt", "context_length_exceeded"),
        ({"max_tokens": 10**12}, 400, "prompt", "context_length_exceeded"),
    ],
)
async def test_refusals_come_before_any_session(
    fe: World, members: dict[str, Any], status: int, param: str, code: str | None, stream: bool
) -> None:
    reply = await fe.ask(asked(stream=stream, **members))
    assert (reply.status, reply.error["param"], reply.error["code"]) == (status, param, code)
    assert reply.error["type"] == "invalid_request_error"
    assert not fe.placement.assigned


async def test_the_context_error_says_how_long_is_too_long(fe: World) -> None:
    error = (await fe.ask(asked(prompt="x" * 500, max_tokens=13))).error
    assert error["message"] == (
        "this model's maximum context length is 512 tokens; the prompt has 500 and 13 more are asked for"
    )
    assert (await fe.ask(asked(prompt="x" * 500, max_tokens=12))).status == 200


async def test_stream_options_need_a_stream(fe: World) -> None:
    assert (await fe.ask(asked(stream_options={"include_usage": True}))).error["param"] == "stream_options"


async def test_a_chat_that_is_too_long(fe: World) -> None:
    reply = await fe.ask(chat("x" * CONTEXT), CHAT)
    assert (reply.error["param"], reply.error["code"]) == ("messages", "context_length_exceeded")


async def test_too_many_requests_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, tokenizer, requests_max=1) as fe:
        fe.ii1.hold_at = 3
        first = fe.parts(asked(stream=True))
        await anext(first)
        reply = await fe.ask(asked())
        assert (reply.status, reply.error["code"], reply.error["retry_after_s"]) == (503, "unavailable", 1)
        await first.aclose()


@pytest.mark.spec("D13")
async def test_a_caller_has_so_many_choices_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, tokenizer, caller_choices_max=4) as fe:
        refused = await fe.ask(asked(prompt=["a", "b"], n=3))
        assert (refused.status, refused.error["param"], refused.error["code"]) == (400, "n", "too_large")
        fe.ii1.hold_at = 3
        first = fe.parts(asked(n=2, stream=True))
        second = fe.parts(chat("hi", n=2, stream=True), CHAT)
        await anext(first)
        await anext(second)
        for body, path in ((asked(), "v1/completions"), (chat("hi"), CHAT)):
            refused = await fe.ask(body, path)
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert (refused.error["type"], refused.error["retry_after_s"]) == ("rate_limit_error", 1)
        assert len(fe.placement.assigned) == 4
        fe.ii1.hold_at = None
        assert (await fe.ask(asked(kvsp_scope="demo"), who="both")).status == 200  # another caller
        await first.aclose()
        async with asyncio.timeout(30):
            while (await fe.ask(asked(n=2))).status != 200:
                await asyncio.sleep(0.005)
        await second.aclose()


@pytest.mark.spec("D13")
async def test_a_caller_has_so_many_characters_waiting(tmp_path: Path, tokenizer: Tokenizer) -> None:
    held, gate = threading.Event(), threading.Event()
    async with world(tmp_path, tokenizer, caller_chars_max=100) as fe:
        for body, path, param in ((asked(prompt=["x" * 51] * 2), "v1/completions", "prompt"),
                                  (chat("x" * 51, "y" * 50), CHAT, "messages")):  # fmt: skip
            refused = await fe.ask(body, path)
            assert (refused.status, refused.error["param"], refused.error["code"]) == (400, param, "too_large")
        # The one thread that encodes is busy with others' prompts.
        busy = tokenizer._thread.submit(lambda: held.set() or gate.wait(30))
        await asyncio.to_thread(held.wait, 30)
        waiting = asyncio.create_task(fe.ask(asked(prompt="x" * 60)))
        while not tokenizer._thread._work_queue.qsize():
            await asyncio.sleep(0.001)
        refused = await fe.ask(asked(prompt="x" * 41))
        gate.set()
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert (await waiting).status == 200
        assert busy.result()
        assert (await fe.ask(asked(prompt="x" * 41))).status == 200


# --- who may ask ---


@pytest.mark.parametrize("who", ["unheard-of", "ii1"])
async def test_only_clients_and_front_ends_may_call(fe: World, who: str) -> None:
    for path in ("v1/completions", "v1/models", "nowhere"):
        with pytest.raises(KvspError) as refused:
            await fe.ask(asked(), path, who)
        assert refused.value.problem is registry.FORBIDDEN
    assert not fe.placement.assigned


async def test_the_scope_is_the_callers_own(fe: World) -> None:
    await fe.ask(asked())
    assert fe.ii1.requests[0].scope_id.hex() == IDS["demo"]


async def test_without_a_scope_nothing_is_served(fe: World) -> None:
    reply = await fe.ask(asked(), who="bare")
    assert (reply.status, reply.error["type"]) == (403, "permission_error")
    assert not fe.placement.assigned


async def test_foreign_and_unknown_scopes_are_refused_alike(fe: World) -> None:
    foreign = await fe.ask(asked(kvsp_scope="other"))
    unknown = await fe.ask(asked(kvsp_scope="no such"))
    assert foreign.status == 403
    assert foreign.body == unknown.body
    assert not fe.placement.assigned


async def test_a_caller_of_several_scopes_names_one(fe: World) -> None:
    reply = await fe.ask(asked(), who="both")
    assert (reply.status, reply.error["param"]) == (400, "kvsp_scope")
    await fe.ask(asked(kvsp_scope="other"), who="both")
    assert fe.ii1.requests[0].scope_id.hex() == IDS["other"]


async def test_or_the_operator_has_named_one_for_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, tokenizer, default_scope="other") as fe:
        await fe.ask(asked(), who="both")
        await fe.ask(asked(), who="demo")
        assert [each.scope_id.hex() for each in fe.ii1.requests] == [IDS["other"], IDS["demo"]]


@pytest.mark.spec("R-215")
async def test_nothing_confidential_in_logs_and_errors(fe: World) -> None:
    with capture_logs() as logs:
        for body in (asked(prompt="SECRET" * 100), asked(prompt="SECRET", n=9), asked(prompt=[5, "SECRET"])):
            assert "SECRET" not in (await fe.ask(body)).body.decode()
        await fe.ask(asked(prompt="SECRET"))
        await fe.ended()
    assert "SECRET" not in str(logs)
    assert not any(SCOPES["demo"].reveal().hex() in str(each) for each in logs)


# --- a slow client ---


async def test_a_slow_client_makes_nobody_buffer_without_bound(tmp_path: Path, tokenizer: Tokenizer) -> None:
    total, again = 6000, 1000  # tokens; and how many the instance sends once more with each, to make it heavy
    async with world(tmp_path, tokenizer, context_tokens=2 * total) as fe:

        async def script(request: instance_pb2.GenerateRequest) -> AsyncIterator[instance_pb2.GenerateEvent]:
            for index in range(total):
                known = min(index, again)
                yield tokens(1, index - known, *[limits.TOKEN_MAX] * known, 70)
            yield finished(1, "length", total)

        fe.ii1.scripts.append(script)
        # gRPC takes several MB for a reader that it thinks is fast.
        slow = grpc.aio.insecure_channel(fe.address("fe"), options=[("grpc.http2.bdp_probe", 0)])
        async with slow as fe.channel:
            call = fe.call(jsonio.encode(asked(max_tokens=total, stream=True)))
            assert (await call.read()).start.status == 200
            before = -1
            while before != fe.ii1.sent:  # until the instance is held up
                before = fe.ii1.sent
                await asyncio.sleep(0.1)
            assert fe.ii1.sent < total // 2
            chunks = 0
            while isinstance(part := await call.read(), frontend_pb2.ApiReply):
                chunks += part.octets.count(b'"finish_reason":null')
            assert (chunks, fe.ii1.sent) == (total, total + 1)
