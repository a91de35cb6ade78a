"""At most one launcher per data directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saltern.errors import FailedPreconditionError


@contextmanager
def launcher_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; the kernel releases it when this process ends, however it ends.

    The file stays, empty: were it removed, two launchers could each hold the lock on a file of that name.

    Raises:
        FailedPreconditionError: another launcher holds it; names its pid.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise FailedPreconditionError(
                f"another launcher{f', process {holder},' if holder else ''} runs on {path.parent}",
                reason="POSTGRES_DATA_DIR_LOCKED",
                hint="stop that one first, or choose another --data-dir for a second stack",
                metadata={"pid": holder} if holder else {},
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
