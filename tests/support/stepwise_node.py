"""Real sessions over real sockets that go on only when a test says so, round by round.

::

    async with stepwise_node({"acme": policy}) as node:
        client = node.connect("acme")
        client.send_pings(100)
        node.round()
        client.receive()

Nothing runs between two calls of :meth:`StepwiseNode.round`, as long as the test does not await.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.core.cache import CacheCore
from dataplane.io.arena import Arena
from dataplane.io.batches import Blocks
from dataplane.io.clock import Clock
from dataplane.io.gate import Gate
from dataplane.io.session import NodeIdentity, NodeState
from dataplane.io.session_table import SessionTable
from dataplane.io.traffic import TenantTraffic, Traffic
from dataplane.io.trimming import Trimmer
from dataplane.settings import SessionLimits
from saltern import wire
from saltern.names import NamespaceId, NodeId, TenantId
from saltern.wire import Opcode
from tenants.policy import NodePolicy, TenantPolicy
from tenants.roles import Role
from tenants.tokens import Audience, Claims, KeySet, sign_token
from tests.support.static_node import ISSUER, KID, MIB


class StepwiseClient:
    """One end of a socket pair, which counts what comes back."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self.received_bytes = 0

    def send(self, opcode: int, body: bytes, payload: bytes = b"") -> None:
        frame = wire.encode_request(opcode, 1, body, len(payload)) + payload
        assert self.sock.send(frame) == len(frame), "more than the socket holds"

    def send_pings(self, count: int) -> None:
        frame = wire.encode_request(Opcode.PING, 1, wire.encode_body(wire.Empty()))
        assert self.sock.send(frame * count) == len(frame) * count

    def put(self, name: bytes, value: bytes) -> None:
        """Send a put of one entry that the socket holds."""
        body = wire.encode_body(wire.Put(name, [len(value)], wire.join_sums([wire.checksum(value)])))
        self.send(Opcode.PUT, body, value)

    def receive(self) -> int:
        """Take what has come; return how many bytes."""
        taken = 0
        try:
            while count := len(self.sock.recv(4 * MIB)):
                taken += count
        except BlockingIOError:
            pass
        self.received_bytes += taken
        return taken


class StepwiseNode:
    """A node's sessions without its doors."""

    def __init__(self, stack: ExitStack, tenants: Mapping[str, TenantPolicy], limits: SessionLimits, dram: int) -> None:
        self._stack = stack
        self._signing_key = Ed25519PrivateKey.generate()
        clock = Clock()
        self.core = CacheCore(dram, soft_mark_percent=90)
        arena = Arena(dram, prefault=False)
        stack.callback(arena.close)
        self.state = NodeState(
            identity=NodeIdentity(NodeId("node-1"), "host"),
            blocks=Blocks(self.core, arena, clock),
            gate=Gate(self.core, clock),
            traffic=Traffic(limits, arena_bytes=dram, clock=clock),
        )
        policy = NodePolicy(1, {TenantId(name): rules for name, rules in tenants.items()})
        self.state.gate.apply(policy, KeySet(issuer=ISSUER, keys={KID: self._signing_key.public_key()}))
        self.state.traffic.apply(policy)
        self.state.blocks.after_put = Trimmer(self.state.traffic.scheduler, self.core, clock).look
        self._table = SessionTable(self.state, limits)
        self._table.start()
        stack.callback(self._table.close)

    def traffic(self, tenant: str) -> TenantTraffic:
        return self.state.traffic.of(TenantId(tenant))

    def used_bytes(self, tenant: str) -> int:
        return self.core.usage().tenants[TenantId(tenant)].used_bytes

    def round(self) -> None:
        self.state.traffic.scheduler.run_round()

    def plug(self) -> StepwiseClient:
        """A connection that has said nothing."""
        near, far = socket.socketpair()
        self._stack.enter_context(near)
        self._table.adopt(far, takes_descriptors=False)
        return StepwiseClient(near)

    def connect(self, tenant: str) -> StepwiseClient:
        """An open session."""
        client = self.plug()
        client.send(Opcode.HELLO, wire.encode_body(wire.Hello(self._token(tenant), "chat", 1)))
        while not client.receive():
            self.round()
        return client

    def _token(self, tenant: str) -> str:
        now_s = int(time.time())
        claims = Claims(
            issuer=ISSUER,
            subject=f"tenants/{tenant}/apiKeys/test",
            audience=Audience.NODE,
            tenant=TenantId(tenant),
            namespace=NamespaceId("chat"),
            role=Role.WRITER,
            issued_at_s=now_s,
            expires_at_s=now_s + 600,
            token_id=secrets.token_hex(16),
        )
        return sign_token(self._signing_key, KID, claims)


@asynccontextmanager
async def stepwise_node(
    tenants: Mapping[str, TenantPolicy], *, limits: SessionLimits | None = None, dram_bytes: int = 64 * MIB
) -> AsyncIterator[StepwiseNode]:
    """Sessions of a node with the given tenants, on the running loop; all are closed afterwards."""
    with ExitStack() as stack:
        yield StepwiseNode(stack, tenants, limits or SessionLimits(), dram_bytes)
