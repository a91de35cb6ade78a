"""A session over RDMA that does exactly what a test says, right or wrong, and a node to say it to."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from saltern import wire
from saltern.rdma import (
    Access,
    Completion,
    Completions,
    Device,
    DeviceChoice,
    Endpoint,
    ProtectionDomain,
    QueuePair,
    Region,
)
from saltern.wire import Opcode
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.wire_client import WireClient, connect_tcp

WAIT_S = 30
TENANTS = {
    name: tenant_policy(limit_bytes=80 * MIB, namespaces=("chat",), block_bytes=64 * MIB) for name in ("acme", "blue")
}


@contextmanager
def rdma_node(dram_bytes: int = 160 * MIB, tenants: Mapping[str, object] | None = None) -> Iterator[StaticNode]:
    """A node that offers RDMA; books must be exact and every queue pair gone when it ends."""
    with static_node(tenants or TENANTS, dram_bytes=dram_bytes, rdma=DeviceChoice()) as node:  # type: ignore[arg-type]
        assert node.call(lambda: node._node._state.fabric is not None), "the node offers no RDMA"
        yield node


class RdmaClient:
    """One session with a queue pair, and ``size_bytes`` of registered memory as region 0."""

    def __init__(
        self, node: StaticNode, tenant: str = "acme", *, size_bytes: int = MIB, registers: bool = True
    ) -> None:
        self.wire: WireClient = connect_tcp(node)
        self.hello = self.wire.hello(node.token(tenant, "chat"))
        assert self.hello.rdma
        self.device = Device()
        try:
            self._connect(size_bytes)
        except BaseException:
            self.__exit__()
            raise
        if registers:
            self.register(self.region.address, size_bytes, self.region.remote_key)

    def _connect(self, size_bytes: int) -> None:
        domain = ProtectionDomain(self.device)
        self.memory = mmap.mmap(-1, size_bytes)
        self.region = Region(domain, self.memory, Access.REMOTE)
        self.completions = Completions(self.device, capacity=16)
        self.pair = QueuePair(domain, self.completions, access=Access.REMOTE, send_requests=4, receive_requests=4)
        self.node_endpoint = self.connect(self.pair.endpoint)
        self.pair.connect(self.node_endpoint)
        self.pair.post_receives([None] * 4)

    def __enter__(self) -> RdmaClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.close()
        self.wire.sock.close()

    def connect(self, endpoint: Endpoint) -> Endpoint:
        """Send CONNECT; raises the error of the reply."""
        self.wire.send(Opcode.CONNECT, wire.Connect(endpoint.pack()))
        return Endpoint.unpack(self.wire.answer(wire.ConnectReply)[0].endpoint)

    def register(self, address: int, size_bytes: int, remote_key: int, *, region: int = 0) -> None:
        self.wire.send(Opcode.REGISTER, wire.Register(region, size_bytes, address, remote_key))
        self.wire.answer(wire.Empty)

    def send_put(self, entries: Mapping[bytes, bytes], offsets: Sequence[int] | None = None) -> None:
        """Lay entries out one behind the other, or where ``offsets`` say, and ask the node to read them."""
        values = list(entries.values())
        if offsets is None:
            offsets = [sum(map(len, values[:at])) for at in range(len(values))]
            for offset, value in zip(offsets, values, strict=True):
                self.memory[offset : offset + len(value)] = value
        sums = wire.join_sums([wire.checksum(value) for value in values])
        put = wire.Put(b"".join(entries), [len(value) for value in values], sums, 0, list(offsets))
        self.wire.send(Opcode.PUT, put)

    def put(self, entries: Mapping[bytes, bytes], offsets: Sequence[int] | None = None) -> wire.PutReply:
        self.send_put(entries, offsets)
        return self.wire.answer(wire.PutReply)[0]

    def send_get(self, keys: Sequence[bytes], room_bytes: int, offsets: Sequence[int] | None = None) -> None:
        where = [at * room_bytes for at in range(len(keys))] if offsets is None else list(offsets)
        self.wire.send(Opcode.GET, wire.Get(b"".join(keys), [room_bytes] * len(keys), 0, where), request_id=7)

    def get(self, key: bytes, room_bytes: int) -> bytes | None:
        """One entry through the start of region 0; None for a miss."""
        self.send_get([key], room_bytes)
        reply, payload = self.wire.answer(wire.GetReply)
        assert not payload
        if reply.codes != b"\0":
            return None
        ended = self.collect()
        assert ended.ok and ended.is_receive and ended.immediate == 7
        self.pair.post_receives([None])
        found = self.memory[: reply.sizes[0]]
        assert wire.split_sums(reply.sums) == [wire.checksum(found)]
        return found

    def collect(self) -> Completion:
        """The next completion."""
        while not (found := self.completions.collect(1)):
            assert self.completions.wait(WAIT_S), "nothing has completed"
        return found[0]
