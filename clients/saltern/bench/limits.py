"""What the machine itself can do: a bare pair of sockets, one thread's memcpy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from saltern.bench.bare_peer import BUFFER_BYTES, REQUEST, Operation, receive_exactly
from saltern.errors import UnavailableError
from saltern.keys import KEY_BYTES

#: The bytes that a LOOKUP of the wire protocol adds to its keys, each way: header and msgpack envelope.
LOOKUP_OVERHEAD_BYTES = 42


class BareSocket:
    """A connected pair of plain blocking sockets with another process on the far side; a context manager.

    Buffers are the kernel's automatic ones on both sides, as they are between our client and node over TCP. Fixed ones
    of 1 and 4 MiB, and MSG_WAITALL, made no difference beyond the noise.
    """

    def __enter__(self) -> Self:
        self._peer = subprocess.Popen(
            [sys.executable, "-m", "saltern.bench.bare_peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._peer.stdout is not None
        port = self._peer.stdout.readline().strip()
        if not port:
            raise UnavailableError("the bare socket peer did not start", reason="BENCH_PEER")
        self._socket = socket.create_connection(("127.0.0.1", int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._scratch = memoryview(bytearray(64 * 1024))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        self._peer.kill()
        self._peer.communicate()

    def get(self, buffer: memoryview, size_bytes: int) -> None:
        """Receive ``len(buffer)`` bytes, as blocks of ``size_bytes``."""
        self._socket.sendall(REQUEST.pack(Operation.SEND, len(buffer) // size_bytes, size_bytes))
        receive_exactly(self._socket, buffer)

    def put(self, buffer: memoryview, size_bytes: int) -> None:
        """Send ``len(buffer)`` bytes and wait for the peer's answer."""
        self._socket.sendall(REQUEST.pack(Operation.RECEIVE, len(buffer) // size_bytes, size_bytes))
        self._socket.sendall(buffer)
        receive_exactly(self._socket, self._scratch[:1])

    def lookup(self, keys: bytes) -> None:
        """One round trip of ``keys`` there and one byte for each back, with a dict lookup of each on the far side."""
        count = len(keys) // KEY_BYTES
        self._socket.sendall(REQUEST.pack(Operation.LOOKUP, count, 0) + keys)
        receive_exactly(self._socket, self._scratch[:count])

    def ping_pong(self) -> None:
        """One round trip of the bytes that a LOOKUP of one key takes, and nothing done with them."""
        sent = LOOKUP_OVERHEAD_BYTES + KEY_BYTES
        self._socket.sendall(REQUEST.pack(Operation.ECHO, LOOKUP_OVERHEAD_BYTES + 1, sent) + bytes(sent))
        receive_exactly(self._socket, self._scratch[: LOOKUP_OVERHEAD_BYTES + 1])


class Memcpy:
    """One thread copying blocks between two areas that are far larger than any cache."""

    def __init__(self) -> None:
        self._source = memoryview(bytearray(os.urandom(1024 * 1024)) * (BUFFER_BYTES // (1024 * 1024)))
        self._target = memoryview(bytearray(BUFFER_BYTES))
        self._start = 0

    def seconds_for(self, block_bytes: int, count: int) -> float:
        """Seconds to copy ``count`` blocks; each call goes on where the last one stopped."""
        source, target = self._source, self._target
        begin = time.perf_counter()
        for _ in range(count):
            start = self._start
            target[start : start + block_bytes] = source[start : start + block_bytes]
            self._start = (start + block_bytes) % BUFFER_BYTES
        return time.perf_counter() - begin
