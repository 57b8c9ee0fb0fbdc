"""A front end over real Unix sockets, between callers and a fleet that does as it is told."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvsp.protocol import jsonio, keys, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.policy import Policy
from kvsp.rpc.channel import open_channel
from kvsp.rpc.config import ServiceConfig
from kvsp.rpc.errors import from_rpc_error
from kvsp.rpc.identity import speak_for
from kvsp.rpc.server import make_server
from kvsp.v1 import (
    frontend_pb2,
    frontend_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from services.frontend.api import Api, Served
from services.frontend.fleet import Fleet, Timing
from services.frontend.server import FrontendService, register
from services.frontend.tokenizer import Tokenizer
from tests.services.rpc import served

II1, II2 = "https://ii1.example/kvsp/", "https://ii2.example/kvsp/"
BASE = "https://fe.example/"
SCOPES = {"demo": ScopeKey(b"d" * 32), "other": ScopeKey(b"o" * 32)}
IDS = {name: keys.scope_id(key).hex() for name, key in SCOPES.items()}
COMPAT = bytes(range(32))
BLOCK_TOKENS = 4
CONTEXT = 512
MODEL = "tiny"
PROMPT = "a quick brown fox"

POLICY = Policy.load(f"""
[identities."spiffe://t/fe"]
roles = ["frontend"]
base_uris = ["{BASE}"]
scopes = ["{IDS["demo"]}", "{IDS["other"]}"]
[identities."spiffe://t/demo"]
roles = ["client"]
scopes = ["{IDS["demo"]}"]
[identities."spiffe://t/both"]
roles = ["client"]
scopes = ["{IDS["demo"]}", "{IDS["other"]}"]
[identities."spiffe://t/bare"]
roles = ["client"]
[identities."spiffe://t/ii1"]
roles = ["instance"]
base_uris = ["{II1}"]
scopes = ["{IDS["demo"]}"]
""")


def make_model(folder: Path) -> Path:
    """Tokenizer and configuration of the dev stack's model, without weights."""
    from transformers import LlamaConfig

    from deploy.local.model import _save_tokenizer

    _save_tokenizer(folder)
    LlamaConfig(vocab_size=258, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=1).save_pretrained(
        folder
    )
    return folder


class ScriptedPlacement(placement_pb2_grpc.PlacementServicer):
    """Binds every session to `instance`, moves it when told, and remembers what it was told."""

    def __init__(self) -> None:
        self.instance = II1
        self.bindings: dict[str, placement_pb2.Binding] = {}
        self.assigned: list[placement_pb2.AssignRequest] = []
        self.ended: list[str] = []
        self.refusals: deque[KvspError] = deque()
        self.ends: KvspError | None = None
        self.lose_reply = False
        self.changed = asyncio.Condition()

    async def Assign(self, request: placement_pb2.AssignRequest, context: Any) -> placement_pb2.AssignReply:
        self.assigned.append(request)
        if self.refusals:
            raise self.refusals.popleft()
        session = request.start.session
        if session in self.bindings:
            raise KvspError(registry.CONFLICT)
        binding = placement_pb2.Binding(session=session, epoch=1, instance=self.instance)
        await self.set(session, binding)
        if self.lose_reply:
            self.lose_reply = False
            await context.abort(grpc.StatusCode.UNAVAILABLE, "as if the connection broke")
        seen = placement_pb2.Candidate
        candidates = [
            seen(instance=II1, wait_us=0, fetch_us=200, recompute_all_us=900, cost_us=700),
            seen(instance=II2, wait_us=5),
        ]
        return placement_pb2.AssignReply(
            binding=binding, matched=3, cost_us=700, candidates=candidates, directive="d-1"
        )

    async def Follow(
        self, request: placement_pb2.SessionName, context: Any
    ) -> AsyncIterator[placement_pb2.Binding]:
        epoch = 0
        while True:
            async with self.changed:
                binding = self.bindings.get(request.session)
                if binding is None:
                    if self.ends is not None:
                        raise self.ends
                    if epoch:
                        return
                    raise KvspError(registry.NOT_FOUND)
                if binding.epoch == epoch:
                    await self.changed.wait()
                    continue
            epoch = binding.epoch
            yield binding

    async def EndSession(self, request: placement_pb2.SessionName, context: Any) -> placement_pb2.EndSessionReply:
        self.ended.append(request.session)
        if request.session not in self.bindings:
            raise KvspError(registry.NOT_FOUND)
        await self.set(request.session, None)
        return placement_pb2.EndSessionReply()

    async def set(self, session: str, binding: placement_pb2.Binding | None) -> None:
        async with self.changed:
            if binding is None:
                self.bindings.pop(session, None)
            else:
                self.bindings[session] = binding
            self.changed.notify_all()

    async def move(self, session: str, instance: str) -> None:
        """Bind a session anew, under the next epoch."""
        epoch = self.bindings[session].epoch + 1
        await self.set(session, placement_pb2.Binding(session=session, epoch=epoch, instance=instance))

    async def told(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds that a call here brings about."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


Events = AsyncIterator[instance_pb2.GenerateEvent]


class ScriptedInstance(instance_pb2_grpc.InstanceServicer):
    """Says `output`, from wherever it is asked to, unless a script says otherwise."""

    def __init__(self, output: Sequence[int]) -> None:
        self.output = output
        self.cached = 0
        self.requests: list[instance_pb2.GenerateRequest] = []
        self.ended: list[str] = []
        self.hold_at: int | None = None
        self.scripts: deque[Callable[[instance_pb2.GenerateRequest], Events]] = deque()
        self.sent = 0
        self.left = asyncio.Event()

    async def Generate(self, request: instance_pb2.GenerateRequest, context: Any) -> Events:
        self.requests.append(request)
        script = self.scripts.popleft() if self.scripts else self._play
        try:
            async for event in script(request):
                yield event
                self.sent += 1
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _play(self, request: instance_pb2.GenerateRequest) -> Events:
        limit = jsonio.decode(request.sampler.params_json, dict[str, Any])["max_tokens"]
        output = self.output[:limit]
        epoch = request.epoch
        yield reused(epoch, len(request.prompt), self.cached)
        for index in range(request.from_index, len(output)):
            if index == self.hold_at:
                await asyncio.Event().wait()
            yield tokens(epoch, index, output[index])
        yield finished(epoch, "length" if len(output) == limit else "stop", len(output))

    async def EndGeneration(
        self, request: instance_pb2.EndGenerationRequest, context: Any
    ) -> instance_pb2.EndGenerationReply:
        self.ended.append(request.session)
        return instance_pb2.EndGenerationReply()


def tokens(epoch: int, first_index: int, *values: int) -> instance_pb2.GenerateEvent:
    return instance_pb2.GenerateEvent(
        epoch=epoch, tokens=instance_pb2.Tokens(first_index=first_index, tokens=values)
    )


def finished(epoch: int, reason: str, output_tokens: int) -> instance_pb2.GenerateEvent:
    return instance_pb2.GenerateEvent(
        epoch=epoch, finished=instance_pb2.Finished(reason=reason, output_tokens=output_tokens)
    )


def reused(epoch: int, prompt_tokens: int, cached: int) -> instance_pb2.GenerateEvent:
    return instance_pb2.GenerateEvent(
        epoch=epoch, reused=instance_pb2.Reused(prompt_tokens=prompt_tokens, cached_tokens=cached)
    )


@dataclass
class Reply:
    """What a caller got."""

    status: int
    media: str
    length: int | None
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        assert self.media == "application/json"
        assert self.length == len(self.body)
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The data of every server-sent event; `[DONE]` as it is."""
        assert self.media == "text/event-stream"
        assert self.length is None
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        data = [block.removeprefix("data: ") for block in blocks]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    @property
    def text(self) -> str:
        """All text of a stream, of whatever choice."""
        found = ""
        for event in self.events:
            if event != "[DONE]":
                for choice in event.get("choices", ()):
                    found += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        return found


class World:
    """A front end, its fleet, and callers of it."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.placement = ScriptedPlacement()
        output = [*self.encode("The ansẅer is 42, my friend."), 1]
        self.instances = {II1: ScriptedInstance(output), II2: ScriptedInstance(output)}
        self.ii1, self.ii2 = self.instances[II1], self.instances[II2]
        self.servers: dict[str, grpc.aio.Server] = {}
        self.fleet: Fleet
        self.channel: grpc.aio.Channel

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer._tokenizer(text)["input_ids"])

    def address(self, name: str) -> str:
        return f"unix:{self.folder}/{name}.sock"

    async def start(self, name: str) -> None:
        """Start "placement" or an instance, at its place."""
        file = {II1: "ii1", II2: "ii2"}.get(name, name)
        config = ServiceConfig(listen=self.address(file), policy="", principal="")
        running = make_server(config, ()).grpc
        if name == "placement":
            placement_pb2_grpc.add_PlacementServicer_to_server(self.placement, running)
        else:
            instance_pb2_grpc.add_InstanceServicer_to_server(self.instances[name], running)
        await running.start()
        self.servers[name] = running

    async def stop(self, name: str) -> None:
        """As if it crashed: its connections break."""
        await self.servers.pop(name).stop(None)

    async def stop_all(self) -> None:
        for name in list(self.servers):
            await self.stop(name)

    async def ask(self, body: Any, path: str = "v1/completions", who: str = "demo", method: str = "POST") -> Reply:
        """One request, to its end."""
        return [reply async for reply in self.parts(body, path, who, method)][-1]

    async def parts(
        self, body: Any, path: str = "v1/completions", who: str = "demo", method: str = "POST"
    ) -> AsyncGenerator[Reply, None]:
        """The reply as it grows. Raises KvspError."""
        octets = body if isinstance(body, bytes) else json.dumps(body).encode()
        call = self.call(octets, path, who, method)
        reply = None
        try:
            async for part in call:
                if part.HasField("start"):
                    assert reply is None
                    start = part.start
                    length = start.length if start.HasField("length") else None
                    reply = Reply(start.status, start.content_type, length)
                else:
                    assert reply is not None
                    reply.pieces.append(part.octets)
                yield reply
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def call(self, octets: bytes, path: str = "v1/completions", who: str = "demo", method: str = "POST") -> Any:
        request = frontend_pb2.ApiRequest(method=method, path=path, body=octets)
        return frontend_pb2_grpc.FrontendStub(self.channel).Call(request, metadata=speak_for(f"spiffe://t/{who}"))

    async def ended(self, sessions: int = 1) -> None:
        """Wait until the placement controller has been told that so many sessions are over."""
        await self.placement.told(lambda: len(self.placement.ended) == sessions)


def asked(**members: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, "temperature": 0, **members}


def chat(*said: str, **members: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": each} for each in said]
    return {"model": MODEL, "messages": messages, "max_tokens": 100, "temperature": 0, **members}


@asynccontextmanager
async def world(
    folder: Path, tokenizer: Tokenizer, patience_s: float = 10.0, **members: Any
) -> AsyncIterator[World]:
    """Everything up; `members` are those of Served."""
    made = World(folder, tokenizer)
    settings = {
        "model": MODEL, "compat_id": COMPAT, "block_tokens": BLOCK_TOKENS, "context_tokens": CONTEXT,
        "scopes": SCOPES, "created": 1, **members,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.stop_all)
        for name in ("placement", II1, II2):
            await made.start(name)
        channels = {
            name: await stack.enter_async_context(open_channel(made.address(name)))
            for name in ("placement", "ii1", "ii2")
        }
        instances = {II1: channels["ii1"], II2: channels["ii2"]}
        timing = Timing(0.005, 0.02, patience_s)
        made.fleet = Fleet("spiffe://t/fe", channels["placement"], instances, timing)
        stack.push_async_callback(made.fleet.close, 5.0)
        service = FrontendService(POLICY, Api(Served(**settings), tokenizer, made.fleet))
        address = made.address("fe")
        await stack.enter_async_context(served(address, lambda server: register(server, service, POLICY)))
        made.channel = await stack.enter_async_context(open_channel(address))
        yield made
