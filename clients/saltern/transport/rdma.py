"""Entries over RDMA: frames go over TCP, the node reads and writes the client's registered memory (WIRE.md 10).

The client's device is asked for nothing: it only answers what the node's asks of memory that this session has
registered. Each session has a protection domain of its own, so a key that is told to one node is of no use to another.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar, Final

from saltern.credentials import Grant
from saltern.deadline import Deadline
from saltern.errors import SalternError, UnavailableError
from saltern.rdma import (
    Access,
    Completions,
    Device,
    DeviceChoice,
    Endpoint,
    ProtectionDomain,
    QueuePair,
    Region,
)
from saltern.transport.address import resolve
from saltern.transport.connection import Connection
from saltern.transport.memory import RegisteredBuffer
from saltern.transport.regional import RegionalSession
from saltern.transport.registry import BufferRegistry
from saltern.transport.session import PIPELINE_FRAMES, FrameT
from saltern.transport.tls import TlsDialer, dial
from saltern.wire import Connect, ConnectReply, Empty, Opcode, Register, immediate_of

logger = logging.getLogger("saltern")
#: Every get in flight finds a receive posted, and a get without hits leaves its own to the next.
_RECEIVES: Final = 2 * PIPELINE_FRAMES
#: How often a wait for the last bytes of a get looks whether the call was cancelled.
_LOOK_S: Final = 0.05


class RdmaSession(RegionalSession):
    """A session over TCP, inside TLS where the node speaks it, with entries over an RDMA queue pair of its own."""

    transport: ClassVar[str] = "rdma"
    takes_dmabuf: ClassVar[bool] = True
    #: Devices of sessions that a fork copied. Were they collected in the child, libibverbs would destroy the parent's.
    _forgotten: ClassVar[list[Device]] = []

    def __init__(
        self,
        connection: Connection,
        grant: Grant,
        registry: BufferRegistry,
        deadline: Deadline,
        *,
        choice: DeviceChoice | None = None,
    ) -> None:
        self._device: Device | None = None
        #: By region id: what this session has registered with the device.
        self._registered: dict[int, Region] = {}
        #: Immediates of gets whose bytes are here, in the order in which they came.
        self._arrived: deque[int | None] = deque()
        self._is_aborted = False
        super().__init__(connection, grant, registry, deadline)
        try:
            if not self.offers_rdma:
                raise UnavailableError(
                    f"node {self.node} offers no RDMA",
                    reason="TRANSPORT_NOT_OFFERED",
                    hint="choose transport='auto'; the node's log says why it does not",
                )
            self._device = Device(choice)
            self._domain = ProtectionDomain(self._device)
            self._completions = Completions(self._device, capacity=_RECEIVES + 1)
            self._queue_pair = QueuePair(
                self._domain,
                self._completions,
                access=Access.REMOTE,
                send_requests=1,  # a queue pair has one at least; nothing is ever posted to it
                receive_requests=_RECEIVES,
            )
            ours = self._queue_pair.endpoint.pack()
            reply = self._call(Opcode.CONNECT, Connect(ours), ConnectReply, deadline)
            self._queue_pair.connect(Endpoint.unpack(reply.endpoint))
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        wire_endpoint: str,
        grant: Grant,
        registry: BufferRegistry,
        deadline: Deadline,
        *,
        node_id: str,
        tls: TlsDialer | None = None,
        server_name: str = "",
        choice: DeviceChoice | None = None,
    ) -> RdmaSession:
        """Connect over TCP, say HELLO, and connect a queue pair.

        Args:
            tls: what the client was told of TLS; None for plain text.
            server_name: what the node's certificate must be for; empty for a node that serves plain text.
            choice: which device, port and GID of this host; None leaves it to the rules.

        Raises:
            UnavailableError, DeadlineExceededError: not reachable in time, or (TRANSPORT_NOT_OFFERED) no RDMA there.
            UnauthenticatedError, PermissionDeniedError: the node refused the token.
            SalternError: a reason ``RDMA_*`` for what this host's or the node's device refused.
        """
        address = resolve(wire_endpoint, deadline)
        connection = dial(
            address, deadline, peer=f"node {node_id} at {wire_endpoint}", tls=tls, server_name=server_name
        )
        return cls(connection, grant, registry, deadline, choice=choice)

    @property
    def usable(self) -> bool:
        return super().usable and self._device is not None and not self._queue_pair.is_broken

    def abort(self) -> None:
        self._is_aborted = True
        super().abort()

    def close(self) -> None:
        """Destroy the queue pair, which ends every transfer, and only then let go of the memory (I7)."""
        device, self._device = self._device, None
        try:
            if device is not None:
                device.close()  # queue pair, regions, completions, domain, in this order
        except SalternError as error:
            logger.error("node %s: the RDMA device keeps what this session had: %s", self.node, error)
        else:
            if self._staging is not None:
                self._staging.close()
        finally:
            self._registered.clear()
            self._being_written.clear()
            super().close()

    def forget(self) -> None:
        if self._device is not None:
            self._forgotten.append(self._device)
            self._device = None
        super().forget()

    def _register_region(self, region: int, buffer: RegisteredBuffer, deadline: Deadline) -> None:
        if buffer.dmabuf is None:
            registered = Region(self._domain, buffer.view, Access.REMOTE)
        else:
            registered = Region.from_dmabuf(self._domain, buffer.dmabuf, buffer.size_bytes, Access.REMOTE)
        try:
            register = Register(region, buffer.size_bytes, registered.address, registered.remote_key)
            self._call(Opcode.REGISTER, register, Empty, deadline)
        except BaseException:
            registered.close()
            raise
        # Nothing is in flight while a region is registered, so what the node knew by this id is used no more.
        old = self._registered.pop(region, None)
        self._registered[region] = registered
        if old is not None:
            old.close()

    def _unregister_region(self, region: int, deadline: Deadline) -> None:
        super()._unregister_region(region, deadline)
        self._registered.pop(region).close()

    def _pipeline(
        self, frames: Iterable[FrameT], send: Callable[[FrameT], int], receive: Callable[[FrameT, int], None]
    ) -> None:
        try:
            super()._pipeline(frames, send, receive)
        except SalternError as error:
            if error.reason.startswith("RDMA_"):
                self.abort()  # the node has destroyed its queue pair and closes the session
            raise

    def _before_get(self, deadline: Deadline) -> None:
        self._collect()
        if free := self._queue_pair.free_receives:
            self._queue_pair.post_receives([None] * free)

    def _after_get(self, request_id: int, deadline: Deadline) -> None:
        """Wait for the immediate that ends the node's WRITEs: then all of their bytes are visible here."""
        self._collect()
        while not self._arrived:
            try:
                self._completions.wait(min(deadline.remaining_s(), _LOOK_S))
            except SalternError:
                self.abort()  # the node may still write: only a queue pair that is gone ends that
                raise
            if self._is_aborted:
                raise UnavailableError("the session was closed", reason="SESSION_CLOSED")
            self._collect()
        if self._arrived.popleft() != immediate_of(request_id):
            raise self._connection.violation("bytes of another get have come", "REPLY_MISMATCH")

    def _collect(self) -> None:
        for completion in self._completions.collect():
            if not completion.ok:
                self.abort()
                raise completion.to_error()
            self._arrived.append(completion.immediate)
