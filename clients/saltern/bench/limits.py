"""What the machine itself can do: a bare pair of sockets, one thread's memcpy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import TracebackType
from typing import Self

from saltern.bench.bare_peer import REQUEST, Operation, receive_exactly
from saltern.errors import UnavailableError
from saltern.keys import KEY_BYTES

#: The bytes that a LOOKUP of the wire protocol adds to its keys, each way: header and msgpack envelope.
LOOKUP_OVERHEAD_BYTES = 42
_AROUND_CACHES = "glibc.cpu.x86_non_temporal_threshold=0x20000"


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

    @property
    def pid(self) -> int:
        """Of the process on the far side."""
        return self._peer.pid

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
    """One thread that copies blocks between two areas far larger than any cache; a context manager.

    Args:
        around_caches: with non-temporal stores, which need not read what they overwrite (GLIBC_TUNABLES,
            x86_non_temporal_threshold); glibc takes them by itself only for copies larger than a part of the caches.
    """

    def __init__(self, *, around_caches: bool) -> None:
        self._environment = {**os.environ, **({"GLIBC_TUNABLES": _AROUND_CACHES} if around_caches else {})}

    def __enter__(self) -> Self:
        self._peer = subprocess.Popen(
            [sys.executable, "-m", "saltern.bench.memcpy_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._peer.kill()
        self._peer.communicate()

    def seconds_for(self, block_bytes: int, count: int) -> float:
        """Seconds to copy ``count`` blocks; each call goes on where the last one stopped."""
        assert self._peer.stdin is not None and self._peer.stdout is not None
        self._peer.stdin.write(b"%d %d\n" % (block_bytes, count))
        self._peer.stdin.flush()
        return float(self._peer.stdout.readline())
