"""What a binding of libibverbs must do. Handles are the binding's own objects: only it looks into them.

A binding translates and nothing else: whether a handle is still open, whether a queue has room, and in which order
things are closed is decided above it, once for all bindings. Every call either succeeds or raises VerbsError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from saltern.rdma.splitting import Chain
from saltern.rdma.values import Access, DeviceLimits, Endpoint

Handle = Any


class VerbsError(Exception):
    """A verb failed. ``number`` is its errno, 0 where the binding does not tell."""

    def __init__(self, verb: str, number: int) -> None:
        super().__init__(f"{verb}: {os.strerror(number) if number else 'failed'}")
        self.verb = verb
        self.number = number


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered region; the keys are integers of their own, good after the handle is gone."""

    handle: Handle
    local_key: int
    remote_key: int


@dataclass(frozen=True, slots=True)
class RawCompletion:
    request_id: int
    status: int
    qpn: int
    opcode: int
    byte_count: int
    immediate: int | None
    vendor_error: int


@dataclass(frozen=True, slots=True)
class Path:
    """How the transitions to ready-to-send are parametrised; times as the verbs code them."""

    local: Endpoint
    peer: Endpoint
    port: int
    gid_index: int
    mtu_bytes: int
    reads: int
    ack_timeout: int  #: 4.096 us * 2^n without an acknowledgement before a retry
    retries: int
    receiver_retries: int  #: 7 is for ever


class Binding(Protocol):
    """See the module; each implementation is a module of this package with a class of its own."""

    name: str
    offers_dmabuf: bool

    def open_device(self, name: str) -> Handle: ...
    def close_device(self, device: Handle) -> None: ...
    def query_limits(self, device: Handle, port: int) -> DeviceLimits: ...

    def allocate_domain(self, device: Handle) -> Handle: ...
    def free_domain(self, domain: Handle) -> None: ...

    def register(self, domain: Handle, address: int, length_bytes: int, access: Access) -> Registration: ...
    def register_dmabuf(
        self, domain: Handle, descriptor: int, offset_bytes: int, length_bytes: int, access: Access
    ) -> Registration:
        """``offset_bytes`` is also the address that work requests name the first byte by."""
        ...

    def deregister(self, region: Handle) -> None: ...

    def create_channel(self, device: Handle) -> tuple[Handle, int]:
        """A completion channel and its file descriptor, non-blocking."""
        ...

    def close_channel(self, channel: Handle) -> None: ...
    def create_completions(self, device: Handle, channel: Handle, capacity: int) -> Handle: ...
    def destroy_completions(self, completions: Handle) -> None: ...
    def arm(self, completions: Handle) -> None: ...
    def take_event(self, channel: Handle, completions: Handle) -> bool:
        """Take and acknowledge one event; False where there is none."""
        ...

    def poll(self, completions: Handle, limit: int) -> list[RawCompletion]: ...

    def create_queue_pair(
        self, domain: Handle, completions: Handle, *, sends: int, receives: int, spans: int
    ) -> tuple[Handle, int]:
        """An RC queue pair in RESET, and its number."""
        ...

    def destroy_queue_pair(self, queue_pair: Handle) -> None: ...
    def make_ready(self, queue_pair: Handle, path: Path, access: Access) -> None:
        """RESET to INIT to RTR to RTS."""
        ...

    def make_error(self, queue_pair: Handle) -> None: ...
    def post(self, queue_pair: Handle, chain: Chain, request_id: int) -> None:
        """Post the chain; all its requests have ``request_id``, and only the last is signalled."""
        ...

    def post_receives(self, queue_pair: Handle, request_ids: Sequence[int]) -> None:
        """Post receives without memory: they end with the other side's immediate."""
        ...
