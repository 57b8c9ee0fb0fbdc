"""The gateway's resources of placement controller and inference instances, over real sockets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.app import HANDLERS
from kvsp.protocol import access, limits, registry
from kvsp.protocol.errors import KvspError, unavailable
from kvsp.protocol.names import party_id
from kvsp.protocol.routes import ROUTES
from tests.services.gateway_harness import CLIENT, FOREIGN, NOWHERE, Response, make_block, store
from tests.services.gateway_roles import (
    CASES,
    CHECKPOINT,
    CHECKPOINT_PATH,
    DIRECTIVE,
    DIRECTIVE_PATH,
    FE,
    II1,
    II2,
    II2_URI,
    PC,
    PLAN,
    PREFETCH,
    SESSION,
    STATUS,
    STATUS_PATH,
    TEMPLATES,
    Roles,
    ask,
    server_of,
)

JSON = {"content-type": "application/kvsp+json"}
WITH_BODY = sorted(set(CASES) - {"directive"})


def decoded(response: Response) -> Any:
    assert response.headers["content-type"] == "application/kvsp+json"
    assert response.headers["cache-control"] == "no-store"
    return msgspec.json.decode(response.body)


@pytest.mark.spec("R-069")
def test_every_route_has_a_handler() -> None:
    assert HANDLERS.keys() == {(route.method, route.path) for route in ROUTES}


# --- what goes through ---


@pytest.mark.spec("R-104", "R-105", "R-106", "R-046", "U-37", "R-067")
def test_status(roles: Roles) -> None:
    for state in ("active", "draining"):
        roles.placement.state = state
        response = ask(roles, "status")
        assert (response.status, decoded(response)) == (200, {"state": state})
        assert roles.placement.last() == (II1, STATUS)
    short = {name: value for name, value in STATUS.items() if name not in ("links", "requested_state")}
    assert roles.json("PUT", STATUS_PATH, short, II1).status == 200
    assert roles.placement.last() == (II1, STATUS | {"links": [], "requested_state": None})


@pytest.mark.spec("R-170", "R-172", "U-33", "U-34", "U-06", "R-047", "R-067")
def test_checkpoints_first_201_then_200(roles: Roles) -> None:
    roles.placement.seen.clear()
    first, again = ask(roles, "checkpoint"), ask(roles, "checkpoint")
    assert (first.status, again.status) == (201, 200)
    assert decoded(first) == decoded(again) == {"epoch": 1, "output_offset": 2}
    assert roles.placement.last() == (II1, CHECKPOINT)
    upper = CHECKPOINT_PATH.replace(SESSION, SESSION.upper())
    assert roles.json("PUT", upper, CHECKPOINT | {"session": SESSION.upper()}, II1).status == 200
    assert roles.placement.last() == (II1, CHECKPOINT)  # normalised on both ways in


@pytest.mark.spec("R-125", "R-051", "R-052", "U-18", "R-132", "R-067")
def test_a_directive_is_accepted_and_its_location_answers(roles: Roles) -> None:
    made = ask(roles, "prefetch")
    assert (made.status, decoded(made)) == (202, {"directive": DIRECTIVE, "state": "pending", "loaded": []})
    assert made.headers["location"] == f"prefetch/{DIRECTIVE}"
    assert roles.instance.last() == (PC, PREFETCH)
    found = roles.request("GET", "/ii1/" + made.headers["location"], principal=PC)
    loaded = ["01" * 32, "02" * 32]
    assert (found.status, decoded(found)) == (200, {"directive": DIRECTIVE, "state": "partial", "loaded": loaded})
    assert roles.instance.last() == (PC, DIRECTIVE)


@pytest.mark.spec("R-072", "R-129")
def test_head_of_a_directive_is_its_get_without_body(roles: Roles) -> None:
    got = roles.request("GET", DIRECTIVE_PATH, principal=PC)
    head = roles.request("HEAD", DIRECTIVE_PATH, principal=PC)
    assert (head.status, head.headers, head.body) == (200, got.headers, b"")
    assert int(head.headers["content-length"]) == len(got.body)
    assert roles.request("HEAD", DIRECTIVE_PATH, principal=II1).status == 403


@pytest.mark.spec("R-179", "U-35", "R-067")
def test_resume(roles: Roles) -> None:
    response = ask(roles, "resume")
    assert (response.status, decoded(response)) == (202, {"session": SESSION, "epoch": 2, "output_offset": 2})
    assert roles.instance.last() == (PC, [2, CHECKPOINT])


@pytest.mark.spec("R-055", "U-38", "R-192")
def test_reshard_plan_commit_abort(roles: Roles) -> None:
    plan = ask(roles, "reshard")
    assert (plan.status, decoded(plan)) == (200, {"map": "m", "to": 4})
    assert roles.instance.last() == (PC, PLAN)
    for step in ("commit", "abort"):
        done = roles.json("POST", "/ii1/reshard", {"map": "m", step: 4}, PC)
        assert (done.status, decoded(done)) == (200, {"map": "m", "version": 4})
        assert roles.instance.last() == (PC, {"map": "m", step: 4})
    # Its deadline is waited for, but not for ever.
    assert ask(roles, "reshard", deadline_ms=100_000).status == 200
    assert ask(roles, "reshard", deadline_ms=limits.INT_MAX).status == 200
    long, longest = roles.instance.timeouts[-2:]
    assert long is not None
    assert longest is not None
    assert 100 < long < 120 < longest < 310


@pytest.mark.spec("R-107", "U-36")
def test_state(roles: Roles) -> None:
    roles.instance.state = "sleeping"
    response = ask(roles, "state")
    assert (response.status, decoded(response)) == (200, {"state": "sleeping"})
    assert roles.instance.last() == (PC, "draining")


@pytest.mark.spec("R-004")
@pytest.mark.parametrize("name", WITH_BODY)
def test_unknown_members_are_ignored(roles: Roles, name: str) -> None:
    assert ask(roles, name, x={"y": [1]}).status in (200, 201, 202)


# --- blocks and leases of an instance (R-074) ---


@pytest.mark.spec("R-074", "U-49")
def test_an_instance_serves_blocks_and_leases_even_while_its_engine_is_away(roles: Roles) -> None:
    block = make_block()
    target = store(roles, "aa" * 32, block).replace("/h1/", "/ii1/")  # type: ignore[arg-type]
    engine = roles.servers.pop()
    roles.run(engine.stop(None))
    try:
        assert ask(roles, "state").status == 503
        assert roles.request("GET", target).body == block
        assert roles.request("GET", target + "?layers=x").status == 400
        assert roles.request("GET", target + "?layers=x", principal="spiffe://test/is").status == 403
        lease = roles.json("POST", "/ii1/leases", {"block_keys": ["aa" * 32], "ttl_ms": 1000})
        assert lease.status == 201
        assert roles.request("DELETE", "/ii1/" + lease.headers["location"]).status == 204
    finally:
        roles.run(roles.start_instance())
        while ask(roles, "state").status == 503:
            pass


# --- who may (D1), and in which order it is told ---


@pytest.mark.spec("D1", "R-210", "R-126", "R-182", "R-197", "R-104", "R-174", "R-107", "U-18")
@pytest.mark.parametrize("name", CASES)
def test_matrix(roles: Roles, name: str) -> None:
    method, target, _, allowed = CASES[name]
    others = {PC, II1, II2, FE, CLIENT, "spiffe://test/h1", "spiffe://test/is", "spiffe://test/outsider"} - {
        allowed
    }
    if name == "checkpoint":
        others.discard(II2)  # which session is bound to whom is the controller's to know
    for principal in others:
        answers = [
            ask(roles, name, principal),
            roles.request(method, target, b"{", JSON, principal),
            roles.request(method, target, b"", {"content-type": "text/plain"}, principal),
            roles.request(method, target, None, JSON | {"content-length": "99999999"}, principal),
        ]
        if method == "GET":
            answers = answers[:1]
        assert {answer.status for answer in answers} == {403}, principal
        assert len({answer.body for answer in answers}) == 1  # what else is wrong is not told
        assert answers[0].problem["type"] == "about:blank"
    assert ask(roles, name).status in (200, 201, 202)


@pytest.mark.spec("D8", "U-09", "R-094")
@pytest.mark.parametrize("name", ["checkpoint", "prefetch", "resume"])
def test_foreign_and_nonexistent_scopes_look_alike(roles: Roles, name: str) -> None:
    def with_scope(scope: str) -> Response:
        if name == "resume":
            return ask(roles, name, checkpoint=CHECKPOINT | {"scope_id": scope})
        return ask(roles, name, scope_id=scope)

    foreign, nowhere = with_scope(FOREIGN), with_scope(NOWHERE)
    assert foreign.type == "kvsp-scope-denied"
    assert foreign.head + foreign.body == nowhere.head + nowhere.body


@pytest.mark.spec("R-104", "R-070")
def test_status_of_another_instance_is_403_before_its_body_is_looked_at(roles: Roles) -> None:
    foreign = f"/pc/instances/{party_id(II2_URI)}/status"
    assert roles.json("PUT", foreign, STATUS, II1).status == 403
    assert roles.request("PUT", foreign, b"{", JSON, II1).status == 403


@pytest.mark.spec("U-05", "D3", "R-002")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_malformed_segment_names_no_resource(roles: Roles, name: str) -> None:
    method, target, _, _ = CASES[name]
    good = party_id(STATUS["instance"]) if name == "status" else DIRECTIVE if name == "directive" else SESSION
    for bad in (good[:-1], good + "0", good[:-2] + "%61", "{" + good + "}", good[:-1] + "é", "", "."):
        response = roles.request(method, target.replace(good, bad), b"{", JSON, principal="spiffe://test/outsider")
        assert (response.status, response.type) == (404, "kvsp-not-found") or "é" in bad, bad
        assert roles.request("PATCH", target.replace(good, bad), b"").status in (400, 405)


@pytest.mark.spec("R-069", "R-072", "U-50", "D9")
@pytest.mark.parametrize("name", CASES)
def test_wrong_methods(roles: Roles, name: str) -> None:
    method, target, _, _ = CASES[name]
    allow = {"GET", "HEAD"} if method == "GET" else {method}
    for wrong in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - allow:
        response = roles.request(wrong, target)
        assert response.status == 405
        assert set(response.headers["allow"].split(", ")) == allow


@pytest.mark.spec("R-069", "R-060")
@pytest.mark.parametrize(
    "target",
    [
        "/pc/", "/pc/lookup", "/pc/state", "/pc/prefetch", f"/pc/instances/{party_id(II2_URI)}",
        f"/pc/sessions/{SESSION}", "/ii1/state/", "/ii1/lookup", "/ii1/sessions",
        f"/ii1/sessions/{SESSION}/checkpoint",
        f"/ii1/prefetch/{DIRECTIVE}/x", "/ii1/v1/models", "/h1/state", "/h1/prefetch", "/is/reshard",
    ],
)  # fmt: skip
def test_routes_of_other_roles(roles: Roles, target: str) -> None:
    response = roles.request("PUT", target, b"{}", JSON)
    assert (response.status, response.problem["type"]) == (404, "about:blank")


# --- bodies ---


@pytest.mark.spec("R-064", "R-073", "U-02", "U-03", "D7", "D4", "R-001")
@pytest.mark.parametrize("name", WITH_BODY)
def test_bodies_are_strict(roles: Roles, name: str) -> None:
    method, target, body, principal = CASES[name]
    assert body is not None
    good = msgspec.json.encode(body)
    for headers in ({}, {"content-type": "application/json"}, JSON | {"content-encoding": "gzip"}):
        assert roles.request(method, target, good, headers, principal).status == 415
    bad = [
        b"", b"{", b"[]", b"null", good + b"x", good[:-1] + b',"x":NaN}', good[:-1] + b',"x":1e400}',
        good[:-1] + b',"x":' + b"[" * 40 + b"]" * 40 + b"}", good[:-1] + b',"x":1,"x":2}', b"\xff" + good,
        good[:-1] + b',"x":"\\ud800"}',
    ]  # fmt: skip
    for octets in bad:
        response = roles.request(method, target, octets, JSON, principal)
        assert (response.status, response.problem["type"]) == (400, "about:blank"), octets[-60:]
    required = set(body) - {"links", "requested_state", "request_ref", "layer_order"}
    for member in required:
        without = {other: value for other, value in body.items() if other != member}
        assert roles.json(method, target, without, principal).status == 400, member
        assert roles.json(method, target, without | {member.upper(): body[member]}, principal).status == 400
        for value in (None, True, -1, [None], [[]], {"x": 1}):
            assert roles.json(method, target, body | {member: value}, principal).status == 400, (member, value)


@pytest.mark.spec("U-33", "U-35", "U-36", "U-38", "U-08", "R-048", "R-008", "R-013", "D6")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("checkpoint", {"output_offset": 3}),
        ("checkpoint", {"generated": [4294967296, 1]}),
        ("checkpoint", {"session": "{" + SESSION + "}"}),
        ("resume", {"epoch": 1}),
        ("resume", {"epoch": 0}),
        ("state", {"state": "hibernating"}),
        ("status", {"kv_utilization": 1.01}),
        ("status", {"epoch": 1.5}),
        ("status", {"epoch": 2**53}),
        ("status", {"instance": "https://LOCALHOST/ii1/"}),
        ("status", {"state": "Active"}),
        ("prefetch", {"layer_order": "descending"}),
        ("prefetch", {"blocks": []}),
        ("prefetch", {"blocks": [{"block_key": "cd" * 32, "sources": []}]}),
        ("prefetch", {"blocks": [{"block_key": "cd" * 32, "sources": ["http://h1.example/"]}]}),
        ("prefetch", {"deadline_ms": 0}),
        ("reshard", {"to": 5}),
        ("reshard", {"commit": 4}),
        ("reshard", {"retain": [[16, 0]]}),
        ("reshard", {"retain": [[0, 17]]}),
    ],
)
def test_bounds_of_a_record(roles: Roles, name: str, changes: dict[str, Any]) -> None:
    response = ask(roles, name, **changes)
    assert (response.status, response.problem["title"]) == (400, "Bad Request")


@pytest.mark.spec("U-10", "R-214", "D13", "D6")
def test_too_many_blocks_sources_and_ranges_are_413(roles: Roles) -> None:
    block, source = PREFETCH["blocks"][0], "https://localhost/h1/"
    most = limits.DIRECTIVE_BLOCKS_MAX
    assert ask(roles, "prefetch", blocks=[block] * most).status == 202
    over = ask(roles, "prefetch", blocks=[block] * (most + 1))
    assert (over.status, over.problem["title"]) == (413, "Content Too Large")
    for count, status in ((limits.DIRECTIVE_SOURCES_MAX, 202), (limits.DIRECTIVE_SOURCES_MAX + 1, 413)):
        assert ask(roles, "prefetch", blocks=[block, block | {"sources": [source] * count}]).status == status
    ranges = [[n, n + 1] for n in range(100, 100 + limits.RESHARD_RANGES_MAX + 1)]
    assert ask(roles, "reshard", release=ranges[:-1]).status == 200
    assert ask(roles, "reshard", release=ranges).status == 413
    assert roles.json("POST", "/ii1/prefetch", PREFETCH | {"blocks": [block] * (most + 1)}, II1).status == 403


@pytest.mark.spec("D13", "D4", "U-10")
def test_a_checkpoint_is_bounded_by_declaration_and_by_count(roles: Roles) -> None:
    tokens = [7] * 1_000_000
    assert ask(roles, "checkpoint", generated=tokens, output_offset=len(tokens)).status in (200, 201)
    assert roles.placement.last()[1]["output_offset"] == len(tokens)
    long = [4294967295] * 800_000
    assert ask(roles, "checkpoint", generated=long, output_offset=len(long)).status == 413

    assert roles.chunked("PUT", CHECKPOINT_PATH, II1) == 413
    # Escapes and exponents make a message of more octets than its text: no message leaves that none would take.
    params = {"x": [1e15] * 900_000}
    grown = ask(roles, "checkpoint", sampler=CHECKPOINT["sampler"] | {"params": params})
    assert grown.status in (200, 413)


# --- what the service answers ---


def problems_of(name: str) -> list[registry.ProblemType]:
    route = access.find(CASES[name][0], TEMPLATES.get(name, CASES[name][1].rsplit("/", 1)[-1]))
    plain = (registry.BAD_REQUEST, registry.FORBIDDEN, registry.CONFLICT, registry.CONTENT_TOO_LARGE)
    return [*route.problems, *plain, registry.INTERNAL]


@pytest.mark.spec("R-200", "R-065", "R-067", "U-52", "R-103", "R-109", "R-129", "R-173", "R-181", "R-195", "U-19")
@pytest.mark.parametrize("name", CASES)
def test_every_refusal_becomes_its_problem(roles: Roles, name: str) -> None:
    server = server_of(roles, name)
    for problem in problems_of(name):
        server.fail = KvspError(problem, "why", {"hint": 1})
        response = ask(roles, name)
        server.fail = None
        expected = {"type": problem.uri, "title": problem.title, "status": problem.status}
        assert response.status == problem.status
        assert response.problem == expected | {"detail": "why", "hint": 1}


@pytest.mark.spec("R-131", "U-01")
def test_too_many_directives_and_a_full_instance_say_when_to_come_back(roles: Roles) -> None:
    for error in (KvspError(registry.TOO_MANY_REQUESTS, retry_after_s=4), unavailable("full")):
        roles.instance.fail = error
        response = ask(roles, "prefetch")
        roles.instance.fail = None
        assert response.status == error.status
        assert response.headers["retry-after"] == str(error.retry_after_s)


@pytest.mark.spec("R-201", "R-215")
def test_a_reply_that_is_none_is_a_bare_500(roles: Roles, capsys: pytest.CaptureFixture[str]) -> None:
    roles.placement.state = "confused"
    response = ask(roles, "status")
    roles.placement.state = "active"
    assert response.problem == {"type": "about:blank", "title": "Internal Server Error", "status": 500}
    assert party_id(STATUS["instance"]) not in "".join(capsys.readouterr())
