"""The node's state folder is one process's at a time, and has a name of its own.

The lock proves that the process before is gone: whoever holds it is the only one that goes by what is kept in there. So
a new process that names the same folder gets its node's leases at once; one in another folder waits until those of the
process before have run out (:mod:`controlplane.core.lease_terms`).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Final

from saltern.errors import FailedPreconditionError

LOCK_FILE: Final = "node.lock"
_STATE_ID: Final = re.compile(rb"[0-9a-f]{32}")


def hold_state_folder(folder: Path) -> str:
    """Make ``folder`` where it is not there, lock it for as long as this process lives, and return its name.

    Raises:
        FailedPreconditionError: STATE_DIR_UNUSABLE; STATE_DIR_IN_USE: another process has the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Never closed: the lock ends with the process, and not with this function. Children do not inherit it.
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _name(descriptor)
        except OSError:
            os.close(descriptor)
            raise
    except BlockingIOError:
        raise FailedPreconditionError(
            f"another process serves from the state directory {folder}",
            reason="STATE_DIR_IN_USE",
            hint="stop it, or give this node a --state-dir of its own",
        ) from None
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot use the state directory {folder}: {(error.strerror or 'unusable').lower()}",
            reason="STATE_DIR_UNUSABLE",
            hint="give --state-dir a folder that this user can write",
        ) from None


def _name(descriptor: int) -> str:
    """The name in the locked file; a new one where there is none, or a torn one."""
    name = os.pread(descriptor, 64, 0)
    if _STATE_ID.fullmatch(name) is None:
        name = secrets.token_hex(16).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, name, 0)
        os.fsync(descriptor)
    return name.decode()
