"""A reliable connection: this side's queue pair and the peer's."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable
from typing import ClassVar, Final

from saltern.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SalternError,
    UnavailableError,
)
from saltern.rdma.bindings.interface import Handle, Path, VerbsError
from saltern.rdma.completions import Completions
from saltern.rdma.device import ProtectionDomain
from saltern.rdma.faults import error_of, verbs
from saltern.rdma.resource_tree import Resource
from saltern.rdma.splitting import Chain, split
from saltern.rdma.values import Access, Endpoint, Operation

#: READs that one queue pair asks to have under way at once; devices offer 16 as a rule.
READS_MAX: Final = 16


class QueuePair(Resource):
    """One RC queue pair: made, connected to a peer's :class:`Endpoint`, posted to, closed.

    With ``access`` left at NONE it refuses whatever the other side's device asks of it, READ, WRITE or atomic,
    whichever key comes with it: that is the node's side (I3). A client gives the access that its regions have.

    Once anything on it has failed it ``is_broken``: nothing more can be posted, what was posted ends as FLUSHED. Close
    it before the memory that its operations name is used for something else (I7), then connect a new one.

    Args:
        send_requests: work requests that can be outstanding; a longer plan goes out in several chains.
        receive_requests: receives that can be outstanding.

    Raises:
        ResourceExhaustedError: RDMA_QUEUE_TOO_LARGE, RDMA_QUEUE_FULL, RDMA_RESOURCES.
    """

    kind: ClassVar[str] = "queue pair"
    close_rank: ClassVar[int] = 0

    def __init__(
        self,
        domain: ProtectionDomain,
        completions: Completions,
        *,
        access: Access = Access.NONE,
        send_requests: int = 128,
        receive_requests: int = 0,
    ) -> None:
        super().__init__(domain.device.binding, domain, completions)
        limits = domain.device.limits
        if not 0 < send_requests <= limits.max_requests or not 0 <= receive_requests <= limits.max_requests:
            raise ResourceExhaustedError(
                f"a queue pair of {send_requests} and {receive_requests} requests: "
                f"{domain.device.name} takes up to {limits.max_requests}",
                reason="RDMA_QUEUE_TOO_LARGE",
                hint="use fewer requests per queue pair",
            )
        self.device = domain.device
        self.access = access
        self.send_requests, self.receive_requests = send_requests, receive_requests
        self._completions = completions
        self._spans = limits.max_spans
        self._sends_free, self._receives_free = send_requests, receive_requests
        self._broken = self._connected = False
        completions._reserve(send_requests + receive_requests)
        try:
            with verbs(f"making a queue pair of {self.device.name}"):
                handle, self.qpn = self._binding.create_queue_pair(
                    domain.handle,
                    completions.handle,
                    sends=send_requests,
                    receives=receive_requests,
                    spans=self._spans,
                )
        except BaseException:
            completions._reserved -= send_requests + receive_requests
            raise
        self._open(handle)
        self.endpoint: Final = Endpoint(
            qpn=self.qpn,
            gid=self.device.gid,
            psn=secrets.randbits(24),
            mtu_bytes=self.device.mtu_bytes,
            lid=limits.lid,
        )

    def connect(self, peer: Endpoint, *, ack_timeout: int = 14, retries: int = 7, receiver_retries: int = 6) -> None:
        """Through INIT and RTR to RTS towards ``peer``. The smaller MTU of both is used.

        Args:
            ack_timeout: 4.096 us * 2^n without an acknowledgement before a retry: 14 is 67 ms.
            retries: then the peer counts as silent (RETRIES_EXCEEDED).
            receiver_retries: while the peer has no receive posted; 7 would be for ever.

        Raises:
            FailedPreconditionError: RDMA_GID_MISMATCH, RDMA_CONNECT_REFUSED, RDMA_CONNECTED (already), RDMA_CLOSED.
            UnavailableError: RDMA_GID_UNREACHABLE.
        """
        handle = self.handle
        if self._connected:
            raise FailedPreconditionError(
                "this RDMA queue pair has been connected before", reason="RDMA_CONNECTED", hint="make a new one"
            )
        if self.endpoint.gid.is_ipv4 != peer.gid.is_ipv4:
            raise FailedPreconditionError(
                f"GID {self.endpoint.gid} of this side cannot reach {peer.gid} of the other: only one is of IPv4",
                reason="RDMA_GID_MISMATCH",
                hint="name a GID index on one side: `saltern doctor` lists them",
            )
        self._connected = True
        path = Path(
            local=self.endpoint,
            peer=peer,
            port=self.device.port,
            gid_index=self.device.gid_index,
            mtu_bytes=min(self.endpoint.mtu_bytes, peer.mtu_bytes),
            reads=max(1, min(READS_MAX, self.device.limits.max_reads)),
            ack_timeout=ack_timeout,
            retries=retries,
            receiver_retries=receiver_retries,
        )
        try:
            with verbs(f"connecting to {peer.gid}"):
                self._binding.make_ready(handle, path, self.access)
        except SalternError:
            self._broken = True
            raise

    def plan(self, operations: Iterable[Operation]) -> tuple[Chain, ...]:
        """Chains that carry out ``operations`` in order, each of at most ``send_requests``, within the device's limits.

        Raises:
            InvalidArgumentError: RDMA_LENGTHS_DIFFER, RDMA_RANGE_INVALID.
        """
        return split(
            operations,
            max_message_bytes=self.device.limits.max_message_bytes,
            max_spans=self._spans,
            max_requests=self.send_requests,
        )

    def post(self, chain: Chain, token: Hashable) -> None:
        """Hand a chain to the device; one Completion with ``token`` follows, whatever happens.

        Raises:
            ResourceExhaustedError: RDMA_QUEUE_FULL: longer than ``free_requests``; nothing was posted.
            UnavailableError: RDMA_QUEUE_PAIR_ENDED: broken, or not connected yet; nothing was posted.
            SalternError: the device refused it; some of the chain may be under way, and the queue pair is broken.
        """
        handle = self._ready()
        if not chain:
            raise InvalidArgumentError("an RDMA chain of no requests", reason="RDMA_CHAIN_EMPTY")
        # Checked here and not by the device: that would have queued the first ones already.
        if len(chain) > self._sends_free:
            raise _full(len(chain), self._sends_free)
        number = self._completions._post(self, token, len(chain))
        self._sends_free -= len(chain)
        try:
            self._binding.post(handle, chain, number)
        except VerbsError as fault:
            # The part that was queued has no signalled request: only the error state makes it end.
            self._completions._withdraw([number])
            self.fail()
            raise error_of(fault, f"posting {len(chain)} RDMA requests") from fault

    def post_receives(self, tokens: Iterable[Hashable]) -> None:
        """Post a receive for each token: it ends with an immediate of the other side and takes no memory.

        Raises: as ``post``; RDMA_QUEUE_FULL: more than ``free_receives``, none was posted.
        """
        handle = self._ready()
        wanted = list(tokens)
        if len(wanted) > self._receives_free:
            raise _full(len(wanted), self._receives_free)
        numbers = [self._completions._post(self, token, 1, is_receive=True) for token in wanted]
        self._receives_free -= len(numbers)
        try:
            if numbers:
                self._binding.post_receives(handle, numbers)
        except VerbsError as fault:
            self._completions._withdraw(numbers)
            self.fail()
            raise error_of(fault, f"posting {len(numbers)} RDMA receives") from fault

    @property
    def free_requests(self) -> int:
        """How long a chain can be posted now; grows when completions are collected."""
        return self._sends_free

    @property
    def free_receives(self) -> int:
        return self._receives_free

    @property
    def is_broken(self) -> bool:
        return self._broken

    def fail(self) -> None:
        """Put it into the error state: what is posted ends as FLUSHED, and the peer gets no more answers."""
        self._broken = True
        if self._connected and self._handle is not None:
            with verbs("ending an RDMA connection"):
                self._binding.make_error(self._handle)

    def _ready(self) -> Handle:
        handle = self.handle
        if self._broken or not self._connected:
            raise UnavailableError(
                f"this RDMA queue pair {'has failed' if self._broken else 'is not connected'}",
                reason="RDMA_QUEUE_PAIR_ENDED",
                hint="close it and connect a new one" if self._broken else "connect it to the peer's endpoint first",
                retry_after_ms=0,
            )
        return handle

    def _settle(self, requests: int, *, is_receive: bool, ok: bool) -> None:
        """Requests have ended, as the completion queue tells."""
        if is_receive:
            self._receives_free += requests
        else:
            self._sends_free += requests
        self._broken = self._broken or not ok

    def _destroy(self, handle: Handle) -> None:
        self._broken = True
        try:
            self._binding.destroy_queue_pair(handle)
        finally:
            self._completions._part(self, self.send_requests + self.receive_requests)


def _full(wanted: int, free: int) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"{wanted} RDMA requests do not fit: {free} are free",
        reason="RDMA_QUEUE_FULL",
        hint="collect completions first, or post a shorter chain",
        retry_after_ms=0,
    )
