import pytest

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from kvsp.protocol.policy import Policy

SCOPE, OTHER = "6d1c6481cd428737da312c089db3832a", "0" * 32
H1, H2, II = "https://h1.example/kvsp/", "https://h2.example/kvsp/", "https://ii1.example/kvsp/"
MOQT = "moqt://relay.example:4443/live"

TEXT = f"""
[identities."spiffe://x/h1"]
roles = ["holder"]
base_uris = ["{H1}", "{MOQT}"]
scopes = ["{SCOPE}"]
[identities."spiffe://x/h1".quotas]
leases = 7

[identities."spiffe://x/ii1"]
roles = ["instance"]
base_uris = ["{II}"]
scopes = ["{SCOPE}", "{OTHER}"]
publish_for = ["{H1}"]

[identities."{H2}"]
roles = ["holder"]
base_uris = ["{H2}"]

[identities."spiffe://x/client"]
roles = ["client", "frontend"]
scopes = ["{SCOPE}"]
withdraw_for = "*"
"""
POLICY = Policy.load(TEXT)
H1_ID, H2_ID, II_ID, MOQT_ID = map(party_id, (H1, H2, II, MOQT))


def refusal(call: object, *arguments: object) -> KvspError:
    with pytest.raises(KvspError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


@pytest.mark.spec("U-39", "D1")
def test_identify() -> None:
    assert POLICY.identify("spiffe://x/h1").base_uris == (H1, MOQT)
    assert POLICY.identify(H2).roles == {"holder"}
    for unknown in ("spiffe://x/h9", "", "spiffe://x/h1 ", "SPIFFE://x/h1"):
        assert refusal(POLICY.identify, unknown).problem is registry.FORBIDDEN


@pytest.mark.spec("D1", "U-09")
def test_roles() -> None:
    client = POLICY.identify("spiffe://x/client")
    POLICY.require_role(client, {"placement", "frontend"})
    assert refusal(POLICY.require_role, client, {"placement"}).problem is registry.FORBIDDEN
    assert refusal(POLICY.require_role, client, ()).problem is registry.FORBIDDEN


@pytest.mark.spec("R-082", "R-094", "D1", "D8")
def test_foreign_and_nonexistent_scopes_are_alike() -> None:
    h1 = POLICY.identify("spiffe://x/h1")
    POLICY.require_scope(h1, SCOPE)
    foreign, nowhere = (refusal(POLICY.require_scope, h1, scope) for scope in (OTHER, "f" * 32))
    assert foreign.problem is registry.SCOPE_DENIED
    assert foreign.to_problem() == nowhere.to_problem()


@pytest.mark.spec("R-081", "R-089", "U-47", "D1")
@pytest.mark.parametrize(
    ("caller", "party", "publish", "withdraw"),
    [
        ("spiffe://x/h1", H1_ID, True, True),
        ("spiffe://x/h1", MOQT_ID, True, True),
        ("spiffe://x/h1", H2_ID, False, False),
        ("spiffe://x/ii1", II_ID, True, True),
        ("spiffe://x/ii1", H1_ID, True, False),
        ("spiffe://x/ii1", H2_ID, False, False),
        ("spiffe://x/client", H1_ID, False, True),
        ("spiffe://x/client", party_id("https://no.example/"), False, True),
    ],
)
def test_grants(caller: str, party: str, publish: bool, withdraw: bool) -> None:
    identity = POLICY.identify(caller)
    for allowed, require in ((publish, POLICY.require_publisher), (withdraw, POLICY.require_withdrawer)):
        if allowed:
            require(identity, party)
        else:
            assert refusal(require, identity, party).problem is registry.FORBIDDEN


@pytest.mark.spec("R-081")
def test_only_holders_publish_for_themselves() -> None:
    policy = Policy.load(f'[identities."a:b"]\nroles = ["client"]\nbase_uris = ["{H1}"]')
    assert refusal(policy.require_publisher, policy.identify("a:b"), H1_ID).status == 403


@pytest.mark.spec("R-211", "D10")
def test_trusted_holders() -> None:
    assert POLICY.trusted_holders(SCOPE) == {H1, MOQT, II}
    assert POLICY.trusted_holders(OTHER) == {II}
    assert POLICY.trusted_holders("f" * 32) == frozenset()
    assert POLICY.is_party(H2)
    assert not POLICY.is_party(H2[:-1])


@pytest.mark.spec("R-142", "R-214")
def test_quotas_default_to_the_limits() -> None:
    quotas = POLICY.identify("spiffe://x/h1").quotas
    assert (quotas.leases, quotas.lease_ttl_ms) == (7, limits.LEASE_TTL_MS_MAX)
    assert quotas.leased_octets == limits.LEASED_OCTETS_DEFAULT
    assert quotas.records == limits.RECORDS_PER_HOLDER_MAX


ENTRY = '[identities."a:b"]\nroles = ["client"]\n'


@pytest.mark.spec("U-39", "U-07")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", "unknown key 'x'"),
        ("identities = 1", "not a table"),
        ("identities = \n", "line 1"),
        ("a = " + "[" * 5000, "deep"),
        ("[identities.a]\nroles = ['client']", "not an absolute URI"),
        ('[identities."a:b,c"]\nroles = ["client"]', "not an absolute URI"),
        ('[identities."a:b"]', "roles"),
        ('[identities."a:b"]\nroles = []', "roles is empty"),
        ('[identities."a:b"]\nroles = ["root"]', "unknown role 'root'"),
        ('[identities."a:b"]\nroles = "client"', "roles"),
        (ENTRY + "scope = []", "`scope`"),
        (ENTRY + 'scopes = ["ABC"]', "hex16"),
        (ENTRY + 'scopes = "*"', "scopes"),
        (ENTRY + 'base_uris = ["http://h1.example/"]', "base_uris"),
        (ENTRY + 'base_uris = ["https://h1.example"]', "base_uris"),
        (ENTRY + 'publish_for = ["*"]', "publish_for"),
        (ENTRY + 'withdraw_for = "all"', "withdraw_for"),
        (ENTRY + "[identities.'a:b'.quotas]\nleases = true", "leases"),
        (ENTRY + "[identities.'a:b'.quotas]\nlease_ttl_ms = 0", "lease_ttl_ms"),
        (ENTRY + f"[identities.'a:b'.quotas]\nleases = {limits.LEASE_COUNT_MAX + 1}", "leases"),
        (ENTRY + "[identities.'a:b'.quotas]\noctets = 1", "octets"),
        (TEXT + f'[identities."c:d"]\nroles = ["holder"]\nbase_uris = ["{H1}"]', H1),
    ],
)
def test_bad_files_say_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        Policy.load(text)
    assert reason in str(caught.value)
