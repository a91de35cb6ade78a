"""A peer that speaks the wire protocol just well enough to break it: for the faults that no healthy node commits.

    def truncate(session: PeerSession) -> None:
        session.hello()
        request = session.read()
        session.send_raw(b"SLTN")          # and the connection closes: a reply that stops in its header

    with faulty_peer(truncate) as peer:
        client = client_of(peer.endpoint)

Every connection runs the behaviour once, in a thread of its own; the connection closes when it returns.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from saltern import wire
from saltern.credentials import NodeEndpoint
from saltern.errors import SalternError


class Request(NamedTuple):
    header: wire.Header
    body: bytes
    payload: bytes


class PeerSession:
    """One accepted connection."""

    def __init__(self, connection: socket.socket, stopping: threading.Event) -> None:
        self.connection = connection
        self.stopping = stopping

    def read(self) -> Request:
        header = wire.decode_header(self._read_exactly(wire.HEADER_BYTES))
        return Request(header, self._read_exactly(header.body_bytes), self._read_exactly(header.payload_bytes))

    def hello(self, *, host: str = "", entry_max_bytes: int = 1 << 20) -> None:
        """Answer HELLO as a node would, whatever the token."""
        request = self.read()
        hello = wire.decode_body(wire.Hello, request.body)
        body = wire.HelloReply("peer", host, "acme", hello.namespace, hello.epoch, 2**40, entry_max_bytes)
        self.reply(request, body)

    def reply(self, request: Request, body: msgspec.Struct, payload: bytes = b"") -> None:
        head = wire.encode_reply(request.header.opcode, request.header.request_id, wire.encode_body(body), len(payload))
        self.connection.sendall(head + payload)

    def refuse(self, request: Request, error: SalternError) -> None:
        self.connection.sendall(wire.encode_error_reply(request.header.opcode, request.header.request_id, error))

    def send_raw(self, data: bytes) -> None:
        self.connection.sendall(data)

    def wait_for_end(self) -> None:
        """Stay silent until the client hangs up or the test is over."""
        self.connection.settimeout(0.05)
        while not self.stopping.is_set():
            with suppress(TimeoutError):
                if not self.connection.recv(65536):
                    return

    def _read_exactly(self, size_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < size_bytes:
            received = self.connection.recv(size_bytes - len(data))
            if not received:
                raise ConnectionError("the client hung up")
            data += received
        return bytes(data)


Behaviour = Callable[[PeerSession], None]


class FaultyPeer:
    def __init__(self, endpoint: NodeEndpoint) -> None:
        self.endpoint = endpoint
        self.connections = 0


@contextmanager
def faulty_peer(behave: Behaviour) -> Iterator[FaultyPeer]:
    """Accept connections on a free port and run ``behave`` on each."""
    stopping = threading.Event()
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        peer = FaultyPeer(NodeEndpoint("peer", f"{host}:{port}"))

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                behave(PeerSession(connection, stopping))

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    peer.connections += 1
                    threads.append(threading.Thread(target=serve, args=(connection,)))
                    threads[-1].start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield peer
        finally:
            stopping.set()
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(10)
            for thread in threads:
                thread.join(10)
            assert not acceptor.is_alive() and not any(thread.is_alive() for thread in threads)
