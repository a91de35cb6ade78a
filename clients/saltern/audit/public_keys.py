"""The public keys that verify checkpoints, as a file: PEM blocks, each after lines that say when its key signs.

::

    Audit checkpoint key: 5f1c0a9be27d4433
    Signs from: 2026-03-01T09:00:00.000000Z
    Signs until: 2026-11-29T21:00:00.000000Z
    -----BEGIN PUBLIC KEY-----

PEM allows text between its blocks (RFC 7468, section 5.2), so other programs read the keys all the same. A block
without these lines, as earlier releases printed it, is a key that signs always.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from saltern.audit.checkpoints import key_id_of
from saltern.errors import InvalidArgumentError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
_BEGIN: Final = "-----BEGIN PUBLIC KEY-----"
_END: Final = "-----END PUBLIC KEY-----"
_FROM: Final = re.compile(r"^Signs from: (\S+)$", re.MULTILINE)
_UNTIL: Final = re.compile(r"^Signs until: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CheckpointPublicKey:
    """A key and the time in which it signs, Unix microseconds; ``until_us`` None: it signs now."""

    key: Ed25519PublicKey
    from_us: int = 0
    until_us: int | None = None

    @property
    def id(self) -> str:
        """How checkpoints name it."""
        return key_id_of(self.key)


def encode_public_keys(keys: Iterable[CheckpointPublicKey]) -> str:
    """The file of ``keys``, in their order."""
    blocks = []
    for key in keys:
        lines = [f"Audit checkpoint key: {key.id}", f"Signs from: {_time_text(key.from_us)}"]
        if key.until_us is not None:
            lines.append(f"Signs until: {_time_text(key.until_us)}")
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        pem = key.key.public_bytes(serialization.Encoding.PEM, form).decode("ascii")
        blocks.append("\n".join(lines) + "\n" + pem)
    return "\n".join(blocks)


def decode_public_keys(text: str) -> dict[str, CheckpointPublicKey]:
    """The keys of a file, by key id.

    Raises:
        InvalidArgumentError: reason INVALID_PUBLIC_KEY: there is none, one is not an Ed25519 key, or a time is none.
    """
    keys: dict[str, CheckpointPublicKey] = {}
    for part in text.split(_END)[:-1]:
        said, begin, body = part.rpartition(_BEGIN)
        try:
            key = serialization.load_pem_public_key(f"{begin}{body}{_END}\n".encode("ascii"))
        except ValueError:
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise _invalid("a block of it is not an Ed25519 public key")
        public = CheckpointPublicKey(key, _time_of(said, _FROM) or 0, _time_of(said, _UNTIL))
        keys[public.id] = public
    if not keys:
        raise _invalid("it holds no PEM block of a public key")
    return keys


def _time_text(time_us: int) -> str:
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _time_of(said: str, pattern: re.Pattern[str]) -> int | None:
    match = pattern.search(said)
    if match is None:
        return None
    try:
        return (datetime.fromisoformat(match.group(1)) - _EPOCH) // _US
    except (ValueError, TypeError):  # no time, or one without an offset
        raise _invalid("a line of it does not say when a key signs") from None


def _invalid(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the public key cannot be used: {why}",
        reason="INVALID_PUBLIC_KEY",
        hint="give the file that `saltern audit public-key` wrote",
    )
