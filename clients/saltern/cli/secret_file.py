"""Secrets to files: only for their owner, never over something that is there."""

from __future__ import annotations

import os
from pathlib import Path

from saltern.errors import AlreadyExistsError, InvalidArgumentError


def reserve_secret_file(path: Path) -> int:
    """Create an empty file of mode 0600 and return its descriptor, before the secret to put into it is made.

    Reserved first, because a secret that is shown once is lost if its file then turns out not to be writable.

    Raises:
        AlreadyExistsError: something is there. InvalidArgumentError: it cannot be created.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise AlreadyExistsError(
            f"the file {str(path)!r} exists and is not overwritten", hint="name another file, or remove this one"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"cannot create {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            reason="FILE_NOT_WRITABLE",
            hint="name a file in a folder that exists and is writable",
        ) from None


def write_secret(descriptor: int, secret: str) -> None:
    """Write ``secret`` and a newline into a reserved file, to the disk, and close it."""
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
