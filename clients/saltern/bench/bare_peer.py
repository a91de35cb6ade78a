"""The machine's limit for sockets: a process that moves bytes and does nothing else.

Run as ``python -m saltern.bench.bare_peer``: it listens on a free loopback port, prints the port and serves one
connection after the other until its standard input closes. Each request is :data:`REQUEST`; see :class:`Operation`.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import threading
from enum import IntEnum

from saltern.keys import KEY_BYTES

#: operation, count, bytes of each; little-endian.
REQUEST = struct.Struct("<IIQ")
BUFFER_BYTES = 256 * 1024 * 1024


class Operation(IntEnum):
    SEND = 1  #: the peer sends count * size bytes
    RECEIVE = 2  #: the peer receives count * size bytes and answers with one byte
    LOOKUP = 3  #: the peer receives count keys of 32 bytes, looks each up in a dict, answers with count bytes
    ECHO = 4  #: the peer receives size bytes and answers with count bytes


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view``; raises EOFError if the other side closes first."""
    received = 0
    while received < len(view):
        step = connection.recv_into(view[received:])
        if step == 0:
            raise EOFError
        received += step


def _serve(connection: socket.socket, buffer: memoryview, known: dict[bytes, int]) -> None:
    request = memoryview(bytearray(REQUEST.size))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        receive_exactly(connection, request)
        operation, count, size_bytes = REQUEST.unpack(request)
        match operation:
            case Operation.SEND:
                connection.sendall(buffer[: count * size_bytes])
            case Operation.RECEIVE:
                receive_exactly(connection, buffer[: count * size_bytes])
                connection.sendall(b"k")
            case Operation.LOOKUP:
                view = buffer[: count * KEY_BYTES]
                receive_exactly(connection, view)
                keys = bytes(view)
                found = [keys[start : start + KEY_BYTES] in known for start in range(0, len(keys), KEY_BYTES)]
                connection.sendall(bytes(found))
            case Operation.ECHO:
                receive_exactly(connection, buffer[:size_bytes])
                connection.sendall(buffer[:count])


def main() -> None:
    area = mmap.mmap(-1, BUFFER_BYTES)
    buffer = memoryview(area)
    buffer[:] = bytes(BUFFER_BYTES)
    known = {os.urandom(KEY_BYTES): index for index in range(100_000)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        # The parent holds our standard input open: when it goes, however it goes, so do we.
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        while True:
            connection, _ = server.accept()
            with connection:
                try:
                    _serve(connection, buffer, known)
                except (EOFError, OSError):
                    continue


if __name__ == "__main__":
    main()
