"""Whom a client trusts at the other end of a unix socket, before it says HELLO (WIRE.md, section 7).

The control plane names a path; anybody on *this* host may have put a socket there, and HELLO carries the token. The
kernel knows who listens, so the client asks it first.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from saltern.errors import UnavailableError

_UCRED: Final = struct.Struct("iII")  # pid, uid, gid
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_ROOT: Final = 0


def require_trusted_listener(sock: socket.socket, path: str) -> None:
    """Raise UnavailableError (UNTRUSTED_SOCKET) unless the process that listens is root's, ours or the folder's owner.

    The owner of the folder counts only where root alone can have given it to them; see :func:`trusted_uids`.
    """
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid not in trusted_uids(path):
        raise UnavailableError(
            f"the socket {path} is served by user {uid}, who may be anybody: no token is sent there",
            reason="UNTRUSTED_SOCKET",
            hint="run the node as root or as this user, or put its --shm-path into a folder that root made for it, such"
            " as /run/saltern; tcp works meanwhile",
        )


def trusted_uids(path: str) -> frozenset[int]:
    """Users whose socket at ``path`` is taken for a node's: root, ourselves, and the owner of a folder made by root.

    A folder is root's gift to its owner if every folder above it belongs to root and only root can write there; nothing
    on the way is a symbolic link, because whoever made that could turn it.
    """
    trusted = {_ROOT, os.geteuid()}
    folder = Path(path).parent
    try:
        owner_uid = folder.lstat().st_uid
        above = [parent.lstat() for parent in folder.parents]
        is_plain = folder.is_absolute() and folder == folder.resolve(strict=True)
    except (OSError, RuntimeError):
        return frozenset(trusted)
    if is_plain and all(info.st_uid == _ROOT and not info.st_mode & _WRITABLE_BY_OTHERS for info in above):
        trusted.add(owner_uid)
    return frozenset(trusted)
