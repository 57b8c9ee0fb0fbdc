"""The running fleet as the demo acts on it: a client who asks, and an operator who drains, kills and looks."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

from tokenizers import Tokenizer

from deploy.local.api import Answer, Api
from deploy.local.configs import INSTANCES, SPARE
from deploy.local.layout import StackError
from deploy.local.moved import PATIENCE_S, Moved
from deploy.local.policy import identity_uri
from deploy.local.stack import Background
from kvsp.cli.controller import instance_name, shard_map
from kvsp.cli.top import read_metrics
from kvsp.client import Client
from kvsp.client.config import load_stack
from kvsp.protocol import descriptor as descriptors
from kvsp.protocol import keys, limits
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.records import DirectiveStatus, Sampler, SessionCheckpoint, ShardMap
from kvsp.rpc.channel import open_channel
from kvsp.rpc.convert import checkpoint_to_message
from kvsp.rpc.errors import translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import placement_pb2, placement_pb2_grpc

SCOPE: Final = "demo"
GREEDY: Final = {"temperature": 0.0}
POLL_S: Final = 0.02
IDLE_OVERVIEWS: Final = 2


class Fleet:
    """Use it in `with`. Methods raise StackError, and KvspError where a service refuses."""

    def __init__(self, background: Background) -> None:
        layout, endpoints = background.stack.layout, background.stack.endpoints
        mine, self._controller = (load_stack(layout.endpoints, name) for name in ("client-demo", "pc"))
        if mine.descriptor is None or background.stack.model is None:
            raise StackError("the stack has no engines")
        self._background = background
        self._placement_socket = layout.socket("placement")
        self._ask = {name: Api(endpoints, f"client-{name}") for name in ("demo", "other")}
        self._client = Client(mine.credentials, mine.endpoints)
        self._operator = Client(self._controller.credentials, self._controller.endpoints)
        self._tokenizer = Tokenizer.from_file(str(background.stack.model / "tokenizer.json"))
        self._shape = descriptors.load(mine.descriptor.read_bytes())
        self._scope_id = mine.scopes[SCOPE]
        self._scope_key = ScopeKey.parse(mine.scope_keys[SCOPE].read_bytes())
        self._uris: dict[str, str] = endpoints["roles"]["instances"]
        self.model = self._ask[SCOPE].models()[0]
        self.moved = Moved(layout.config("placement").parent)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._operator.close()

    # --- the client ---

    def ask(
        self, prompt: str, max_tokens: int, *, scope: str = SCOPE, on_text: Callable[[Answer], None] | None = None,
        **options: Any,
    ) -> Answer:  # fmt: skip
        """A completion in a scope, of which the front end also tells where it was placed."""
        options = {**GREEDY, **options, "model": self.model, "ignore_eos": True, "kvsp_explain": True}
        return self._ask[scope].complete(prompt, max_tokens, on_text, **options)

    def wait_published(self, text: str) -> int:
        """Wait until the index knows all complete blocks of a text; how many those are."""
        names = self._block_keys(self._tokens(text))
        compat = descriptors.compat_id(self._shape).hex()
        until = time.monotonic() + PATIENCE_S
        while (matched := self._client.lookup(self._scope_id, compat, names).matched) < len(names):
            if time.monotonic() > until:
                raise StackError(f"the index knows {matched} of {len(names)} blocks that were computed")
            time.sleep(POLL_S)
        return matched

    # --- the front end, before there is a request ---

    def announce(self, prompt: str) -> placement_pb2.AssignReply:
        """Ask the controller for an instance for this prompt, as a front end that has heard that it will come.

        The session is ended at once; what the controller has directed the instance to load stays.
        """
        tokens = self._tokens(prompt)
        blocks = self._block_keys(tokens)
        start = SessionCheckpoint(
            session=str(uuid.uuid4()),
            epoch=0,
            compat_id=descriptors.compat_id(self._shape).hex(),
            scope_id=self._scope_id,
            prompt_blocks=blocks,
            prompt_tail=tokens[len(blocks) * self._shape.block_tokens :],
            generated=[],
            output_offset=0,
            sampler=Sampler("greedy", {"max_tokens": 1, "stop_tokens": []}, 0, 0, deterministic=True),
        )
        request = placement_pb2.AssignRequest(start=checkpoint_to_message(start), prompt_tokens=len(tokens))
        return self._background.call(self._assign(request))

    async def _assign(self, request: placement_pb2.AssignRequest) -> placement_pb2.AssignReply:
        me = speak_for(identity_uri("fe"))
        async with open_channel(f"unix:{self._placement_socket}") as channel, translated():
            placement = placement_pb2_grpc.PlacementStub(channel)
            reply = await placement.Assign(request, metadata=me, timeout=PATIENCE_S)
            await placement.EndSession(placement_pb2.SessionName(session=request.start.session), metadata=me)
        return reply

    # --- the operator ---

    def directive(self, instance: str, directive: str) -> DirectiveStatus:
        """The state of a prefetch directive once it is no longer pending, asked over HTTPS as the controller."""
        until = time.monotonic() + PATIENCE_S
        while (status := self._operator.directive(self._uris[instance], directive)).state == "pending":
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)
        return status

    @contextlib.contextmanager
    def drained(self, instance: str) -> Iterator[None]:
        """While this lasts, an instance takes no requests."""
        self._background.call(self._set_state(instance, "draining"))
        try:
            yield
        finally:
            self._background.call(self._set_state(instance, "active"))
            self.epochs(instance)

    async def _set_state(self, instance: str, state: str) -> None:
        async with self._background.stack.controller() as controller:
            await controller.set_state(self._uris[instance], state)

    def epochs(self, *instances: str) -> dict[str, int]:
        """Epochs of instances, of all by default, once they are active."""
        return self._background.call(self._background.stack.wait_active(*(instances or INSTANCES)))

    def settle(self) -> None:
        """Wait until the controller, whose costs count on it, has heard that all instances are idle."""
        self._background.call(self._settled())

    async def _settled(self) -> None:
        idle = 0
        async with self._background.stack.controller() as controller:
            async for overview in controller.watch():
                busy = any(each.running or each.queued for each in overview.instances)
                # An overview a second, a status every half: what one shows twice was reported in between.
                idle = 0 if busy else idle + 1
                if idle == IDLE_OVERVIEWS:
                    return

    def kill(self, instance: str) -> None:
        """kill -9 of an engine and of the holder beside it, at once."""
        processes = _processes(instance)
        self.moved.look(*processes)
        self._background.kill(*processes)

    def start_again(self, instance: str) -> None:
        """Start what was killed, and wait until the controller has it as active."""
        self._background.start_again(*reversed(_processes(instance)))
        self.epochs(instance)

    @contextlib.contextmanager
    def spare(self) -> Iterator[None]:
        """While this lasts, there is one more instance; it begins when that is active."""
        self.start_again(SPARE)
        try:
            yield
        finally:
            processes = _processes(SPARE)
            self.moved.look(*processes)
            for name in processes:
                self._background.call(self._background.stack.supervisor.stop_one(name))

    # --- groups ---

    def groups(self) -> list[ShardMap]:
        """The authoritative versions of all shard maps."""
        return self._background.call(self._overview_groups())

    async def _overview_groups(self) -> list[ShardMap]:
        async with self._background.stack.controller() as controller:
            async for overview in controller.watch():
                return [shard_map(each) for each in overview.groups]
        raise StackError("the placement controller has ended")

    def resize(self, session: str, members: int) -> ShardMap:
        """Shard a session's context over so many instances; the version that came of it."""
        return self._background.call(self._resize(session, members))

    async def _resize(self, session: str, members: int) -> ShardMap:
        async with self._background.stack.controller() as controller:
            return await controller.resize_group(session, members)

    def octets_served(self) -> int:
        """Octets of blocks that holders have served so far, as they count them."""
        served = read_metrics(self._background.stack.layout.config("placement").parent, PATIENCE_S).items()
        return sum(int(value) for name, value in served if name.startswith("kvsp_holder_octets_total:out:"))

    def kv_octets(self, tokens: int) -> int:
        """Octets of the KV of so many tokens."""
        return self._shape.payload_octets * tokens // self._shape.block_tokens

    # --- names ---

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def _block_keys(self, tokens: list[int]) -> list[str]:
        """Keys of all complete blocks, as far as one lookup takes them."""
        compat = descriptors.compat_id(self._shape)
        names = keys.block_keys(self._scope_key, compat, tokens, self._shape.block_tokens)
        return [key.hex() for key in names[: limits.LOOKUP_KEYS_MAX]]


def _processes(instance: str) -> tuple[str, str]:
    """The engine's, and its holder's, which has to be there first."""
    return instance, f"{instance}-blocks"


def place(answer: Answer) -> str:
    """The name of the instance that an answer was assigned to."""
    return instance_name(answer.placement.get("instance", ""))
