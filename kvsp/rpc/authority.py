"""The Authority service that every role serves beside its own."""

from __future__ import annotations

from typing import Any

import grpc

from kvsp.protocol import access
from kvsp.protocol.policy import Policy
from kvsp.rpc.identity import caller
from kvsp.v1 import common_pb2, common_pb2_grpc


class Authority(common_pb2_grpc.AuthorityServicer):
    """Answers whether a caller may use a route at all (order of checks: role and scope before syntax)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def Authorize(  # noqa: N802 - the name is the RPC's
        self, request: common_pb2.AuthorizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.AuthorizeReply:
        """Raise KvspError (403) unless the caller may use the route."""
        access.authorize(
            self._policy,
            caller(context, self._policy),
            access.find(request.method, request.path),
            scope_id=request.scope_id.hex() or None,
            party_id=request.party_id or None,
        )
        return common_pb2.AuthorizeReply()
