"""Key-encryption keys from a file or from the environment: one or several, the newest last.

A new key is appended, never put in place of the old one: until everything is wrapped anew both are needed, on every
host that runs a control plane.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from controlplane.secrets.keyring import Keyring
from controlplane.secrets.wrapping import ENVIRONMENT_NAME, KEY_BYTES, LocalKeyEncryptionKey
from saltern.errors import FailedPreconditionError

FILE_NAME: Final = "key-encryption-key"
_FILE_MAX_BYTES: Final = 64 * 1024
_BETWEEN: Final = re.compile(r"[\s,]+")
_COMMENT: Final = re.compile(r"#.*")


def load_local_keys(
    state_dir: Path, *, environment: Mapping[str, str] | None = None, create: bool = True
) -> list[LocalKeyEncryptionKey]:
    """The keys of ``SALTERN_KEY_ENCRYPTION_KEY`` if set, else of ``state_dir/key-encryption-key``; the newest last.

    Each is 64 hex digits. In the file each has a line, and ``#`` begins a comment; in the environment white space or
    commas are between them.

    Args:
        environment: ``os.environ`` if None.
        create: make the file (mode 0600) where it is missing; a start on a database that is not fresh says False.

    Raises:
        FailedPreconditionError: a key is malformed, others may read the file, or it is missing and not to be made.
    """
    given = (os.environ if environment is None else environment).get(ENVIRONMENT_NAME)
    if given is not None:
        return _parse(given, ENVIRONMENT_NAME)
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
        return _parse(_COMMENT.sub("", file.read(_FILE_MAX_BYTES)), str(path))


def has_local_keys(state_dir: Path, *, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a file or the environment holds keys here."""
    named = os.environ if environment is None else environment
    return ENVIRONMENT_NAME in named or (state_dir / FILE_NAME).exists()


def load_key_encryption_key(
    state_dir: Path, *, environment: Mapping[str, str] | None = None, create: bool = True
) -> Keyring:
    """As :func:`load_local_keys`, as one that wraps with the newest; for tools that have no database."""
    keys = load_local_keys(state_dir, environment=environment, create=create)
    return Keyring(keys, keys[-1].key_id)


def _create_file(path: Path) -> None:
    """Make the file unless it is there: whole or not at all, and of two starters one wins."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
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


def _parse(text: str, source: str) -> list[LocalKeyEncryptionKey]:
    words = [word for word in _BETWEEN.split(text) if word]
    if not words:
        raise _malformed(f"there is no key-encryption key in {source}")
    keys: dict[str, LocalKeyEncryptionKey] = {}
    for word in words:
        try:
            key = LocalKeyEncryptionKey(bytes.fromhex(word))
        except ValueError:
            raise _malformed(f"a key-encryption key in {source} is not hexadecimal") from None
        keys.setdefault(key.key_id, key)
    return list(keys.values())


def _malformed(what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        what, reason="KEY_ENCRYPTION_KEY_MALFORMED", hint=f"it is {KEY_BYTES} bytes as {2 * KEY_BYTES} hex digits"
    )
