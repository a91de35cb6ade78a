"""Root secrets: 32 random bytes for each epoch of an owner, at rest only wrapped.

For everything that has salt epochs: a tenant (``root_secret_context(tenant.uid, epoch)``), and in the same way a
sharing group, with a context of its own. Each epoch has a root of its own and the row holds its only copy, so that
deleting the row makes every salt of the epoch underivable (I12). Neither function logs, caches or prints what it opens.
"""

from __future__ import annotations

import secrets

from controlplane.secrets import KeyEncryptionKey, WrapContext
from saltern.keys import KEY_BYTES, RootSecret


async def new_root(key_encryption_key: KeyEncryptionKey, context: WrapContext) -> bytes:
    """Draw a root secret and return it wrapped, as the column ``wrapped_root_secret`` holds it."""
    return await key_encryption_key.wrap(secrets.token_bytes(KEY_BYTES), context)


async def open_root(key_encryption_key: KeyEncryptionKey, wrapped: bytes, context: WrapContext) -> RootSecret:
    """Unwrap a root secret, to derive salt keys with and then to let go of.

    Raises:
        FailedPreconditionError, DataLossError: as ``KeyEncryptionKey.unwrap``.
    """
    return RootSecret(await key_encryption_key.unwrap(wrapped, context))
