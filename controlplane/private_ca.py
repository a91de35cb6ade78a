"""A certificate authority of one's own, so that TLS can be tried without one: what ``saltern up --tls`` uses.

::

    ca.pem, ca.key            the authority; clients are given ca.pem and nothing else
    server.pem, server.key    for this host alone: localhost, 127.0.0.1, ::1

Keys are EC P-256, files of keys are 0600. Certificates are looked at when the stack starts and made anew when they end
soon. The authority lives long, because every client would have to be given another one.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from controlplane.files import make_folder, write_private_file
from saltern.errors import FailedPreconditionError, SalternError
from saltern.tls import ServerTls, read_identity

CA_LIFETIME: Final = timedelta(days=3650)
SERVER_LIFETIME: Final = timedelta(days=90)
#: What ends within this time is made anew.
RENEW_BEFORE: Final = timedelta(days=30)
_CLOCK_SLACK: Final = timedelta(minutes=5)
_NAMES: Final = (
    x509.DNSName("localhost"),
    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    x509.IPAddress(ipaddress.ip_address("::1")),
)


@dataclass(frozen=True, slots=True)
class StackTls:
    """The files of a stack: what its servers show, and the authority that their clients are to trust."""

    server: ServerTls
    ca: Path


def ensure_certificates(folder: Path, now: datetime | None = None) -> StackTls:
    """Make what is missing in ``folder`` or ends within RENEW_BEFORE of ``now``, by default the present.

    Raises:
        FailedPreconditionError: PRIVATE_CA_UNUSABLE: the authority's own files are damaged. They are not made anew
            without a word: whoever trusts the authority would trust another one.
    """
    now = now or datetime.now(UTC)
    make_folder(folder, 0o700)
    ca_file, ca_key_file = folder / "ca.pem", folder / "ca.key"
    server = ServerTls(folder / "server.pem", folder / "server.key")
    if not ca_file.exists() and not ca_key_file.exists():
        _make_authority(ca_file, ca_key_file, now)
    authority, authority_key = _read_authority(ca_file, ca_key_file, now)
    if not _is_good(server, authority, now):
        _make_server(server, authority, authority_key, now)
    return StackTls(server, ca_file)


def _is_good(server: ServerTls, authority: x509.Certificate, now: datetime) -> bool:
    try:
        identity = read_identity(server.certificate, server.private_key, now)
        x509.load_pem_x509_certificate(identity.chain_pem).verify_directly_issued_by(authority)
    except (SalternError, ValueError, TypeError, InvalidSignature):
        return False
    return identity.expires_at - now > RENEW_BEFORE


def _make_authority(ca_file: Path, ca_key_file: Path, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    # The serial number tells the authorities of two stacks apart where both are trusted.
    name = _name(f"Saltern private CA {x509.random_serial_number() % 0xFFFFFF:06x}")
    certificate = (
        _builder(name, name, key.public_key(), now, CA_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    _write_key(ca_key_file, key)
    write_private_file(ca_file, certificate.public_bytes(Encoding.PEM).decode())


def _make_server(
    files: ServerTls, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, now: datetime
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    lifetime = min(SERVER_LIFETIME, authority.not_valid_after_utc - now)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name("Saltern on this host"), authority.subject, key.public_key(), now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(_NAMES), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, SHA256())
    )
    _write_key(files.private_key, key)
    write_private_file(files.certificate, certificate.public_bytes(Encoding.PEM).decode())


def _read_authority(
    ca_file: Path, ca_key_file: Path, now: datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        identity = read_identity(ca_file, ca_key_file, now)
        key = load_pem_private_key(identity.private_key_pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("not a key that was made here")
        return x509.load_pem_x509_certificate(identity.chain_pem), key
    except (SalternError, ValueError) as error:
        why = error.message if isinstance(error, SalternError) else str(error)
        raise FailedPreconditionError(
            f"the private authority in {ca_file.parent} cannot be used: {why}",
            reason="PRIVATE_CA_UNUSABLE",
            hint=f"restore ca.pem and ca.key, or remove {ca_file.parent}: then clients must be given the new ca.pem",
        ) from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + lifetime)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private_file(path, pem.decode())
