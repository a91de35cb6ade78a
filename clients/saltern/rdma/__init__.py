"""A thin seam over RDMA verbs: values in, values out, the same over pyverbs and over the ``ibverbs`` wheel.

Importing this imports no binding; ``Device(...)`` does. Every failure is an error of :mod:`saltern.errors` with a hint;
nothing here can read freed memory, because a closed object has no handle any more (RDMA_CLOSED).

::

    Device.discover() -> tuple[PortFacts, ...]                          what the kernel lists, no library needed
    Device(choice: DeviceChoice | None = None, *, mtu_bytes=None, binding="")      opened by the rules of choice.py
        .chosen .limits: DeviceLimits .mtu_bytes .gid .gid_index .name .port
    DeviceChoice.parse("mlx5_0:1:3" | "auto") -> DeviceChoice
    ProtectionDomain(device)
    Region(domain, buffer, access=Access.LOCAL_WRITE)                   holds a memoryview until it is closed
    Region.from_dmabuf(domain, descriptor, length_bytes, access, *, offset_bytes=0)
        .address .length_bytes .local_key .remote_key                   plain integers
        .local(offset_bytes=0, length_bytes=None) -> LocalSpan          for operations of this side
        .remote(offset_bytes=0, length_bytes=None) -> RemoteSpan        to tell the other side; refused if local-only
    Completions(device, *, capacity)                                    capacity >= requests of all its queue pairs
        .fileno() -> int                                                readable when there is something; non-blocking
        .collect(limit=64) -> list[Completion]                          again while it returns `limit`; never blocks
        .wait(timeout_s) -> bool                                        for threads; releases the GIL
    QueuePair(domain, completions, *, access=Access.NONE, send_requests=128, receive_requests=0)
        .endpoint: Endpoint                                             pack() / unpack(): ENDPOINT_BYTES bytes
        .connect(peer: Endpoint, *, ack_timeout=14, retries=7, receiver_retries=6)
        .plan(operations) -> tuple[Chain, ...]                          split by the limits of device and queue
        .post(chain, token)                                             one Completion with this token, always
        .post_receives(tokens)                                          end with the other side's immediate; no memory
        .free_requests .free_receives .is_broken
        .fail()                                                         error state: all that is posted is flushed
    Read(local=(LocalSpan, ...), remote=RemoteSpan)                     remote bytes into local ones
    Write(local=(LocalSpan, ...), remote=RemoteSpan, immediate=None)    local bytes into remote ones, then tell
    Completion(token, qpn, status, is_receive, immediate, byte_count)   .ok, .to_error() -> SalternError

Every object has ``close()`` (twice does nothing) and is a context manager; closing one closes what was made from it
first, queue pairs before regions before completion queues before domains. A buffer may be reused once its operation has
completed, or after a failure once its queue pair or its region is closed (I7). One thread at a time for one device's
objects.
"""

from __future__ import annotations

from saltern.rdma.bindings import BINDING_NAMES
from saltern.rdma.choice import Chosen, DeviceChoice, choose
from saltern.rdma.completions import Completions
from saltern.rdma.device import Device, ProtectionDomain
from saltern.rdma.queue_pair import QueuePair
from saltern.rdma.region import Region
from saltern.rdma.splitting import Chain, split
from saltern.rdma.values import (
    ENDPOINT_BYTES,
    Access,
    Completion,
    CompletionStatus,
    DeviceLimits,
    Endpoint,
    Gid,
    GidEntry,
    GidType,
    LinkLayer,
    LocalSpan,
    Operation,
    PortFacts,
    Read,
    RemoteSpan,
    Write,
)

__all__ = [
    "BINDING_NAMES",
    "ENDPOINT_BYTES",
    "Access",
    "Chain",
    "Chosen",
    "Completion",
    "CompletionStatus",
    "Completions",
    "Device",
    "DeviceChoice",
    "DeviceLimits",
    "Endpoint",
    "Gid",
    "GidEntry",
    "GidType",
    "LinkLayer",
    "LocalSpan",
    "Operation",
    "PortFacts",
    "ProtectionDomain",
    "QueuePair",
    "Read",
    "Region",
    "RemoteSpan",
    "Write",
    "choose",
    "split",
]
