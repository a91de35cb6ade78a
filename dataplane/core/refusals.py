"""The refusals of a put, each with what was asked, which limit refused it and what to do next (I6)."""

from __future__ import annotations

from typing import Final

from dataplane.core.entry import PutRefused
from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from saltern.errors import (
    AlreadyExistsError,
    EntryTooLargeError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from tenants.quota import Tier

#: A put takes about as long as its bytes need to arrive.
WRITE_IN_PROGRESS_RETRY_MS: Final = 20
#: What fills the limit or the pool is being read or written now and will be evictable after.
HELD_RETRY_MS: Final = 50
#: The node reports every two seconds, and may grow again with the answer.
LEASE_RETRY_MS: Final = 2000

#: Made once: re-putting what is there is the common case in a batch.
ALREADY_EXISTS: Final = PutRefused(
    AlreadyExistsError("the key is stored already; a block is immutable, so its bytes are kept")
)
WRITE_IN_PROGRESS: Final = PutRefused(
    UnavailableError(
        "another session is writing the key right now",
        reason="WRITE_IN_PROGRESS",
        hint="look the key up again shortly; the other writer's bytes are the same",
        retry_after_ms=WRITE_IN_PROGRESS_RETRY_MS,
    )
)


def empty_entry(size_bytes: int) -> PutRefused:
    return PutRefused(
        InvalidArgumentError(
            f"an entry of {size_bytes} bytes", reason="ENTRY_SIZE_OUT_OF_RANGE", hint="an entry has at least 1 byte"
        )
    )


def entry_too_large(owner: TenantCache, size_bytes: int, maximum_bytes: int, what: str) -> PutRefused:
    """``size_bytes`` is above ``maximum_bytes``, which is ``what``; no waiting and no eviction could help (I6)."""
    return PutRefused(
        EntryTooLargeError(
            f"an entry of {size_bytes} bytes can never fit: {what} is {maximum_bytes} bytes",
            hint="put smaller entries, or have the quota or the namespace's block size raised",
            metadata=_books(owner) | {"size_bytes": str(size_bytes), "maximum_bytes": str(maximum_bytes)},
        )
    )


def quota_exceeded(owner: TenantCache, size_bytes: int) -> PutRefused:
    """The limit is filled by entries that are being read or written now (I4)."""
    budget = owner.budget
    return PutRefused(
        ResourceExhaustedError(
            f"an entry of {size_bytes} bytes would take tenant {owner.tenant!r} from {budget.used_bytes} past its limit"
            f" of {budget.limit_bytes} bytes, and only {budget.evictable_bytes} bytes of its own can be evicted now",
            reason="QUOTA_EXCEEDED",
            hint="retry when transfers in progress have ended, or have the limit raised",
            metadata=_books(owner),
            retry_after_ms=HELD_RETRY_MS,
        )
    )


def limit_lowered(owner: TenantCache, size_bytes: int) -> PutRefused:
    """The limit was lowered below what is used, and the tenant's coldest entries are still leaving (I4)."""
    budget = owner.budget
    return PutRefused(
        ResourceExhaustedError(
            f"an entry of {size_bytes} bytes finds tenant {owner.tenant!r} at {budget.used_bytes} bytes, above its"
            f" limit, which was lowered to {budget.limit_bytes} bytes; its coldest entries are leaving now",
            reason="QUOTA_EXCEEDED",
            hint="retry in a moment, or have the limit raised",
            metadata=_books(owner),
            retry_after_ms=HELD_RETRY_MS,
        )
    )


def namespace_limit(index: PartitionIndex, size_bytes: int) -> PutRefused:
    """The namespace's own limit is filled by entries of it that are being read or written now (I4)."""
    namespace = index.partition.namespace
    return PutRefused(
        ResourceExhaustedError(
            f"an entry of {size_bytes} bytes would take namespace {namespace!r} from {index.namespace.used_bytes} past"
            f" its limit of {index.namespace.limit_bytes} bytes, and too much of it is being read or written now",
            reason="NAMESPACE_LIMIT",
            hint="retry when transfers in progress have ended, or have the namespace's limit raised",
            metadata=_namespace_books(index),
            retry_after_ms=HELD_RETRY_MS,
        )
    )


def namespace_limit_lowered(index: PartitionIndex, size_bytes: int) -> PutRefused:
    """The namespace's limit was lowered below what it uses, and its coldest entries are still leaving (I4)."""
    namespace = index.partition.namespace
    return PutRefused(
        ResourceExhaustedError(
            f"an entry of {size_bytes} bytes finds namespace {namespace!r} at {index.namespace.used_bytes} bytes, above"
            f" its limit, which was lowered to {index.namespace.limit_bytes} bytes; its coldest entries are leaving",
            reason="NAMESPACE_LIMIT",
            hint="retry in a moment, or have the namespace's limit raised",
            metadata=_namespace_books(index),
            retry_after_ms=HELD_RETRY_MS,
        )
    )


def lease_expired(owner: TenantCache, size_bytes: int) -> PutRefused:
    """The node may not grow any more, and the tenant has less than this entry here to put it in place of (I9)."""
    return PutRefused(
        ResourceExhaustedError(
            f"an entry of {size_bytes} bytes would make tenant {owner.tenant!r} grow past the"
            f" {owner.budget.limit_bytes} bytes that it held here when the node's lease ran out",
            reason="LEASE_EXPIRED",
            hint="bring the control plane back, or the node's way to it; it goes on serving what it holds",
            metadata=_books(owner),
            retry_after_ms=LEASE_RETRY_MS,
        )
    )


def transfers_full(owner: TenantCache, size_bytes: int) -> PutRefused:
    """Transfers beyond reservations fill what is promised to nobody (:mod:`dataplane.core.held`)."""
    budget = owner.budget
    return PutRefused(
        ResourceExhaustedError(
            f"an entry of {size_bytes} bytes would take what tenant {owner.tenant!r} has in transfer from"
            f" {budget.held_bytes} further past its reservation of {budget.reserved_bytes} bytes, and the node keeps"
            " the rest free for other tenants' reservations",
            reason="TRANSFERS_FULL",
            hint="retry when transfers in progress have ended, move fewer entries at a time, or raise the reservation",
            metadata=_books(owner),
            retry_after_ms=HELD_RETRY_MS,
        )
    )


def node_full(owner: TenantCache, size_bytes: int, free_bytes: int) -> PutRefused:
    """The pool is full of what this tenant may not evict: reservations of others (I5) and entries in transfer."""
    return PutRefused(
        ResourceExhaustedError(
            f"no room for an entry of {size_bytes} bytes: {free_bytes} bytes are free, not in one piece, and the rest"
            " is reserved by other tenants or in transfer",
            reason="NODE_FULL",
            hint="retry later, raise the tenant's reservation, or add a node",
            metadata=_books(owner),
            retry_after_ms=HELD_RETRY_MS,
        )
    )


def _namespace_books(index: PartitionIndex) -> dict[str, str]:
    return {
        "tenant": index.owner.tenant,
        "namespace": index.partition.namespace,
        "tier": Tier.DRAM.value,
        "used_bytes": str(index.namespace.used_bytes),
        "limit_bytes": str(index.namespace.limit_bytes),
    }


def _books(owner: TenantCache) -> dict[str, str]:
    return {
        "tenant": owner.tenant,
        "tier": Tier.DRAM.value,
        "used_bytes": str(owner.budget.used_bytes),
        "limit_bytes": str(owner.budget.limit_bytes),
    }
