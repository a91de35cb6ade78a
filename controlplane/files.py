"""Small files that other processes wait for or that must survive a crash: whole or not there at all."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def write_private_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` for this user alone (0600): whole or not at all, and on disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
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
