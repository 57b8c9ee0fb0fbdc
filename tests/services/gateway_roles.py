"""A gateway in front of all roles: placement, instance and front end authorize as theirs do, then do as told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from kvsp.protocol import access
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy
from kvsp.protocol.routes import Route
from kvsp.rpc import convert
from kvsp.rpc.identity import caller
from kvsp.v1 import (
    common_pb2,
    frontend_pb2,
    frontend_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from services.frontend.server import FrontendAuthority
from tests.services.gateway_harness import COMPAT, CONFIG, POLICY, SCOPE, Response, World

PC, II1, II2, FE = (f"spiffe://test/{name}" for name in ("pc", "ii1", "ii2", "fe"))
II1_URI, II2_URI = "https://localhost/ii1/", "https://localhost/ii2/"
SESSION = "0f0e0d0c-0b0a-4908-8706-050403020100"
DIRECTIVE = "1f1e1d1c-1b1a-4918-8716-151413121110"
STATUS_PATH = f"/pc/instances/{party_id(II1_URI)}/status"
CHECKPOINT_PATH = f"/pc/sessions/{SESSION}/checkpoint"
DIRECTIVE_PATH = f"/ii1/prefetch/{DIRECTIVE}"
RESUME_PATH = f"/ii1/sessions/{SESSION}/resume"

STATUS: dict[str, Any] = {
    "instance": II1_URI, "epoch": 12, "state": "active", "running": 3, "queued": 1, "batch_size": 8,
    "kv_utilization": 0.5, "prefill_tokens_per_s": 42000.0, "decode_tokens_per_s": 1900.0, "ttl_ms": 1500,
    "links": [{"holder": "https://localhost/h1/", "mbit_per_s": 200000.0, "rtt_us": 12.0}],
    "requested_state": "sleeping",
}  # fmt: skip
CHECKPOINT: dict[str, Any] = {
    "session": SESSION, "epoch": 1, "compat_id": COMPAT, "scope_id": SCOPE, "prompt_blocks": ["cd" * 32],
    "prompt_tail": [1, 2], "generated": [7, 4294967295], "output_offset": 2,
    "sampler": {"method": "top-k", "params": {"k": 5}, "seed": -3, "step": 2, "deterministic": False},
}  # fmt: skip
PREFETCH: dict[str, Any] = {
    "directive": DIRECTIVE, "scope_id": SCOPE, "compat_id": COMPAT, "deadline_ms": 500, "lease_ms": 3000,
    "blocks": [{"block_key": "cd" * 32, "sources": ["https://localhost/h1/", "moqt://relay.example/"]}],
    "request_ref": "r-1", "layer_order": "ascending",
}  # fmt: skip
RESUME: dict[str, Any] = {"epoch": 2, "checkpoint": CHECKPOINT}
PLAN: dict[str, Any] = {
    "map": "m", "from": 3, "to": 4, "deadline_ms": 500, "retain": [[0, 16]],
    "fetch": [{"tokens": [16, 32], "from": II2_URI}], "release": [[32, 48]],
}  # fmt: skip
STATE: dict[str, Any] = {"state": "draining"}


CASES = {
    "status": ("PUT", STATUS_PATH, STATUS, II1),
    "checkpoint": ("PUT", CHECKPOINT_PATH, CHECKPOINT, II1),
    "prefetch": ("POST", "/ii1/prefetch", PREFETCH, PC),
    "directive": ("GET", DIRECTIVE_PATH, None, PC),
    "resume": ("POST", RESUME_PATH, RESUME, PC),
    "reshard": ("POST", "/ii1/reshard", PLAN, PC),
    "state": ("PUT", "/ii1/state", STATE, PC),
}
TEMPLATES = {
    "status": "instances/{instance_id}/status",
    "checkpoint": "sessions/{session}/checkpoint",
    "directive": "prefetch/{directive}",
    "resume": "sessions/{session}/resume",
}


@dataclass
class Scripted:
    """What a role was asked, by whom; `fail` is what it answers with when set."""

    policy: Policy
    calls: list[tuple[str, Any]] = field(default_factory=list)
    fail: KvspError | None = None
    state: str = "active"
    timeouts: list[float | None] = field(default_factory=list)

    def take(
        self, context: Any, route: Route, record: Any, party: str | None = None, scope: str | None = None
    ) -> None:
        """Authorize, fail as told, or note the call."""
        identity = caller(context, self.policy)
        access.authorize(self.policy, identity, route, party_id=party, scope_id=scope)
        if self.fail is not None:
            raise self.fail
        self.calls.append((identity.uri, record))
        self.timeouts.append(context.time_remaining())

    def last(self) -> tuple[str, Any]:
        """The caller and the record of the last call, as JSON has it."""
        uri, record = self.calls.pop()
        return uri, msgspec.json.decode(msgspec.json.encode(record))


class Placement(Scripted, placement_pb2_grpc.PlacementServicer):
    seen: ClassVar[set[str]] = set()

    async def PutStatus(self, request: placement_pb2.PutStatusRequest, context: Any) -> common_pb2.StateChange:
        status = convert.status_from_message(request.status)
        self.take(context, access.STATUS, status, request.instance_id)
        return common_pb2.StateChange(state=self.state)

    async def PutCheckpoint(
        self, request: placement_pb2.PutCheckpointRequest, context: Any
    ) -> placement_pb2.PutCheckpointReply:
        checkpoint = convert.checkpoint_from_message(request.checkpoint)
        assert request.session == checkpoint.session
        route = access.find("PUT", "sessions/{session}/checkpoint")
        self.take(context, route, checkpoint, scope=checkpoint.scope_id)
        created = checkpoint.session not in self.seen
        self.seen.add(checkpoint.session)
        return placement_pb2.PutCheckpointReply(
            created=created, epoch=checkpoint.epoch, output_offset=checkpoint.output_offset
        )


class Instance(Scripted, instance_pb2_grpc.InstanceServicer):
    async def Prefetch(self, request: instance_pb2.PrefetchDirective, context: Any) -> Any:
        directive = convert.directive_from_message(request)
        self.take(context, access.find("POST", "prefetch"), directive, scope=directive.scope_id)
        return instance_pb2.DirectiveStatus(directive=directive.directive, state="pending")

    async def GetDirective(self, request: instance_pb2.GetDirectiveRequest, context: Any) -> Any:
        self.take(context, access.find("GET", "prefetch/{directive}"), request.directive)
        loaded = b"".join(bytes([n]) * 32 for n in (1, 2))
        return instance_pb2.DirectiveStatus(directive=request.directive, state="partial", loaded=loaded)

    async def Resume(self, request: instance_pb2.ResumeRequest, context: Any) -> instance_pb2.ResumeReply:
        checkpoint = convert.checkpoint_from_message(request.checkpoint)
        route = access.find("POST", "sessions/{session}/resume")
        self.take(context, route, (request.epoch, checkpoint), scope=checkpoint.scope_id)
        return instance_pb2.ResumeReply(
            session=request.session, epoch=request.epoch, output_offset=checkpoint.output_offset
        )

    async def Reshard(self, request: instance_pb2.ReshardRequest, context: Any) -> instance_pb2.ReshardReply:
        plan = convert.reshard_from_message(request)
        self.take(context, access.find("POST", "reshard"), plan)
        if request.WhichOneof("step") == "plan":
            return instance_pb2.ReshardReply(map=plan.map, to=plan.new)
        return instance_pb2.ReshardReply(map=plan.map, version=request.commit or request.abort)

    async def PutState(self, request: common_pb2.StateChange, context: Any) -> common_pb2.StateChange:
        self.take(context, access.find("PUT", "state"), request.state)
        return common_pb2.StateChange(state=self.state)


Part = bytes | Exception | frontend_pb2.ApiStart


@dataclass
class Frontend(frontend_pb2_grpc.FrontendServicer):
    """Answers with what the test puts into `parts`; ends with the length told, else with None."""

    policy: Policy
    parts: asyncio.Queue[Part | None] = field(default_factory=asyncio.Queue)
    calls: list[tuple[str, frontend_pb2.ApiRequest]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def Call(self, request: frontend_pb2.ApiRequest, context: Any) -> Any:
        self.calls.append((caller(context, self.policy).uri, request))
        self.left.clear()
        length = -1
        try:
            while length and (part := await self.parts.get()) is not None:
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, bytes):
                    length -= len(part)
                    yield frontend_pb2.ApiReply(octets=part)
                else:
                    length = part.length if part.HasField("length") else -1
                    yield frontend_pb2.ApiReply(start=part)
        finally:
            self.left.set()

    async def forget(self) -> None:
        """Wait for the end of the call, and drop what is left of its script."""
        await self.left.wait()
        self.parts = asyncio.Queue()

    def script(self, *parts: Part | None) -> None:
        for part in parts:
            self.parts.put_nowait(part)


@dataclass
class Roles(World):
    """All roles; the blocks of instance ii1 are those of the small holder."""

    policy_text: ClassVar[str] = (
        POLICY
        + f"""
[identities."{PC}"]
roles = ["placement"]
scopes = ["{SCOPE}"]
[identities."{II1}"]
roles = ["instance"]
base_uris = ["{II1_URI}"]
scopes = ["{SCOPE}"]
[identities."{II2}"]
roles = ["instance"]
base_uris = ["{II2_URI}"]
scopes = ["{SCOPE}"]
[identities."{FE}"]
roles = ["frontend"]
scopes = ["{SCOPE}"]
"""
    )
    config_text: ClassVar[str] = (
        CONFIG
        + """
[[roles]]
role = "placement"
base_uri = "https://localhost/pc/"
backend.address = "unix:{folder}/placement.sock"
[[roles]]
role = "instance"
base_uri = "https://localhost/ii1/"
backend.address = "unix:{folder}/instance.sock"
blocks.address = "unix:{folder}/holder.sock"
[[roles]]
role = "frontend"
base_uri = "https://localhost/fe/"
backend.address = "unix:{folder}/frontend.sock"
"""
    )

    async def start_services(self) -> None:
        await super().start_services()
        self.placement = Placement(self.policy)
        self.frontend = Frontend(self.policy)
        await self.serve(
            "placement", lambda to: placement_pb2_grpc.add_PlacementServicer_to_server(self.placement, to)
        )
        await self.serve(
            "frontend",
            lambda to: frontend_pb2_grpc.add_FrontendServicer_to_server(self.frontend, to),
            FrontendAuthority(self.policy),
        )
        self.instance = Instance(self.policy)
        await self.start_instance()

    async def start_instance(self) -> None:
        await self.serve(
            "instance", lambda to: instance_pb2_grpc.add_InstanceServicer_to_server(self.instance, to)
        )

    def chat(self, body: bytes = b"{}", path: str = "v1/completions", **changes: Any) -> Response:
        headers = {"content-type": "application/json"} | changes.pop("headers", {})
        return self.request("POST", f"/fe/{path}", body, headers, **changes)


def ask(roles: Roles, name: str, principal: str | None = None, **changes: Any) -> Response:
    """A good request, but for `changes` of the body's members."""
    method, target, body, allowed = CASES[name]
    if body is None:
        return roles.request(method, target, principal=principal or allowed)
    return roles.json(method, target, body | changes, principal or allowed)


def server_of(roles: Roles, name: str) -> Scripted:
    return roles.placement if CASES[name][1].startswith("/pc/") else roles.instance
