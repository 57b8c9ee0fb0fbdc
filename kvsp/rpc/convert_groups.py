"""Messages of parallel groups <-> records, checked as in convert.py."""

from __future__ import annotations

from collections.abc import Iterable

from kvsp.protocol.errors import bad_request
from kvsp.protocol.records import ReshardReply, Shard, ShardMap
from kvsp.protocol.reshard import GroupContext
from kvsp.rpc import convert
from kvsp.v1 import common_pb2, instance_pb2


def shards_to_messages(shards: Iterable[Shard]) -> list[common_pb2.GroupShard]:
    """Shards as messages."""
    return [
        common_pb2.GroupShard(tokens=convert.token_range(shard.tokens), instance=shard.instance)
        for shard in shards
    ]


def shard_map_from_messages(name: str, version: int, shards: Iterable[common_pb2.GroupShard]) -> ShardMap:
    """A shard map from its parts.

    Raises KvspError (400) when it breaks a bound, or does not begin with token 0.
    """
    try:
        made = ShardMap(
            convert.session_id(name),
            version,
            [Shard((each.tokens.first, each.tokens.end), each.instance) for each in shards],
        )
    except ValueError as error:
        raise bad_request(f"shards: {error}") from None
    if made.shards[0].tokens[0]:
        raise bad_request("shards: the ranges do not begin with token 0")
    return made


def context_to_message(context: GroupContext) -> instance_pb2.GroupContext:
    """A group's context as a message."""
    return instance_pb2.GroupContext(
        map=context.map.map,
        version=context.map.version,
        shards=shards_to_messages(context.map.shards),
        checkpoint=convert.checkpoint_to_message(context.checkpoint),
        prompt_tokens=context.prompt_tokens,
        block_tokens=context.block_tokens,
        next=shards_to_messages(context.next),
    )


def context_from_message(message: instance_pb2.GroupContext) -> GroupContext:
    """A group's context from a message. Raises KvspError (400) when it breaks a bound, or fits not together."""
    shard_map = shard_map_from_messages(message.map, message.version, message.shards)
    following: tuple[Shard, ...] = ()
    if message.next:
        following = tuple(shard_map_from_messages(message.map, message.version + 1, message.next).shards)
        if following[-1].tokens[1] != shard_map.shards[-1].tokens[1]:
            raise bad_request("the next version is not over the same tokens")
    checkpoint = convert.checkpoint_from_message(message.checkpoint)
    if checkpoint.session != shard_map.map:
        raise bad_request("the checkpoint is another session's")
    blocks, tail = len(checkpoint.prompt_blocks), len(checkpoint.prompt_tail)
    if message.block_tokens < 1 or message.prompt_tokens != blocks * message.block_tokens + tail:
        raise bad_request("prompt_tokens is not what the checkpoint says")
    if tail >= message.block_tokens:
        raise bad_request("prompt_tail holds a complete block")
    return GroupContext(shard_map, checkpoint, message.prompt_tokens, message.block_tokens, following)


def reshard_reply_to_message(reply: ReshardReply) -> instance_pb2.ReshardReply:
    """What a member answers to a plan, a commit or an abort, as a message."""
    return instance_pb2.ReshardReply(
        map=reply.map,
        to=reply.to if isinstance(reply.to, int) else None,
        version=reply.version if isinstance(reply.version, int) else None,
    )
