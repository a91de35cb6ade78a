"""A TCP door in front of a node: the network between engine and node, to be slowed, held and cut within a load.

The node listens on 127.0.0.2 and says that it is to be called at 127.0.0.1; there, at the same port, is the door.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 64 * 1024


class Door:
    """What passes between clients and the node. Every switch takes effect at once, on open connections too.

    Attributes:
        delay_s: before each part of a reply is passed on.
        held: set once a reply stands still because of :meth:`hold_replies`.
    """

    def __init__(self, inside: tuple[str, int], outside: tuple[str, int]) -> None:
        self.delay_s = 0.0
        self.held = threading.Event()
        self.reply_bytes = 0
        self.connections = 0
        self._inside = inside
        self._listener = socket.create_server(outside)
        self._hold_after_bytes: int | None = None
        self._passes = threading.Event()
        self._passes.set()
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="door")]
        self._threads[0].start()

    def hold_replies(self, after_bytes: int = 0) -> None:
        """Let ``after_bytes`` more of the node's replies through, then nothing until :meth:`release`."""
        self.held.clear()
        with self._lock:
            self._hold_after_bytes = self.reply_bytes + after_bytes
        self._passes.clear()

    def release(self) -> None:
        with self._lock:
            self._hold_after_bytes = None
        self._passes.set()

    def cut(self) -> None:
        """Close every connection, as when a host goes away; new ones are let in."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        self.release()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outer, _ = self._listener.accept()
                self.connections += 1
                thread = threading.Thread(target=self._serve, args=(outer,), name="door-connection")
                self._threads.append(thread)
                thread.start()

    def _serve(self, outer: socket.socket) -> None:
        with outer, suppress(OSError), socket.create_connection(self._inside, 10) as inner:
            inner.settimeout(None)
            for one in (outer, inner):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {outer, inner}
            try:
                self._pass_on(outer, inner)
            finally:
                with self._lock:
                    self._open -= {outer, inner}

    def _pass_on(self, outer: socket.socket, inner: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(outer, selectors.EVENT_READ, inner)
            selector.register(inner, selectors.EVENT_READ, outer)
            while not self._closing.is_set():
                for key, _ in selector.select():
                    source: socket.socket = key.fileobj  # type: ignore[assignment]  # only sockets are registered
                    data = source.recv(_CHUNK_BYTES)
                    if not data:
                        return
                    if source is inner:
                        self._reply(data, outer)
                    else:
                        key.data.sendall(data)

    def _reply(self, data: bytes, outer: socket.socket) -> None:
        if self.delay_s:
            self._closing.wait(self.delay_s)
        with self._lock:
            limit = self._hold_after_bytes
            before = len(data) if limit is None else max(0, min(len(data), limit - self.reply_bytes))
            self.reply_bytes += len(data)
        outer.sendall(data[:before])
        if before < len(data):
            self.held.set()
            self._passes.wait()
            outer.sendall(data[before:])


@contextmanager
def open_door(inside: tuple[str, int], outside: tuple[str, int]) -> Iterator[Door]:
    door = Door(inside, outside)
    try:
        yield door
    finally:
        door.close()
