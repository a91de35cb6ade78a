"""A private network of this process and its children, loopback alone, for peers that listen on every interface."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from typing import Final

from saltern.errors import FailedPreconditionError

_CLONE_NEWNET: Final = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP: Final = 1
#: struct ifreq of netdevice(7): a name of 16 bytes and the flags.
_INTERFACE_REQUEST: Final = struct.Struct("16sH22x")


def enter_private_network() -> None:
    """Move this process, which must not have threads yet, into a new network namespace and bring its loopback up.

    Raises:
        FailedPreconditionError: the system does not allow it; nothing has changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise FailedPreconditionError(
            f"the system allows no private network namespace: {os.strerror(ctypes.get_errno())}",
            reason="NO_PRIVATE_NETWORK",
            hint="run as root, or leave out the peers that need one",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, _SIOCGIFFLAGS, _INTERFACE_REQUEST.pack(b"lo", 0))
        _, flags = _INTERFACE_REQUEST.unpack(answer)
        fcntl.ioctl(control, _SIOCSIFFLAGS, _INTERFACE_REQUEST.pack(b"lo", flags | _IFF_UP))
