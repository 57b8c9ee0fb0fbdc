"""What a member of a parallel group refuses, and whom; its bounds; how its blocks come."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsp.client import AsyncClient, Endpoints, Options
from kvsp.protocol import container, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Policy
from kvsp.protocol.records import (
    ReplicaRecord,
    ReshardFetch,
    ReshardRequest,
    Sampler,
    SessionCheckpoint,
    Shard,
    ShardMap,
)
from kvsp.protocol.registry import ProblemType
from kvsp.protocol.reshard import GroupContext
from kvsp.rpc import convert_groups
from kvsp.rpc.clock import now_ms
from kvsp.rpc.config import ConfigError, Party
from kvsp.rpc.errors import from_message, translated
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, instance_pb2
from services.instance.config import check_parties
from services.instance.group_blocks import GroupBlocks, Rows
from services.instance.groups import IDLE_MS
from services.instance.peers import HttpsHolder
from services.instance.shards import Shards
from tests.client import peers
from tests.services.group_rig import ENGINE, B, Rig, S, rig, shards
from tests.services.instance_engine import tokens_of
from tests.services.instance_rig import FE, FOREIGN, II, PC, SCOPE, URIS, World, policy_text

PROMPT = tokens_of(3, 61)
MEMBERS = "ii1", "ii2"
DIM, HEADS, LAYERS = 16, 4, 4  # of the small model


async def refused(problem: ProblemType, call: Any) -> None:
    with pytest.raises(KvspError) as caught:
        await call
    assert caught.value.problem is problem


def compute(first: int = 0, end: int = 24, **changes: Any) -> instance_pb2.ComputeShardRequest:
    tokens = common_pb2.TokenRange(first=first, end=end)
    made: dict[str, Any] = {"map": S[0], "version": 1, "tokens": tokens, "ids": PROMPT[first:end]}
    return instance_pb2.ComputeShardRequest(**(made | changes))


def question(**changes: Any) -> instance_pb2.AttendRequest:
    made: dict[str, Any] = {
        "version": 1, "layer": 0, "before": 24, "heads": HEADS, "new": 1, "dim": DIM,
        "queries": bytes(4 * HEADS * DIM),
    }  # fmt: skip
    return instance_pb2.AttendRequest(**(made | changes))


async def asked(made: Rig, name: str, principal: str, *requests: instance_pb2.AttendRequest) -> list[Any]:
    """Replies to the questions of one stream. Raises KvspError: the stream's, or that of a reply."""
    stream: Any = made.instances[name].stub.Attend
    async with translated():
        call = stream(iter([instance_pb2.AttendRequest(map=S[0]), *requests]), metadata=speak_for(principal))
        replies = [reply async for reply in call]
    for reply in replies:
        if reply.HasField("problem"):
            raise from_message(reply.problem)
    return replies


def reshard(**step: Any) -> instance_pb2.ReshardRequest:
    return instance_pb2.ReshardRequest(**({"map": S[0]} | step))


@pytest.mark.spec("R-197", "R-210")
async def test_who_may_do_what(tmp_path: Path) -> None:
    async with rig(tmp_path, *MEMBERS) as made:
        made.prompts[S[0]] = PROMPT
        made.maps[S[0]] = ShardMap(S[0], 1, shards(56, MEMBERS))
        context = made.context(S[0])
        for principal in (II, FE, "spiffe://t/ii2", "spiffe://t/h1"):
            await refused(registry.FORBIDDEN, made.join("ii1", context, principal))
            for name, request in (
                ("LeaveGroup", common_pb2.GroupName(map=S[0])),
                ("Reshard", reshard(commit=1)),
            ):
                await refused(registry.FORBIDDEN, made.call("ii1", name, request, principal))
        # Whether there is such a group nobody learns who is not of it.
        for _ in range(2):
            for principal in (PC, FE):
                await refused(registry.FORBIDDEN, made.call("ii1", "ComputeShard", compute(), principal))
                await refused(registry.FORBIDDEN, asked(made, "ii1", principal))
            await refused(registry.NOT_FOUND, made.call("ii1", "ComputeShard", compute(), "spiffe://t/ii3"))
            await refused(registry.NOT_FOUND, asked(made, "ii1", "spiffe://t/ii3"))
            await made.join("ii1", context)
        await refused(registry.FORBIDDEN, made.call("ii1", "ComputeShard", compute(), II))  # not the home


@pytest.mark.spec("R-195", "U-38")
async def test_a_context_that_cannot_be_joined(tmp_path: Path) -> None:
    async with rig(tmp_path, *MEMBERS) as made:
        made.prompts[S[0]] = PROMPT
        made.maps[S[0]] = ShardMap(S[0], 1, shards(56, MEMBERS))
        context, checkpoint = made.context(S[0]), made.start_checkpoint(S[0])
        replace = msgspec.structs.replace

        def joined(**changes: Any) -> Any:
            values = {name: getattr(context, name) for name in GroupContext.__slots__}
            return made.join("ii1", GroupContext(**(values | changes)))

        async def joins(problem: ProblemType, **changes: Any) -> None:
            await refused(problem, joined(**changes))

        foreign = replace(checkpoint, scope_id=FOREIGN)
        await joins(registry.SCOPE_DENIED, checkpoint=foreign)
        await joins(registry.INCOMPATIBLE, checkpoint=replace(checkpoint, compat_id="00" * 32))
        tail, blocks = PROMPT[56:], checkpoint.prompt_blocks
        await joins(registry.BAD_REQUEST, prompt_tokens=62)
        await joins(registry.BAD_REQUEST, checkpoint=replace(checkpoint, session=S[1]))
        await joins(registry.BAD_REQUEST, block_tokens=9)
        of_sixteen = replace(checkpoint, prompt_blocks=blocks[:3])
        await joins(registry.INCOMPATIBLE, checkpoint=of_sixteen, block_tokens=16, prompt_tokens=48 + len(tail))
        two = [Shard((0, 24), URIS["ii1"]), Shard((24, 56), URIS["ii2"])]
        for bad in (
            [Shard((0, 20), URIS["ii1"]), Shard((20, 56), URIS["ii2"])],  # not whole blocks
            [Shard((8, 24), URIS["ii1"]), Shard((24, 56), URIS["ii2"])],
            [Shard((0, 24), URIS["ii1"]), Shard((24, 64), URIS["ii2"])],  # more than there is
            [*two[:1], Shard((24, 32), URIS["ii2"]), Shard((32, 56), URIS["ii1"])],  # twice
        ):
            await joins(registry.BAD_REQUEST, map=ShardMap(S[0], 1, bad))
        gap = convert_groups.context_to_message(context)
        gap.shards[1].tokens.first += B
        await refused(registry.BAD_REQUEST, made.call("ii1", "JoinGroup", gap))
        stranger = Shard((24, 56), URIS["h1"])
        await joins(registry.UNAVAILABLE, map=ShardMap(S[0], 1, [two[0], stranger]))
        # Known from before a restart: what it says that is held here is not.
        await joins(registry.PLAN_CONFLICT, next=(Shard((0, 56), URIS["ii2"]),))
        await joins(registry.PLAN_CONFLICT, map=ShardMap(S[0], 2, two))
        await joined()
        await joined()
        await joins(registry.PLAN_CONFLICT, map=ShardMap(S[0], 2, two))
        other = replace(checkpoint, prompt_blocks=[*blocks[:-1], "77" * 32])
        await joins(registry.PLAN_CONFLICT, checkpoint=other)
        await made.call("ii2", "PutState", common_pb2.StateChange(state="draining"))
        await refused(registry.INVALID_STATE, made.join("ii2", context))


@pytest.mark.spec("R-192", "R-195", "U-38", "D6")
async def test_what_of_a_plan_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, *MEMBERS) as made:
        plan = instance_pb2.ReshardPlan

        def tokens(*ranges: tuple[int, int]) -> list[common_pb2.TokenRange]:
            return [common_pb2.TokenRange(first=first, end=end) for first, end in ranges]

        def planned(old: int, **members: Any) -> instance_pb2.ReshardRequest:
            return reshard(plan=plan(**{"from": old, "to": old + 1, "deadline_ms": 100, **members}))

        fetch: Any = [instance_pb2.ReshardFetch(tokens=tokens((24, 32))[0], **{"from": URIS["h1"]})]
        # Nobody has told of the map: what it would fetch has no names.
        assert (await made.call("ii1", "Reshard", planned(1))).to == 2
        assert (await made.call("ii1", "Reshard", reshard(abort=2))).version == 1
        await refused(registry.UNAVAILABLE, made.call("ii1", "Reshard", planned(1, fetch=fetch)))
        await refused(registry.PLAN_CONFLICT, made.call("ii1", "Reshard", reshard(commit=2)))
        assert (await made.call("ii1", "Reshard", reshard(abort=2))).version == 1
        assert (await made.call("ii1", "Reshard", reshard(abort=2))).version == 1  # of nothing
        await refused(registry.PLAN_CONFLICT, made.call("ii1", "Reshard", planned(1, retain=tokens((0, 24)))))
        assert (await made.call("ii1", "Reshard", planned(1))).to == 2  # forgotten as soon as the map is told of
        million = planned(1, retain=tokens(*((2 * n, 2 * n + 1) for n in range(1_000_000))))
        await refused(registry.CONTENT_TOO_LARGE, made.call("ii1", "Reshard", million))
        await made.form(S[0], PROMPT, *MEMBERS)
        for step in ({"commit": 2}, {"commit": 3}, {"abort": 1}):
            await refused(registry.PLAN_CONFLICT, made.call("ii1", "Reshard", reshard(**step)))
        assert (await made.call("ii1", "Reshard", reshard(abort=2))).version == 1
        assert (await made.call("ii1", "Reshard", reshard(commit=1))).version == 1
        # The home has not been told whom to ask then.
        await refused(registry.UNAVAILABLE, made.call("ii2", "Reshard", planned(1, retain=tokens((24, 56)))))
        for old in (0, 2):
            await refused(
                registry.PLAN_CONFLICT, made.call("ii1", "Reshard", planned(old, retain=tokens((0, 24))))
            )
        await refused(registry.PLAN_CONFLICT, made.call("ii1", "Reshard", planned(1, retain=tokens((0, 16)))))
        await refused(
            registry.BAD_REQUEST, made.call("ii1", "Reshard", planned(1, retain=tokens((0, 20), (20, 24))))
        )
        twice = planned(1, release=tokens((0, 24)))
        for _ in range(2):
            assert (await made.call("ii1", "Reshard", twice)).to == 2
        await refused(registry.PLAN_CONFLICT, made.call("ii1", "Reshard", planned(1, retain=tokens((0, 24)))))
        assert (await made.call("ii1", "Reshard", reshard(abort=2))).version == 1
        # Nobody that is not configured and trusted is ever asked (D10).
        await refused(
            registry.UNAVAILABLE, made.call("ii1", "Reshard", planned(1, retain=tokens((0, 24)), fetch=fetch))
        )
        assert (await made.call("ii1", "Reshard", reshard(abort=2))).version == 1
        assert made.store("ii1", S[0]).ranges() == [(0, 24)]


async def test_what_of_a_question_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, *MEMBERS) as made:
        await made.form(S[0], PROMPT, *MEMBERS)
        home = "spiffe://t/ii2"
        for bad in (
            compute(end=16), compute(version=2), compute(24, 56),
            compute(tokens=common_pb2.TokenRange(first=0, end=1 << 40)),
        ):  # fmt: skip
            await refused(registry.PLAN_CONFLICT, made.call("ii1", "ComputeShard", bad, home))
        for ids in (PROMPT[1:25], PROMPT[:23], [*PROMPT[:23], 1 << 20]):
            await refused(registry.BAD_REQUEST, made.call("ii1", "ComputeShard", compute(ids=ids), home))
        calls = [made.call("ii1", "ComputeShard", compute(), home) for _ in range(3)]
        await asyncio.gather(*calls)  # computed once
        replies = await asked(made, "ii1", home, question(), question(before=0), question(before=9))
        assert [len(reply.output) for reply in replies] == [4 * HEADS * DIM] * 3
        assert [len(reply.log_sum) for reply in replies] == [4 * HEADS] * 3
        assert replies[1].output == bytes(4 * HEADS * DIM)  # of no token
        for bad_question in (
            question(layer=LAYERS), question(dim=DIM - 1), question(heads=3), question(heads=0, queries=b""),
            question(new=2), question(new=0, queries=b""), question(queries=b"abc"), question(dim=1 << 31),
        ):  # fmt: skip
            await refused(registry.BAD_REQUEST, asked(made, "ii1", home, bad_question))
        stream = made.instances["ii1"].stub.Attend  # an answer that is an error does not end it
        mixed: Any = [instance_pb2.AttendRequest(map=S[0]), question(dim=1), question()]
        call: Any = stream(iter(mixed), metadata=speak_for(home))
        assert [reply.problem.status async for reply in call] == [400, 0]
        for version in (0, 2):
            problem = registry.NOT_FOUND if version else registry.PLAN_CONFLICT
            await refused(problem, asked(made, "ii1", home, question(version=version)))


async def test_a_question_waits_for_its_layer_and_for_no_more(tmp_path: Path) -> None:
    async with rig(tmp_path, *MEMBERS) as made:
        home = "spiffe://t/ii2"
        for end in ("computed", "left"):
            await made.form(S[0], PROMPT, *MEMBERS)
            # More questions than there are threads: none of them keeps one from being computed.
            waiting = [asyncio.create_task(asked(made, "ii1", home, question(layer=LAYERS - 1))) for _ in range(9)]
            await asyncio.sleep(0.2)
            assert not any(each.done() for each in waiting)
            if end == "computed":
                await made.call("ii1", "ComputeShard", compute(), home)
                first, *rest = await asyncio.gather(*waiting)
                assert len(first) == 1
                assert all(each == first for each in rest)
            for name in MEMBERS:
                await made.call(name, "LeaveGroup", common_pb2.GroupName(map=S[0]))
            if end == "left":
                for each in waiting:
                    await refused(registry.NOT_FOUND, each)


@pytest.mark.spec("R-193")
def test_the_version_that_may_be_asked_for() -> None:
    member = Shards(B)
    member.adopt("m", 1, [(0, 24)])

    def serves(version: int) -> list[tuple[int, int]] | None:
        try:
            return member.serves("m", version)
        except KvspError:
            return None

    assert [serves(version) for version in range(4)] == [None, [(0, 24)], None, None]
    fetch = [ReshardFetch((24, 32), URIS["ii2"])]
    plan = ReshardRequest("m", 1, 2, 100, [(8, 24)], fetch, [(0, 8)])
    assert not member.plan(plan)
    assert member.under_way("m") == plan
    assert [serves(version) for version in range(4)] == [None, [(0, 24)], None, None]
    member.loaded("m", 2)  # acknowledged: some other member may hear of the commit first
    assert [serves(version) for version in range(4)] == [None, [(0, 24)], [(8, 32)], None]
    member.commit("m", 2)
    assert member.under_way("m") is None
    assert [serves(version) for version in range(4)] == [None, None, [(8, 32)], None]


async def test_memory_of_all_groups_is_bounded_and_given_back(tmp_path: Path) -> None:
    async with rig(tmp_path, *MEMBERS, group_octets=512 << 10) as made:
        for session in S:
            made.prompts[session] = PROMPT
            made.maps[session] = ShardMap(session, 1, shards(56, MEMBERS))
        for session in S[:4]:
            await made.join("ii1", made.context(session))
        groups = made.groups("ii1")
        assert groups.utilization == 1
        await refused(registry.UNAVAILABLE, made.join("ii1", made.context(S[4])))
        await made.call("ii1", "LeaveGroup", common_pb2.GroupName(map=S[0]))
        await made.join("ii1", made.context(S[4]))
        groups.expire(now_ms() + IDLE_MS - 1000)
        assert groups.utilization
        groups.expire(now_ms() + IDLE_MS)
        assert groups.utilization == 0


# --- blocks ---------------------------------------------------------------------------


class Listed:
    """An index that lists what it is told to, and learns of liars."""

    def __init__(self, *records: ReplicaRecord) -> None:
        self.records = list(records)
        self.withdrawn: list[str] = []
        self.lookups = 0

    async def each(self, scope_id: str, keys: list[bytes]) -> list[list[ReplicaRecord]]:
        self.lookups += 1
        return [[record for record in self.records if record.block_key == key.hex()] for key in keys]

    async def withdraw(self, holder: str, block_key: str) -> None:
        self.withdrawn.append(holder)


class Trusted:
    def __init__(self, holder: HttpsHolder) -> None:
        self.others = {holder.base_uri: holder}

    def sources(self, scope_id: str) -> list[str]:
        return list(self.others)


@pytest.mark.spec("R-192", "R-155", "R-161")
@pytest.mark.parametrize("mode", ["honest", "flipped"])
async def test_blocks_of_a_foreign_member_come_over_https_and_verified(tmp_path: Path, mode: str) -> None:
    authority = peers.Authority(tmp_path)
    octets = peers.container_of(4, 128 << 10)
    peer = peers.Peer(mode, octets)
    peer.replies["POST leases"] = (201, {"lease": peers.LEASE, "ttl_ms": 60_000})
    peer.replies["DELETE leases"] = (204, None)
    server = peers.Server(peer, authority.issue("server"), None)
    client = AsyncClient(authority.issue("client"), Endpoints(holders=frozenset({peer.base})), Options(total_s=10))
    directory: Any = Listed()
    store: Any = None  # nothing is computed
    holders: Any = Trusted(HttpsHolder(peer.base, client, peers.GEOMETRY))
    placed: dict[int, bytes] = {}

    def place(block: int, rows: Rows) -> None:
        placed[block] = b"".join(bytes(part) for pair in rows for part in pair)

    with ThreadPoolExecutor(2) as workers:
        blocks = GroupBlocks(
            holders, directory, workers, store, descriptor=peers.GEOMETRY, compat_id=peers.COMPAT, parallel=2
        )
        try:
            wanted = {peer.base: [(7, bytes.fromhex(peers.KEY))]}
            fetching = asyncio.create_task(blocks.fetch(peers.SCOPE, wanted, place))
            while directory.lookups < 3:  # its member has not stored it yet
                await asyncio.sleep(0.01)
            directory.records.append(peers.record_of(peer.base, octets))
            if mode == "honest":
                await fetching
                header = container.parse_header(octets)
                assert placed == {7: octets[header.header_octets :]}
                assert peer.count("GET") == 1
            else:
                while len(directory.withdrawn) < 2:  # asked again, until the plan's deadline
                    await asyncio.sleep(0.01)
                fetching.cancel()
                assert placed == {}
            with pytest.raises(KvspError) as caught:
                await blocks.fetch(peers.SCOPE, {"https://other.example/kvsp/": wanted[peer.base]}, place)
            assert caught.value.problem is registry.UNAVAILABLE
        finally:
            await client.close()
            server.stop()


def test_instances_to_share_with_are_others_with_an_address(tmp_path: Path) -> None:
    policy = Policy.load(policy_text())
    config = World(tmp_path, policy, ENGINE.descriptor, AsyncExitStack()).config
    check_parties(config(instances=(Party(URIS["ii2"], "unix:/ii2"),)), policy)
    for party in (
        Party(URIS["ii1"], "unix:/ii1"), Party(URIS["ii2"]), Party("https://nobody.example/", "unix:/x"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"example"):
            check_parties(config(instances=(party,)), policy)


def test_a_context_survives_the_way_through_protobuf() -> None:
    checkpoint = SessionCheckpoint(
        S[0], 3, "0a" * 32, SCOPE, ["77" * 32] * 2, [1, 2, 3], [4, 5], 2, Sampler("greedy", {}, 0, 2, True)
    )
    for following in ((), tuple(shards(16, ["ii2"]))):
        context = GroupContext(ShardMap(S[0], 4, shards(16, MEMBERS)), checkpoint, 2 * B + 3, B, following)
        octets = convert_groups.context_to_message(context).SerializeToString()
        assert convert_groups.context_from_message(instance_pb2.GroupContext.FromString(octets)) == context
    other_end = GroupContext(context.map, checkpoint, 2 * B + 3, B, tuple(shards(8, ["ii2"])))
    with pytest.raises(KvspError) as caught:
        convert_groups.context_from_message(convert_groups.context_to_message(other_end))
    assert caught.value.status == 400
