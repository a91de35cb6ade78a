"""Small files that other processes wait for or that must survive a crash: whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from saltern.errors import FailedPreconditionError


def write_private_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` for this user alone (0600): whole or not at all, and on disk when it returns."""
    make_folder(path.parent, 0o700)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def make_folder(path: Path, mode: int) -> None:
    """Make ``path`` with exactly ``mode``, and missing parents with 0755, whatever the umask says.

    A umask of 0 would let everybody replace what lies below, one of 077 would shut PostgreSQL's account out.
    """
    if path.is_dir():
        return
    make_folder(path.parent, 0o755)
    with suppress(FileExistsError):  # somebody else was faster
        path.mkdir(mode=0o700)
        path.chmod(mode)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def require_own_folder(path: Path) -> None:
    """Check that nobody but this user and root can replace what lies in ``path``.

    Raises:
        FailedPreconditionError: reason FOLDER_EXPOSED: it is another's, or others may write to it or rename it.
    """
    info = path.stat()
    if info.st_uid != os.geteuid():
        raise _exposed(path, f"belongs to user {info.st_uid}", f"chown it to user {os.geteuid()}")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _exposed(path, f"has the mode {stat.S_IMODE(info.st_mode):04o}", f"chmod go-w {path}")
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _exposed(path, f"lies in {parent}, which everybody may write to", f"chmod o-w {parent}")


def _exposed(path: Path, what: str, remedy: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{path} {what}: others could replace the secrets in it",
        reason="FOLDER_EXPOSED",
        hint=f"{remedy}, or choose another folder",
    )


@contextmanager
def announced(path: Path | None, content: Mapping[str, object]) -> Iterator[None]:
    """Keep ``content`` as JSON in ``path`` for the time of the block; None: nowhere."""
    if path is None:
        yield
        return
    write_private_file(path, json.dumps(content) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
