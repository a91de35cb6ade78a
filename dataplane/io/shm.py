"""The shared-memory door: a unix socket whose clients pass memfds (WIRE.md, sections 1 and 4).

Frames are those of the TCP door; regions are in :mod:`dataplane.io.regions`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from saltern.errors import FailedPreconditionError, InvalidArgumentError

_BACKLOG: Final = 256
#: sun_path of sockaddr_un, with its closing NUL.
_PATH_MAX_BYTES: Final = 108


def listen_unix(path: Path, *, mode: int) -> socket.socket:
    """Bind and listen on a unix socket file with permission bits ``mode``; a dead node's file is replaced.

    Raises:
        InvalidArgumentError: the path is too long for a socket address.
        FailedPreconditionError: a live node listens there, another kind of file is there, or it cannot be created.
    """
    if len(os.fsencode(path)) >= _PATH_MAX_BYTES:
        raise InvalidArgumentError(
            f"the socket path is longer than {_PATH_MAX_BYTES - 1} bytes: {path}",
            reason="SHM_PATH_TOO_LONG",
            hint="choose a shorter --shm-path",
        )
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Bound with no permissions at all, so that nobody gets in before the mode is what was asked for.
        previous = os.umask(0o777)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(previous)
        path.chmod(mode)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise FailedPreconditionError(
            f"cannot listen on {path}: {error.strerror or error}",
            reason="ADDRESS_NOT_AVAILABLE",
            hint="give --shm-path a file name in an existing folder that this user may write",
        ) from None
    return listener


def remove_socket_file(path: Path) -> None:
    """Remove the file of a socket that is closed; one that is gone already is fine."""
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_stale(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise FailedPreconditionError(
            f"{path} exists and is not a socket", reason="SHM_PATH_TAKEN", hint="choose another --shm-path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            remove_socket_file(path)
            return
        except OSError as error:
            reason = f": {error.strerror or error}"
        else:
            reason = ""
    raise FailedPreconditionError(
        f"another process listens on {path}{reason}",
        reason="SHM_PATH_TAKEN",
        hint="stop the other node or choose another --shm-path",
    )
