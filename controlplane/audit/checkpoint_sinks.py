"""Where checkpoints are kept: out of the database's reach, append-only.

``CheckpointSink`` is the interface; ``FolderSink`` keeps files, ``controlplane.audit.object_sink`` objects.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from controlplane.files import make_folder
from saltern.audit.checkpoints import Checkpoint, decode_checkpoint, encode_checkpoint
from saltern.errors import DataLossError, FailedPreconditionError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOCK_FILE: Final = ".lock"
_READABLE_BY_GROUP: Final = 0o640  # whoever verifies is seldom the service's own user


class CheckpointSink(Protocol):
    """Keeps checkpoints. Used by one thread at a time."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let nobody else write for the time of the block; raises OSError."""
        ...

    def last(self, chain: str) -> Checkpoint | None:
        """The newest checkpoint of ``chain``, not verified; raises OSError, or SalternError of an object store."""
        ...

    def append(self, checkpoint: Checkpoint) -> bool:
        """Keep ``checkpoint``: it is safe when this returns True.

        False: another writer has appended since :meth:`last`, and nothing was done. Raises OSError, or SalternError of
        an object store, and then mostly nothing is there; the next :meth:`last` tells.
        """
        ...


class FolderSink:
    """Keeps checkpoints in ``FOLDER/<chain>/<day>.jsonl``, each synced to disk before it counts.

    Several control planes may share the folder (on one host): they take turns by a lock on it.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder.

        Raises:
            FailedPreconditionError: reason CHECKPOINT_DIR_UNUSABLE: it cannot be made or written to.
        """
        self._folder = folder
        try:
            make_folder(folder, 0o750)
            with self.writing():
                pass
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot keep checkpoints of the audit trail in {folder}: {(error.strerror or 'unusable').lower()}",
                reason="CHECKPOINT_DIR_UNUSABLE",
                hint="give --audit-checkpoint-dir a folder that this user can write",
            ) from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        descriptor = os.open(self._folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)  # lets go of the lock

    def last(self, chain: str) -> Checkpoint | None:
        """As the interface; lines that are no checkpoint, such as one cut off by a crash, are passed over."""
        for path in sorted((self._folder / chain).glob("*.jsonl"), reverse=True):
            for line in reversed(path.read_bytes().splitlines()):
                try:
                    return decode_checkpoint(line)
                except DataLossError:
                    continue
        return None

    def append(self, checkpoint: Checkpoint) -> bool:
        folder = self._folder / checkpoint.chain
        make_folder(folder, 0o750)
        day = (_EPOCH + timedelta(microseconds=checkpoint.time_us)).date().isoformat()
        path = folder / f"{day}.jsonl"
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, _READABLE_BY_GROUP)
        try:
            line = encode_checkpoint(checkpoint)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a crash has cut off the line before; it counts for nothing
            if os.write(descriptor, line) != len(line):
                raise OSError(f"{path}: a checkpoint was written in part")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            _sync_folder(folder)
            _sync_folder(self._folder)
        return True


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
