"""Faults planted into the core on purpose: a simulator that finds none of them would prove nothing.

Each is one small, believable mistake, made by replacing one function for the time of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from dataplane.core import cache as cache_module
from dataplane.core import compaction as compaction_module
from dataplane.core import loans as loans_module
from dataplane.core import policy_in_force as policy_module
from dataplane.core import pool as pool_module
from dataplane.core import victims as victims_module
from dataplane.core.admission import check_partition, peer_partitions
from dataplane.core.borrowers import Borrowers
from dataplane.core.budget import TierBudget
from dataplane.core.cache import CacheCore
from dataplane.core.entry import Entry, EntryState, PutRefused
from dataplane.core.extents import GRANULE_BYTES, Extents, TrialFree
from dataplane.core.loans import Loans
from dataplane.core.partition import Partition
from dataplane.core.policy_in_force import PolicyInForce
from dataplane.core.pool import Pool
from dataplane.core.tenant_cache import PartitionIndex
from dataplane.core.usage import EvictionCause
from dataplane.io.arena import Arena
from dataplane.io.batches import GetBatch, PutBatch
from tenants.policy import NodePolicy


class Plant(NamedTuple):
    """One fault.

    Attributes:
        rule: what it breaks.
        owner, attribute: the function that is replaced.
        replace: makes the broken function from the right one.
    """

    rule: str
    owner: Any
    attribute: str
    replace: Callable[[Any], Any]


def _skip_a_charge(original: Any) -> Any:
    def begin(self: TierBudget, size_bytes: int, extent_bytes: int) -> None:
        original(self, size_bytes, extent_bytes)
        if extent_bytes > GRANULE_BYTES:
            self.used_bytes -= GRANULE_BYTES

    return begin


def _charge_only_the_length(original: Any) -> Any:
    def release(self: TierBudget, size_bytes: int, extent_bytes: int) -> None:
        original(self, size_bytes, size_bytes)

    return release


def _publish_before_the_sum_is_checked(original: Any) -> Any:
    return lambda self, index, digest, claimed: original(self, index, digest, digest)


def _evict_what_is_being_read(original: Any) -> Any:
    def advance(self: Any) -> None:
        self.head = next(self._rest, None)

    return advance


def _take_below_the_reservation(original: Any) -> Any:
    def init(self: Any, owner: Any, *leaving: Any) -> None:
        original(self, owner, *leaving)
        self.protected_bytes = 0

    return init


def _lend_and_not_give_back(original: Any) -> Any:
    return lambda extents, requester, borrowers, *rest, **named: original(
        extents, requester, Borrowers(), *rest, **named
    )


def _forget_to_purge_an_epoch(original: Any) -> Any:
    def apply(self: PolicyInForce, owner: Any, rules: Any) -> int:
        kept = dict(owner.partitions)
        for partition in kept:
            space = rules.namespaces.get(partition.namespace)
            if space is not None and space.uid == partition.namespace_uid and partition.epoch not in space.epochs:
                del owner.partitions[partition]
        purged: int = original(self, owner, rules)
        owner.partitions.update(kept)
        return purged

    return apply


def _serve_a_group_that_was_left(original: Any) -> Any:
    """Leaving is a change of the policy alone: sessions of the group that was go on as they were."""

    def apply(self: PolicyInForce, owner: Any, rules: Any) -> int:
        left = {}
        for partition, index in list(owner.partitions.items()):
            space = rules.namespaces.get(partition.namespace)
            is_its_own = space is not None and space.uid == partition.namespace_uid
            if partition.group_uid and is_its_own and partition.epoch not in space.epochs_of(partition.group_uid):
                left[partition] = index
                del owner.partitions[partition]
        purged: int = original(self, owner, rules)
        owner.partitions.update(left)
        self._open.update(left)
        return purged

    return apply


def _share_by_one_sides_word(_: Any) -> Any:
    """Whoever a member names is read, whether it has accepted or not."""

    def peer_partitions(policy: NodePolicy, partition: Partition) -> tuple[Partition, ...]:
        if check_partition(policy, partition) is not None:
            return ()
        own = policy.tenants[partition.tenant].namespaces[partition.namespace].groups[partition.group_uid]
        named = [
            Partition(peer.tenant, peer.namespace, peer.namespace_uid, partition.epoch, partition.group_uid)
            for peer in own.peers
        ]
        return tuple(peer for peer in named if check_partition(policy, peer) is None)

    return peer_partitions


def _remember_who_shared(_: Any) -> Any:
    """Who a session reads is found out once, whatever the policy says since."""

    def peers(self: PolicyInForce, partition: Partition, now_ns: int) -> tuple[Partition, ...]:
        known = self.__dict__.setdefault("remembered", {})
        if partition not in known:
            known[partition] = peer_partitions(self.policy, partition)
        found: tuple[Partition, ...] = known[partition]
        return found

    return peers


def _lend_past_the_bound(original: Any) -> Any:
    def begin(self: Loans, entry: Entry) -> bool:
        with patch.object(loans_module, "LENT_PARTS", 1):
            return bool(original(self, entry))

    return begin


def _touch_what_is_lent(original: Any) -> Any:
    """A peer's read is a use: a busy neighbour decides what the owner keeps."""

    def pin(pool: Pool, reader: PartitionIndex, peers: Any, keys: Any, pins: Any) -> None:
        original(pool, reader, peers, keys, pins)
        for given in pins:
            if given is not None and given.is_loan:
                given.entry.index.owner.order.refresh(given.entry)

    return pin


def _take_new_namespace_for_old(original: Any) -> Any:
    """As if a namespace were known by its name: the new one inherits the entries."""

    def apply(self: PolicyInForce, owner: Any, rules: Any) -> int:
        for partition, index in list(owner.partitions.items()):
            space = rules.namespaces.get(partition.namespace)
            if space is not None and space.uid != partition.namespace_uid:
                renamed = Partition(partition.tenant, partition.namespace, space.uid, partition.epoch)
                self._open.pop(partition, None)
                del owner.partitions[partition]
                index.partition = renamed
                owner.partitions[renamed] = self._open[renamed] = index
        return int(original(self, owner, rules))

    return apply


def _serve_a_suspended_tenant(original: Any) -> Any:
    def apply(self: PolicyInForce, owner: Any, rules: Any) -> int:
        purged: int = original(self, owner, rules)
        self._open.update(owner.partitions)
        return purged

    return apply


def _one_index_for_every_tenant(original: Any) -> Any:
    """As if a namespace's name alone were the key: two tenants that use it share entries."""

    def open_index(self: PolicyInForce, partition: Any) -> PartitionIndex | None:
        for other, index in self._open.items():
            if other.namespace == partition.namespace and original(self, partition) is not None:
                self._open[partition] = index
                return index
        return original(self, partition)  # type: ignore[no-any-return]

    return open_index


def _keep_a_deleted_tenant(original: Any) -> Any:
    """As if deleting were a change of the policy alone."""

    def apply(self: CacheCore, policy: NodePolicy, now_ns: int) -> Any:
        with patch.object(Pool, "purge", lambda *_: 0):
            return original(self, policy, now_ns)

    return apply


def _free_what_is_being_read(original: Any) -> Any:
    def remove(self: Pool, entry: Entry) -> None:
        pins, entry.pins = entry.pins, 0
        original(self, entry)
        entry.pins = pins

    return remove


def _leak_a_torn_put(original: Any) -> Any:
    """A put that is torn off gives back its budget and keeps its memory."""

    def abort(self: Pool, entry: Entry) -> None:
        with patch.object(Extents, "free", lambda *_: None):
            original(self, entry)

    return abort


def _reuse_the_memory_of_a_purged_put(original: Any) -> Any:
    """Purging a partition frees memory that a client is still writing to."""

    def purge(self: Pool, index: PartitionIndex) -> int:
        writing = list(index.writing.values())
        purged: int = original(self, index)
        for entry in writing:
            self.extents.free(entry.offset, entry.extent_bytes)
        return purged

    return purge


def _evict_before_refusing(original: Any) -> Any:
    def admit(self: Pool, index: PartitionIndex, *rest: Any) -> Any:
        outcome = original(self, index, *rest)
        if not isinstance(outcome, Entry):
            for entry in list(index.owner.order)[:1]:
                if not entry.pins:
                    self.evict(entry, EvictionCause.OWN_PUT)
        return outcome

    return admit


def _wipe_for_what_can_never_fit(original: Any) -> Any:
    def put_start(self: CacheCore, partition: Partition, *rest: Any) -> Any:
        outcome = original(self, partition, *rest)
        if isinstance(outcome, PutRefused) and outcome.error.reason == "ENTRY_TOO_LARGE":
            for entry in list(self._pool.tenants[partition.tenant].order):
                if not entry.pins:
                    self._pool.evict(entry, EvictionCause.OWN_PUT)
        return outcome

    return put_start


def _ignore_reservations(original: Any) -> Any:
    def admit(self: Pool, index: PartitionIndex, *rest: Any) -> Any:
        protected_bytes = {owner: owner.budget.protected_bytes for owner in self.tenants.values()}
        for owner in protected_bytes:
            owner.budget.protected_bytes = 0
            self.borrowers.note(owner)
        try:
            return original(self, index, *rest)
        finally:
            for owner, kept_bytes in protected_bytes.items():
                owner.budget.protected_bytes = kept_bytes
                self.borrowers.note(owner)

    return admit


def _refuse_instead_of_evicting(original: Any) -> Any:
    return lambda extents, requester, *rest, **named: (
        original(extents, requester, *rest, **named) if requester.budget.weight < 1000 else None
    )


def _grow_past_the_limit(original: Any) -> Any:
    def admit(self: Pool, index: PartitionIndex, *rest: Any) -> Any:
        budget = index.owner.budget
        limit_bytes, budget.limit_bytes = budget.limit_bytes, budget.limit_bytes + 16 * GRANULE_BYTES
        try:
            return original(self, index, *rest)
        finally:
            budget.limit_bytes = limit_bytes

    return admit


def _keep_what_is_above_a_lowered_limit(original: Any) -> Any:
    return lambda self, owner: 0


def _publish_into_a_closed_partition(original: Any) -> Any:
    def commit(self: CacheCore, ticket: Any, checksum: int, now_ns: int) -> Any:
        entry = ticket.entry
        if entry.state is EntryState.DETACHED:
            del self._pool.detached[entry]
            entry.index.writing[entry.key] = entry
            entry.index.owner.partitions[entry.index.partition] = self._open[entry.index.partition] = entry.index
        return original(self, ticket, checksum, now_ns)

    return commit


def _overwrite_a_stored_key(original: Any) -> Any:
    def put_start(self: CacheCore, partition: Any, key: Any, size_bytes: int, now_ns: int) -> Any:
        self.drop(partition, key)
        return original(self, partition, key, size_bytes, now_ns)

    return put_start


def _promise_more_than_there_is(original: Any) -> Any:
    def check(reservations_bytes: Iterable[int], capacity_bytes: int, tier: Any) -> None:
        original(reservations_bytes, 2 * capacity_bytes, tier)

    return check


def _give_out_overlapping_memory(original: Any) -> Any:
    def allocate(self: Extents, extent_bytes: int) -> Any:
        offset = original(self, extent_bytes)
        return offset - GRANULE_BYTES if offset and extent_bytes > 2 * GRANULE_BYTES else offset

    return allocate


def _misjudge_what_eviction_frees(original: Any) -> Any:
    def add(self: TrialFree, offset: Any, extent_bytes: int) -> tuple[int, int]:
        start, end = original(self, offset, extent_bytes)
        return start, end + GRANULE_BYTES

    return add


def _send_the_next_granule(original: Any) -> Any:
    def view(self: GetBatch, pin: Any) -> memoryview:
        arena = self._blocks.arena
        offset = pin.offset + GRANULE_BYTES
        return arena.view(offset if offset + pin.size_bytes <= arena.capacity_bytes else pin.offset, pin.size_bytes)

    return view


def _receive_into_the_granule_before(original: Any) -> Any:
    def start(self: PutBatch, index: int, size_bytes: int) -> memoryview | None:
        target = original(self, index, size_bytes)
        offset = self._tickets[index].offset if target is not None else 0
        return self._blocks.arena.view(offset - GRANULE_BYTES, size_bytes) if offset else target

    return start


def _forget_what_was_purged(original: Any) -> Any:
    """The entries are unreachable, and nobody frees them ever."""

    def purge(self: Pool, index: PartitionIndex) -> int:
        purged: int = original(self, index)
        self.purged.pop(index, None)
        return purged

    return purge


def _move_without_the_bytes(original: Any) -> Any:
    """All but the last entry follow."""
    return lambda self, moves: original(self, moves[:-1])


def _copy_in_the_wrong_order(original: Any) -> Any:
    return lambda self, moves: original(self, moves[::-1])


def _forget_where_it_went(original: Any) -> Any:
    def move(self: Pool, moves: list[tuple[Entry, int]]) -> None:
        before = [(entry, entry.offset) for entry, _ in moves]
        original(self, moves)
        for entry, offset in before[:1]:
            entry.offset = offset

    return move


#: Every fault by its name.
PLANTS: dict[str, Plant] = {
    "skip a charge": Plant("I8", TierBudget, "begin", _skip_a_charge),
    "credit only the length": Plant("I8", TierBudget, "release", _charge_only_the_length),
    "publish before the sum is checked": Plant("I6", PutBatch, "finish", _publish_before_the_sum_is_checked),
    "evict what is being read": Plant("I7", victims_module._Candidate, "_advance", _evict_what_is_being_read),
    "take below the reservation": Plant("I5", victims_module._Candidate, "__init__", _take_below_the_reservation),
    "ignore reservations": Plant("I5", Pool, "admit", _ignore_reservations),
    "lend and not give back": Plant("I5", pool_module, "choose_room", _lend_and_not_give_back),
    "forget to purge an epoch": Plant("I12", PolicyInForce, "_apply_namespaces", _forget_to_purge_an_epoch),
    "serve a group that was left": Plant("I12", PolicyInForce, "_apply_namespaces", _serve_a_group_that_was_left),
    "share by one side's word": Plant("I2", policy_module, "peer_partitions", _share_by_one_sides_word),
    "remember who shared": Plant("I2", PolicyInForce, "peers", _remember_who_shared),
    "lend past the bound": Plant("I5", Loans, "begin", _lend_past_the_bound),
    "touch what is lent": Plant("I5", cache_module, "pin_loans", _touch_what_is_lent),
    "take a new namespace for the old": Plant("I12", PolicyInForce, "_apply_namespaces", _take_new_namespace_for_old),
    "serve a suspended tenant": Plant("I12", PolicyInForce, "_apply_namespaces", _serve_a_suspended_tenant),
    "keep a deleted tenant": Plant("I12", CacheCore, "apply_policy", _keep_a_deleted_tenant),
    "one index for every tenant": Plant("I2", PolicyInForce, "open_index", _one_index_for_every_tenant),
    "free what is being read": Plant("I7", Pool, "remove", _free_what_is_being_read),
    "leak the memory of a torn put": Plant("I8", Pool, "abort", _leak_a_torn_put),
    "reuse the memory of a purged put": Plant("I7", Pool, "purge", _reuse_the_memory_of_a_purged_put),
    "evict before refusing": Plant("I6", Pool, "admit", _evict_before_refusing),
    "wipe for what can never fit": Plant("I6", CacheCore, "put_start", _wipe_for_what_can_never_fit),
    "refuse instead of evicting": Plant("I6", pool_module, "choose_room", _refuse_instead_of_evicting),
    "evict before what was purged": Plant("I6", pool_module, "reap_for", lambda _: lambda *_: None),
    "forget what was purged": Plant("I8", Pool, "purge", _forget_what_was_purged),
    "grow past the limit": Plant("I4", Pool, "admit", _grow_past_the_limit),
    "keep what is above a lowered limit": Plant("I4", Pool, "evict_down_to_limit", _keep_what_is_above_a_lowered_limit),
    "publish into a closed partition": Plant("I12", CacheCore, "put_commit", _publish_into_a_closed_partition),
    "overwrite a stored key": Plant("I6", CacheCore, "put_start", _overwrite_a_stored_key),
    "promise more than there is": Plant("I5", policy_module, "check_reservations", _promise_more_than_there_is),
    "give out overlapping memory": Plant("I7", Extents, "allocate", _give_out_overlapping_memory),
    "misjudge what an eviction frees": Plant("I6", TrialFree, "add", _misjudge_what_eviction_frees),
    "move what is being read": Plant("I7", compaction_module, "_is_movable", lambda _: lambda entry: True),
    "move an entry without its bytes": Plant("I7", Arena, "relocate", _move_without_the_bytes),
    "copy in the wrong order": Plant("I7", Arena, "relocate", _copy_in_the_wrong_order),
    "forget where an entry went": Plant("I7", Pool, "_move", _forget_where_it_went),
    "send a neighbour's bytes": Plant("I2", GetBatch, "view", _send_the_next_granule),
    "receive into a neighbour's memory": Plant("I7", PutBatch, "start", _receive_into_the_granule_before),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break the core in this way until the end of the block."""
    plant = PLANTS[name]
    with patch.object(plant.owner, plant.attribute, plant.replace(getattr(plant.owner, plant.attribute))):
        yield
