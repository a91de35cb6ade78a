"""Certificates for tests: of an authority of one's own, good or wrong in one respect."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from saltern.tls import ClientTls, ServerTls


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its key, and the certificate's serial number."""

    certificate: Path
    private_key: Path
    serial: int


class Authority:
    """Issues certificates into ``folder``; its own is ``ca.pem`` there."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._begin(self._name, self._key, datetime.now(UTC), timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, SHA256())
        )
        self.ca.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str = "leaf",
        *,
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        now: datetime | None = None,
        lifetime: timedelta = timedelta(days=1),
    ) -> Pair:
        """Write ``{name}.pem`` and ``{name}.key``, over what is there; valid from an hour before ``now`` on."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._begin(subject, key, now or datetime.now(UTC), lifetime)
            .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
            .sign(self._key, SHA256())
        )
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key", certificate.serial_number)
        _replace(pair.private_key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        _replace(pair.certificate, certificate.public_bytes(Encoding.PEM))
        return pair

    def server(self, name: str = "server", *, client_ca: Path | None = None) -> ServerTls:
        """A good certificate of a server on this host."""
        pair = self.issue(name)
        return ServerTls(pair.certificate, pair.private_key, client_ca)

    def client(self, name: str | None = None) -> ClientTls:
        """A client that trusts this authority, with a certificate of it if ``name`` says under which name."""
        if name is None:
            return ClientTls(self.ca)
        pair = self.issue(name)
        return ClientTls(self.ca, pair.certificate, pair.private_key)

    def _begin(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lifetime: timedelta
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + lifetime)
        )


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.new")
    partial.write_bytes(content)
    partial.chmod(0o600)
    partial.replace(path)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
