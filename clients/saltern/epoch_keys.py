"""Block keys under the epochs of a grant: callers give the engine's hashes once, whatever salts come and go."""

from __future__ import annotations

from collections.abc import Iterable

from saltern.errors import FailedPreconditionError
from saltern.grant import EpochSalt, Grant
from saltern.keys import BlockHash, BlockKey, BlockKeyDeriver, check_block_hash


class EpochKeys:
    """Derives the block keys of one namespace; keeps the hash state of the salts used last. Thread-safe."""

    def __init__(self) -> None:
        self._derivers: dict[EpochSalt, BlockKeyDeriver] = {}

    def check(self, grant: Grant, block_hashes: Iterable[BlockHash]) -> None:
        """Raise what ``derive`` would for these hashes under the current epoch, without deriving anything."""
        _salt_of(grant, grant.epoch)
        for block_hash in block_hashes:
            check_block_hash(block_hash)

    def derive(self, grant: Grant, block_hashes: Iterable[BlockHash], *, epoch: int | None = None) -> list[BlockKey]:
        """The keys of an engine's blocks under one of the grant's epochs, the current one by default.

        Raises:
            InvalidArgumentError: a hash is not 1 to 64 bytes.
            FailedPreconditionError: the credentials hold no salt key of that epoch.
        """
        salt = _salt_of(grant, grant.epoch if epoch is None else epoch)
        # By the salt, not by the number: a namespace that was made anew begins at the same epoch with another one.
        deriver = self._derivers.get(salt)
        if deriver is None:
            deriver = BlockKeyDeriver(salt.key, grant.model_fingerprint)
            kept = {known: self._derivers[known] for known in grant.salts if known in self._derivers}
            self._derivers = {**kept, salt: deriver}
        return deriver.derive_many(block_hashes)


def _salt_of(grant: Grant, epoch: int) -> EpochSalt:
    salt = next((salt for salt in reversed(grant.salts) if salt.epoch == epoch), None)
    if salt is None:
        raise FailedPreconditionError(
            "these credentials hold no salt key, so block keys cannot be derived",
            reason="NO_SALT_KEY",
            hint="pass salt_key to StaticCredentials, or use an API key",
        )
    return salt
