import pytest

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError, bad_request

TABLE = {  # the table of the text
    "kvsp-not-found": 404, "kvsp-scope-denied": 403, "kvsp-incompatible": 409, "kvsp-lease-quota": 429,
    "kvsp-stale-epoch": 409, "kvsp-invalid-state": 409, "kvsp-digest-mismatch": 422,
    "kvsp-plan-conflict": 409,
    "kvsp-layers-unavailable": 404,
}  # fmt: skip


@pytest.mark.spec("R-200")
def test_problem_types() -> None:
    assert {row.suffix: row.status for row in registry.PROBLEMS.values()} == TABLE
    for suffix, row in registry.PROBLEMS.items():
        assert row.uri == f"https://iana.org/assignments/kvsp#{suffix}"


@pytest.mark.spec("U-01", "R-201")
def test_plain_problems() -> None:
    for status, row in registry.PLAIN_PROBLEMS.items():
        assert (row.uri, row.status) == ("about:blank", status)
    assert registry.PLAIN_PROBLEMS[413].title == "Content Too Large"
    assert set(registry.PLAIN_PROBLEMS) >= {400, 403, 404, 405, 413, 414, 415, 428, 429, 431, 500, 503}


@pytest.mark.spec("R-065", "R-201")
@pytest.mark.parametrize("row", [*registry.PROBLEMS.values(), *registry.PLAIN_PROBLEMS.values()])
def test_problem_round_trip(row: registry.ProblemType) -> None:
    error = KvspError(row, "detail", {"block_keys": ["k"]}, 3)
    back = KvspError.from_problem(row.status, error.to_problem(), 3)
    assert (back.problem, back.detail, back.retry_after_s) == (row, "detail", 3)
    assert back.extensions == {"block_keys": ["k"]}
    assert error.to_problem()["status"] == error.status == row.status
    assert "detail" not in KvspError(row).to_problem()


@pytest.mark.spec("R-201")
def test_extensions_never_replace_the_members_of_the_problem() -> None:
    hostile = {"type": "x", "title": "x", "status": 200}
    problem = KvspError(registry.NOT_FOUND, extensions=hostile).to_problem()
    assert (problem["type"], problem["status"]) == (registry.NOT_FOUND.uri, 404)


@pytest.mark.spec("R-066")
@pytest.mark.parametrize("status", [299, 471, 599])
def test_unlisted_statuses_keep_their_class(status: int) -> None:
    assert KvspError.from_problem(status, {}).status == status
    assert KvspError.from_problem(status, {"type": registry.NOT_FOUND.uri}).status == status


@pytest.mark.spec("R-066")
@pytest.mark.parametrize("body", [{}, {"type": None, "detail": None}, {"type": [], "status": "x"}, {"detail": 7}])
def test_a_peer_may_send_anything(body: dict[str, object]) -> None:
    assert KvspError.from_problem(404, body).status == 404
    assert isinstance(KvspError.from_problem(404, body).detail, str)


def test_bad_request() -> None:
    assert bad_request("why").to_problem() == {
        "type": "about:blank", "title": "Bad Request", "status": 400, "detail": "why"
    }  # fmt: skip


@pytest.mark.spec("R-219")
def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError):
        registry.index_rows(("a", "b", "a"), lambda row: row)


@pytest.mark.spec("R-221", "R-032", "R-043")
def test_contents() -> None:
    assert registry.CODECS[1] == registry.RAW
    assert set(registry.ELEMENT_TYPES) == {"bf16", "fp16", "fp32", "fp8-e4m3", "fp8-e5m2"}
    assert {"device", "host", "local-storage", "remote-memory", "remote-storage"} == registry.TIERS
    assert {"active", "draining", "sleeping", "failed"} == registry.INSTANCE_STATES
    for name in (*registry.TIERS, *registry.INSTANCE_STATES, *registry.ELEMENT_TYPES):
        assert registry.TOKEN.fullmatch(name)


@pytest.mark.spec("U-10", "R-095", "R-214", "D5")
def test_limits() -> None:
    assert (limits.LOOKUP_KEYS_MAX, limits.LOOKUP_TARGETS_MAX, limits.LEASE_KEYS_MAX) == (8192, 256, 1024)
    assert (limits.DIRECTIVE_BLOCKS_MAX, limits.DIRECTIVE_SOURCES_MAX) == (4096, 16)
    assert (limits.JSON_OCTETS_MAX, limits.BLOCK_OCTETS_MAX) == (8 << 20, 256 << 20)
    assert limits.CONTAINER_HEADER_OCTETS_MAX == 20 + 4096 * 16
