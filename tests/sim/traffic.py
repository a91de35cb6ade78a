"""Commands of the clients: batches that begin, move on by a few bytes, end, or are torn off."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from random import Random
from typing import TYPE_CHECKING

from dataplane.core.compaction import Move
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.io.batches import GetBatch, PutBatch
from saltern.errors import StatusCode
from saltern.keys import BlockKey
from saltern.wire import checksum
from tests.sim.model import SimEntry, SimModel
from tests.sim.sessions import Getting, Item, Putting, Session, name_of

if TYPE_CHECKING:
    from dataplane.core.cache import CacheCore
    from dataplane.io.arena import Arena
    from dataplane.io.batches import Blocks
    from tests.sim.shape import Shape

BATCH_MAX = 6
PINNED_BATCHES_MAX = 4
SOFT_MARK_PERCENT = 80
_CODES = {
    "ALREADY_EXISTS": StatusCode.ALREADY_EXISTS,
    "WRITE_IN_PROGRESS": StatusCode.UNAVAILABLE,
    "NAMESPACE_NOT_AVAILABLE": StatusCode.PERMISSION_DENIED,
    "GROUP_NOT_AVAILABLE": StatusCode.PERMISSION_DENIED,
    "TENANT_SUSPENDED": StatusCode.PERMISSION_DENIED,
    "EPOCH_NOT_AVAILABLE": StatusCode.PERMISSION_DENIED,
    "ENTRY_TOO_LARGE": StatusCode.RESOURCE_EXHAUSTED,
    "QUOTA_EXCEEDED": StatusCode.RESOURCE_EXHAUSTED,
    "NODE_FULL": StatusCode.RESOURCE_EXHAUSTED,
    "TRANSFERS_FULL": StatusCode.RESOURCE_EXHAUSTED,
    "CHECKSUM_MISMATCH": StatusCode.DATA_LOSS,
}


class TrafficCommands:
    """Each command returns whether it made sense in this state."""

    rng: Random
    shape: Shape
    core: CacheCore
    arena: Arena
    blocks: Blocks
    model: SimModel
    keys: list[BlockKey]
    sessions: list[Session]
    now_ns: int
    done: Counter[str]
    offered: int
    moved: list[tuple[SimEntry, int]]

    @abstractmethod
    def say(self, line: str) -> None:
        """Add a line to the transcript."""

    # ---- puts

    def begin_put(self) -> bool:
        session = self._idle_session()
        if session is None:
            return False
        items = []
        for _ in range(self.rng.randint(1, BATCH_MAX)):
            self.offered += 1
            key, size_bytes = self.rng.choice(self.keys), self._draw_size(session.partition)
            payload = _payload(session.partition, key, self.offered, size_bytes)
            items.append(Item(key, payload, is_sum_right=self.rng.random() > 0.08))
        batch = PutBatch(self.blocks, session.partition, [item.key for item in items], errors_max=BATCH_MAX)
        session.busy = Putting(batch, items)
        told = ", ".join(f"{_short(item.key)} {len(item.payload)} B" for item in items)
        self.say(f"{session} begins to put {told}")
        return True

    def _advance_put(self, session: Session, put: Putting) -> None:
        if put.position == len(put.items):
            assert [int(code) for code in put.batch.codes] == put.codes, "I6: a put was answered otherwise than done"
            session.busy = None
            self._close_put(session, put)
            self.say(f"{session} ends its put")
        elif put.target is None:
            self._start_entry(session, put)
        else:
            self._receive_entry(session, put)

    def _start_entry(self, session: Session, put: Putting) -> None:
        model, partition = self.model, session.partition
        item = put.items[put.position]
        size_bytes = len(item.payload)
        told = f"{session} offers {_short(item.key)} of {size_bytes} B"
        expected = model.expected_refusal(partition, item.key, size_bytes)
        visible = model.readable()
        refusals_before, moved_before = len(put.batch.refused), self.done["moved"]
        target = put.batch.start(put.position, size_bytes)
        lost = [entry for entry in visible if not self.sees(entry)]
        self.follow()
        if target is None:
            refused = put.batch.refused[refusals_before:]
            reason = refused[0][1].reason if refused else "ALREADY_EXISTS"
            self.say(f"{told}: {reason}")
            if expected is None:
                model.judge_refusal(partition.tenant, -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES, reason)
            else:
                assert reason == expected, f"I6: refused for {reason} where {expected} is the case"
            assert not lost, "I6: a put that was refused evicted something"
            assert self.done["moved"] == moved_before, "I6: a put that was refused had something moved"
            self._answered(put, reason, partition)
            return
        assert expected is None, f"a put was admitted that is {expected}"
        entry = SimEntry(partition, item.key, size_bytes, self._offset_of(partition, item.key), payload=item.payload)
        names = ", ".join(f"{_short(e.key)} of {e.tenant}" for e in lost)
        self.say(f"{told}: admitted at {entry.offset}{', evicts ' + names if names else ''}")
        model.judge_losses(partition.tenant, entry.extent_bytes, lost)  # type: ignore[arg-type]
        for moved, target_offset in self.moved:
            moved.offset = target_offset
        self.moved.clear()
        self.done["evicted for a put"] += len(lost)
        self.done["evicted from others"] += sum(e.tenant != partition.tenant for e in lost)
        taken = {granule for other in model.live for granule in other.granules}
        assert not taken & set(entry.granules), "I7: memory in use was given out again"
        model.write(entry)
        put.target, put.entry = target, entry

    def relocate(self, moves: Sequence[Move]) -> None:
        """Entries are moved for a put; the model follows once it has judged whether anybody had to lose for it."""
        self.arena.relocate(moves)
        lying = {entry.offset: entry for entry in self.model.entries()}
        for source, target, size_bytes in moves:
            entry = lying[source]
            assert entry.is_evictable, f"I7: {_short(entry.key)} is moved while it is read or written"
            assert entry.size_bytes == size_bytes, "I7: other bytes are moved than an entry's"
            self.say(f"{_short(entry.key)} of {entry.tenant} is moved from {source} to {target}")
            self.done["moved"] += 1
            self.moved.append((entry, target))

    def _receive_entry(self, session: Session, put: Putting) -> None:
        """Receive some more bytes; after the last, publish or abort."""
        item, entry, target = put.items[put.position], put.entry, put.target
        assert entry is not None and target is not None
        left = entry.size_bytes - entry.written_bytes
        count = left if self.rng.random() < 0.6 else self.rng.randint(1, left)
        end = entry.written_bytes + count
        target[entry.written_bytes : end] = entry.payload[entry.written_bytes : end]
        entry.written_bytes = end
        if end < entry.size_bytes:
            self.say(f"{session} sends {_short(item.key)} up to byte {end}")
            return
        model, tenant = self.model, entry.tenant
        is_open = entry.state == "writing" and model.is_open(entry.partition)
        fits = model.used(tenant) <= model.quota(tenant).limit_bytes
        digest = checksum(target)
        put.target = put.entry = None
        put.batch.finish(put.position, digest, digest if item.is_sum_right else digest ^ 1)
        if item.is_sum_right and is_open and fits:
            entry.state = "readable"
            model.use(entry)
            model.counters[tenant].puts_stored += 1
            model.counters[tenant].put_bytes += entry.size_bytes
            assert self.sees(entry), "I6: acknowledged and not readable"
            self.done["stored"] += 1
            reason = ""
        else:
            model.live.remove(entry)
            if not item.is_sum_right:
                reason = "CHECKSUM_MISMATCH"
            else:
                reason = "QUOTA_EXCEEDED" if is_open else model.closed_because(entry.partition) or "UNEXPECTED"
                model.counters[tenant].refused(reason)
            model.forget()
            self.done[f"finished as {reason}"] += 1
        self.say(f"{session} sends the last of {_short(item.key)}: {reason or 'stored'}")
        self._answered(put, reason, None)

    def _answered(self, put: Putting, reason: str, refused_in: Partition | None) -> None:
        put.codes.append(int(_CODES[reason]) if reason else 0)
        put.position += 1
        if refused_in is not None:
            self.done[f"refused as {reason}"] += 1
            if reason != "ALREADY_EXISTS" and refused_in.tenant in self.model.counters:
                self.model.counters[refused_in.tenant].refused(reason)

    def _close_put(self, session: Session, put: Putting) -> None:
        put.batch.close()
        if put.entry is not None:
            self.model.live.remove(put.entry)
            self.model.forget()
        if len(put.items) > 1:
            for item in reversed(put.items):
                entry = self.model.find(session.partition, item.key)
                if entry is not None:
                    self.model.use(entry)

    # ---- gets

    def begin_get(self) -> bool:
        session = self._idle_session()
        if session is None:
            return False
        keys = self.rng.choices(self.keys, k=self.rng.randint(1, BATCH_MAX))
        peers = self.model.peers(session.partition)
        lent = [entry.key for entry in self.model.readable() if entry.partition in peers]
        if lent and self.rng.random() < 0.5:
            keys[: len(keys) // 2 + 1] = self.rng.choices(lent, k=len(keys) // 2 + 1)
        self._begin_get(session, keys)
        return True

    def read_nearly_all(self) -> bool:
        """A slow reader takes all but the coldest entries of its partition: little is left that could be evicted."""
        session = self._idle_session()
        pinned = sum(isinstance(other.busy, Getting) for other in self.sessions)
        if session is None or pinned >= PINNED_BATCHES_MAX:
            return False
        mine = [e for e in self.model.coldest_first(session.partition.tenant) if e.partition == session.partition]
        keys = [entry.key for entry in mine[self.rng.randint(0, 2) :]]
        if not keys:
            return False
        self._begin_get(session, keys)
        return True

    def _begin_get(self, session: Session, keys: list[BlockKey]) -> None:
        model, partition = self.model, session.partition
        rooms = [self.rng.choice([1, GRANULE_BYTES, 2**26, 2**26]) for _ in keys]
        entries: list[SimEntry | None] = model.serve(partition, keys)  # type: ignore[assignment]
        for entry in reversed(entries):
            if entry is not None:
                entry.pins += 1
                model.use(entry)
        is_loan = model.lend(partition, keys, entries)
        batch = GetBatch(self.blocks, partition, keys, rooms)
        for _ in batch.pin():
            pass
        reply = batch.reply()
        hits = [entry for entry in entries if entry is not None]
        if model.is_open(partition):
            counters = model.counters[partition.tenant]
            counters.get_hits += len(hits)
            counters.get_misses += len(entries) - len(hits)
            counters.get_bytes += sum(entry.size_bytes for entry in hits)
        expected = [
            StatusCode.NOT_FOUND if entry is None
            else StatusCode.FAILED_PRECONDITION if entry.size_bytes > room
            else StatusCode.OK
            for entry, room in zip(entries, rooms, strict=True)
        ]  # fmt: skip
        assert list(reply.codes) == expected, f"I2: a get answered {list(reply.codes)} instead of {expected}"
        sent = [entry for entry, code in zip(entries, expected, strict=True) if code is StatusCode.OK]
        assert [pin.checksum for _, pin in batch.hits] == [checksum(e.payload) for e in sent if e is not None]
        session.busy = Getting(batch, keys, entries, is_loan)
        self.done["hits"] += len(hits)
        self.done["hits of a peer"] += sum(is_loan)
        self.say(f"{session} begins to get {', '.join(map(_short, keys))}: {len(hits)} hits")

    def _advance_get(self, session: Session, get: Getting) -> None:
        if get.position == len(get.batch.hits):
            session.busy = None
            self._close_get(get)
            self.say(f"{session} ends its get")
            return
        index, pin = get.batch.hits[get.position]
        entry, view = get.entries[index], get.batch.view(pin)
        assert entry is not None
        left = len(view) - len(get.received)
        count = left if self.rng.random() < 0.4 else self.rng.randint(1, left)
        get.received += view[len(get.received) : len(get.received) + count]
        if len(get.received) < len(view):
            self.say(f"{session} reads {_short(entry.key)} up to byte {len(get.received)}")
            return
        received, get.received = bytes(get.received), bytearray()
        get.position += 1
        if checksum(received) == pin.checksum:
            assert received == entry.payload, "I2, I7: a reader got bytes that were never put there"
            self.say(f"{session} has all of {_short(entry.key)}")
            return
        assert entry.is_rotten, "I7: bytes changed under a reader"
        there = self.model.find(session.partition, entry.key)
        assert self.core.drop(session.partition, entry.key) == (there is not None)
        if there is not None:
            self.model.remove(there)
        self.done["dropped a corrupt entry"] += 1
        self.say(f"{session} finds {_short(entry.key)} corrupt and drops it")

    def _close_get(self, get: Getting) -> None:
        get.batch.close()
        for entry, is_loan in zip(get.entries, get.is_loan, strict=True):
            if entry is not None:
                if is_loan:
                    self.model.end_loan(entry)
                self.model.unpin(entry)

    # ---- the rest

    def advance(self) -> bool:
        """One busy client moves on."""
        busy = [session for session in self.sessions if session.busy is not None]
        if not busy:
            return False
        session = self.rng.choice(busy)
        if isinstance(session.busy, Putting):
            self._advance_put(session, session.busy)
        elif session.busy is not None:
            self._advance_get(session, session.busy)
        return True

    def die(self) -> bool:
        """A client is gone, whatever it was doing."""
        if not self.sessions:
            return False
        closed = [session for session in self.sessions if not self.model.is_open(session.partition)]
        session = self.rng.choice(closed if closed and self.rng.random() < 0.8 else self.sessions)
        doing = type(session.busy).__name__.lower() if session.busy else "idle"
        self.say(f"{session} dies while {doing}")
        self.done[f"died while {doing}"] += 1
        self.end(session)
        return True

    def end(self, session: Session) -> None:
        self.sessions.remove(session)
        if isinstance(session.busy, Putting):
            self._close_put(session, session.busy)
        elif session.busy is not None:
            self._close_get(session.busy)

    def lookup(self) -> bool:
        """Ask for every key there is: that touches and holds nothing."""
        if not self.sessions:
            return False
        session = self.rng.choice(self.sessions)
        prefix, found = self.core.lookup(session.partition, self.keys)
        expected = bytes(self.model.find(session.partition, key) is not None for key in self.keys)
        assert found == expected, "I2: a look-up found something else than what is there"
        assert prefix == (expected.find(0) if 0 in expected else len(expected))
        _, shared = self.core.lookup(session.partition, self.keys, self.now_ns)
        expected = bytes(self.model.find_shared(session.partition, key) is not None for key in self.keys)
        assert shared == expected, "I2: a look-up found something else than what the group has"
        self.say(f"{session} looks up every key: {sum(found)} there")
        return True

    def delete(self) -> bool:
        session = self._idle_session()
        if session is None:
            return False
        wanted = self.rng.choices(self.keys, k=self.rng.randint(1, BATCH_MAX))
        there = dict.fromkeys(e for key in wanted if (e := self.model.find(session.partition, key)))
        deleted = self.core.delete(session.partition, wanted)
        assert deleted == len(there), f"I2: {deleted} entries deleted instead of {len(there)}"
        for entry in there:
            self.model.remove(entry)
        self.say(f"{session} deletes {', '.join(map(_short, wanted))}: {deleted} were there")
        return True

    def work_off(self) -> bool:
        """The background does what policies have left to do, some entries at a time."""
        if not self.core.has_arrears:
            return False
        budget = self.rng.choice([1, 2, 40])
        visible, before = self.model.readable(), len(self.model.live)
        self.core.work_off(self.now_ns, budget * GRANULE_BYTES)
        self.follow(visible)
        went = before - len(self.model.live)
        assert went <= budget, "more was done in one turn than it was to be"
        self.done["worked off"] += went
        self.say(f"work off: {went} entries go")
        return True

    def settle(self) -> None:
        for _ in range(2 * self.shape.capacity_bytes // GRANULE_BYTES):
            if not self.work_off():
                return
        raise AssertionError("I4: what policies have left to do never ends")

    def follow(self, visible: Collection[SimEntry] = ()) -> None:
        """Tell the model how far the core is with what policies left to do; ``visible`` could be read before."""
        pool = self.core._pool
        purged = {(index.partition, key) for index in pool.purged for key in index.entries}
        lagging = [owner.tenant for owner in pool.above_limit]
        if not self.model.is_lazy:
            assert not purged and not lagging, "I4: a small slice of work was left to do"
            return
        self.model.follow(purged, lagging)
        self.model.judge_shrink([entry for entry in visible if entry.state == "readable" and not self.sees(entry)])
        self.model.forget()

    def trim(self) -> bool:
        """The background takes tenants back to their soft marks, some bytes at a time."""
        if self.core.has_arrears:
            return False  # it comes after what policies have left to do
        budget_bytes = self.rng.choice([1, 2, 40]) * GRANULE_BYTES
        visible = self.model.readable()
        evicted_bytes = self.core.trim(self.now_ns, budget_bytes)
        lost = [entry for entry in visible if not self.sees(entry)]
        assert evicted_bytes == sum(entry.extent_bytes for entry in lost), "I8: trimmed and told otherwise"
        assert evicted_bytes <= budget_bytes or len(lost) == 1, "trimmed by more than it was to be"
        self.model.judge_trim(list(lost), SOFT_MARK_PERCENT, is_complete=evicted_bytes == 0)
        self.done["trimmed"] += len(lost)
        self.say(f"trim: {len(lost)} entries go")
        return True

    def rot(self) -> bool:
        """A bit flips in the memory of an entry."""
        whole = self.model.readable()
        if not whole:
            return False
        entry = self.rng.choice(whole)
        at = entry.offset + self.rng.randrange(entry.size_bytes)
        self.arena.view(at, 1)[0] ^= 1 << self.rng.randrange(8)
        entry.is_rotten = True
        self.say(f"a bit of {_short(entry.key)} of {name_of(entry.partition)} flips")
        return True

    # ---- helpers

    def sees(self, entry: SimEntry) -> bool:
        """Whether the core still has a readable entry, in a suspended tenant's partition too."""
        owner = self.core._pool.tenants.get(entry.tenant)
        index = owner and owner.partitions.get(entry.partition)
        found = index.entries.get(entry.key) if index else None
        return found is not None and found.offset == dict(self.moved).get(entry, entry.offset)

    def _draw_size(self, partition: Partition) -> int:
        """A length of this world, mostly one that the namespace takes."""
        maximum_bytes = self.shape.block_bytes[partition.namespace]
        fitting = [size for size in self.shape.sizes_bytes if size <= maximum_bytes]
        return self.rng.choice(fitting if fitting and self.rng.random() < 0.95 else self.shape.sizes_bytes)

    def _offset_of(self, partition: Partition, key: BlockKey) -> int:
        return self.core._pool.open[partition].writing[key].offset

    def _idle_session(self) -> Session | None:
        idle = [session for session in self.sessions if session.busy is None]
        return self.rng.choice(idle) if idle else None


def _payload(partition: Partition, key: BlockKey, number: int, size_bytes: int) -> bytes:
    """Bytes that no other entry has at any place: whose they are can be seen from each 32 of them."""
    tag = hashlib.blake2b(f"{partition} {key.hex()} {number}".encode(), digest_size=32).digest()
    return (tag * (size_bytes // 32 + 1))[:size_bytes]


def _short(key: BlockKey) -> str:
    return f"k{int.from_bytes(key, 'big')}"
