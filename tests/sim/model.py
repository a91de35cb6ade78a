"""The plain model of the stateful core test, with the bytes of every entry and the refusals that a put can expect."""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.core.partition import Partition
from saltern.keys import BlockKey
from tests.support.cache_model import CacheModel, ModelEntry


@dataclass(eq=False)
class SimEntry(ModelEntry):
    """An entry with the bytes that it must hold.

    Attributes:
        payload: what its writer sends; no other entry has the same.
        written_bytes: how much of it is in the arena by now.
        is_rotten: a bit of it was flipped behind the core's back.
    """

    payload: bytes = b""
    written_bytes: int = 0
    is_rotten: bool = False


class SimModel(CacheModel):
    """What should be there."""

    def is_newest(self, partition: Partition) -> bool:
        """Whether the partition's epoch is the one that may be written."""
        return partition.epoch == self.namespace_of(partition).epochs[-1]

    def closed_because(self, partition: Partition) -> str | None:
        """The reason for which the policy does not open ``partition``; None if it does."""
        rules = self.tenants.get(partition.tenant)
        namespace = rules.namespaces.get(partition.namespace) if rules else None
        if rules is None or namespace is None or namespace.uid != partition.namespace_uid:
            return "NAMESPACE_NOT_AVAILABLE"
        if rules.suspended:
            return "TENANT_SUSPENDED"
        return None if partition.epoch in namespace.epochs else "EPOCH_NOT_AVAILABLE"

    def expected_refusal(self, partition: Partition, key: BlockKey, size_bytes: int) -> str | None:
        """What refuses a put whatever is evicted for it; None if it depends on that."""
        closed = self.closed_because(partition)
        if closed is not None:
            return closed
        if self.find(partition, key):
            return "ALREADY_EXISTS"
        if self.find(partition, key, "writing"):
            return "WRITE_IN_PROGRESS"
        if not self.is_newest(partition):
            return "EPOCH_NOT_AVAILABLE"
        extent_bytes = SimEntry(partition, key, size_bytes, 0).extent_bytes
        limit_bytes = min(self.quota(partition.tenant).limit_bytes, self.capacity_bytes)
        if size_bytes > self.namespace_of(partition).block_bytes or extent_bytes > limit_bytes:
            return "ENTRY_TOO_LARGE"
        return None

    def readable(self) -> list[SimEntry]:
        """Entries that were acknowledged and that nothing has removed since."""
        return [entry for entry in self.entries() if entry.state == "readable"]

    def entries(self) -> list[SimEntry]:
        """Everything that occupies memory."""
        return self.live  # type: ignore[return-value]  # only this simulator writes into its model
