"""The fuzz of a node: CacheService and the wire protocol, beside a tenant whose blocks nobody else may see."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import msgspec

from saltern import wire
from saltern.errors import StatusCode
from saltern.wire import HEADER, Opcode
from tenants.roles import Role
from tests.fuzz import oracle
from tests.fuzz.calls import NOBODY, CallFuzz, Outcome
from tests.fuzz.cases import Cases
from tests.fuzz.services import Method, cache_methods
from tests.fuzz.values import TEXTS, Names
from tests.support.static_node import MIB, StaticNode, tenant_policy
from tests.support.wire_client import WireClient

OWN, OTHER = "alpha", "bravo"
TENANTS = {
    OWN: tenant_policy(limit_bytes=8 * MIB, namespaces=("chat", "code"), block_bytes=MIB),
    OTHER: tenant_policy(limit_bytes=8 * MIB, namespaces=("chat", "canary-ns"), block_bytes=MIB, uid="canary-uid"),
}
#: Bytes of bravo's blocks, under the very keys that the fuzz asks for.
CANARY = b"canary block of bravo"
_KEYS = [bytes(31) + bytes([number]) for number in range(4)]
_ROLES = {"writer": Role.WRITER, "reader": Role.READER}
_NUMBERS = (0, 1, -1, 4, 16, 4096, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_REPLY_TIMEOUT_S = 10.0


def fill(node: StaticNode) -> None:
    """Bravo's blocks, in both of its namespaces."""
    for namespace in ("chat", "canary-ns"):
        with WireClient(socket.create_connection(node.wire_address)) as client:
            client.hello(node.token(OTHER, namespace), namespace)
            client.put(dict.fromkeys(_KEYS, CANARY * 20))


def check(node: StaticNode) -> list[str]:
    """Faults of the node after a run: its books, and whether bravo has lost anything."""
    found = []
    try:
        node.check_invariants()
    except AssertionError as error:
        found.append(f"the books are wrong: {error}")
    for tenant, books in node.usage().tenants.items():
        if books.in_flight_bytes or books.held_bytes:
            found.append(f"{tenant} has {books.in_flight_bytes} bytes in flight, {books.held_bytes} held")
    with WireClient(socket.create_connection(node.wire_address)) as client:
        client.hello(node.token(OTHER, "chat"))
        if client.get(*_KEYS) != dict.fromkeys(_KEYS, CANARY * 20):
            found.append("bravo's blocks are not what they were")
    return found


class CacheFuzz(CallFuzz):
    """Calls every method of CacheService in every way; ``channel`` is to the node's gRPC door."""

    def __init__(self, node: StaticNode, channel: grpc.aio.Channel, seed: int) -> None:
        self._node = node
        names = {role: Names((OWN,), (OTHER, "canary-ns", "chat"), ("",)) for role in (*_ROLES, NOBODY)}
        super().__init__(
            channel,
            Outcome(seed),
            Cases(seed, cache_methods(), names, _able),
            names,
            secrets=[CANARY, b"canary-uid", b"canary-ns"],
            outsiders=list(names),
        )

    async def token(self, role: str) -> str:
        return self._node.token(OWN, "chat", _ROLES[role])

    def token_refused(self, role: str, token: str) -> None:
        self.outcome.faults.append(f"a good token of the role {role} was refused")


def _able(_method: Method) -> Sequence[str]:
    return ("writer",)


class WireFuzz:
    """Sends frames that nobody should send, each run of them over a session of its own."""

    def __init__(self, node: StaticNode, seed: int) -> None:
        self._node = node
        self._seed = seed
        self.sessions = 0
        self.faults: list[str] = []

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        for number in itertools.count():
            if number >= len(Opcode) and time.monotonic() > end_s:
                return
            self._session(number)

    def _session(self, number: int) -> None:
        rng = random.Random(f"{self._seed} wire {number}")
        self.sessions += 1
        with WireClient(socket.create_connection(self._node.wire_address)) as client:
            client.sock.settimeout(_REPLY_TIMEOUT_S)
            if rng.random() < 0.8:
                client.hello(self._node.token(OWN, "chat", rng.choice(list(_ROLES.values()))))
            frames = list(itertools.islice(self._frames(rng), rng.randint(1, 6)))
            sent = b"".join(frames)
            try:
                client.sock.sendall(sent)
                client.sock.shutdown(socket.SHUT_WR)
                received = _read_all(client.sock)
            except TimeoutError:
                self._fault(number, sent, "no answer, and the session is not closed")
                return
            except OSError:
                return  # closed in the middle of what nobody wants
            for fault in _faults_of(received, sent):
                self._fault(number, sent, fault)

    def _fault(self, number: int, sent: bytes, fault: str) -> None:
        self.faults.append(f"session {number}, {len(sent)} bytes {sent[:2000].hex()}\n    {fault}")

    def _frames(self, rng: random.Random) -> Iterator[bytes]:
        while True:
            opcode = rng.choice(list(Opcode))
            body, payload = self._body(opcode, rng)
            match rng.randrange(8):
                case 0:
                    yield rng.randbytes(rng.choice((1, 31, 32, 33, 500)))
                case 1:
                    yield _header(rng, opcode=rng.randrange(256), body_bytes=len(body)) + body
                case 2:
                    changed = {rng.choice(("flags", "status", "version", "payload_bytes", "body_bytes")): 1}
                    yield _header(rng, opcode=opcode, **{"body_bytes": len(body), **changed}) + body
                case 3:
                    damaged = bytearray(body or b"\x80")
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                    yield _header(rng, opcode=opcode, body_bytes=len(damaged)) + damaged
                case 4:
                    whole = (
                        _header(rng, opcode=opcode, body_bytes=len(body), payload_bytes=len(payload)) + body + payload
                    )
                    yield whole[: rng.randrange(len(whole) + 1)]
                case _:
                    yield _header(rng, opcode=opcode, body_bytes=len(body), payload_bytes=len(payload)) + body + payload

    def _body(self, opcode: Opcode, rng: random.Random) -> tuple[bytes, bytes]:
        """A body and the payload that goes with it, or does not."""
        keys = [rng.choice(_KEYS) for _ in range(rng.randint(0, 4))]
        blocks = [rng.randbytes(rng.choice((1, 100, 4096))) for _ in keys]
        fields: dict[str, Any]
        match opcode:
            case Opcode.PUT:
                sums = wire.join_sums([wire.checksum(block) for block in blocks])
                fields = {"keys": b"".join(keys), "sizes": [len(block) for block in blocks], "sums": sums}
            case Opcode.GET:
                fields = {"keys": b"".join(keys), "max_sizes": [MIB] * len(keys)}
            case Opcode.LOOKUP | Opcode.DELETE:
                fields = {"keys": b"".join(keys)}
            case Opcode.HELLO:
                token = self._node.token(OWN, "chat")
                fields = {"token": token, "namespace": rng.choice(("chat", "canary-ns")), "epoch": 1}
            case Opcode.REFRESH:
                fields = {"token": self._node.token(rng.choice((OWN, OTHER)), "chat")}
            case Opcode.REGISTER:
                fields = {"region": 0, "region_bytes": 4096}
            case Opcode.UNREGISTER:
                fields = {"region": 0}
            case _:  # one that has come since: anything in every field
                fields = {name: _hostile(rng) for name in _fields_of(opcode)}
        if rng.random() < 0.6:
            fields[rng.choice(_fields_of(opcode))] = _hostile(rng)
        return msgspec.msgpack.encode(fields), b"".join(blocks) if opcode is Opcode.PUT else b""


def _fields_of(opcode: Opcode) -> list[str]:
    """Of the body of a request."""
    body = getattr(wire, opcode.name.title().replace("_", ""), wire.Empty)
    return [field.name for field in msgspec.structs.fields(body)] or ["unknown"]


def _hostile(rng: random.Random) -> Any:
    number = rng.choice(_NUMBERS)
    return rng.choice(
        (
            None, number, [number], [number] * 5000, rng.choice(TEXTS), [rng.choice(TEXTS)], rng.randbytes(33), b"",
            bytes(32 * 4097), 1.5, float("nan"), {"a": {"b": []}}, True, [[[[]]]], {str(n): n for n in range(300)},
        )
    )  # fmt: skip


def _header(rng: random.Random, *, opcode: int, **fields: int) -> bytes:
    return HEADER.pack(
        wire.MAGIC,
        fields.get("version", 0) + 1 if "version" in fields else 1,
        opcode,
        fields.get("flags", 0),
        rng.getrandbits(64),
        fields.get("body_bytes", 0),
        fields.get("status", 0),
        fields.get("payload_bytes", 0),
    )


def _read_all(sock: socket.socket) -> bytes:
    received = bytearray()
    while piece := sock.recv(1 << 16):
        received += piece
    return bytes(received)


def _faults_of(received: bytes, sent: bytes) -> list[str]:
    """What is wrong with the replies of a session; they are taken apart frame by frame."""
    found = oracle.faults_of_bytes([received]) + oracle.leaks([received], [CANARY, b"canary-uid"], sent)
    at = 0
    while at < len(received):
        if len(received) - at < wire.HEADER_BYTES:
            return [*found, "the last reply is not whole"]
        header = wire.decode_header(received[at : at + wire.HEADER_BYTES])
        body = received[at + wire.HEADER_BYTES : at + wire.HEADER_BYTES + header.body_bytes]
        at += wire.HEADER_BYTES + header.body_bytes + header.payload_bytes
        if not header.is_reply:
            found.append("what came is not a reply")
        if header.status == StatusCode.INTERNAL:
            found.append(f"INTERNAL: {body!r}")
        if header.status:
            error = wire.decode_body(wire.ErrorBody, body)
            if not (error.reason and error.message and error.hint):
                found.append(f"a refusal does not say why and what to do: {error}")
    return found if at == len(received) else [*found, "the last reply is not whole"]


async def fuzz_node(node: StaticNode, seed: int, seconds: float) -> tuple[Outcome, int]:
    """Both doors at once; the outcome of CacheService with the faults of both, and how many sessions there were."""
    fill(node)
    frames = WireFuzz(node, seed)
    async with grpc.aio.insecure_channel(node.grpc_endpoint) as channel:
        outcome, _ = await asyncio.gather(
            CacheFuzz(node, channel, seed).run(seconds), asyncio.to_thread(frames.run, seconds)
        )
    outcome.faults += [*frames.faults, *await asyncio.to_thread(check, node)]
    return outcome, frames.sessions
