"""The cache of one node as a state machine that knows no I/O: commands and ``now`` in, results out.

::

    put_start --> [bytes arrive at ticket.offset] --> put_commit | put_abort
    get_start --> [bytes leave from pin.offset]   --> get_end
    promote_start --> [bytes are read from SSD to ticket.offset] --> promote_end, promote_pin
    on_evict      --> [bytes are taken to SSD, see dataplane.core.ssd_tier]

The shell owns the arena, the sockets and the clock; the core says where bytes go and who may hold how many. Same
commands, same results: the server, the simulator and the replay run this very code.

Rules upheld here: I2 (every index operation takes a Partition), I4 and I5 (budgets and victims), I6 (refuse before
evicting), I7 (readable only between commit and removal; held memory is never reused), I8 (books against truth),
I9 (no growth past the lease), I12 (what the policy no longer names is gone at once).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

from dataplane.core import refusals
from dataplane.core.admission import check_partition, namespace_not_available
from dataplane.core.adoption import Adopted, adopt_snapshot
from dataplane.core.at_once import can_be_at_once, use_at_once
from dataplane.core.compaction import Relocate
from dataplane.core.entry import Entry, Pin, Promotion, PutRefused, PutTicket
from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.extents import ArenaOffset, round_up
from dataplane.core.invariants import check_invariants
from dataplane.core.lease import NEVER_NS, Lease
from dataplane.core.loans import pin_loans
from dataplane.core.partition import Partition
from dataplane.core.policy_in_force import PolicyInForce
from dataplane.core.pool import Pool
from dataplane.core.prechecks import limit_was_lowered, precheck
from dataplane.core.promotion import promote_end, promote_start
from dataplane.core.reading import find_keys, note_missing, pin_entries, touch_entries, unpin_entries
from dataplane.core.reaping import POLICY_SLICE_BYTES, work_off
from dataplane.core.report import known_tenants, node_usage, reported_tenants
from dataplane.core.reservations import DEFAULT_RESERVATIONS, Reservations
from dataplane.core.snapshot import ArenaIdentity, Snapshot, encode_snapshot
from dataplane.core.soft_mark import trim
from dataplane.core.ssd_invariants import check_ssd_invariants
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.tenant_cache import PartitionIndex
from dataplane.core.usage import NodeUsage, PolicyApplied
from saltern.errors import PermissionDeniedError
from saltern.keys import BlockKey
from saltern.names import TenantId
from tenants.policy import NodePolicy


class CacheCore:
    """Index, budgets and eviction of one node's DRAM tier, and what joins it with the SSD tier below.

    Every ``now_ns`` is a reading of one monotonic clock in nanoseconds; an earlier one than before counts as the same.

    Args:
        capacity_bytes: length of the arena, rounded down to whole granules.
        eviction: the order in which a tenant's entries leave.
        reservations: what of a reservation nobody else may take (I5).
        ssd: the tier below; None for none.
        soft_mark_percent: of its limit, above which :meth:`trim` evicts a tenant's own coldest; 100 for no mark.
        slice_bytes: of what a policy leaves to do (:mod:`dataplane.core.reaping`), how much is done as it is applied.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        eviction: Eviction = DEFAULT_EVICTION,
        reservations: Reservations = DEFAULT_RESERVATIONS,
        ssd: SsdTier | None = None,
        soft_mark_percent: int = 100,
        slice_bytes: int = POLICY_SLICE_BYTES,
    ) -> None:
        self._pool = Pool(capacity_bytes)
        self._open = self._pool.open
        self._eviction = eviction
        self._ssd = ssd
        self._policies = PolicyInForce(
            self._pool, eviction, reservations, ssd, soft_mark_percent=soft_mark_percent, slice_bytes=slice_bytes
        )

    # ---- policy

    @property
    def policy(self) -> NodePolicy:
        """The snapshot in force; version 0 without tenants before the first."""
        return self._policies.policy

    def apply_policy(
        self, policy: NodePolicy, now_ns: int, *, touched: Collection[TenantId] | None = None
    ) -> PolicyApplied:
        """Replace the policy. What it no longer names is unreachable when this returns (I12), and no tenant grows (I4).

        Freeing that memory, and evicting down to lower limits, is done in slices: a first one here, then by
        :meth:`work_off`. What is being read or written now follows when its transfer ends.

        Args:
            touched: tenants that may differ from the policy in force, of which it was made; None for all.

        Raises:
            FailedPreconditionError: POLICY_STALE (older than the one in force) or RESERVATIONS_ABOVE_CAPACITY (I5);
                the policy in force stays.
        """
        return self._policies.apply(policy, now_ns, touched=touched)

    @property
    def has_arrears(self) -> bool:
        """Whether a policy has left something for :meth:`work_off`."""
        return bool(self._pool.purged or self._pool.above_limit or self._pool.namespaces_above)

    def work_off(self, now_ns: int, budget_bytes: int) -> None:
        """Do some of what a policy has left to do, about ``budget_bytes`` of it; call it between requests.

        An entry counts as one granule, or where it is copied to SSD as its bytes.
        """
        self._pool.advance(now_ns)
        work_off(self._pool, budget_bytes)

    def renew(self, lease: Lease, now_ns: int) -> None:
        """Grow until ``lease`` runs out, and from then on no more (I9); without one, for ever."""
        self._policies.renew(lease, now_ns)

    @property
    def is_frozen(self) -> bool:
        """Whether the lease has run out, and a put since has found it so."""
        return self._policies.is_frozen

    @property
    def settled_version(self) -> int:
        """The newest policy that was in force with no tenant above its limits, on either tier (I4)."""
        return self._policies.settled_version

    def check_access(self, partition: Partition) -> PermissionDeniedError | None:
        """Say why the policy in force no longer opens ``partition``, or None if it does (I10)."""
        return None if partition in self._open else check_partition(self.policy, partition)

    # ---- put

    def put_start(self, partition: Partition, key: BlockKey, size_bytes: int, now_ns: int) -> PutTicket | PutRefused:
        """Admit an entry: charge it and set its memory aside (I4), evicting what must go for it.

        Returns:
            A ticket to write the bytes with; or, with nothing evicted (I6), a refusal carrying AlreadyExistsError,
            UnavailableError (WRITE_IN_PROGRESS), EntryTooLargeError, ResourceExhaustedError (QUOTA_EXCEEDED,
            NAMESPACE_LIMIT, NODE_FULL, TRANSFERS_FULL), InvalidArgumentError or PermissionDeniedError.
        """
        if now_ns >= self._policies.stops_ns:
            self._policies.freeze()
        index = self._open.get(partition) or self._policies.open_index(partition)
        if index is None:
            return self._refuse_closed(partition)
        if key in index.entries or (self._ssd is not None and self._ssd.outdate(partition, key)):
            return refusals.ALREADY_EXISTS
        extent_bytes = round_up(size_bytes)
        is_frozen = self._policies.is_frozen
        admitted = precheck(self._pool, index, key, size_bytes, extent_bytes, is_frozen=is_frozen) or self._pool.admit(
            index, key, size_bytes, extent_bytes, now_ns
        )
        if isinstance(admitted, PutRefused):
            index.owner.counters.refused(admitted.error.reason)
            return admitted
        return PutTicket(admitted.offset, size_bytes, admitted)

    def put_commit(self, ticket: PutTicket, checksum: int, now_ns: int) -> PutRefused | None:
        """Make a written entry readable (I7); when this returns None it may be acknowledged (I6).

        Args:
            checksum: XXH3-64 over the bytes in the arena.

        Returns:
            None, or a refusal if the policy changed since ``put_start``: the partition is closed, or a limit was
            lowered and this entry no longer fits. The memory is then free again.

        Raises:
            InternalError: the ticket was used before.
        """
        entry = ticket.close()
        index = entry.index
        if self._open.get(index.partition) is not index:
            refused = self._refuse_closed(index.partition)
        elif not index.is_within_limits:
            refused = limit_was_lowered(index, entry.size_bytes)
            index.owner.counters.refused(refused.error.reason)
        else:
            self._pool.publish(entry, checksum, now_ns)
            return None
        self._pool.abort(entry)
        return refused

    def put_abort(self, ticket: PutTicket) -> None:
        """Give a ticket back without an entry: a sum did not match, or the client is gone. Nobody ever saw it (I7).

        Raises:
            InternalError: the ticket was used before.
        """
        self._pool.abort(ticket.close())

    # ---- get

    def get_start(
        self, partition: Partition, keys: Sequence[BlockKey], now_ns: int, *, counts_misses: bool = True
    ) -> list[Pin | None]:
        """Pin the entries of ``keys`` that are in DRAM, in order, None for a miss; touches them last key first.

        In a sharing group what the partition itself lacks is looked for at the peers (:meth:`sources`).
        Every pin must be given back with :meth:`get_end`; until then its bytes stay where they are (I7).

        Args:
            counts_misses: False if the caller looks on SSD as well and ends with :meth:`count_misses`.
        """
        index = self._open.get(partition) or self._policies.open_index(partition)
        if index is None:
            return [None] * len(keys)
        peers = self._policies.peers(partition, now_ns)
        pins = pin_entries(self._pool, index, keys, now_ns, counts_misses=counts_misses and not peers)
        if peers:
            pin_loans(self._pool, index, [self._open_index(peer) for peer in peers], keys, pins)
            if counts_misses:
                self.count_misses(partition, pins.count(None))
        return pins

    def sources(self, partition: Partition, now_ns: int) -> tuple[Partition, ...]:
        """The partitions that a get of ``partition`` is served from: its own, then those of its peers in a group (I2).

        Peers are read only while the node is in touch: its lease has not run out. The caller's partition is open.
        """
        return (partition, *self._policies.peers(partition, now_ns))

    def count_misses(self, partition: Partition, misses: int) -> None:
        """Count what a get found on neither tier."""
        owner = self._pool.tenants.get(partition.tenant)
        if owner is not None:
            owner.counters.get_misses += misses
            namespace = owner.namespaces.get(partition.namespace_uid)
            if namespace is not None:
                namespace.get_misses += misses

    def get_end(self, pins: Iterable[Pin | None]) -> None:
        """Give pins back, in any order and any grouping; None is skipped.

        Raises:
            InternalError: a pin was given back before.
        """
        unpin_entries(self._pool, pins)

    def lookup(self, partition: Partition, keys: Sequence[BlockKey], now_ns: int = NEVER_NS) -> tuple[int, bytes]:
        """Which keys are there: (how many from the first on without a gap, a byte of 0 or 1 for each); no touch.

        What is not there is a miss of the tenant's, for whoever looks up first reads no more than there is (I5,
        :mod:`dataplane.core.earning`).

        Args:
            now_ns: without it nothing of a sharing group's peers is seen, for which the time must be known.
        """
        index = self._open.get(partition) or self._policies.open_index(partition)
        if index is None:
            return 0, bytes(len(keys))
        sources = self.sources(partition, now_ns)
        places: list[Container[BlockKey]] = [self._open_index(source).entries for source in sources]
        if self._ssd is not None:
            places += [books.entries for books in map(self._ssd.index, sources) if books is not None]
        answer = find_keys(keys, places)
        if index.owner.account is not None:
            note_missing(self._pool, index.owner, keys, answer[1])
        return answer

    def touch(self, partition: Partition, keys: Sequence[BlockKey], now_ns: int) -> None:
        """Mark entries as used, last key first, without reading them: call it after a put batch."""
        index = self._open.get(partition)
        if index is not None:
            touch_entries(self._pool, index, keys, now_ns)

    def use_at_once(
        self, partition: Partition, keys: Sequence[BlockKey], size_bytes: int, now_ns: int, *, reads: bool = True
    ) -> None:
        """Get each key that is there, if ``reads``, and put each that is not, in the order given, in no time.

        For replays, where no bytes move (:mod:`dataplane.core.at_once`): the same as a get or a put of each key.
        """
        index = self._open.get(partition) or self._policies.open_index(partition)
        if now_ns >= self._policies.stops_ns:
            self._policies.freeze()
        if index is not None and can_be_at_once(self._pool, index):
            frozen = self._policies.is_frozen
            use_at_once(self._pool, index, keys, size_bytes, now_ns, reads=reads, is_frozen=frozen, ssd=self._ssd)
            return
        for key in keys:
            if index is not None and key in index.entries:
                if reads:
                    self.get_end(self.get_start(partition, (key,), now_ns))
            elif isinstance(ticket := self.put_start(partition, key, size_bytes, now_ns), PutTicket):
                self.put_commit(ticket, 0, now_ns)

    # ---- removal

    def delete(self, partition: Partition, keys: Iterable[BlockKey]) -> int:
        """Remove entries from both tiers; return how many were there. A put that has begun is not stopped."""
        index = self._open.get(partition) or self._policies.open_index(partition)
        if index is None:
            return 0
        wanted = list(dict.fromkeys(keys))
        on_ssd = set() if self._ssd is None else self._ssd.delete(partition, wanted)
        deleted = 0
        for key in wanted:
            entry = index.entries.get(key)
            if entry is not None:
                self._pool.remove(entry)
                if index.owner.account is not None:
                    index.owner.account.deleted(key)
            deleted += entry is not None or key in on_ssd
        return deleted

    def drop(self, partition: Partition, key: BlockKey) -> bool:
        """Remove one entry, such as one whose sum no longer matches (I7); return whether it was there."""
        return self.delete(partition, (key,)) == 1

    @property
    def is_above_soft_mark(self) -> bool:
        """Whether any tenant may be: :meth:`trim` may have something to do."""
        return bool(self._pool.above_mark)

    def trim(self, now_ns: int, budget_bytes: int) -> int:
        """Evict own coldest entries of tenants above their soft marks; call it between requests, never in one.

        At most ``budget_bytes``, or one entry that is larger. Returns the bytes evicted; 0 if there is nothing to do.
        """
        self._pool.advance(now_ns)
        return trim(self._pool, budget_bytes)

    # ---- from SSD and to it

    def on_evict(self, demote: Callable[[Entry], None]) -> None:
        """Have ``demote`` told of every entry that is evicted, while its bytes are still in the arena.

        It takes the bytes before it returns: their memory may be somebody else's right after (I2, I7).
        """
        self._pool.demote = demote

    def on_relocate(self, relocate: Relocate) -> None:
        """Let entries be moved for a put that finds no room in one piece, and have ``relocate`` copy their bytes.

        Call it before there are entries. The copies are to be made one after the other and all before it returns;
        nobody holds what is moved (I7). Without it nothing is moved, and such a put is refused.
        """
        self._pool.move_with(relocate)

    def promote_start(
        self, partition: Partition, key: BlockKey, now_ns: int, *, source: Partition | None = None
    ) -> Promotion | None:
        """Set memory aside for an entry that is on SSD; None if there is none to promote, or no room for it (I4).

        Args:
            source: where it is, one of :meth:`sources`; ``partition`` itself for None.
        """
        if now_ns >= self._policies.stops_ns:
            self._policies.freeze()
        index = self._open.get(partition) or self._policies.open_index(partition)
        if self._ssd is None or index is None:
            return None
        return promote_start(self._pool, self._ssd, index, key, now_ns, source=source or partition)

    def promote_end(self, promotion: Promotion, checksum: int | None, now_ns: int) -> bool:
        """Make a promoted entry readable; False if it is not: its checksum is None, or it was deleted (I7, I12)."""
        assert self._ssd is not None, "nothing is promoted without an SSD tier"
        partition = promotion.ticket.entry.index.partition
        is_source_open = promotion.source in self.sources(partition, now_ns)
        return promote_end(self._pool, self._ssd, promotion, checksum, now_ns, is_source_open=is_source_open)

    def promote_pin(self, partition: Partition, key: BlockKey, now_ns: int) -> Pin | None:
        """Pin one entry for a get that waited for it; counts a hit."""
        return self.get_start(partition, (key,), now_ns, counts_misses=False)[0]

    # ---- over a restart

    def snapshot(self, arena: ArenaIdentity) -> Iterator[bytes]:
        """Encode what a later process needs to serve the same entries from the same memory, piece by piece.

        Nothing may change until the last piece is taken. Entries that somebody reads or writes are left out.
        """
        return encode_snapshot(self._pool, self._eviction, arena)

    def adopt(self, snapshot: Snapshot, digest: Callable[[ArenaOffset, int], int], now_ns: int) -> Adopted:
        """Take over the entries of a snapshot, as far as the policy in force names them (I12) and has room (I4).

        Call it once, after the first policy and before anything else. Each entry's bytes are verified before they
        leave for the first time (I7).

        Args:
            digest: XXH3-64 over so many bytes of the arena from an offset on.

        Raises:
            BadSnapshotError: it contradicts itself; the core is as empty as before.
        """
        self._pool.digest = digest
        self._policies.recheck_limits()
        return adopt_snapshot(self._pool, self.policy, self._eviction, snapshot, now_ns)

    # ---- what is there

    def tenants(self) -> list[TenantId]:
        """Every tenant that the policy names or that still holds bytes, on either tier."""
        return known_tenants(self._pool, self._ssd)

    def reported_tenants(self) -> list[TenantId]:
        """Those of :meth:`tenants` that a report names: of very many, those of which there is anything to tell."""
        return reported_tenants(self._pool, self._ssd)

    def usage(self, tenants: Iterable[TenantId] | None = None) -> NodeUsage:
        """Books and counters of all :meth:`tenants`, or of some: whoever has 10,000 can take them in pieces.

        Of ``tenants`` those that are not known, or not any more, are left out.
        """
        return node_usage(self._pool, self._ssd, self.policy, self.tenants() if tenants is None else tenants)

    def displaced_bytes(self) -> Mapping[tuple[TenantId, TenantId], int]:
        """Lengths of the entries that were evicted by (whose they were, whose puts evicted them), of the last pairs.

        Tenants that are gone are not named.
        """
        pairs = self._pool.displaced.snapshot()
        return {pair: size_bytes for pair, size_bytes in pairs.items() if all(of in self._pool.tenants for of in pair)}

    def check_invariants(self) -> None:
        """Recompute every book from what is there and assert that all agree (I4, I7, I8); for tests and simulators."""
        check_invariants(self._pool)
        if self._ssd is not None:
            check_ssd_invariants(self._ssd)

    # ---- inside

    def _open_index(self, partition: Partition) -> PartitionIndex:
        """The index of a partition that the policy is known to open."""
        index = self._open.get(partition) or self._policies.open_index(partition)
        assert index is not None, "I2: a peer that the policy does not open"
        return index

    def _refuse_closed(self, partition: Partition) -> PutRefused:
        error = check_partition(self.policy, partition) or namespace_not_available(partition.namespace)
        owner = self._pool.tenants.get(partition.tenant)
        if owner is not None:
            owner.counters.refused(error.reason)
        return PutRefused(error)
