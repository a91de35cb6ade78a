"""TLS for both sides: which files, what is wrong with them, and the contexts that they make.

Whether a connection is encrypted is never found out by trying. A client that was given a :class:`ClientTls` speaks TLS
on every TCP connection and calls nobody who does not; one without speaks plain text. So nobody on the path can talk a
client out of it.

A certificate is a second lock, not an identity: with ``client_ca`` a server turns away whoever has no certificate of
that authority, and then still takes the tenant from the token alone (I1).

The wire protocol takes TLS 1.3 only. gRPC takes 1.2 too, because its Python library has no switch for that.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from saltern.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, PermissionDeniedError

#: Instead of a file: the authorities that the system trusts.
SYSTEM_CA: Final = "system"
ENVIRONMENT_CA: Final = "SALTERN_TLS_CA"
ENVIRONMENT_CERT: Final = "SALTERN_TLS_CERT"
ENVIRONMENT_KEY: Final = "SALTERN_TLS_KEY"
ENVIRONMENT_SERVER_NAME: Final = "SALTERN_TLS_SERVER_NAME"

#: The system's own list of authorities is about 250 KiB.
_FILE_MAX_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate with its private key, checked: valid now, and the key is the certificate's.

    Attributes:
        chain_pem: the certificate, then those that lead to its authority.
        private_key_pem: never shown, logged or put into an error.
        serial: of the certificate.
        expires_at: when it ends, UTC.
    """

    chain_pem: bytes = field(repr=False)
    private_key_pem: bytes = field(repr=False)
    serial: int
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class ServerMaterial:
    """What the files of a :class:`ServerTls` held when they were read."""

    identity: Identity
    client_ca_pem: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The files of a server. Attributes: certificate and chain, private key, authority of client certificates (or None:
    clients need none)."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        files = (self.certificate, self.private_key)
        return files if self.client_ca is None else (*files, self.client_ca)

    def read(self, now: datetime | None = None) -> ServerMaterial:
        """Read and check all files.

        Raises:
            NotFoundError, PermissionDeniedError: a file is not there or cannot be read.
            FailedPreconditionError: one does not hold what it should; see :func:`read_identity`.
        """
        client_ca_pem = None if self.client_ca is None else read_authorities(self.client_ca)
        return ServerMaterial(read_identity(self.certificate, self.private_key, now), client_ca_pem)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What a client trusts and how it shows itself.

    Attributes:
        ca: file of the authorities that it trusts, and no others; None for the system's.
        certificate: what it shows to a server that asks for one; needs ``private_key``.
        server_name: what the certificate of the *control plane* must be for, where that is not the host that is called.
            Nodes say theirs in the registry.
    """

    ca: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError: a certificate without its key, or the reverse."""
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidArgumentError(
                "a client certificate and its private key belong together",
                reason="TLS_OPTIONS_INCOMPLETE",
                hint="give both --tls-cert and --tls-key, or neither",
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are named; not those of the system."""
        return tuple(path for path in (self.ca, self.certificate, self.private_key) if path is not None)

    def read_identity(self) -> Identity | None:
        """The client's own certificate, or None; raises as :func:`read_identity`."""
        if self.certificate is None or self.private_key is None:
            return None
        return read_identity(self.certificate, self.private_key)

    def read_authorities(self) -> bytes:
        """The trusted authorities, PEM.

        Raises:
            NotFoundError, PermissionDeniedError, FailedPreconditionError: the file cannot be used.
        """
        if self.ca is not None:
            return read_authorities(self.ca)
        system = ssl.get_default_verify_paths().cafile
        if system is None:
            raise NotFoundError(
                "this system has no file of trusted authorities",
                reason="TLS_FILE_NOT_FOUND",
                hint="install the package ca-certificates, or name a file with --tls-ca",
            )
        return read_authorities(Path(system))


def client_tls(
    ca: str | None, certificate: Path | None = None, private_key: Path | None = None, server_name: str = ""
) -> ClientTls | None:
    """TLS as a client's options say it: a file or ``system`` as ``ca``; None without one: plain text.

    Raises:
        InvalidArgumentError: TLS_OPTIONS_INCOMPLETE: the others are given without ``ca``: that would be plain text.
    """
    if ca is None:
        if certificate is not None or private_key is not None or server_name:
            raise InvalidArgumentError(
                "TLS options are given, but not whom to trust",
                reason="TLS_OPTIONS_INCOMPLETE",
                hint=f"add --tls-ca FILE (or {ENVIRONMENT_CA}); '{SYSTEM_CA}' for the authorities of the system",
            )
        return None
    return ClientTls(None if ca == SYSTEM_CA else Path(ca), certificate, private_key, server_name)


def client_tls_from_environment() -> ClientTls | None:
    """TLS as ``SALTERN_TLS_CA``, ``_CERT``, ``_KEY`` and ``_SERVER_NAME`` say it; raises as :func:`client_tls`."""
    certificate, key = os.environ.get(ENVIRONMENT_CERT), os.environ.get(ENVIRONMENT_KEY)
    return client_tls(
        os.environ.get(ENVIRONMENT_CA) or None,
        Path(certificate) if certificate else None,
        Path(key) if key else None,
        os.environ.get(ENVIRONMENT_SERVER_NAME, ""),
    )


def server_tls(certificate: Path | None, private_key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """TLS as a server's options say it; None without any: plain text.

    Raises:
        InvalidArgumentError: TLS_OPTIONS_INCOMPLETE: some of them are missing.
    """
    if certificate is None and private_key is None and client_ca is None:
        return None
    if certificate is None or private_key is None:
        raise InvalidArgumentError(
            "TLS needs a certificate and its private key",
            reason="TLS_OPTIONS_INCOMPLETE",
            hint="give both --tls-cert and --tls-key; --tls-client-ca goes with them",
        )
    return ServerTls(certificate, private_key, client_ca)


def file_stamps(files: Iterable[Path]) -> tuple[tuple[int, int, int] | None, ...]:
    """What tells that files are others than before, through symbolic links; None for one that cannot be reached."""
    return tuple(map(_stamp_of, files))


def read_identity(certificate: Path, private_key: Path, now: datetime | None = None) -> Identity:
    """Read a certificate and its key and check that they can be used together at ``now``, by default the present.

    Raises:
        NotFoundError: TLS_FILE_NOT_FOUND. PermissionDeniedError: TLS_FILE_NOT_READABLE.
        FailedPreconditionError: TLS_KEY_EXPOSED (others may read it), TLS_CERTIFICATE_MALFORMED, TLS_KEY_MALFORMED,
            TLS_CERTIFICATE_EXPIRED, TLS_CERTIFICATE_NOT_YET_VALID, TLS_KEY_MISMATCH. No message quotes a file.
    """
    now = now or datetime.now(UTC)
    chain_pem = _read(certificate)
    leaf = _parse_certificates(certificate, chain_pem)[0]
    if now >= leaf.not_valid_after_utc:
        raise _unusable(
            f"the certificate {certificate} expired on {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC",
            "TLS_CERTIFICATE_EXPIRED",
            "renew it; running servers pick the new file up by themselves",
        )
    if now < leaf.not_valid_before_utc:
        raise _unusable(
            f"the certificate {certificate} is not valid before {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC",
            "TLS_CERTIFICATE_NOT_YET_VALID",
            "check this machine's clock",
        )
    private_key_pem = _read(private_key, is_secret=True)
    try:
        key = load_pem_private_key(private_key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Its own text is not passed on: it could quote what the file holds.
        raise _unusable(
            f"{private_key} holds no private key that can be used",
            "TLS_KEY_MALFORMED",
            "it must be PEM, of a supported kind (EC, RSA, Ed25519), and not encrypted with a password",
        ) from None
    if _public_bytes(key.public_key()) != _public_bytes(leaf.public_key()):
        raise _unusable(
            f"the private key {private_key} is not the one of the certificate {certificate}",
            "TLS_KEY_MISMATCH",
            "give the two files that were made together; while one is being replaced this passes by itself",
        )
    return Identity(chain_pem, private_key_pem, leaf.serial_number, leaf.not_valid_after_utc)


def read_authorities(path: Path) -> bytes:
    """Read a file of trusted certificates; raises as :func:`read_identity`."""
    pem = _read(path)
    try:
        # By OpenSSL, not cryptography: the latter warns of old roots in the system's list.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise _no_certificate(path) from None
    return pem


def server_context(material: ServerMaterial) -> ssl.SSLContext:
    """The context of a wire door: TLS 1.3, and client certificates required where there is an authority for them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A resumed session is not asked for a certificate again, and would outlive a reload: every one begins anew.
    context.num_tickets = 0
    _load_identity(context, material.identity)
    if material.client_ca_pem is not None:
        context.load_verify_locations(cadata=material.client_ca_pem.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """The context of a client of wire doors: TLS 1.3, names and authorities always checked; raises as reading does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False
    context.load_verify_locations(cadata=tls.read_authorities().decode("ascii"))
    identity = tls.read_identity()
    if identity is not None:
        _load_identity(context, identity)
    return context


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _load_identity(context: ssl.SSLContext, identity: Identity) -> None:
    # From memory, not from the files: those may have been replaced since they were checked.
    with _memory_file(identity.chain_pem) as chain, _memory_file(identity.private_key_pem) as key:
        try:
            context.load_cert_chain(chain, key)
        except ssl.SSLError as error:
            raise _unusable(
                f"the certificate cannot be used: {error.reason or 'refused by OpenSSL'}",
                "TLS_CERTIFICATE_MALFORMED",
                "use a key of at least 2048 bits (RSA) or 256 bits (EC), signed with SHA-256 or better",
            ) from None


@contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """A path that OpenSSL can read ``content`` from, without a file on a disk."""
    descriptor = os.memfd_create("saltern-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _read(path: Path, *, is_secret: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if is_secret and mode & stat.S_IRWXO:
                raise _unusable(
                    f"everybody may use the private key {path}: its mode is {stat.S_IMODE(mode):04o}",
                    "TLS_KEY_EXPOSED",
                    f"chmod o= {path}, and replace the key if others use this machine",
                )
            content = file.read(_FILE_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(
            f"there is no file {path}", reason="TLS_FILE_NOT_FOUND", hint="check the TLS options"
        ) from None
    except OSError as error:
        raise PermissionDeniedError(
            f"cannot read {path}: {(error.strerror or 'unreadable').lower()}",
            reason="TLS_FILE_NOT_READABLE",
            hint="run as a user that may read it",
        ) from None
    if len(content) > _FILE_MAX_BYTES:
        raise _unusable(f"{path} is larger than {_FILE_MAX_BYTES} bytes", "TLS_CERTIFICATE_MALFORMED", "give PEM files")
    return content


def _parse_certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise _no_certificate(path) from None


def _public_bytes(key: object) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined, no-any-return]


def _no_certificate(path: Path) -> FailedPreconditionError:
    return _unusable(
        f"{path} holds no certificate that can be used",
        "TLS_CERTIFICATE_MALFORMED",
        "it must be PEM: -----BEGIN CERTIFICATE-----",
    )


def _unusable(message: str, reason: str, hint: str) -> FailedPreconditionError:
    return FailedPreconditionError(message, reason=reason, hint=hint)
