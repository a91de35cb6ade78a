"""A client of the wire protocol that does exactly what a test says, right or wrong: no retries, no checks."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from saltern import wire
from saltern.errors import SalternError
from saltern.wire import Opcode
from tests.support.static_node import StaticNode

TIMEOUT_S = 20
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 0x0002
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def block(number: int, size_bytes: int = 4096) -> bytes:
    """Bytes of an entry that no other number has."""
    return (number.to_bytes(8, "little") * (size_bytes // 8 + 1))[:size_bytes]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def ends_unheard(sock: socket.socket) -> bool:
    """Whether the other side closes ``sock`` without another byte; waits for it.

    A peer that closes with bytes of ours still unread resets the connection (RFC 1122, 4.2.2.13): an end too.
    """
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


class WireClient:
    """One connection. Every receive fails after 20 s instead of hanging."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(TIMEOUT_S)

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, opcode: int, body: msgspec.Struct, payload: bytes = b"", *, request_id: int = 1) -> None:
        frame = wire.encode_request(Opcode(opcode), request_id, wire.encode_body(body), len(payload))
        self.sock.sendall(frame + payload)

    def receive(self) -> tuple[wire.Header, bytes, bytes]:
        """Header, body and payload of the next reply; raises EOFError if the node has closed the connection."""
        header = wire.decode_header(self.read(wire.HEADER_BYTES))
        assert header.is_reply
        return header, self.read(header.body_bytes), self.read(header.payload_bytes)

    def read(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            try:
                piece = self.sock.recv(length - len(received))
            except ConnectionResetError:
                raise EOFError from None
            if not piece:
                raise EOFError
            received += piece
        return bytes(received)

    def answer(self, kind: type[BodyT]) -> tuple[BodyT, bytes]:
        """Body and payload of the next reply; raises the error that it carries."""
        header, body, payload = self.receive()
        if header.status:
            raise wire.error_from_body(wire.decode_body(wire.ErrorBody, body), header.status)
        return wire.decode_body(kind, body), payload

    def error(self) -> SalternError:
        """The error of the next reply, which must carry one."""
        header, body, payload = self.receive()
        assert header.status and not payload
        return wire.error_from_body(wire.decode_body(wire.ErrorBody, body), header.status)

    def is_closed(self) -> bool:
        """Whether the node has closed the connection; waits for it."""
        return ends_unheard(self.sock)

    def hello(self, token: str, namespace: str = "chat", epoch: int = 1, group: str = "") -> wire.HelloReply:
        self.send(Opcode.HELLO, wire.Hello(token, namespace, epoch, group=group))
        return self.answer(wire.HelloReply)[0]

    def put(self, entries: dict[bytes, bytes], **fields: object) -> wire.PutReply:
        """Put entries inline."""
        values = list(entries.values())
        put = wire.Put(
            keys=b"".join(entries),
            sizes=[len(value) for value in values],
            sums=wire.join_sums([wire.checksum(value) for value in values]),
        )
        self.send(Opcode.PUT, msgspec.structs.replace(put, **fields), b"".join(values))
        return self.answer(wire.PutReply)[0]

    def get(self, *keys: bytes, max_size: int = 64 * 1024 * 1024) -> dict[bytes, bytes]:
        """The hits of an inline get, by key; sums are checked."""
        self.send(Opcode.GET, wire.Get(b"".join(keys), [max_size] * len(keys)))
        reply, payload = self.answer(wire.GetReply)
        found, at = {}, 0
        for name, code, size, total in zip(keys, reply.codes, reply.sizes, wire.split_sums(reply.sums), strict=True):
            if code == 0:
                found[name] = payload[at : at + size]
                assert wire.checksum(found[name]) == total
                at += size
        assert at == len(payload)
        return found

    def lookup(self, *keys: bytes) -> wire.LookupReply:
        self.send(Opcode.LOOKUP, wire.Lookup(b"".join(keys)))
        return self.answer(wire.LookupReply)[0]

    def delete(self, *keys: bytes) -> int:
        self.send(Opcode.DELETE, wire.Delete(b"".join(keys)))
        return self.answer(wire.DeleteReply)[0].deleted

    def ping(self) -> None:
        self.send(Opcode.PING, wire.Empty())
        self.answer(wire.Empty)

    def register(self, descriptors: Sequence[int], region_bytes: int, *, region: int = 0) -> None:
        """Register a region with whatever descriptors are given."""
        frame = wire.encode_request(Opcode.REGISTER, 1, wire.encode_body(wire.Register(region, region_bytes)))
        if descriptors:
            assert socket.send_fds(self.sock, [frame], list(descriptors)) == len(frame)
        else:
            self.sock.sendall(frame)
        self.answer(wire.Empty)


def connect_tcp(node: StaticNode) -> WireClient:
    sock = socket.create_connection(node.wire_address, timeout=TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return WireClient(sock)


def connect_unix(node: StaticNode) -> WireClient:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(node.shm_path)
    return WireClient(sock)


class Segment:
    """A memfd of this process, mapped; sealed against shrinking unless told otherwise."""

    def __init__(self, size_bytes: int, *, sealed: bool = True) -> None:
        self.descriptor = os.memfd_create("segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size_bytes)
        if sealed:
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, F_SEAL_SHRINK)
        self.memory = mmap.mmap(self.descriptor, size_bytes)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()
        os.close(self.descriptor)
