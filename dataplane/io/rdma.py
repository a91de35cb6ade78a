"""The RDMA device of a node: the arena registered with it, and one queue pair for each session that asks (WIRE.md 10).

The node issues every transfer: READ of the client's memory for a put, WRITE into it for a get. Its own memory is
registered for its own device alone, and its queue pairs let nobody in, so a client holds nothing that it could use or
forge (I3). Whatever memory a transfer names is not given to anybody else before the transfer has completed or its queue
pair is gone (I7); until then it stays charged to the tenant (I4). One bad completion ends its session and no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from dataplane.core.device_share import Claim, DeviceShare, Sharer, cost_of
from dataplane.core.remote_region import ChainLimits
from dataplane.io.arena import Arena
from dataplane.io.scheduler import Scheduler
from dataplane.io.stream import WAKE, Script
from saltern.errors import FailedPreconditionError, ResourceExhaustedError, SalternError, UnavailableError
from saltern.names import TenantId
from saltern.rdma import (
    Access,
    Chain,
    Completion,
    Completions,
    Device,
    DeviceChoice,
    Endpoint,
    Gid,
    LocalSpan,
    Operation,
    ProtectionDomain,
    QueuePair,
    Region,
)

if TYPE_CHECKING:
    from dataplane.io.exchange import Exchange  # which imports sessions, which have links

_log = structlog.get_logger(__name__)
#: Work requests of one chain, and so of a session: one chain of a session is under way at a time.
CHAIN_REQUESTS_MAX: Final = 128
#: Bytes of one chain; on a link of 100 Gbit/s it is under way for 0.3 ms.
CHAIN_MAX_BYTES: Final = 4 * 1024 * 1024
#: Cost of the chains of all sessions that are under way: several times what a fast device needs to be busy.
_DEVICE_BOUND: Final = 16 * CHAIN_MAX_BYTES
LINKS_MAX: Final = 512
TENANT_LINKS_MAX: Final = 128
#: The kernel looks for the way to an address while the node stands still, up to a second where there is none. So after
#: a connection that failed, its tenant waits this long: it could name such addresses one after the other (I2).
_HELD_S: Final = 30.0
_UNREACHABLE: Final = frozenset({"RDMA_GID_MISMATCH", "RDMA_GID_UNREACHABLE", "RDMA_CONNECT_REFUSED"})
#: 268 ms without an acknowledgement before a retry, and 6 of them: a client on a busy host is not taken for one that
#: has vanished, and that one is given up on before its session counts as stalled. Not 7: Soft-RoCE takes that for ever.
_ACK_TIMEOUT: Final = 16
_RETRIES: Final = 6
#: A client that has posted no receive is asked a few times, never for ever.
_RECEIVER_RETRIES: Final = 3


class RemoteFailedError(Exception):
    """A transfer failed and its queue pair is gone; ``error`` is what the client is told before its session ends."""

    def __init__(self, error: SalternError) -> None:
        super().__init__(error.message)
        self.error = error


class Fabric:
    """The device, with the whole arena registered.

    Args:
        choice: which device, port and GID.
        arena: closed after the fabric.
        scheduler: whose loop completions come on.

    Attributes:
        share: what tenants have under way.
        chain_limits: how much one chain may be.

    Raises:
        SalternError: there is no device or library, or the device does not take the arena; nothing is left open then.
    """

    def __init__(self, choice: DeviceChoice, arena: Arena, scheduler: Scheduler) -> None:
        self.device: Final = Device(choice)
        try:
            self.domain: Final = ProtectionDomain(self.device)
            # I3: LOCAL_WRITE lets this device put what it has read into the arena, and lets nobody else do anything.
            self._arena = Region(self.domain, arena.view(0, arena.capacity_bytes), Access.LOCAL_WRITE)
        except BaseException:
            self.device.close()
            raise
        self.scheduler: Final = scheduler
        self.share: Final = DeviceShare(_DEVICE_BOUND)
        self.chain_limits: Final = ChainLimits(
            requests_max=min(CHAIN_REQUESTS_MAX, self.device.limits.max_requests),
            bytes_max=CHAIN_MAX_BYTES,
            message_bytes=self.device.limits.max_message_bytes,
        )
        self._links: dict[tuple[Gid, int], Link] = {}
        self._by_tenant: Counter[TenantId] = Counter()
        self._sharers: dict[TenantId, Sharer] = {}
        #: Until when a tenant may connect nothing, on the clock of ``time.monotonic``.
        self._held_until_s: dict[TenantId, float] = {}

    def __len__(self) -> int:
        """Queue pairs that are open."""
        return len(self._links)

    def connect(self, tenant: TenantId, weight: int, peer: Endpoint) -> Link:
        """Connect a queue pair of its own to ``peer``, for a session of ``tenant``.

        Raises:
            ResourceExhaustedError: RDMA_SESSIONS_FULL, RDMA_RESOURCES.
            FailedPreconditionError: RDMA_ENDPOINT_IN_USE, RDMA_GID_MISMATCH, RDMA_CONNECT_REFUSED.
            UnavailableError: RDMA_GID_UNREACHABLE; RDMA_CONNECT_HELD, a moment ago that happened to the tenant.
        """
        now_s = monotonic()
        held_s = self._held_until_s.get(tenant, 0.0) - now_s
        if held_s > 0:
            raise UnavailableError(
                "a queue pair of the tenant could not be connected a moment ago",
                reason="RDMA_CONNECT_HELD",
                hint="go on over TCP in this session; see that the client's GID can be reached from the node",
                retry_after_ms=int(held_s * 1000) + 1,
            )
        if len(self._links) >= LINKS_MAX or self._by_tenant[tenant] >= TENANT_LINKS_MAX:
            raise ResourceExhaustedError(
                "too many sessions of this node use RDMA",
                reason="RDMA_SESSIONS_FULL",
                hint="go on over TCP in this session, or close sessions that are not used",
                metadata={"limit_sessions": str(LINKS_MAX), "tenant_limit_sessions": str(TENANT_LINKS_MAX)},
            )
        if (peer.gid, peer.qpn) in self._links:
            # I2: a second queue pair of ours, set up by another tenant, could otherwise speak to the first one's peer.
            raise FailedPreconditionError(
                "another session has connected this queue pair",
                reason="RDMA_ENDPOINT_IN_USE",
                hint="make a queue pair for each session",
            )
        sharer = self._sharers.setdefault(tenant, Sharer(weight))
        sharer.weight = weight
        try:
            link = Link(self, tenant, sharer, peer)
        except SalternError as error:
            self._drop_idle_sharer(tenant)
            if error.reason in _UNREACHABLE:
                self._held_until_s = {each: until_s for each, until_s in self._held_until_s.items() if until_s > now_s}
                self._held_until_s[tenant] = now_s + _HELD_S
            raise
        self._links[peer.gid, peer.qpn] = link
        self._by_tenant[tenant] += 1
        return link

    def local(self, offset: int, size_bytes: int) -> LocalSpan:
        """Bytes of the arena, as the core gave them out."""
        return self._arena.local(offset, size_bytes)

    def close(self) -> None:
        """Close every queue pair, let go of the arena and close the device."""
        for link in list(self._links.values()):
            link.close()
        self.device.close()

    def forget(self, link: Link) -> None:
        """A link is closed."""
        self._links.pop((link.peer.gid, link.peer.qpn), None)
        self._by_tenant[link.tenant] -= 1
        if not self._by_tenant[link.tenant]:
            del self._by_tenant[link.tenant]
        self._drop_idle_sharer(link.tenant)

    def _drop_idle_sharer(self, tenant: TenantId) -> None:
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
            self._sharers.pop(tenant, None)


class Link:
    """One session's queue pair, with a completion queue of its own: what one session does overflows no other's.

    Attributes:
        tenant: whose session it is.
        peer: the client's queue pair.
        is_quiet: whether no transfer of it can touch the arena any more. False only while a chain is under way, or
            for good if the device did not give the queue pair back.
    """

    def __init__(self, fabric: Fabric, tenant: TenantId, sharer: Sharer, peer: Endpoint) -> None:
        self.tenant: Final = tenant
        self.peer: Final = peer
        self.is_quiet = True
        self._fabric = fabric
        self._sharer = sharer
        self._outcome: Completion | SalternError | None = None
        #: Why nothing can complete any more.
        self._failure: SalternError | None = None
        self._exchange: Exchange | None = None
        self._is_closed = False
        requests = fabric.chain_limits.requests_max
        self._completions = Completions(fabric.device, capacity=requests)
        try:
            # I3: Access.NONE: whatever the client's device asks of this queue pair is refused.
            self._queue_pair = QueuePair(fabric.domain, self._completions, access=Access.NONE, send_requests=requests)
            self._queue_pair.connect(
                peer, ack_timeout=_ACK_TIMEOUT, retries=_RETRIES, receiver_retries=_RECEIVER_RETRIES
            )
        except BaseException:
            self._completions.close()
            raise
        fabric.scheduler.loop.add_reader(self._completions.fileno(), self._on_completions)

    @property
    def endpoint(self) -> Endpoint:
        return self._queue_pair.endpoint

    @property
    def chain_limits(self) -> ChainLimits:
        return self._fabric.chain_limits

    def local(self, offset: int, size_bytes: int) -> LocalSpan:
        """Bytes of the arena, for an operation."""
        return self._fabric.local(offset, size_bytes)

    def carry_out(self, exchange: Exchange, operations: Sequence[Operation]) -> Script[None]:
        """Do ``operations`` in order and wait until all of them have completed.

        When it ends in any other way, closed from outside or by an error, the queue pair is destroyed first, so that
        the caller may give the memory back at once (I7), unless :attr:`is_quiet` says that this did not work.

        Raises:
            RemoteFailedError: one of them failed.
        """
        try:
            chains = self._queue_pair.plan(operations)
        except SalternError as error:
            raise RemoteFailedError(error) from None
        for chain in chains:
            yield from self._carry_out(exchange, chain)

    def close(self) -> None:
        """Destroy the queue pair; when this returns, no transfer of it is under way any more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fabric.scheduler.loop.remove_reader(self._completions.fileno())
        try:
            self._completions.close()  # the queue pair first
            self.is_quiet = True
        except SalternError as error:
            # Then its memory stays as it is until the process ends: charged, and never used again (I4, I7).
            _log.error(
                "the RDMA device keeps a queue pair", tenant=self.tenant, reason=error.reason, message=error.message
            )
        self._fabric.forget(self)

    def _carry_out(self, exchange: Exchange, chain: Chain) -> Script[None]:
        if self._failure is not None:
            raise RemoteFailedError(self._failure)
        size_bytes = sum(span.length_bytes for request in chain for span in request.local)
        share = self._fabric.share
        claim = share.enter(self._sharer, cost_of(len(chain), size_bytes), exchange.wake)
        try:
            if claim.is_waiting:
                exchange.expect_nothing()  # it is not the client that takes its time
                while claim.is_waiting:
                    yield WAKE
            exchange.expect_transfer(size_bytes)
            self._outcome, self._exchange = None, exchange
            self.is_quiet = False
            try:
                self._queue_pair.post(chain, 0)
            except SalternError as error:
                raise RemoteFailedError(error) from None
            while self._outcome is None:
                yield WAKE
            if isinstance(self._outcome, SalternError):
                raise RemoteFailedError(self._outcome)
            if not self._outcome.ok:
                raise RemoteFailedError(self._outcome.to_error())
            self.is_quiet = True
        finally:
            self._exchange = None
            if not self.is_quiet:
                self.close()  # I7: before the caller's own finally gives the memory back
            _wake(share.leave(claim))

    def _on_completions(self) -> None:
        """The one chain that is under way has ended, or the channel has failed."""
        try:
            for completion in self._completions.collect():
                self._outcome = completion
        except SalternError as error:
            # Its descriptor would be ready for ever, and the loop would do nothing else (I5).
            self._fabric.scheduler.loop.remove_reader(self._completions.fileno())
            self._outcome = self._failure = error
        if self._outcome is not None and self._exchange is not None:
            self._exchange.wake()


def _wake(claims: Sequence[Claim]) -> None:
    for claim in claims:
        claim.wake()
