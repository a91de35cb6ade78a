"""Key derivation: from a tenant's salt to the 32-byte name of a block.

::

    salt_key  = HMAC-SHA256(root_secret, frame("saltern/salt/1", tenant, namespace, scope, scope_id, epoch))
    block_key = BLAKE2b-256(key=salt_key, frame(model_fingerprint) || engine_block_hash)

The root secret never leaves the control plane; a client receives salt keys, a node sees only block keys. Look-alike
bytes have distinct types, so that mypy finds a root secret where a salt key belongs. HMAC is RFC 2104; BLAKE2b with a
key is RFC 7693, section 2.5.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from saltern.errors import InvalidArgumentError
from saltern.names import NamespaceId, TenantId

RootSecret = NewType("RootSecret", bytes)  #: 32 random bytes of one tenant; control plane only
SaltKey = NewType("SaltKey", bytes)  #: 32 bytes, one for each scope and epoch; client side
BlockHash = NewType("BlockHash", bytes)  #: what the inference engine calls the block: 1 to 64 bytes
BlockKey = NewType("BlockKey", bytes)  #: 32 bytes, opaque to the node, unguessable without the salt

KEY_BYTES = 32
BLOCK_HASH_MAX_BYTES = 64
_SALT_LABEL = "saltern/salt/1"
_TYPE_BYTES, _TYPE_TEXT, _TYPE_INTEGER = b"b", b"s", b"i"
_INTEGER_MAX = 2**64 - 1


class SaltScope(StrEnum):
    """How widely blocks are shared inside a tenant: the widest is the whole tenant, every other scope narrows it."""

    TENANT = "tenant"
    NAMESPACE = "namespace"
    PROJECT = "project"
    USER = "user"
    SESSION = "session"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What a salt is narrowed to inside a namespace; empty where it is not.

    No two of them share a salt: one name alone is the ``scope_id`` of its scope, as text; several are framed in a fixed
    order, each after the scope that it belongs to, as bytes, which ``frame`` never confuses with text (I2).
    """

    project: str = ""
    user: str = ""
    session: str = ""

    def of_scope(self, widest: SaltScope) -> tuple[SaltScope, str | bytes]:
        """The scope and ``scope_id`` for :func:`derive_salt_key`.

        Args:
            widest: the scope where nothing is named: TENANT or NAMESPACE; of a narrower one its name must be there.
        """
        named = [
            (scope, name)
            for scope, name in (
                (SaltScope.PROJECT, self.project),
                (SaltScope.USER, self.user),
                (SaltScope.SESSION, self.session),
            )
            if name
        ]
        if not named:
            return widest, ""
        narrowest, name = named[-1]
        if len(named) == 1:
            return narrowest, name
        return narrowest, frame(*(part for scope, name in named for part in (scope.value, name)))


#: A salt of the whole tenant, inside its namespace.
NOT_NARROWED = Narrowing()


def frame(*parts: str | bytes | int) -> bytes:
    """Encode ``parts`` so that no two argument lists share an encoding.

    Each part is one type byte (``s`` UTF-8 text, ``b`` bytes, ``i`` unsigned integer), its length as 8 bytes
    little-endian, and the value (an integer as 8 bytes little-endian). Concatenating frames is again unambiguous.

    Raises:
        InvalidArgumentError: a part is of another type, an integer is negative or past 64 bits, or text is not
            encodable as UTF-8.
    """
    encoded = bytearray()
    for part in parts:
        match part:
            case bool():
                raise InvalidArgumentError("cannot frame a bool", reason="UNFRAMEABLE")
            case str():
                try:
                    kind, value = _TYPE_TEXT, part.encode("utf-8")
                except UnicodeEncodeError:
                    raise InvalidArgumentError("cannot frame text with lone surrogates", reason="UNFRAMEABLE") from None
            case bytes():
                kind, value = _TYPE_BYTES, part
            case int():
                if not 0 <= part <= _INTEGER_MAX:
                    raise InvalidArgumentError(f"cannot frame {part}: outside 0..2^64-1", reason="UNFRAMEABLE")
                kind, value = _TYPE_INTEGER, part.to_bytes(8, "little")
            case _:
                raise InvalidArgumentError(f"cannot frame a {type(part).__name__}", reason="UNFRAMEABLE")
        encoded += kind + len(value).to_bytes(8, "little") + value
    return bytes(encoded)


def derive_salt_key(
    root: RootSecret, *, tenant: TenantId, namespace: NamespaceId, scope: SaltScope, scope_id: str | bytes, epoch: int
) -> SaltKey:
    """Derive the salt key of one scope and epoch. ``scope_id`` is empty for the scopes tenant and namespace.

    ``Narrowing.of_scope`` makes the other ones: text for one name, bytes for several.

    Raises:
        InvalidArgumentError: the root secret is not 32 bytes.
    """
    _require_length(root, KEY_BYTES, "root secret")
    message = frame(_SALT_LABEL, tenant, namespace, scope.value, scope_id, epoch)
    return SaltKey(hmac.new(root, message, hashlib.sha256).digest())


class BlockKeyDeriver:
    """Derives block keys for one salt key and model fingerprint; keeps the keyed hash state between calls.

    Args:
        salt_key: 32 bytes, from the token exchange.
        model_fingerprint: everything that must match for bytes to be interchangeable (weights, dtype, layout, ...).
    """

    __slots__ = ("_state",)

    def __init__(self, salt_key: SaltKey, model_fingerprint: bytes) -> None:
        _require_length(salt_key, KEY_BYTES, "salt key")
        self._state = hashlib.blake2b(frame(model_fingerprint), digest_size=KEY_BYTES, key=salt_key)

    def __repr__(self) -> str:
        return "BlockKeyDeriver(<secret>)"

    def derive(self, block_hash: BlockHash) -> BlockKey:
        """Return the 32-byte key of a block; raises InvalidArgumentError unless the hash is 1 to 64 bytes."""
        check_block_hash(block_hash)
        state = self._state.copy()
        state.update(block_hash)
        return BlockKey(state.digest())

    def derive_many(self, block_hashes: Iterable[BlockHash]) -> list[BlockKey]:
        """What ``derive`` gives for each, at less cost for each."""
        copy, keys = self._state.copy, []
        for block_hash in block_hashes:
            check_block_hash(block_hash)
            state = copy()
            state.update(block_hash)
            keys.append(BlockKey(state.digest()))
        return keys


def check_block_hash(block_hash: bytes) -> None:
    """Raise InvalidArgumentError unless an engine's block hash is 1 to 64 bytes."""
    if not isinstance(block_hash, bytes) or not 1 <= len(block_hash) <= BLOCK_HASH_MAX_BYTES:
        raise InvalidArgumentError(
            f"engine block hash must be 1 to {BLOCK_HASH_MAX_BYTES} bytes", reason="INVALID_BLOCK_HASH"
        )


def _require_length(value: bytes, length: int, what: str) -> None:
    if not isinstance(value, bytes) or len(value) != length:
        raise InvalidArgumentError(f"{what} must be {length} bytes", reason="INVALID_KEY_LENGTH")
