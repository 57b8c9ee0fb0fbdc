"""A small certificate authority for the dev stack and its tests.

Clients get exactly one URI SAN, which is their identity (U-39); Envoy gets the names it is reached by.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deploy.local.layout import Layout, StackError, write_private
from deploy.local.policy import PARTIES, identity_uri

AUTHORITY_LIFE = timedelta(days=730)
LEAF_LIFE = timedelta(days=365)
RENEW_BEFORE = timedelta(days=7)
CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Credential:
    """A certificate and its private key (EC P-256)."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, directory: Path, name: str) -> None:
        """Write NAME.pem and NAME-key.pem, the key with mode 0600."""
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(directory / f"{name}-key.pem", key)
        write_private(directory / f"{name}.pem", self.certificate.public_bytes(serialization.Encoding.PEM))

    @classmethod
    def read(cls, directory: Path, name: str) -> Credential | None:
        """What `write` left, or None when it is missing or unreadable."""
        try:
            certificate = x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes())
            key = serialization.load_pem_private_key((directory / f"{name}-key.pem").read_bytes(), None)
        except (OSError, ValueError):
            return None
        return cls(certificate, key) if isinstance(key, ec.EllipticCurvePrivateKey) else None


def make_authority(name: str = "kvsp dev CA") -> Credential:
    """A self-signed certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = (
        _builder(name, name, key, now - CLOCK_SKEW, now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
    )
    return Credential(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Credential,
    name: str,
    *,
    uris: Sequence[str] = (),
    dns: Sequence[str] = (),
    ips: Sequence[str] = (),
    not_before: datetime | None = None,
    not_after: datetime | None = None,
) -> Credential:
    """A leaf with these SANs: for servers when it has DNS names, else for clients. Valid from now by default."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    issuer = authority.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if dns else ExtendedKeyUsageOID.CLIENT_AUTH
    alternatives: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    alternatives += [x509.DNSName(host) for host in dns]
    alternatives += [x509.IPAddress(ipaddress.ip_address(ip)) for ip in ips]
    builder = (
        _builder(name, str(issuer), key, not_before or now - CLOCK_SKEW, not_after or now + LEAF_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return Credential(builder.sign(authority.key, hashes.SHA256()), key)


def issue_client(authority: Credential, name: str, uri: str) -> Credential:
    """A client certificate whose one URI SAN is `uri`."""
    return issue(authority, name, uris=[uri])


def issue_server(authority: Credential) -> Credential:
    """Envoy's certificate."""
    return issue(authority, "envoy", dns=["localhost"], ips=["127.0.0.1", "::1"])


def ensure(layout: Layout) -> Credential:
    """Make what is missing or about to expire, keep the rest. Returns the authority."""
    authority = Credential.read(layout.pki, "ca")
    if authority is None or _is_stale(authority):
        authority = make_authority()
        authority.write(layout.pki, "ca")
    if _needs_issue(layout, authority, "envoy"):
        issue_server(authority).write(layout.pki, "envoy")
    for party in PARTIES:
        if _needs_issue(layout, authority, party.name):
            issue_client(authority, party.name, party.uri).write(layout.pki, party.name)
    return authority


def add_identity(layout: Layout, name: str) -> tuple[str, Path, Path]:
    """Issue one more client identity. Returns its URI and the paths of certificate and key. Raises StackError."""
    if name in {"ca", "envoy"} or not name.replace("-", "").isalnum() or not name.isascii():
        raise StackError(f"identity {name!r}: use ASCII letters, digits and '-', not 'ca' or 'envoy'")
    authority = ensure(layout)
    uri = identity_uri(name)
    issue_client(authority, name, uri).write(layout.pki, name)
    return uri, layout.pki / f"{name}.pem", layout.pki / f"{name}-key.pem"


def _needs_issue(layout: Layout, authority: Credential, name: str) -> bool:
    leaf = Credential.read(layout.pki, name)
    if leaf is None or _is_stale(leaf):
        return True
    try:
        leaf.certificate.verify_directly_issued_by(authority.certificate)
    except Exception:  # any failure of the check means: not ours, issue again
        return True
    return False


def _is_stale(credential: Credential) -> bool:
    return datetime.now(UTC) > credential.certificate.not_valid_after_utc - RENEW_BEFORE


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )
