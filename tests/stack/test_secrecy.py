"""Nothing as confidential as the prompts leaves by logs, metrics or problems; files are their owner's alone."""

from __future__ import annotations

import base64
import contextlib
import stat
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvsp.client import Client
from kvsp.protocol.errors import KvspError
from kvsp.protocol.names import party_id
from tests.stack.harness import Reply, RunningStack, free_port, start_stack, temporary_layout
from tests.stack.traffic import (
    Sample,
    arenas,
    assert_problem,
    chain,
    client_of,
    create_lease,
    eventually,
    get,
    half_get,
    half_put,
    look_up,
    matched,
    put,
    random_tokens,
    store,
)

pytestmark = pytest.mark.stack

PROCESSES = ("index", "h1", "gateway")


@dataclass
class Secrets:
    """Everything that must not be seen, and every problem that was."""

    stack: RunningStack
    admins: dict[str, str]
    tokens: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    problems: list[Reply] = field(default_factory=list)

    def forms(self) -> dict[str, bytes]:
        """Each secret in every form in which it could be written, by what it is."""
        found: dict[str, bytes] = {}
        for name in ("demo", "other"):
            _spell(found, f"scope key {name}", self.stack.scope_key(name).reveal())
        for at, sample in enumerate(self.samples):
            _spell(found, f"block key {at}", bytes.fromhex(sample.block_key))
            _spell(found, f"octets of block {at}", sample.payload[:24])
        for at, token in enumerate(self.tokens):
            found[f"token {at}"] = b"%d" % token
        return found

    def check(self, where: str, text: bytes) -> None:
        """Raise AssertionError that names what was found, but does not show it."""
        low = text.lower()
        found = [name for name, form in self.forms().items() if form in text or form.lower() in low]
        assert not found, f"{where} shows {found}"

    def problem(self, reply: Reply, status: int, kind: str = "about:blank") -> None:
        """A problem of this kind, kept for inspection."""
        assert_problem(reply, status, kind)
        self.problems.append(reply)


def _spell(found: dict[str, bytes], name: str, octets: bytes) -> None:
    found[f"{name}, raw"] = octets
    found[f"{name}, hex"] = octets.hex().encode()
    found[f"{name}, part"] = octets.hex().encode()[:16]
    found[f"{name}, repr"] = repr(octets).encode()[2:-1]
    found[f"{name}, base64"] = base64.b64encode(octets)[:-4]
    found[f"{name}, base64url"] = base64.urlsafe_b64encode(octets)[:-4]


@pytest.fixture(scope="module")
def told() -> Iterator[Secrets]:
    """A stack that logs as much as it can, after all sorts of traffic."""
    admins = {name: f"127.0.0.1:{free_port()}" for name in PROCESSES}
    overrides: dict[str, dict[str, Any]] = {
        name: {"admin": admin, "log_level": "debug"} for name, admin in admins.items()
    }
    overrides["h1"]["arena_octets"] = 1 << 20
    with temporary_layout() as layout, start_stack(layout, overrides) as started:
        secrets = Secrets(started, admins)
        with client_of(started) as client:
            succeed(secrets, client)
        be_refused(secrets)
        break_off(secrets)
        started.stop("envoy")  # it writes its log every ten seconds, and when it ends
        started.start("envoy")
        yield secrets


def succeed(secrets: Secrets, client: Client) -> None:
    stack = secrets.stack
    secrets.tokens = random_tokens(12)
    samples = chain(stack, 12, tokens=secrets.tokens)
    secrets.samples += samples
    store(stack, samples)
    eventually(lambda: matched(stack, samples) == len(samples), "not published")
    for replicas in client.lookup(samples[0].scope_id, samples[0].compat_id, [samples[0].block_key]).replicas:
        client.get(replicas)
    with client.lease(stack.holder, [each.block_key for each in samples], 60_000) as lease:
        lease.renew_now()
        assert lease.wait_renewed(1, 30)
    first = samples[0].block_key
    where = f"{stack.index}replicas/{party_id(stack.holder)}/{first}"
    assert stack.request("DELETE", where, identity="pc").status == 204


def be_refused(secrets: Secrets) -> None:
    """Every failure that a client can ask for, with keys and tokens wherever they fit."""
    stack, sample = secrets.stack, secrets.samples[0]
    unknown = chain(stack, 1)[0]
    foreign = chain(stack, 1, scope="other")[0]
    secrets.samples += [unknown, foreign]
    url = stack.holder + sample.path
    secrets.problem(get(stack, unknown), 404, "kvsp-not-found")
    secrets.problem(get(stack, foreign), 403, "kvsp-scope-denied")
    secrets.problem(get(stack, sample, "outsider"), 403)
    secrets.problem(put(stack, sample), 412)
    secrets.problem(stack.request("PUT", url, sample.octets), 428)
    secrets.problem(stack.request("GET", url + "?layers=9-9"), 404, "kvsp-layers-unavailable")
    secrets.problem(stack.request("GET", f"{url}?layers={sample.block_key}"), 400)
    secrets.problem(stack.request("GET", f"{url}?codec={secrets.tokens[0]}"), 400)
    secrets.problem(stack.request("DELETE", url), 405)
    secrets.problem(stack.request("GET", url + "/x"), 404)
    secrets.problem(
        stack.request("GET", url.replace(sample.block_key, sample.block_key.upper())), 404, "kvsp-not-found"
    )
    secrets.problem(stack.request("GET", url.replace("/h1/", f"/{sample.block_key}/")), 404)
    fields = {"content-type": "application/kvsp-block", "if-none-match": "*"}
    wrong = {**fields, "repr-digest": f"sha-256=:{base64.b64encode(bytes(32)).decode()}:"}
    other = stack.holder + unknown.path
    secrets.problem(stack.request("PUT", other, unknown.octets, wrong), 422, "kvsp-digest-mismatch")
    secrets.problem(stack.request("PUT", other, unknown.octets[:-1], fields), 400)
    secrets.problem(stack.request("PUT", other, sample.payload, fields), 400)
    secrets.problem(stack.request("PUT", other, unknown.octets, {**fields, "content-encoding": "gzip"}), 415)
    secrets.problem(put(stack, Sample(*_names(unknown), bytes(2 << 20))), 413)
    for key in (sample.block_key.upper(), sample.block_key + "0", secrets.tokens):
        body = {"scope_id": sample.scope_id, "compat_id": sample.compat_id, "block_keys": [key]}
        secrets.problem(stack.request("POST", stack.index + "lookup", body), 400)
        secrets.problem(stack.request("POST", stack.holder + "leases", {**body, "ttl_ms": 1000}), 400)
    secrets.problem(stack.request("POST", stack.index + "lookup", sample.octets), 415)
    broken = b'{"block_keys":["' + sample.block_key.encode() + b'",' + str(secrets.tokens).encode()
    secrets.problem(
        stack.request("POST", stack.index + "lookup", broken, {"content-type": "application/kvsp+json"}), 400
    )
    where = f"{stack.index}replicas/{party_id(stack.holder)}/{sample.block_key}"
    secrets.problem(stack.request("DELETE", where), 403)
    record = {"block_key": sample.block_key, "tokens": secrets.tokens}
    secrets.problem(stack.request("PUT", where, record), 403)
    secrets.problem(stack.request("PUT", where, record, identity="h1"), 400)
    secrets.problem(create_lease(stack, [sample], 10**12), 429, "kvsp-lease-quota")
    secrets.problem(stack.request("DELETE", f"{stack.holder}leases/{sample.block_key}"), 404, "kvsp-not-found")


def _names(sample: Sample) -> tuple[str, str, str]:
    return sample.compat_id, sample.scope_id, sample.block_key


def break_off(secrets: Secrets) -> None:
    """Clients and processes that end in the middle."""
    stack, sample = secrets.stack, secrets.samples[1]
    upload = chain(stack, 1)[0]
    secrets.samples.append(upload)
    half_put(stack, upload).reset()
    half_get(stack, sample).reset()
    for name in PROCESSES:
        stack.kill(name)
        url = stack.index + "lookup" if name == "index" else stack.holder + sample.path
        reply = look_up(stack, [sample]) if name == "index" else stack.request("GET", url)
        secrets.problem(reply, 503)
        with client_of(stack) as client, contextlib.suppress(KvspError):
            client.head(stack.holder, *_names(sample))
        stack.start(name)
    eventually(lambda: get(stack, sample).status == 404, "the holder is not found again")
    store(stack, [upload])


@pytest.mark.spec("R-215", "R-025", "D15")
def test_logs_are_silent(told: Secrets) -> None:
    logs = sorted((told.stack.layout.home / "logs").iterdir())
    assert {"access.log", "index.log", "h1.log", "gateway.log", "envoy.log"} <= {each.name for each in logs}
    assert told.stack.layout.log("access").stat().st_size > 1000
    for each in logs:
        told.check(each.name, each.read_bytes())


@pytest.mark.spec("R-215", "R-217", "D8")
def test_metrics_are_silent(told: Secrets) -> None:
    sources = {name: f"http://{admin}/metrics" for name, admin in told.admins.items()}
    envoy = told.stack.endpoints["envoy_admin"]
    sources |= {page: f"{envoy}/{page}" for page in ("stats", "clusters", "listeners", "server_info")}
    for name, url in sources.items():
        with urllib.request.urlopen(url) as reply:
            text = reply.read()
        assert text
        told.check(name, text)


@pytest.mark.spec("R-201", "R-215", "R-065", "R-067", "D8")
def test_problems_are_silent(told: Secrets) -> None:
    assert len(told.problems) > 30
    for reply in told.problems:
        told.check(f"problem {reply.status}", reply.body + repr(reply.headers).encode())
        for internal in (b"Traceback", b".py", b"/tmp", b"unix:", b"grpc", told.stack.layout.home.name.encode()):
            assert internal not in reply.body


@pytest.mark.spec("R-210", "D1", "U-39")
def test_a_stranger_is_refused_every_time(told: Secrets) -> None:
    """Each request opens a stream to the holder anew; none may end otherwise than by the refusal."""
    sample = told.samples[0]
    for _ in range(30):
        assert_problem(get(told.stack, sample, "outsider"), 403)
        assert_problem(put(told.stack, sample, "outsider"), 403)


@pytest.mark.spec("R-094", "D8", "R-150")
def test_foreign_and_nonexistent_scopes_look_the_same(told: Secrets) -> None:
    stack, sample = told.stack, chain(told.stack, 1, scope="other")[0]
    assert put(stack, sample, "client-other").status == 201
    nowhere = Sample(sample.compat_id, "ab" * 16, sample.block_key, b"")
    absent = Sample(sample.compat_id, sample.scope_id, "cd" * 32, b"")
    replies = [get(stack, each) for each in (sample, nowhere, absent)]
    replies += [look_up(stack, [each]) for each in (sample, nowhere, absent)]
    assert {each.status for each in replies} == {403}
    assert len({each.body for each in replies}) == 1


@pytest.mark.spec("D15", "D2", "D14", "R-215")
def test_files_are_their_owners_alone(told: Secrets) -> None:
    """What is not in a closed folder is closed itself, and secrets are twice."""
    home = told.stack.layout.home
    for folder in (home, *(each for each in home.iterdir() if each.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder.name
    private = [*home.glob("pki/*-key.pem"), *home.glob("scopes/*"), *home.glob("config/*"), *home.glob("*.toml")]
    assert len(private) > 10
    memory = arenas(told.stack)
    assert len(memory) == 1
    for path in (*private, *memory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    sockets = [each for each in (home / "run").iterdir() if stat.S_ISSOCK(each.stat().st_mode)]
    assert {"index.sock", "h1.sock", "gateway.sock"} <= {each.name for each in sockets}
    assert all(each.stat().st_mode & 0o077 == 0 for each in sockets)


@pytest.mark.spec("R-025", "D15")
def test_processes_know_no_scope_key(told: Secrets) -> None:
    """Neither by arguments, nor environment, nor configuration: the services need none at all."""
    keys = {name: told.stack.scope_key(name).reveal() for name in ("demo", "other")}
    for process in PROCESSES:
        pid = told.stack.pid(process)
        seen = b"".join(Path(f"/proc/{pid}/{part}").read_bytes() for part in ("cmdline", "environ"))
        seen += told.stack.layout.config(process).read_bytes() + told.stack.layout.policy.read_bytes()
        for key in keys.values():
            assert key.hex().encode() not in seen
        assert not any("/scopes/" in str(each.resolve()) for each in Path(f"/proc/{pid}/fd").iterdir())
