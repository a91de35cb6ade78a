"""Reports that a command writes where its caller said."""

from __future__ import annotations

from pathlib import Path

from saltern.errors import InvalidArgumentError


def write_report(path: Path, content: bytes) -> None:
    """Raises InvalidArgumentError (CANNOT_WRITE)."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write {str(path)!r} ({error.strerror})", reason="CANNOT_WRITE", hint="name another file"
        ) from None
