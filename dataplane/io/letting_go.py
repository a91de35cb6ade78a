"""Closing what clients have a hold on, away from the event loop.

A descriptor is the client's choice, and closing one can take as long as the client likes: a TCP socket with SO_LINGER
waits for its peer, a file of a FUSE file system asks its daemon, the last user of a segment frees all of its memory.
The same goes for a unix socket that has unread descriptors queued. So a client could stop the node for everybody; here
it stops a thread that nobody waits for (I2: what one client does is not felt by the others).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

#: More than this many at a time are never stuck; the rest waits, and the unix door takes nobody new meanwhile.
THREADS_MAX: Final = 64
_NO_LINGER: Final = struct.pack("ii", 0, 0)

_lock = threading.Lock()
_waiting: deque[Callable[[], None]] = deque()
_threads = 0


def let_go(close: Callable[[], None]) -> None:
    """Run ``close``, which may block, in a daemon thread; an OSError or BufferError of it is nobody's business."""
    global _threads  # noqa: PLW0603 - one pool for the process, as there is one descriptor table
    with _lock:
        _waiting.append(close)
        if _threads >= THREADS_MAX:
            return
        _threads += 1
    threading.Thread(target=_run, name="letting-go", daemon=True).start()


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor that a client has sent, or one of a socket that a client may have sent descriptors over."""
    let_go(lambda: _close(descriptor))


def is_overloaded() -> bool:
    """Whether every thread is taken: clients hold closes up faster than they end."""
    return _threads >= THREADS_MAX


def _run() -> None:
    global _threads  # noqa: PLW0603
    while True:
        with _lock:
            if not _waiting:
                _threads -= 1
                return
            close = _waiting.popleft()
        with contextlib.suppress(OSError, BufferError):
            close()


def _close(descriptor: int) -> None:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:  # not a socket
        os.close(descriptor)
        return
    with sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
