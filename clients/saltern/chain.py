"""The blocks of one prompt, head first, by the engine's own hashes: three calls are all that an engine needs.

::

    chain = client.chain(block_hashes)
    found = chain.lookup()                                       # found.prefix blocks can be read
    chain.get_into(range(found.prefix), buffers)                 # [Hit | Miss | Error]
    chain.put_many([(position, block), ...])                     # [Stored | AlreadyStored | Refused | Error]

Where the blocks are (:mod:`saltern.placement`) and under which salt epoch they were stored is found out here: at most
two nodes are asked, at once; while an older epoch is readable, reads fall back to it and writes go to the newest. A
block that one node cannot give is taken from the other one within the deadline (I10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from saltern.arguments import byte_view, room_view
from saltern.chain_plan import Sighting, Source, copies_wanted, plan_reads, plan_writes
from saltern.deadline import Deadline, DeadlineMs
from saltern.entry_calls import EntryCalls, Failures, first_failure
from saltern.epoch_keys import EpochKeys
from saltern.errors import (
    DeadlineExceededError,
    EntryTooLargeError,
    InvalidArgumentError,
    SalternError,
    UnavailableError,
)
from saltern.grant import EpochSalt, Grant
from saltern.keys import BlockHash, BlockKey
from saltern.placement import Pair, Placement
from saltern.results import (
    AlreadyStored,
    ChainLookup,
    Deleted,
    GetResult,
    Hit,
    Miss,
    PutResult,
    Refused,
    Stored,
    get_result,
    put_result,
)
from saltern.routing import EPOCH_NOT_AVAILABLE, Target
from saltern.transport.slots import GetSlot, PutSlot, Room, Taker, buffer_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Of the time that is left, for a node that another could stand in for.
_PART_WITH_ANOTHER = 0.5
#: One attempt, and one more under the epoch that a new exchange gave.
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class _View:
    """What is known of a chain: the grant that it was asked under, its nodes, and what they were seen to hold."""

    grant: Grant
    placement: Placement
    pair: Pair
    sighting: Sighting

    @property
    def writable(self) -> list[str]:
        """Nodes that take new blocks and have answered, best first; one that has not is asked if there is no other."""
        node_ids = [node.node_id for node in self.pair.writable]
        return [node_id for node_id in node_ids if node_id not in self.sighting.failed] or node_ids[:1]

    @property
    def is_simple(self) -> bool:
        """Whether there is one node and one epoch, so that there is nothing to find out before reading or writing."""
        return len(self.pair.asked) == 1 and self.grant.older_epoch is None


class Chain:
    """One prompt's blocks; made by :meth:`saltern.Client.chain`. Used by one thread at a time, and not for long."""

    def __init__(
        self,
        calls: EntryCalls,
        keys: EpochKeys,
        start_deadline: Callable[[DeadlineMs], Deadline],
        block_hashes: Iterable[BlockHash],
        *,
        placement_hint: str,
        reused_blocks: int | None,
    ) -> None:
        self._calls = calls
        self._router = calls.router
        self._epoch_keys = keys
        self._start_deadline = start_deadline
        self._hashes = list(block_hashes)
        self._hint = placement_hint
        self._reused_blocks = reused_blocks
        self._view: _View | None = None
        self._keys: dict[EpochSalt, dict[int, BlockKey]] = {}
        keys.check(self._router.grant, self._hashes)

    def __len__(self) -> int:
        return len(self._hashes)

    def __repr__(self) -> str:
        return f"Chain({len(self)} blocks)"

    def lookup(self, *, deadline_ms: DeadlineMs = None) -> ChainLookup:
        """Find out how far the chain can be read, without touching its entries."""
        try:
            view = self._look(self._start_deadline(deadline_ms))
        except SalternError as error:
            return ChainLookup(0, (), error)
        wanted = copies_wanted(view.sighting, view.grant.epoch, view.writable, twice=self._twice(view))
        return ChainLookup(view.sighting.prefix, wanted, view.sighting.error)

    def get_many(self, positions: Iterable[int], *, deadline_ms: DeadlineMs = None) -> list[GetResult]:
        """Read blocks into memory of their own; returns one result for each position, in order.

        Raises:
            InvalidArgumentError: a position is outside the chain.
        """
        return self._get([(position, None) for position in positions], self._start_deadline(deadline_ms))

    def get_into(
        self, positions: Iterable[int], buffers: Iterable[Buffer], *, deadline_ms: DeadlineMs = None
    ) -> list[GetResult]:
        """Read block ``positions[i]`` into ``buffers[i]``; a Hit's payload is the filled part of it.

        Raises:
            InvalidArgumentError: a position is outside the chain or comes twice, a buffer is read-only, empty or not
                contiguous, or the numbers of positions and buffers differ.
        """
        wanted, views = list(positions), [room_view(buffer) for buffer in buffers]
        if len(wanted) != len(views):
            raise InvalidArgumentError(f"{len(wanted)} positions but {len(views)} buffers", reason="INVALID_ARGUMENT")
        return self._get(list(zip(wanted, views, strict=True)), self._start_deadline(deadline_ms))

    def get_each(
        self,
        positions: Iterable[int],
        take: Callable[[int, memoryview], None],
        *,
        room_bytes: int,
        deadline_ms: DeadlineMs = None,
    ) -> list[GetResult]:
        """Read blocks, lending each to ``take(position, payload)`` as soon as its checksum has matched (I7).

        For whoever copies the bytes on in any case: they are in the core's cache still, and the next ones are on
        their way. ``payload`` is the transport's own memory and is taken back when ``take`` returns. ``take`` is called
        once for each Hit (whose own payload is empty), in any order, from one thread for each node, and never after
        this returns. It must not raise: that would end the call while other threads still call it.

        Args:
            room_bytes: of each block; a longer one is a Miss with cause EntryTooLargeError.

        Raises:
            InvalidArgumentError: a position is outside the chain or comes twice.
        """
        takers = [(position, Taker(partial(take, position), room_bytes)) for position in positions]
        return self._get(takers, self._start_deadline(deadline_ms))

    def put_many(self, items: Iterable[tuple[int, Buffer]], *, deadline_ms: DeadlineMs = None) -> list[PutResult]:
        """Store blocks, one copy or two as the rule says; returns one result for each item, in order.

        A block with two copies is Stored as soon as one of them is readable (I6).

        Args:
            items: (position in the chain, bytes-like payload of 1 byte to the namespace's ``block_bytes``), the first
                positions first: heads then outlive tails.

        Raises:
            InvalidArgumentError: a position is outside the chain or comes twice, a payload is empty or not contiguous.
        """
        payloads = {position: byte_view(payload) for position, payload in self._checked(list(items))}
        deadline = self._start_deadline(deadline_ms)
        results: dict[int, PutResult] = {}
        try:
            for attempt in range(_ATTEMPTS):
                pending = [position for position in payloads if position not in results]
                view = self._view_for_put(pending, deadline)
                stale = self._put(view, pending, payloads, results, deadline)
                if not (stale and attempt == 0 and self._router.newer(view.grant, deadline)):
                    break
                self._view = None
                for position in stale:
                    del results[position]
        except SalternError as error:
            for position in payloads:
                results.setdefault(position, put_result(error))
        return [results[position] for position in payloads]

    def delete(self, *, deadline_ms: DeadlineMs = None) -> Deleted:
        """Delete the chain's blocks on every node and under every readable epoch; ``count`` counts each copy.

        Heads that other chains share go with it.
        """
        deadline = self._start_deadline(deadline_ms)
        try:
            grant = self._router.current(deadline)
            targets = [
                Source(node.node_id, epoch)
                for node in self._router.placement(grant).nodes
                for epoch in (grant.epoch, grant.older_epoch)
                if epoch is not None
            ]
            count, failures = self._calls.delete(
                {target: self._keys_at(range(len(self)), grant, target.epoch) for target in targets}, deadline
            )
        except SalternError as error:
            return Deleted(0, error)
        self._view = None
        return Deleted(count, first_failure(failures))

    # ---- looking -------------------------------------------------------------------------------------------------

    def _look(self, deadline: Deadline) -> _View:
        """Ask the chain's nodes what they have; keeps and returns the answer."""
        for attempt in range(_ATTEMPTS):
            view = self._blank_view(deadline)
            grant, everything = view.grant, range(len(self))
            failures = self._ask(view, grant.epoch, everything, deadline)
            outdated = any(error.reason == EPOCH_NOT_AVAILABLE for error in failures.values())
            if not (outdated and attempt == 0 and self._router.newer(grant, deadline)):
                break
        view.sighting.failed = {node_id: error for (node_id, _), error in failures.items()}
        if grant.older_epoch is not None and view.sighting.prefix < len(self):
            anywhere = view.sighting.anywhere()
            absent = [position for position in everything if not anywhere[position]]
            ended = self._ask(view, grant.older_epoch, absent, deadline)
            if any(error.reason == EPOCH_NOT_AVAILABLE for error in ended.values()):
                self._router.renew_soon()  # purged there already: that is an answer, and need not be asked for long
        if self._reused_blocks is None:
            self._reused_blocks = view.sighting.prefix
        self._view = view
        return view

    def _blank_view(self, deadline: Deadline) -> _View:
        grant = self._router.current(deadline)
        placement = self._router.placement(grant)
        pair = placement.pair_of(placement.anchor_of(self._hashes, self._hint)) if self._hashes else Pair(())
        return _View(grant, placement, pair, Sighting(len(self)))

    def _ask(self, view: _View, epoch: int, positions: Sequence[int], deadline: Deadline) -> Failures:
        """Note which of these positions each node of the pair has under ``epoch``."""
        wanted = self._keys_at(positions, view.grant, epoch)
        sources = [Source(node.node_id, epoch) for node in view.pair.asked]
        found, failures = self._calls.lookup(dict.fromkeys(sources, wanted), deadline)
        for source in sources:
            present = [position for position, there in zip(positions, found[source], strict=True) if there]
            view.sighting.note(source, present, present=True)
        return failures

    def _view_for(self, positions: Sequence[int], deadline: Deadline) -> _View:
        """What was seen last, if that is enough to read these positions by; else a new look."""
        view = self._view or self._blank_view(deadline)
        if view.is_simple:
            view.sighting.note(Source(view.pair.asked[0].node_id, view.grant.epoch), positions, present=True)
            return view
        anywhere = view.sighting.anywhere()
        if all(anywhere[position] for position in positions):
            return view
        return self._look(deadline.share(_PART_WITH_ANOTHER))

    def _view_for_put(self, positions: Sequence[int], deadline: Deadline) -> _View:
        """What was seen last, if every block is to be sent by that; what is answered for unsent is looked at anew."""
        grant, view = self._router.current(deadline), self._view
        if view is not None and (grant.epoch, grant.nodes) == (view.grant.epoch, view.grant.nodes):
            planned = plan_writes(view.sighting, positions, grant.epoch, view.writable, twice=self._twice(view))
            if len({position for some in planned.values() for position in some}) == len(positions):
                return view
        blank = self._blank_view(deadline)
        return blank if blank.is_simple else self._look(deadline.share(_PART_WITH_ANOTHER))

    def _twice(self, view: _View) -> bool:
        """Whether the chain was found again with its whole head, so that it deserves a second copy."""
        return (self._reused_blocks or 0) >= view.placement.head_blocks

    def _keys_at(self, positions: Sequence[int], grant: Grant, epoch: int) -> list[BlockKey]:
        """The keys of these positions; each is derived once: a long chain may be stored a block at a time."""
        salt = next((salt for salt in reversed(grant.salts) if salt.epoch == epoch), None)
        known = {} if salt is None else self._keys.setdefault(salt, {})
        unknown = [position for position in positions if position not in known]
        derived = self._epoch_keys.derive(grant, [self._hashes[position] for position in unknown], epoch=epoch)
        known.update(zip(unknown, derived, strict=True))
        return [known[position] for position in positions]

    def _checked(self, items: list[tuple[int, Buffer]]) -> list[tuple[int, Buffer]]:
        self._check_positions([position for position, _ in items])
        return items

    def _check_positions(self, positions: Sequence[int]) -> None:
        if not all(0 <= position < len(self) for position in positions):
            raise InvalidArgumentError(f"a position is outside the chain's {len(self)} blocks", reason="OUT_OF_RANGE")
        if len(set(positions)) < len(positions):
            raise InvalidArgumentError("a position comes twice", reason="INVALID_ARGUMENT")

    # ---- reading -------------------------------------------------------------------------------------------------

    def _get(self, wanted: Sequence[tuple[int, Room]], deadline: Deadline) -> list[GetResult]:
        positions = [position for position, _ in wanted]
        self._check_positions(positions)
        if not wanted:
            return []
        rooms = dict(wanted)
        results: dict[int, GetResult] = {}
        try:
            for attempt in range(_ATTEMPTS):
                view = self._view_for(positions, deadline)
                for _ in view.pair.asked:  # each node has its turn
                    pending = [position for position in positions if _may_be_elsewhere(results.get(position))]
                    if not self._read(view, pending, rooms, results, deadline):
                        break
                stale = [position for position, result in results.items() if _is_of_no_epoch(result)]
                if not (stale and attempt == 0 and self._router.newer(view.grant, deadline)):
                    break
                self._view = None
                for position in stale:
                    del results[position]
        except SalternError as error:
            return [results.get(position) or get_result(error) for position in positions]
        nowhere = get_result(view.sighting.error) if view.sighting.error is not None else Miss()
        return [results.get(position) or nowhere for position in positions]

    def _read(
        self,
        view: _View,
        positions: list[int],
        rooms: Mapping[int, Room],
        results: dict[int, GetResult],
        deadline: Deadline,
    ) -> bool:
        """Read what was seen somewhere, each block from one source; returns whether there was any."""
        if results:
            # What a late node may still write to stays missed (I7).
            doubtful = self._calls.in_doubt([buffer_of(rooms[position]) for position in positions])
            positions = [position for position, late in zip(positions, doubtful, strict=True) if not late]
        reads = plan_reads(view.sighting, positions, self._router.load)
        if not reads:
            return False
        slots: dict[Target, list[GetSlot]] = {}
        for source, planned in reads.items():
            keys = self._keys_at(planned, view.grant, source.epoch)
            slots[source] = [GetSlot(key, rooms[position]) for key, position in zip(keys, planned, strict=True)]
        another = len(view.pair.asked) > 1 and len(view.sighting.found) > 1 and not results
        self._calls.get(slots, deadline.share(_PART_WITH_ANOTHER) if another else deadline)
        for source, planned in reads.items():
            hits = 0
            for position, slot in zip(planned, slots[source], strict=True):
                result = slot.answer
                hits += isinstance(result, Hit)
                if not isinstance(result, Hit):
                    view.sighting.note(source, [position], present=False)
                # Why a node could not be asked says more than that another one has nothing.
                if position not in results or result != Miss():
                    results[position] = result
            self._router.load.note(source.node_id, hits)
        return True

    # ---- writing -------------------------------------------------------------------------------------------------

    def _put(
        self,
        view: _View,
        positions: Sequence[int],
        payloads: Mapping[int, memoryview],
        results: dict[int, PutResult],
        deadline: Deadline,
    ) -> list[int]:
        """Store blocks; returns the positions that were refused because the epoch is none any more."""
        epoch = view.grant.epoch
        keys = dict(zip(positions, self._keys_at(positions, view.grant, epoch), strict=True))
        writable = view.writable
        pending = list(positions)
        while pending and writable:
            writes = plan_writes(view.sighting, pending, epoch, writable, twice=self._twice(view))
            slots: dict[Target, list[PutSlot]] = {
                Source(node_id, epoch): [PutSlot(keys[position], payloads[position]) for position in planned]
                for node_id, planned in writes.items()
            }
            self._calls.put(slots, deadline)
            unreachable = set()
            for (node_id, planned), batch in zip(writes.items(), slots.values(), strict=True):
                for position, slot in zip(planned, batch, strict=True):
                    stored = slot.answer
                    results[position] = _better(results.get(position), stored)
                    if isinstance(stored, Stored | AlreadyStored):
                        view.sighting.note(Source(node_id, epoch), [position], present=True)
                    elif isinstance(stored, Refused) and _is_absence(stored.error):
                        unreachable.add(node_id)
            for position in pending:
                results.setdefault(position, AlreadyStored())
            # What only a node that is gone was to have goes to the other one.
            writable = [node_id for node_id in writable if node_id not in unreachable]
            pending = [p for p in pending if isinstance(results[p], Refused)] if unreachable else []
        refused = {p: result for p in positions if isinstance(result := results.get(p), Refused)}
        return [p for p, result in refused.items() if result.error.reason == EPOCH_NOT_AVAILABLE]


def _may_be_elsewhere(result: GetResult | None) -> bool:
    """Whether another copy of the block might do better."""
    return result is None or (isinstance(result, Miss) and not isinstance(result.cause, EntryTooLargeError))


def _is_of_no_epoch(result: GetResult) -> bool:
    return isinstance(result, Miss) and result.cause is not None and result.cause.reason == EPOCH_NOT_AVAILABLE


def _is_absence(error: SalternError) -> bool:
    return isinstance(error, UnavailableError | DeadlineExceededError)


def _better(known: PutResult | None, result: PutResult) -> PutResult:
    """Of two copies' results the one that says more good: a block is stored where one copy is readable."""
    order = (Stored, AlreadyStored, Refused)
    rank = {kind: number for number, kind in enumerate(order)}
    if known is None:
        return result
    return min(known, result, key=lambda one: rank.get(type(one), len(order)))
