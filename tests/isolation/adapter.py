"""What a store must offer to be put through the isolation suite: a few plain calls, and a hostile client.

::

    with adapter.store({"a": Quota(16 * MIB), "b": Quota(16 * MIB)}, capacity_bytes=64 * MIB) as store:
        store.client("a").put([(key, value)])

An adapter never judges: it does what it is told and says what came of it. The cases judge (``cases_*.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

MIB = 1024 * 1024
KEY_BYTES = 32


class NotOfferedError(Exception):
    """The store has nothing like that; the case says so instead of holding or failing."""


class Over(StrEnum):
    """How a hostile client reaches the store."""

    TCP = "tcp"
    SHM = "shared memory"


class Put(StrEnum):
    """What became of one item of a put."""

    STORED = "stored"
    THERE = "there already"
    REFUSED = "refused"


@dataclass(frozen=True)
class Quota:
    """What one tenant is promised and may hold, in memory and, where a case asks for it, on SSD."""

    limit_bytes: int
    reserved_bytes: int = 0
    ssd_limit_bytes: int = 0


@dataclass(frozen=True)
class Attempt:
    """One way in which somebody tried to pass for a tenant.

    Attributes:
        how: the trick, in a few words.
        opened: it got a session as that tenant.
        value: what it read of the tenant's entry; None for nothing.
    """

    how: str
    opened: bool
    value: bytes | None


class TenantClient(ABC):
    """An honest client of one tenant. Keys are 32 bytes."""

    @abstractmethod
    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[Put]:
        """Store a batch; one answer for each item, in order. STORED promises that it can be read (I6)."""

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read a batch; None for what is not there, or not in time."""

    @abstractmethod
    def get_into(self, key: bytes, buffer: bytearray) -> int | None:
        """Read into the caller's memory; the length, or None if nothing was delivered."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove entries; how many were there."""


class Store(ABC):
    """A running store with its tenants."""

    @abstractmethod
    def client(self, tenant: str, namespace: str = "chat") -> TenantClient:
        """A client that may work there. Raises NotOfferedError for a name that the store refuses."""

    @abstractmethod
    def used_bytes(self, tenant: str) -> int:
        """What the tenant is charged right now."""

    @abstractmethod
    def ssd_used_bytes(self, tenant: str) -> int:
        """What the tenant is charged on SSD right now."""

    @abstractmethod
    def set_limit(self, tenant: str, limit_bytes: int) -> None:
        """Change a quota; in force when this returns."""

    @abstractmethod
    def remove_all(self, tenant: str) -> None:
        """Everything of a tenant goes."""

    @abstractmethod
    def impersonate(self, victim: str, by: str, key: bytes, forged: bytes) -> list[Attempt]:
        """Every trick by which a client of ``by`` may pass for ``victim``: each reads ``key``, then writes ``forged``
        under it, then deletes it."""

    @abstractmethod
    def overwrite(self, victim: str, by: str, key: bytes, forged: bytes) -> list[str]:
        """Every trick by which a client of ``by`` may change ``victim``'s bytes under its own name; what was tried."""

    @abstractmethod
    def slow_get(self, tenant: str, key: bytes, meanwhile: Callable[[], None], *, over: Over) -> bytes | None:
        """Begin to read, call ``meanwhile`` with most of the bytes still to come, and read the rest."""

    @abstractmethod
    def half_put(self, tenant: str, key: bytes, value: bytes, *, over: Over) -> AbstractContextManager[None]:
        """Send half of a value; at the end of the block the writer is gone."""

    @abstractmethod
    def swap_bytes(self, tenant: str, key: bytes, other_tenant: str, other_key: bytes) -> None:
        """Put one entry's bytes where another's are, behind the store's back, as faulty memory would."""

    def limit_namespace(self, tenant: str, namespace: str, limit_bytes: int) -> None:
        """Bound what one of a tenant's namespaces may hold; in force when this returns."""
        raise NotOfferedError("there is no limit within a tenant")

    def agree_to_share(self, tenant: str, other: str) -> None:
        """``tenant`` consents, for itself, to share with ``other``; in force when this returns."""
        raise NotOfferedError("nothing is shared on purpose")

    def stop_sharing(self, tenant: str) -> None:
        """``tenant`` wants to share no more; in force when this returns."""
        raise NotOfferedError("nothing is shared on purpose")

    def shared_client(self, tenant: str) -> TenantClient:
        """A client of what ``tenant`` shares; where it may share nothing, it finds nothing and stores nothing."""
        raise NotOfferedError("nothing is shared on purpose")


class StoreAdapter(ABC):
    """Starts stores of one kind.

    Attributes:
        name: of the store, for the table.
    """

    name: str

    @abstractmethod
    def store(self, tenants: Mapping[str, Quota], *, capacity_bytes: int) -> AbstractContextManager[Store]:
        """A fresh store for the time of the block."""

    @abstractmethod
    def frozen_store(self) -> AbstractContextManager[FrozenStore]:
        """A store whose server can be stopped in its tracks."""

    @abstractmethod
    def deployment(self, tenants: Mapping[str, Quota], *, capacity_bytes: int) -> AbstractContextManager[Deployment]:
        """The whole service with whatever manages it; it may be shared with other cases, so use keys of your own."""

    @abstractmethod
    def close(self) -> None:
        """Stop what cases have shared."""


class FrozenStore(ABC):
    """A server in a process of its own that stops answering."""

    @abstractmethod
    def freeze(self) -> None: ...

    @abstractmethod
    def call_beside_a_ticking_loop(self) -> tuple[str, int]:
        """Read one key from an event loop while the server is frozen: (how that ended, how often the loop ticked)."""


class Deployment(ABC):
    """The service as it is run, with its management."""

    @abstractmethod
    def client(self, tenant: str) -> TenantClient: ...

    @abstractmethod
    def restart_management(self, while_down: Callable[[], None]) -> None:
        """Kill what manages the store, call ``while_down``, start it again; returns when it manages again."""

    @abstractmethod
    def administer_without_right(self, by: str, victim: str) -> dict[str, str]:
        """Raise the own quota, wipe a neighbour: with no credential and with a client's; (what, how it was answered),
        where an empty answer means that it was done."""
