"""Who a service takes its caller for, over real sockets and real TLS (D14, U-39)."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvsp.protocol import registry
from kvsp.protocol.policy import Policy
from kvsp.rpc import channel, server
from kvsp.rpc.authority import Authority
from kvsp.rpc.config import ConfigError, ServiceConfig, Tls
from kvsp.rpc.errors import from_rpc_error
from kvsp.rpc.identity import speak_for
from kvsp.v1 import common_pb2, common_pb2_grpc
from tests.services.rpc import connected, problem_of, served

A, B = "a" * 32, "b" * 32
POLICY = Policy.load(
    "".join(
        f'[identities."spiffe://t/{name}"]\nroles = ["{role}"]\nscopes = ["{scope}"]\n'
        for name, role, scope in (("gw", "gateway", A), ("a", "client", A), ("b", "client", B))
    )
)
FORBIDDEN = registry.FORBIDDEN


def lookup_in(scope: str) -> common_pb2.AuthorizeRequest:
    return common_pb2.AuthorizeRequest(method="POST", path="lookup", scope_id=bytes.fromhex(scope))


def register(target: grpc.aio.Server) -> None:
    common_pb2_grpc.add_AuthorityServicer_to_server(Authority(POLICY), target)


async def refusal(stub: common_pb2_grpc.AuthorityStub, scope: str, metadata: tuple = ()) -> registry.ProblemType:
    call = stub.Authorize(lookup_in(scope), metadata=metadata, timeout=5)
    return from_rpc_error(await problem_of(call)).problem


class TestUnixSocket:
    @pytest.fixture
    async def stub(self, tmp_path: Path) -> AsyncIterator[common_pb2_grpc.AuthorityStub]:
        async with connected(tmp_path, register) as opened:
            yield common_pb2_grpc.AuthorityStub(opened)

    @pytest.mark.spec("D14", "R-210")
    async def test_metadata_names_the_principal(self, stub: common_pb2_grpc.AuthorityStub) -> None:
        await stub.Authorize(lookup_in(A), metadata=speak_for("spiffe://t/a"), timeout=5)
        assert await refusal(stub, A, speak_for("spiffe://t/b")) is registry.SCOPE_DENIED

    @pytest.mark.spec("D14", "D1")
    @pytest.mark.parametrize(
        "metadata",
        [(), speak_for("spiffe://t/nobody"), speak_for(""), speak_for("spiffe://t/a") + speak_for("spiffe://t/b")],
        ids=["none", "unknown", "empty", "two"],
    )
    async def test_no_one_principal_is_403(self, stub: common_pb2_grpc.AuthorityStub, metadata: tuple) -> None:
        assert await refusal(stub, A, metadata) is FORBIDDEN


class Pki:
    """A throw-away CA that issues certificates with any SANs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        ca = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, 0), True)
        self._write("ca.pem", ca.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *sans: x509.GeneralName, common_name: str = "x") -> Tls:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = self._builder(subject, key)
        if sans:
            builder = builder.add_extension(x509.SubjectAlternativeName(sans), False)
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        cert = self._write(f"{name}.pem", builder.sign(self._key, hashes.SHA256()).public_bytes(pem))
        private = key.private_bytes(pem, form, serialization.NoEncryption())
        return Tls(ca=f"{self._folder}/ca.pem", cert=cert, key=self._write(f"{name}-key.pem", private))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    def _write(self, name: str, octets: bytes) -> str:
        (self._folder / name).write_bytes(octets)
        return str(self._folder / name)


def uri(name: str) -> x509.UniformResourceIdentifier:
    return x509.UniformResourceIdentifier(f"spiffe://t/{name}")


class TestMutualTls:
    @pytest.fixture
    def pki(self, tmp_path: Path) -> Pki:
        return Pki(tmp_path)

    @pytest.fixture
    async def address(self, pki: Pki, unused_tcp_port: int) -> AsyncIterator[str]:
        address = f"127.0.0.1:{unused_tcp_port}"
        tls = pki.issue("server", uri("is"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        async with served(address, register, tls):
            yield address

    async def ask(self, address: str, tls: Tls, scope: str, named: str = "") -> registry.ProblemType | None:
        async with channel.open_channel(address, tls) as opened:
            stub = common_pb2_grpc.AuthorityStub(opened)
            try:
                await stub.Authorize(lookup_in(scope), metadata=speak_for(named) if named else (), timeout=5)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).problem
            return None

    @pytest.mark.spec("D14", "U-39", "R-062")
    async def test_the_uri_san_is_the_principal(self, pki: Pki, address: str) -> None:
        tls = pki.issue("a", uri("a"), x509.DNSName("spiffe.example"))
        assert await self.ask(address, tls, A) is None
        assert await self.ask(address, tls, A, named="spiffe://t/a") is None
        assert await self.ask(address, tls, B) is registry.SCOPE_DENIED

    @pytest.mark.spec("D14")
    async def test_only_a_gateway_speaks_for_others(self, pki: Pki, address: str) -> None:
        gateway, other = pki.issue("gw", uri("gw")), pki.issue("a", uri("a"))
        assert await self.ask(address, gateway, B, named="spiffe://t/b") is None
        assert await self.ask(address, gateway, A, named="spiffe://t/b") is registry.SCOPE_DENIED
        assert await self.ask(address, gateway, A, named="spiffe://t/nobody") is FORBIDDEN
        assert await self.ask(address, other, B, named="spiffe://t/b") is FORBIDDEN
        assert await self.ask(address, gateway, A) is FORBIDDEN, "a gateway itself has no business at the index"

    @pytest.mark.spec("U-39", "D14")
    async def test_no_uri_two_uris_and_unknown_uris_are_403(self, pki: Pki, address: str) -> None:
        for name, sans, common_name in (
            ("none", [x509.DNSName("spiffe://t/a")], "spiffe://t/a"),
            ("two", [uri("a"), uri("b")], "x"),
            ("unknown", [uri("nobody")], "x"),
        ):
            assert await self.ask(address, pki.issue(name, *sans, common_name=common_name), A) is FORBIDDEN, name

    @pytest.mark.spec("D14", "R-062")
    async def test_a_certificate_of_another_ca_gets_no_connection(
        self, address: str, pki: Pki, tmp_path: Path
    ) -> None:
        (tmp_path / "other").mkdir()
        forged = Pki(tmp_path / "other").issue("a", uri("a"))
        forged = Tls(ca=f"{tmp_path}/ca.pem", cert=forged.cert, key=forged.key)
        assert await self.ask(address, forged, A) in (registry.UNAVAILABLE, registry.GATEWAY_TIMEOUT)


@pytest.mark.spec("D14")
def test_tcp_without_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs"):
        channel.open_channel("127.0.0.1:1")


@pytest.mark.spec("D14")
async def test_a_tcp_listener_without_tls_is_refused() -> None:
    with pytest.raises(ConfigError, match="tls"):
        server.make_server(ServiceConfig(listen="127.0.0.1:0", policy="", principal=""), ())


async def test_a_stale_socket_is_replaced_and_a_live_one_is_an_error(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{tmp_path}/s.sock")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no socket"):
        server.clear_stale_socket(tmp_path / "file")
    assert (tmp_path / "file").exists()
    async with served(address, register):
        with pytest.raises(ConfigError, match="another process"):
            server.make_server(ServiceConfig(listen=address, policy="", principal=""), ())
