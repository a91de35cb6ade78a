"""Secrets to files: only for their owner, never over something that is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from saltern.errors import AlreadyExistsError, InvalidArgumentError


@contextlib.contextmanager
def secret_file(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Reserve ``path`` (mode 0600) for a secret that is made inside the block; yields what writes it there.

    Reserved first, because a secret that is shown once is lost if its file then turns out not to be writable. Where
    the block fails before it has written, nothing is left. Without a path nothing is reserved or written.

    Raises:
        AlreadyExistsError: something is there. InvalidArgumentError: it cannot be created.
    """
    if path is None:
        yield lambda _: None
        return
    descriptor = _reserve(path)
    written = False

    def write(secret: str) -> None:
        nonlocal written
        os.write(descriptor, secret.encode("ascii") + b"\n")
        os.fsync(descriptor)
        written = True

    try:
        yield write
    finally:
        os.close(descriptor)
        if not written:
            path.unlink(missing_ok=True)


def _reserve(path: Path) -> int:
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
