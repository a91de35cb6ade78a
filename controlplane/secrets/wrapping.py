"""The key-encryption key: what is secret in the database is useless without it.

A wrapped secret is ``version (1) | key id (8) | nonce (12) | AES-256-GCM ciphertext and tag``. Its associated data
names what it is, whose, and of which version, so that a wrapped secret moved to another row does not open. The key id
says which key wrapped it, so that a wrong key is a clear error and not a failed tag.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from saltern.errors import DataLossError, FailedPreconditionError
from saltern.keys import frame

ENVIRONMENT_NAME = "SALTERN_KEY_ENCRYPTION_KEY"
KEY_BYTES = 32
_VERSION = b"\x01"
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


def group_root_context(group_uid: UUID, epoch: int) -> WrapContext:
    """Context of the root secret of one epoch of a sharing group."""
    return WrapContext("sharing-group-root-secret", str(group_uid), epoch)


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
        if len(key) != KEY_BYTES:
            raise FailedPreconditionError(
                f"the key-encryption key has {len(key)} bytes",
                reason="KEY_ENCRYPTION_KEY_MALFORMED",
                hint=f"it is {KEY_BYTES} bytes as {2 * KEY_BYTES} hex digits",
            )
        self._cipher = AESGCM(key)
        self._key_id = hashlib.sha256(frame("saltern/kek-id/1", key)).digest()[:_KEY_ID_BYTES]

    def __repr__(self) -> str:
        return f"LocalKeyEncryptionKey(key_id={self.key_id})"

    @property
    def key_id(self) -> str:
        """16 hexadecimal digits of its hash: what it wraps names it so."""
        return self._key_id.hex()

    async def wrap(self, secret: bytes, context: WrapContext) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, secret, _associated_data(context))
        return _VERSION + self._key_id + nonce + sealed

    async def unwrap(self, wrapped: bytes, context: WrapContext) -> bytes:
        key_id = key_id_of(wrapped, context)
        if key_id != self.key_id:
            raise FailedPreconditionError(
                f"a {context.purpose} was wrapped under the key {key_id}, but the key-encryption key loaded here"
                f" is {self.key_id}",
                reason="WRONG_KEY_ENCRYPTION_KEY",
                hint=f"start with the state folder of this database, or set {ENVIRONMENT_NAME} to the key it was"
                " made with; without it nothing that is wrapped can be read",
            )
        nonce, sealed = wrapped[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES], wrapped[_HEAD_BYTES + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, sealed, _associated_data(context))
        except InvalidTag:
            raise _damaged(context) from None


def key_id_of(wrapped: bytes, context: WrapContext) -> str:
    """Which key wrapped ``wrapped``; raises DataLossError if that is not the form of a wrapped secret."""
    if len(wrapped) < _HEAD_BYTES + _NONCE_BYTES or not wrapped.startswith(_VERSION):
        raise _damaged(context)
    return wrapped[len(_VERSION) : _HEAD_BYTES].hex()


def _damaged(context: WrapContext) -> DataLossError:
    return DataLossError(
        f"a wrapped {context.purpose} does not open: it is damaged or belongs elsewhere",
        reason="WRAPPED_SECRET_DAMAGED",
        hint="restore the database from a backup",
    )


def _associated_data(context: WrapContext) -> bytes:
    return frame("saltern/wrap/1", context.purpose, context.owner, context.version)
