"""Several key-encryption keys as one: it wraps with the current one and unwraps with whichever it was."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.secrets.wrapping import LocalKeyEncryptionKey, WrapContext, key_id_of
from saltern.errors import FailedPreconditionError


class Keyring:
    """The keys that this process holds; a :class:`KeyEncryptionKey`.

    Attributes:
        wraps_with: id of the current key.
    """

    def __init__(self, keys: Iterable[LocalKeyEncryptionKey], wraps_with: str) -> None:
        """``wraps_with``: one of ``keys``."""
        self._keys = {key.key_id: key for key in keys}
        self.wraps_with = ""
        self.use(wraps_with)

    def __repr__(self) -> str:
        return f"Keyring(held={sorted(self._keys)}, wraps_with={self.wraps_with})"

    @property
    def held(self) -> frozenset[str]:
        """Ids of the keys that it unwraps with."""
        return frozenset(self._keys)

    def add(self, key: LocalKeyEncryptionKey) -> None:
        """Unwrap with ``key``, too."""
        self._keys[key.key_id] = key

    def use(self, key_id: str) -> None:
        """Wrap with a key that is held; raises FailedPreconditionError for another."""
        if key_id not in self._keys:
            raise _not_held(key_id, self.held, "the current key-encryption key")
        self.wraps_with = key_id

    def forget(self, key_id: str) -> None:
        """Give up a key that nothing is under; the current one stays."""
        if key_id != self.wraps_with:
            self._keys.pop(key_id, None)

    async def wrap(self, secret: bytes, context: WrapContext) -> bytes:
        return await self._keys[self.wraps_with].wrap(secret, context)

    async def unwrap(self, wrapped: bytes, context: WrapContext) -> bytes:
        key_id = key_id_of(wrapped, context)
        key = self._keys.get(key_id)
        if key is None:
            raise _not_held(key_id, self.held, f"the key of a {context.purpose}")
        return await key.unwrap(wrapped, context)


def _not_held(key_id: str, held: frozenset[str], what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{what} is {key_id}, which is not loaded here; loaded: {', '.join(sorted(held)) or 'none'}",
        reason="WRONG_KEY_ENCRYPTION_KEY",
        hint="start with the state folder of this database, or give every key that is still in use"
        " (`saltern key-encryption-key list`); without it nothing that is wrapped under it can be read",
    )
