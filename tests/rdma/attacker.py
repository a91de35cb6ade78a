"""A session over RDMA that does exactly what a test says, right or wrong, and a node to say it to."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from dataplane.settings import SessionLimits, SsdSettings
from saltern import wire
from saltern.client import Client
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
from tenants.policy import TenantPolicy
from tests.rdma.sides import shared_device
from tests.support.clients import node_client
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, connect_tcp

WAIT_S = 30
#: Clients register room for two frames or two blocks: with small blocks that is soon done.
TENANTS = {name: tenant_policy(limit_bytes=16 * MIB, block_bytes=MIB) for name in ("acme", "blue")}


@contextmanager
def rdma_node(
    dram_bytes: int = 16 * MIB,
    tenants: Mapping[str, TenantPolicy] | None = None,
    *,
    ssd: SsdSettings | None = None,
    limits: SessionLimits | None = None,
) -> Iterator[StaticNode]:
    """A node that offers RDMA; once its sessions have ended its books are exact and every queue pair is gone."""
    with static_node(
        tenants or TENANTS, dram_bytes=dram_bytes, rdma=DeviceChoice(), ssd=ssd, limits=limits, metrics_tenants_max=8
    ) as node:
        assert node.call(lambda: node._node._state.fabric is not None), "the node offers no RDMA"
        yield node
        wait_until(lambda: node.session_count() == 0)
        node.check_invariants()
        for books in node.usage().tenants.values():
            assert books.in_flight_bytes == books.held_bytes == 0
        assert node.call(lambda: fabric_holds(node)) == (0, 0)


def sdk_client(node: StaticNode, transport: str = "rdma", tenant: str = "acme") -> Client:
    """A client of the SDK that waits as long as an emulator on a busy machine may take."""
    return node_client(node, transport, tenant=tenant, deadline_ms=4_000 * WAIT_S)


def fabric_holds(node: StaticNode) -> tuple[int, int]:
    """Queue pairs that are open, and what is under way on them; on the node's loop."""
    fabric = node._node._state.fabric
    assert fabric is not None
    return len(fabric), fabric.share.held


class RdmaClient:
    """One session with a queue pair, and ``size_bytes`` of registered memory as region 0."""

    def __init__(self, node: StaticNode, tenant: str = "acme", *, size_bytes: int = MIB, token: str = "") -> None:
        self.wire: WireClient = connect_tcp(node)
        self.wire.sock.settimeout(2 * WAIT_S)  # the node may wait for a silent peer first
        self.hello = self.wire.hello(token or node.token(tenant, "chat"))
        assert self.hello.rdma
        self._resources = ExitStack()
        try:
            self._connect(shared_device(), size_bytes)
            self.register(self.region.address, size_bytes, self.region.remote_key)
        except BaseException:
            self.__exit__()
            raise

    def _connect(self, device: Device, size_bytes: int) -> None:
        domain = self._resources.enter_context(ProtectionDomain(device))
        self.memory = mmap.mmap(-1, size_bytes)
        self.region = Region(domain, self.memory, Access.REMOTE)
        self.completions = self._resources.enter_context(Completions(device, capacity=16))
        self.pair = QueuePair(domain, self.completions, access=Access.REMOTE, send_requests=4, receive_requests=4)
        self.node_endpoint = self.connect(self.pair.endpoint)
        self.pair.connect(self.node_endpoint)
        self.pair.post_receives([None] * 4)

    def __enter__(self) -> RdmaClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()
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
