"""One test a member of every JSON object: missing, wrong type, out of bound (R-040 ... R-055)."""

import json
from typing import Any

import pytest

from kvsp.protocol import jsonio, records, registry
from kvsp.protocol.errors import KvspError

H, I = "https://h1.example/kvsp/", "https://ii7.example/kvsp/"  # noqa: E741
HEX, SCOPE, DIGEST = "a" * 64, "b" * 32, "sha-256:" + "c" * 64
UUID = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
MOQT_NAMESPACE = "AWEBYgFjAWQBZQ"

REPLICA = {
    "block_key": HEX, "compat_id": HEX, "scope_id": SCOPE, "holder": H, "codec": 1, "size": 2097152,
    "digest": DIGEST, "layer_digests": [HEX] * 32, "ttl_ms": 600000,
    "residency": [{"tier": "device", "layers": [0, 15]},
                  {"tier": "host", "layers": [16, 31], "read_mbit_per_s": 400000}],
}  # fmt: skip
STATUS = {
    "instance": I, "epoch": 12, "state": "active", "running": 18, "queued": 3, "batch_size": 32,
    "kv_utilization": 0.71, "prefill_tokens_per_s": 42000, "decode_tokens_per_s": 3100,
    "links": [{"holder": H, "mbit_per_s": 200000, "rtt_us": 12}], "requested_state": None, "ttl_ms": 3000,
}  # fmt: skip
CHECKPOINT = {
    "session": UUID, "epoch": 1, "compat_id": HEX, "scope_id": SCOPE, "prompt_blocks": [HEX, HEX],
    "prompt_tail": [374, 264], "generated": [1296, 315, 279], "output_offset": 3,
    "sampler": {"method": "top-p", "params": {"p": 0.9}, "seed": 7, "step": 3, "deterministic": False},
}  # fmt: skip
LOOKUP = {"scope_id": SCOPE, "compat_id": HEX, "block_keys": [HEX], "targets": [I]}
DIRECTIVE = {
    "directive": UUID, "request_ref": "opaque", "scope_id": SCOPE, "compat_id": HEX,
    "blocks": [{"block_key": HEX, "sources": [H]}], "layer_order": "ascending", "deadline_ms": 50,
    "lease_ms": 2000,
}  # fmt: skip
PARTIAL = {"directive": UUID, "state": "partial", "loaded": [HEX]}
LEASE = {"block_keys": [HEX], "ttl_ms": 1000, "scope_id": SCOPE, "compat_id": HEX}
SHARDS = {
    "map": "m",
    "version": 4,
    "shards": [{"tokens": [0, 8], "instance": I}, {"tokens": [8, 9], "instance": H}],
}
PLAN = {"map": "m", "from": 4, "to": 5, "deadline_ms": 200, "retain": [[0, 8]], "release": [],
        "fetch": [{"tokens": [8, 12], "from": I}]}  # fmt: skip

OBJECTS: list[tuple[type, dict[str, Any], set[str]]] = [
    (records.ReplicaRecord, REPLICA, {"layer_digests"}),
    (records.InstanceStatus, STATUS, {"links", "requested_state"}),
    (records.SessionCheckpoint, CHECKPOINT, set()),
    (records.LookupRequest, LOOKUP, {"targets"}),
    (records.PrefetchDirective, DIRECTIVE, {"request_ref", "layer_order"}),
    (records.LeaseRequest, LEASE, {"scope_id", "compat_id"}),
    (records.DirectiveStatus, PARTIAL, set()),
    (records.ShardMap, SHARDS, set()),
    (records.ReshardRequest, PLAN, set()),
]

INT: list[Any] = [None, True, "1", 1.5, [], -1, 2**53]
NUMBER: list[Any] = [None, True, "1", [], -1]
STRING: list[Any] = [None, True, 1, []]
HEX32 = [*STRING, "a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n"]
HEX16 = [*STRING, HEX, "b" * 31, "B" * 32]
HEX32S: list[Any] = [None, HEX, 1, {}, [1], [None], ["a" * 63], ["A" * 64], [HEX, "a" * 63 + "g"]]
DIGESTS = [*STRING, HEX, "SHA-256:" + HEX, "sha-256=:AAAA:", "sha-256:" + "C" * 64]
HTTPS = [*STRING, "", "http://h1.example/", "https://h1.example", "https://H1.example/", "moqt://h1.example"]
POSITIVE = [*INT, 0]
TOKENS = [None, 1, [2**32], [-1], [1.5], [True], ["1"], [None]]
UUIDS = [*STRING, "", UUID[:-1], "{" + UUID + "}", UUID.replace("-", "")]
RANGES = [None, 1, [1], [[1]], [[1, 2, 3]], [[5, 5]], [[6, 5]], [[-1, 5]], [[0, 2**53]], [[0, 5], [4, 8]]]
TARGETS = [None, I, [1], ["https://h1.example"], [None]]


def residency(**changes: Any) -> list[dict[str, Any]]:
    return [{"tier": "device", "layers": [0, 31]} | changes]


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def sampler(**changes: Any) -> dict[str, Any]:
    return CHECKPOINT["sampler"] | changes  # type: ignore[operator, no-any-return]


BAD: list[tuple[type, dict[str, Any], str, list[Any]]] = [
    (records.ReplicaRecord, REPLICA, "block_key", HEX32),
    (records.ReplicaRecord, REPLICA, "compat_id", HEX32),
    (records.ReplicaRecord, REPLICA, "scope_id", HEX16),
    (records.ReplicaRecord, REPLICA, "holder", HTTPS),
    (records.ReplicaRecord, REPLICA, "codec", [*POSITIVE, 65536]),
    (records.ReplicaRecord, REPLICA, "size", POSITIVE),
    (records.ReplicaRecord, REPLICA, "digest", DIGESTS),
    (records.ReplicaRecord, REPLICA, "layer_digests", [*HEX32S, [], [HEX] * 31, [HEX] * 4097]),
    (records.ReplicaRecord, REPLICA, "ttl_ms", [*POSITIVE, "600000"]),
    (records.ReplicaRecord, REPLICA, "moqt_namespace", [None, 1, MOQT_NAMESPACE]),
    (records.ReplicaRecord, REPLICA, "residency", [
        None, {}, [], [1], residency(tier=1), residency(tier="Device"), residency(tier=""),
        residency(layers=[0]),
        residency(layers=[0, 1, 2]), residency(layers=[1, 0]), residency(layers=[-1, 0]),
        residency(layers=[0, 32]),
        residency(layers=[0, 2**53]), residency(layers=["0", "1"]), residency(layers=[True, 1]),
        residency(layers=[0, 1.5]), *(residency(read_mbit_per_s=value) for value in (0, -1, "1", None, True)),
        residency(layers=[0, 15]) + residency(layers=[15, 31]), residency(layers=[0,
        31]) + residency(layers=[3, 3]),
        [{"tier": "device"}], [{"layers": [0, 31]}]]),
    (records.InstanceStatus, STATUS, "instance", HTTPS),
    (records.InstanceStatus, STATUS, "epoch", INT),
    (records.InstanceStatus, STATUS, "state", [*STRING, "", "Active"]),
    (records.InstanceStatus, STATUS, "running", INT),
    (records.InstanceStatus, STATUS, "queued", INT),
    (records.InstanceStatus, STATUS, "batch_size", INT),
    (records.InstanceStatus, STATUS, "kv_utilization", [*NUMBER, 1.01]),
    (records.InstanceStatus, STATUS, "prefill_tokens_per_s", NUMBER),
    (records.InstanceStatus, STATUS, "decode_tokens_per_s", NUMBER),
    (records.InstanceStatus, STATUS, "requested_state", [True, 1, [], "", "Sleeping"]),
    (records.InstanceStatus, STATUS, "ttl_ms", POSITIVE),
    (records.InstanceStatus, STATUS, "links", [
        None, {}, [1], [{"holder": H, "mbit_per_s": 1}], [{"holder": H, "rtt_us": 1}],
        [{"mbit_per_s": 1, "rtt_us": 1}], [{"holder": "h", "mbit_per_s": 1, "rtt_us": 1}],
        *([{"holder": H, "mbit_per_s": rate, "rtt_us": 1}] for rate in (0, *NUMBER)),
        *([{"holder": H, "mbit_per_s": 1, "rtt_us": rtt}] for rtt in NUMBER)]),
    (records.SessionCheckpoint, CHECKPOINT, "session", UUIDS),
    (records.SessionCheckpoint, CHECKPOINT, "epoch", INT),
    (records.SessionCheckpoint, CHECKPOINT, "compat_id", HEX32),
    (records.SessionCheckpoint, CHECKPOINT, "scope_id", HEX16),
    (records.SessionCheckpoint, CHECKPOINT, "prompt_blocks", HEX32S),
    (records.SessionCheckpoint, CHECKPOINT, "prompt_tail", TOKENS),
    (records.SessionCheckpoint, CHECKPOINT, "generated", [*TOKENS, [], [1, 2], [1, 2, 3, 4]]),
    (records.SessionCheckpoint, CHECKPOINT, "output_offset", [*INT, 2, 4]),
    (records.SessionCheckpoint, CHECKPOINT, "sampler", [
        None, [], *(without(sampler(), name) for name in sampler()),
        *(sampler(method=value) for value in STRING),
        *(sampler(params=value) for value in (None, "p", 1)), *(sampler(step=value) for value in INT),
        *(sampler(seed=value) for value in (None, True, "7", 1.5, 2**53, -(2**53))),
        *(sampler(deterministic=value) for value in (None, 0, 1, "true"))]),
    (records.LookupRequest, LOOKUP, "scope_id", HEX16),
    (records.LookupRequest, LOOKUP, "compat_id", HEX32),
    (records.LookupRequest, LOOKUP, "block_keys", HEX32S),
    (records.LookupRequest, LOOKUP, "targets", TARGETS),
    (records.PrefetchDirective, DIRECTIVE, "directive", UUIDS),
    (records.PrefetchDirective, DIRECTIVE, "request_ref", [None, 1, "x" * 1025]),
    (records.PrefetchDirective, DIRECTIVE, "scope_id", HEX16),
    (records.PrefetchDirective, DIRECTIVE, "compat_id", HEX32),
    (records.PrefetchDirective, DIRECTIVE, "layer_order", [None, 1, "descending"]),
    (records.PrefetchDirective, DIRECTIVE, "deadline_ms", POSITIVE),
    (records.PrefetchDirective, DIRECTIVE, "lease_ms", POSITIVE),
    (records.PrefetchDirective, DIRECTIVE, "blocks", [
        None, [], {}, [1], [{"block_key": HEX}], [{"sources": [H]}], [{"block_key": HEX, "sources": []}],
        [{"block_key": "a", "sources": [H]}], [{"block_key": HEX, "sources": ["http://h/"]}]]),
    (records.LeaseRequest, LEASE, "block_keys", [*HEX32S, []]),
    (records.LeaseRequest, LEASE, "ttl_ms", POSITIVE),
    (records.LeaseRequest, LEASE, "scope_id", HEX16),
    (records.LeaseRequest, LEASE, "compat_id", HEX32),
    (records.LeaseRenewal, {"ttl_ms": 1}, "ttl_ms", POSITIVE),
    (records.LeaseReply, {"lease": UUID, "ttl_ms": 1}, "lease", UUIDS),
    (records.Granted, {"ttl_ms": 1}, "ttl_ms", POSITIVE),
    (records.ShardMap, SHARDS, "map", STRING),
    (records.ShardMap, SHARDS, "version", INT),
    (records.ShardMap, SHARDS, "shards", [
        None, [], [1], [{"tokens": [0, 8]}], [{"tokens": [0, 8], "instance": "x"}],
        *([{"tokens": [0, 8], "instance": I}, {"tokens": tokens, "instance": H}]
          for tokens in ([9, 12], [7, 12], [8, 8], [9, 8], [8], [8, "9"]))]),
    (records.ReshardRequest, PLAN, "map", STRING),
    (records.ReshardRequest, PLAN, "from", [*INT, 5]),
    (records.ReshardRequest, PLAN, "to", [*INT, 4, 6]),
    (records.ReshardRequest, PLAN, "deadline_ms", POSITIVE),
    (records.ReshardRequest, PLAN, "retain", [*RANGES, [[7, 9]]]),
    (records.ReshardRequest, PLAN, "release", [*RANGES, [[7, 9]]]),
    (records.ReshardRequest, PLAN, "fetch", [
        None, [1], [{"tokens": [8, 12]}], [{"from": I}], [{"tokens": [8, 8], "from": I}],
        [{"tokens": [7, 9], "from": I}], [{"tokens": [8, 9], "from": "x"}]]),
    (records.ReshardRequest, PLAN, "commit", [None, 5, -1]),
    (records.ReshardRequest, PLAN, "abort", [None, 5]),
    (records.StateChange, {"state": "active"}, "state", [*STRING, "", "Active", "asleep"]),
    (records.DirectiveStatus, PARTIAL, "directive", UUIDS),
    (records.DirectiveStatus, PARTIAL, "state", [*STRING, "done"]),
    (records.DirectiveStatus, PARTIAL, "loaded", HEX32S),
]  # fmt: skip


def decode(record: type, members: Any) -> Any:
    return jsonio.decode(json.dumps(members).encode(), record)


def refused(record: type, members: Any) -> None:
    with pytest.raises(KvspError) as caught:
        decode(record, members)
    assert caught.value.problem is registry.BAD_REQUEST


@pytest.mark.spec("R-040", "R-044", "R-046", "R-047", "R-050", "R-051", "R-053", "R-054", "R-055")
@pytest.mark.parametrize(("record", "members", "optional"), OBJECTS)
def test_examples_round_trip(record: type, members: dict[str, Any], optional: set[str]) -> None:
    parsed = decode(record, members)
    assert decode(record, json.loads(jsonio.encode(parsed))) == parsed
    written = json.loads(jsonio.encode(parsed))
    assert all(written.get(name, value) == value for name, value in members.items())


@pytest.mark.spec("R-040", "R-046", "R-047", "R-050", "R-051", "R-053", "R-054", "R-055", "R-042")
@pytest.mark.parametrize(
    ("record", "members", "name", "required"),
    [(record, members, name, name not in optional) for record, members,
    optional in OBJECTS for name in members],
)  # fmt: skip
def test_missing_member(record: type, members: dict[str, Any], name: str, required: bool) -> None:
    rest = without(members, name)
    if required:
        refused(record, rest)
    else:
        decode(record, rest)


@pytest.mark.spec("R-002", "R-003", "R-005", "R-006", "R-007", "R-008", "R-040", "R-041", "R-043", "R-046",
                  "R-047", "R-048", "R-050", "R-051", "R-053", "R-054", "R-055", "U-33", "U-38",
                  "D6")  # fmt: skip
@pytest.mark.parametrize(
    ("record", "members", "name", "value"),
    [(record, members, name, value) for record, members, name, values in BAD for value in values],
)
def test_bad_member(record: type, members: dict[str, Any], name: str, value: Any) -> None:
    refused(record, members | {name: value})


@pytest.mark.spec("R-004")
@pytest.mark.parametrize(("record", "members", "optional"), OBJECTS)
def test_unknown_members_at_every_level(record: type, members: dict[str, Any], optional: set[str]) -> None:
    def spread(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            extra = {} if name == "params" else {"x": {"y": [1]}}
            return {key: spread(item, key) for key, item in value.items()} | extra
        return [spread(item) for item in value] if isinstance(value, list) else value

    assert decode(record, spread(members)) == decode(record, members)


@pytest.mark.spec("R-042")
def test_partial_replica_needs_layer_digests() -> None:
    bare = without(REPLICA, "layer_digests")
    for layers in ([1, 31], [3, 3]):
        refused(records.ReplicaRecord, bare | {"residency": residency(layers=layers)})
    gap = residency(layers=[0, 3]) + residency(layers=[5, 31])
    refused(records.ReplicaRecord, bare | {"residency": gap})
    partial = REPLICA | {"residency": gap}
    assert decode(records.ReplicaRecord, partial).layer_count == 32
    assert decode(records.ReplicaRecord, bare).layer_count == 32


@pytest.mark.spec("R-045")
def test_moqt_replica() -> None:
    moqt = REPLICA | {"holder": "moqt://relay.example/live", "moqt_namespace": MOQT_NAMESPACE}
    assert decode(records.ReplicaRecord, moqt).moqt_namespace == MOQT_NAMESPACE
    refused(records.ReplicaRecord, without(moqt, "moqt_namespace"))
    for value in ("", MOQT_NAMESPACE + "==", MOQT_NAMESPACE + "AA", 1):
        refused(records.ReplicaRecord, moqt | {"moqt_namespace": value})


@pytest.mark.spec("R-043", "U-08", "R-219")
def test_unregistered_names_are_reported_unchanged() -> None:
    record = decode(records.ReplicaRecord, REPLICA | {"residency": residency(tier="optane-2")})
    assert record.residency[0].tier == "optane-2"
    assert decode(records.InstanceStatus, STATUS | {"state": "warming"}).state == "warming"
    assert decode(records.ReplicaRecord, REPLICA | {"codec": 65535}).codec == 65535


@pytest.mark.spec("R-005")
def test_single_layer_and_token_ranges() -> None:
    single = REPLICA | {"residency": residency(layers=[3, 3])}
    assert decode(records.ReplicaRecord, single).residency[0].layer_count == 1
    decode(records.ReshardRequest, PLAN | {"retain": [[5, 6]]})


@pytest.mark.spec("R-007", "U-06")
def test_uuids_are_normalised() -> None:
    assert decode(records.SessionCheckpoint, CHECKPOINT | {"session": UUID.upper()}).session == UUID
    assert decode(records.PrefetchDirective, DIRECTIVE | {"directive": UUID.upper()}).directive == UUID


@pytest.mark.spec("R-055")
def test_exactly_one_of_plan_commit_and_abort() -> None:
    assert decode(records.ReshardRequest, {"map": "m", "commit": 5}).commit == 5
    assert decode(records.ReshardRequest, {"map": "m", "abort": 5}).abort == 5
    for bad in ({"map": "m"}, {"map": "m", "commit": 5, "abort": 5}, {"commit": 5}, {"map": "m", "from": 4}):
        refused(records.ReshardRequest, bad)


@pytest.mark.spec("U-11")
def test_lookup_reply_is_aligned() -> None:
    reply = decode(records.LookupReply, {"matched": 1, "replicas": [[REPLICA]], "targets": [{"instance": I}]})
    assert json.loads(jsonio.encode(reply))["targets"] == [{"instance": I}]
    refused(records.LookupReply, {"matched": 2, "replicas": [[REPLICA]]})
    empty = json.loads(jsonio.encode(records.LookupReply(0, [])))
    assert empty == {"matched": 0, "replicas": []}


@pytest.mark.spec("U-11")
def test_ttl_is_the_last_member_of_an_encoded_record() -> None:
    assert jsonio.encode(decode(records.ReplicaRecord, REPLICA)).endswith(b',"ttl_ms":600000}')
