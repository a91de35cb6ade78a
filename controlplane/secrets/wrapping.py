"""The key-encryption key: what is secret in the database is useless without it.

A wrapped secret is ``version (1) | key id (8) | nonce (12) | AES-256-GCM ciphertext and tag``. Its associated data
names what it is, whose, and of which version, so that a wrapped secret moved to another row does not open. The key id
says which key wrapped it, so that a wrong key is a clear error and not a failed tag.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from saltern.errors import DataLossError, FailedPreconditionError
from saltern.keys import frame

ENVIRONMENT_NAME = "SALTERN_KEY_ENCRYPTION_KEY"
FILE_NAME = "key-encryption-key"
_VERSION = b"\x01"
_KEY_BYTES = 32
_KEY_ID_BYTES = 8
_NONCE_BYTES = 12
_HEAD_BYTES = len(_VERSION) + _KEY_ID_BYTES


@dataclass(frozen=True, slots=True)
class WrapContext:
    """What a wrapped secret is: ``purpose`` a constant, ``owner`` whose it is, ``version`` which generation of it."""

    purpose: str
    owner: str
    version: int = 1


def root_secret_context(tenant_uid: UUID, epoch: int) -> WrapContext:
    """Context of the root secret of one salt epoch; by uid: a deleted tenant's opens for no later namesake (I12)."""
    return WrapContext("tenant-root-secret", str(tenant_uid), epoch)


def signing_key_context(kid: str) -> WrapContext:
    """Context of the private half of a token-signing key."""
    return WrapContext("token-signing-key", kid)


class KeyEncryptionKey(Protocol):
    """Wraps and unwraps secrets. Asynchronous, because a key management service is a network call away."""

    async def wrap(self, secret: bytes, context: WrapContext) -> bytes:
        """Encrypt ``secret`` so that only the same key and context open it."""
        ...

    async def unwrap(self, wrapped: bytes, context: WrapContext) -> bytes:
        """Decrypt.

        Raises:
            FailedPreconditionError: reason WRONG_KEY_ENCRYPTION_KEY: another key wrapped it.
            DataLossError: the bytes are damaged or were wrapped for another context.
        """
        ...


class LocalKeyEncryptionKey:
    """A key-encryption key held in this process: 32 bytes from a file or the environment."""

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_BYTES:
            raise _malformed(f"the key-encryption key has {len(key)} bytes")
        self._cipher = AESGCM(key)
        self._key_id = hashlib.sha256(frame("saltern/kek-id/1", key)).digest()[:_KEY_ID_BYTES]

    def __repr__(self) -> str:
        return f"LocalKeyEncryptionKey(key_id={self._key_id.hex()})"

    async def wrap(self, secret: bytes, context: WrapContext) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, secret, _associated_data(context))
        return _VERSION + self._key_id + nonce + sealed

    async def unwrap(self, wrapped: bytes, context: WrapContext) -> bytes:
        if len(wrapped) < _HEAD_BYTES + _NONCE_BYTES or not wrapped.startswith(_VERSION):
            raise _damaged(context)
        key_id = wrapped[len(_VERSION) : _HEAD_BYTES]
        if key_id != self._key_id:
            raise FailedPreconditionError(
                f"a {context.purpose} was wrapped under the key {key_id.hex()}, but the key-encryption key loaded here"
                f" is {self._key_id.hex()}",
                reason="WRONG_KEY_ENCRYPTION_KEY",
                hint=f"start with the state folder of this database, or set {ENVIRONMENT_NAME} to the key it was"
                " made with; without it nothing that is wrapped can be read",
            )
        nonce, sealed = wrapped[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES], wrapped[_HEAD_BYTES + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, sealed, _associated_data(context))
        except InvalidTag:
            raise _damaged(context) from None


def load_key_encryption_key(
    state_dir: Path, *, environment: Mapping[str, str] | None = None, create: bool = True
) -> LocalKeyEncryptionKey:
    """The key from ``SALTERN_KEY_ENCRYPTION_KEY`` if set, else from ``state_dir/key-encryption-key`` (64 hex digits).

    Args:
        environment: ``os.environ`` if None.
        create: make the file (mode 0600) where it is missing; a start on a database that is not fresh says False.

    Raises:
        FailedPreconditionError: the key is malformed, others may read its file, or it is missing and not to be made.
    """
    given = (os.environ if environment is None else environment).get(ENVIRONMENT_NAME)
    if given is not None:
        return LocalKeyEncryptionKey(_parse(given, ENVIRONMENT_NAME))
    path = state_dir / FILE_NAME
    if create:
        _create_file(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise FailedPreconditionError(
            f"there is no key-encryption key at {path}",
            reason="KEY_ENCRYPTION_KEY_MISSING",
            hint=f"restore the file from a backup, or set {ENVIRONMENT_NAME}",
        ) from None
    with os.fdopen(descriptor) as file:
        info = os.fstat(file.fileno())
        if info.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(info.st_mode) & 0o077:
            raise FailedPreconditionError(
                f"the key-encryption key {path} can be read by others or is theirs",
                reason="KEY_ENCRYPTION_KEY_EXPOSED",
                hint=f"chmod 600 {path}, as this user's own file, and think about who has read it",
            )
        return LocalKeyEncryptionKey(_parse(file.read(2 * _KEY_BYTES + 2), str(path)))


def _create_file(path: Path) -> None:
    """Make the file unless it is there: whole or not at all, and of two starters one wins."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(partial)  # unlike a rename it never replaces the key that another process just made
        except FileExistsError:
            return
    finally:
        partial.unlink()
    # A key that a power cut takes away takes every tenant's entries with it: the folder entry must last too.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _parse(text: str, source: str) -> bytes:
    try:
        return bytes.fromhex(text.strip())
    except ValueError:
        raise _malformed(f"the key-encryption key in {source} is not hexadecimal") from None


def _malformed(what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        what, reason="KEY_ENCRYPTION_KEY_MALFORMED", hint=f"it is {_KEY_BYTES} bytes as {2 * _KEY_BYTES} hex digits"
    )


def _damaged(context: WrapContext) -> DataLossError:
    return DataLossError(
        f"a wrapped {context.purpose} does not open: it is damaged or belongs elsewhere",
        reason="WRAPPED_SECRET_DAMAGED",
        hint="restore the database from a backup",
    )


def _associated_data(context: WrapContext) -> bytes:
    return frame("saltern/wrap/1", context.purpose, context.owner, context.version)
