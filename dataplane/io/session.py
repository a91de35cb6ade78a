"""One session of the wire protocol without its socket: HELLO, REFRESH, and what every request must pass (WIRE.md 3, 4).

::

    NEW --HELLO--> OPEN --any number of requests, each checked against the gate--> (closed by the shell)

The shell (:mod:`dataplane.io.conversation`) moves bytes; a session decodes bodies, asks the gate and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dataplane.core.partition import Partition
from dataplane.io.batches import Blocks, GetBatch, PutBatch
from dataplane.io.gate import Gate, Grant
from dataplane.io.rdma import Fabric, Link
from dataplane.io.regions import RegionSpace
from dataplane.io.traffic import TenantTraffic, Traffic
from dataplane.metrics.meters import Meters
from saltern import wire
from saltern.errors import (
    FailedPreconditionError,
    ProtocolError,
    ResourceExhaustedError,
    SalternError,
    UnavailableError,
)
from saltern.keys import BlockKey
from saltern.names import NodeId, TenantId
from saltern.rdma import Endpoint
from saltern.wire import Opcode
from tenants.roles import Permission

#: An enum's member costs a descriptor call at each use in Python 3.11; these do not.
_READ: Final = Permission.ENTRIES_READ
_WRITE: Final = Permission.ENTRIES_WRITE
_HELLO, _REFRESH, _PUT, _PING = map(int, (Opcode.HELLO, Opcode.REFRESH, Opcode.PUT, Opcode.PING))

#: Reasons after which the rest of the stream means nothing or is not wanted: the session is closed (WIRE.md 6).
CLOSING_REASONS: Final = frozenset(
    {
        "BAD_MAGIC", "UNSUPPORTED_VERSION", "UNKNOWN_OPCODE", "RESERVED_BITS", "BODY_TOO_LARGE", "PAYLOAD_TOO_LARGE",
        "LENGTH_MISMATCH", "UNEXPECTED_REPLY", "HELLO_REQUIRED", "ALREADY_OPEN",
        "TOO_MANY_SESSIONS", "NO_POLICY", "DRAINING",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What a node tells of itself in HELLO. ``host_id`` is random for each process."""

    node_id: NodeId
    host_id: str


@dataclass(slots=True)
class NodeState:
    """What all sessions of a node share.

    Attributes:
        fabric: the RDMA device with the arena registered; None where RDMA is not offered.
    """

    identity: NodeIdentity
    blocks: Blocks
    gate: Gate
    traffic: Traffic
    region_space: RegionSpace = field(default_factory=RegionSpace)
    meters: Meters = field(default_factory=Meters)
    is_draining: bool = False
    fabric: Fabric | None = None


class Session:
    """The state of one session.

    Args:
        claim_place: called with the tenant before the session opens; False refuses it (TOO_MANY_SESSIONS).

    Attributes:
        traffic: the tenant's rates and bounds; None before HELLO.
    """

    __slots__ = ("_claim_place", "_grant", "_node", "traffic")

    def __init__(self, node: NodeState, claim_place: Callable[[TenantId], bool]) -> None:
        self._node = node
        self._claim_place = claim_place
        self._grant: Grant | None = None
        self.traffic: TenantTraffic | None = None

    @property
    def is_open(self) -> bool:
        """Whether HELLO has succeeded."""
        return self._grant is not None

    @property
    def tenant(self) -> TenantId | None:
        """Whose session it is; None before HELLO."""
        return None if self._grant is None else self._grant.partition.tenant

    @property
    def is_lapsed(self) -> bool:
        """Whether the gate would refuse any request now: expired, revoked, suspended, deleted. REFRESH may end that."""
        try:
            return self._grant is not None and self._node.gate.check(self._grant, None) is None
        except SalternError:
            return True

    @property
    def region_space(self) -> RegionSpace:
        return self._node.region_space

    @property
    def is_draining(self) -> bool:
        """Whether the node is shutting down."""
        return self._node.is_draining

    @property
    def blocks(self) -> Blocks:
        return self._node.blocks

    def check_frame(self, header: wire.Header) -> None:
        """Refuse a frame by its header alone.

        Raises:
            ProtocolError: UNEXPECTED_REPLY, RESERVED_BITS, HELLO_REQUIRED, ALREADY_OPEN, PAYLOAD_TOO_LARGE or
                LENGTH_MISMATCH.
            UnavailableError: DRAINING.
        """
        if header.is_reply:
            raise ProtocolError("a client sent a reply", reason="UNEXPECTED_REPLY", hint="send requests only")
        if header.status:
            raise ProtocolError("the status of a request is not 0", reason="RESERVED_BITS", hint="send 0")
        if self._node.is_draining:
            raise UnavailableError(
                "the node is shutting down", reason="DRAINING", hint="use another node", retry_after_ms=1000
            )
        if self._grant is None:
            if header.payload_bytes:
                raise ProtocolError("a payload before HELLO", reason="PAYLOAD_TOO_LARGE", hint="send HELLO first")
            if header.opcode != _HELLO:
                raise ProtocolError("the first frame is not HELLO", reason="HELLO_REQUIRED", hint="send HELLO first")
        elif header.opcode == _HELLO:
            raise ProtocolError("the session is open already", reason="ALREADY_OPEN", hint="open another session")
        if header.payload_bytes and header.opcode != _PUT:
            raise ProtocolError("only a put carries a payload", reason="LENGTH_MISMATCH", hint="send no payload")

    def answer(self, opcode: int, body: memoryview) -> msgspec.Struct:
        """Handle a request that moves no entries and return the body of its reply.

        Raises:
            SalternError: the body of the error reply.
        """
        if opcode == _PING:
            wire.decode_body(wire.Empty, body)
            self.require(None)
            return wire.Empty()
        if opcode == _REFRESH:
            return self._refresh(wire.decode_body(wire.Refresh, body))
        assert opcode == _HELLO, "the other opcodes are handled elsewhere"
        return self._hello(wire.decode_body(wire.Hello, body))

    def require(self, permission: Permission | None) -> Partition:
        """I1, I10: pass the gate, at every request; raises what :meth:`Gate.check` does."""
        assert self._grant is not None, "check_frame lets only HELLO through before"
        return self._node.gate.check(self._grant, permission)

    def connect(self, connect: wire.Connect) -> Link:
        """Set up a queue pair to the client's.

        Raises:
            FailedPreconditionError: RDMA_NOT_OFFERED, or what :meth:`Fabric.connect` raises.
            ProtocolError: RDMA_ENDPOINT_INVALID.
        """
        tenant = self.require(None).tenant
        fabric = self._node.fabric
        if fabric is None:
            raise FailedPreconditionError(
                "this node offers no RDMA", reason="RDMA_NOT_OFFERED", hint="go on over TCP in this session"
            )
        assert self.traffic is not None
        return fabric.connect(tenant, self.traffic.flow.weight, Endpoint.unpack(connect.endpoint))

    def begin_put(self, put: wire.Put) -> PutBatch:
        """Begin a put whose lengths are checked; raises SalternError if none of it may begin."""
        return PutBatch(self.blocks, self.require(_WRITE), wire.split_keys(put.keys))

    def begin_get(self, get: wire.Get) -> GetBatch:
        """Begin a get whose lengths are checked; the caller pins its hits, calls :meth:`check_payload` and closes it.

        Raises:
            SalternError: the gate refuses it.
        """
        return GetBatch(self.blocks, self.require(_READ), wire.split_keys(get.keys), get.max_sizes)

    def check_payload(self, batch: GetBatch) -> None:
        """Refuse a get by its hits.

        Raises:
            ProtocolError: PAYLOAD_TOO_LARGE, they are above the limit. It holds for regional gets too: 4,096 times one
                large entry would keep the node copying for minutes.
        """
        if batch.payload_bytes > wire.PAYLOAD_MAX_BYTES:
            raise ProtocolError(
                f"the hits are {batch.payload_bytes} bytes, above the payload limit of {wire.PAYLOAD_MAX_BYTES}",
                reason="PAYLOAD_TOO_LARGE",
                hint="split the batch",
                metadata={"limit_bytes": str(wire.PAYLOAD_MAX_BYTES)},
            )

    def lookup(self, keys: Sequence[BlockKey]) -> wire.LookupReply:
        """Say which entries are there; raises SalternError if the gate refuses it."""
        blocks = self.blocks
        prefix, found = blocks.core.lookup(self.require(_READ), keys, blocks.clock.monotonic_ns())
        return wire.LookupReply(prefix, found)

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """Remove entries and return how many were there; raises SalternError if the gate refuses it."""
        return self.blocks.core.delete(self.require(_WRITE), keys)

    def charge_bytes(self, payload_bytes: int) -> None:
        """Charge bytes to the tenant's rate that were not known when the request was let in; negative ones less."""
        assert self.traffic is not None
        self.traffic.charge_bytes(payload_bytes)

    def hold(self, size_bytes: int) -> None:
        """A transfer holds so many bytes of the arena until :meth:`release`."""
        assert self.traffic is not None
        self.traffic.hold(size_bytes)

    def release(self, size_bytes: int, *, served_bytes: int) -> None:
        """A transfer has ended and has moved ``served_bytes``."""
        assert self.traffic is not None
        self.traffic.served_bytes += served_bytes
        self.traffic.release(size_bytes)

    def _hello(self, hello: wire.Hello) -> wire.HelloReply:
        node = self._node
        grant = node.gate.admit(hello.token, hello.namespace, hello.epoch, hello.group)
        partition = grant.partition
        if not self._claim_place(partition.tenant):
            raise too_many_sessions("the tenant has too many sessions open on this node")
        self._grant = grant
        self.traffic = node.traffic.of(partition.tenant)
        namespace = node.blocks.core.policy.tenants[partition.tenant].namespaces[partition.namespace]
        return wire.HelloReply(
            node=node.identity.node_id,
            host=node.identity.host_id,
            tenant=partition.tenant,
            namespace=partition.namespace,
            epoch=partition.epoch,
            expires_ms=grant.claims.expires_at_s * 1000,
            entry_max_bytes=min(namespace.block_bytes, wire.ENTRY_MAX_BYTES),
            rdma=node.fabric is not None,
        )

    def _refresh(self, refresh: wire.Refresh) -> wire.RefreshReply:
        assert self._grant is not None
        self._grant = self._node.gate.renew(self._grant, refresh.token)
        return wire.RefreshReply(expires_ms=self._grant.claims.expires_at_s * 1000)


def closes_session(error: SalternError, session: Session) -> bool:
    """Whether a session ends after ``error`` was answered: the stream is broken, or HELLO failed (WIRE.md 6)."""
    return not session.is_open or error.reason in CLOSING_REASONS


def too_many_sessions(message: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        message,
        reason="TOO_MANY_SESSIONS",
        hint="close sessions that are not used, or retry later",
        retry_after_ms=1000,
    )
