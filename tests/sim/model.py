"""The plain model of the stateful core test, with the bytes of every entry and the refusals that a put can expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.core.loans import LENT_PARTS
from dataplane.core.partition import Partition
from saltern.keys import BlockKey
from saltern.names import TenantId
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
    """What should be there.

    Attributes:
        loans: entries that peers read, each with how many do.
    """

    def __init__(self, capacity_bytes: int, *, is_lazy: bool = False) -> None:
        super().__init__(capacity_bytes, is_lazy=is_lazy)
        self.loans: Counter[SimEntry] = Counter()

    def is_newest(self, partition: Partition) -> bool:
        """Whether the partition's epoch is the one that may be written."""
        return partition.epoch == self.namespace_of(partition).epochs_of(partition.group_uid)[-1]

    # ---- sharing groups

    def peers(self, partition: Partition) -> list[Partition]:
        """Whose entries a session of ``partition`` may read besides its own: both policies name each other (I2)."""
        if not partition.group_uid or not self.is_open(partition):
            return []
        peers = []
        for peer in self.namespace_of(partition).groups[partition.group_uid].peers:
            its = Partition(peer.tenant, peer.namespace, peer.namespace_uid, partition.epoch, partition.group_uid)
            if self.is_open(its):
                named = self.namespace_of(its).groups[partition.group_uid].peers
                if (partition.tenant, partition.namespace_uid) in {(one.tenant, one.namespace_uid) for one in named}:
                    peers.append(its)
        return peers

    def find_shared(self, partition: Partition, key: BlockKey) -> SimEntry | None:
        """What a session finds, of its own first, then of its peers."""
        found = (self.find(place, key) for place in (partition, *self.peers(partition)))
        return next((entry for entry in found if isinstance(entry, SimEntry)), None)

    def lend(self, partition: Partition, keys: Sequence[BlockKey], entries: list[SimEntry | None]) -> list[bool]:
        """Fill in what the reader lacks and a peer has, and pin that; returns which are loans.

        Its own entries are pinned already. A loan takes nothing of its owner but that it is held: not its place in the
        order, and of all loans together at most half of the limit (I5).
        """
        is_loan = [False] * len(keys)
        for peer in self.peers(partition):
            for position, key in enumerate(keys):
                entry = self.find(peer, key) if entries[position] is None else None
                if not isinstance(entry, SimEntry):
                    continue
                may_hold = entry.pins > 0 or self.may_hold(entry.tenant, entry.extent_bytes)
                if not may_hold or not (self.loans[entry] or self._may_lend(entry)):
                    self.counters[partition.tenant].hits_held_back += 1
                    continue
                entry.pins += 1
                self.loans[entry] += 1
                self.counters[partition.tenant].peer_hits += 1
                entries[position], is_loan[position] = entry, True
        return is_loan

    def end_loan(self, entry: SimEntry) -> None:
        """One peer less reads it; the caller takes away the pin."""
        self.loans[entry] -= 1
        if not self.loans[entry]:
            del self.loans[entry]

    def lent_bytes(self, tenant: TenantId) -> int:
        return sum(entry.extent_bytes for entry in self.loans if entry.tenant == tenant)

    def _may_lend(self, entry: SimEntry) -> bool:
        limit_bytes = self.quota(entry.tenant).limit_bytes
        return self.lent_bytes(entry.tenant) + entry.extent_bytes <= limit_bytes // LENT_PARTS

    def closed_because(self, partition: Partition) -> str | None:
        """The reason for which the policy does not open ``partition``; None if it does."""
        rules = self.tenants.get(partition.tenant)
        namespace = rules.namespaces.get(partition.namespace) if rules else None
        if rules is None or namespace is None or namespace.uid != partition.namespace_uid:
            return "NAMESPACE_NOT_AVAILABLE"
        if rules.suspended:
            return "TENANT_SUSPENDED"
        if partition.group_uid and partition.group_uid not in namespace.groups:
            return "GROUP_NOT_AVAILABLE"
        return None if partition.epoch in namespace.epochs_of(partition.group_uid) else "EPOCH_NOT_AVAILABLE"

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
