"""Work on entries at one or several nodes at once: slots and keys for each node in, results in the slots.

What is here knows nothing of chains: who asks which node is decided by :mod:`saltern.client` for plain keys and by
:mod:`saltern.chain` for chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from saltern.deadline import Deadline
from saltern.errors import DataLossError, EntryTooLargeError, InternalError, SalternError
from saltern.keys import BlockKey
from saltern.results import Hit, Miss, Refused, get_result, put_result
from saltern.routing import Operation, Router, Target
from saltern.transport.registry import in_doubt_error
from saltern.transport.session import Session, split_requests
from saltern.transport.slots import GetSlot, PutSlot
from saltern.wire import KEYS_MAX

SlotT = TypeVar("SlotT", GetSlot, PutSlot)
#: What to ask or to give which node.
KeysByTarget: TypeAlias = Mapping[Target, Sequence[BlockKey]]
GetsByTarget: TypeAlias = Mapping[Target, Sequence[GetSlot]]
PutsByTarget: TypeAlias = Mapping[Target, Sequence[PutSlot]]
Failures: TypeAlias = dict[Target, SalternError]


class EntryCalls:
    """Gets, puts, lookups and deletes of one client. Thread-safe; never raises for what a node or the network does."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._entry_bytes_seen = 0

    def put(self, puts: PutsByTarget, deadline: Deadline) -> None:
        """Store entries; fills in ``result`` of every slot."""
        slots = _all_of(puts)
        for slot, doubtful in zip(slots, self.in_doubt([slot.view for slot in slots]), strict=True):
            if doubtful:
                slot.result = Refused(in_doubt_error())

        def storing(batch: Sequence[PutSlot]) -> Operation:
            def operation(session: Session, deadline: Deadline) -> None:
                for slot in batch:
                    if slot.view.nbytes > session.entry_max_bytes:
                        slot.result = Refused(_too_large(slot.view.nbytes, session.entry_max_bytes))
                session.put([slot for slot in batch if slot.result is None], deadline)

            return operation

        work = [
            (target, storing(batch)) for target, batch in puts.items() if any(slot.result is None for slot in batch)
        ]
        failures = self._run(work, deadline)
        for target, batch in puts.items():
            for slot in batch:
                if slot.result is None:
                    slot.result = put_result(_cause(failures.get(target)))

    def get(self, gets: GetsByTarget, deadline: Deadline) -> None:
        """Read entries; fills in ``result`` of every slot."""
        slots = _all_of(gets)
        for slot, doubtful in zip(slots, self.in_doubt([slot.buffer for slot in slots]), strict=True):
            if doubtful:
                slot.result = Miss(in_doubt_error())
        work = [
            (target, self._reading(batch))
            for target, batch in gets.items()
            if any(slot.result is None for slot in batch)
        ]
        failures = self._run(work, deadline)
        self._note_sizes(slots)
        for target, batch in gets.items():
            for slot in batch:
                if slot.result is None:
                    slot.result = get_result(_cause(failures.get(target)))
        self._delete_damaged(gets, deadline)

    def in_doubt(self, buffers: Sequence[memoryview | None]) -> list[bool]:
        """Whether each piece of memory is such that a late node may still write to it (I7)."""
        return [place is not None for place in self.router.registry.locate_doubtful(buffers)]

    def lookup(self, keys: KeysByTarget, deadline: Deadline) -> tuple[dict[Target, bytearray], Failures]:
        """Ask each node which of its keys are there, without touching them.

        Returns:
            For each target one byte, 0 or 1, for each key, 0 for those that could not be asked for; and who failed.
        """
        found = {target: bytearray() for target in keys}

        def looking(wanted: Sequence[BlockKey], row: bytearray) -> Operation:
            def operation(session: Session, deadline: Deadline) -> None:
                while len(row) < len(wanted):
                    row.extend(session.lookup(wanted[len(row) : len(row) + KEYS_MAX], deadline))

            return operation

        work = [(target, looking(wanted, found[target])) for target, wanted in keys.items() if wanted]
        failures = self._run(work, deadline)
        for target in failures:
            found[target].extend(bytes(len(keys[target]) - len(found[target])))
        return found, failures

    def delete(self, keys: KeysByTarget, deadline: Deadline) -> tuple[int, Failures]:
        """Delete entries; returns how many were there, each copy counted, as far as nodes have answered."""
        counts: list[int] = []

        def deleting(requests: list[Sequence[BlockKey]]) -> Operation:
            def operation(session: Session, deadline: Deadline) -> None:
                while requests:
                    counts.append(session.delete(requests[0], deadline))
                    requests.pop(0)

            return operation

        work = [(target, deleting(list(split_requests(wanted)))) for target, wanted in keys.items() if wanted]
        failures = self._run(work, deadline)
        return sum(counts), failures

    # ---- inside --------------------------------------------------------------------------------------------------

    def _run(self, work: Sequence[tuple[Target, Operation]], deadline: Deadline) -> Failures:
        if len(work) == 1:
            target, operation = work[0]
            error = self.router.run(target, operation, deadline)
            return {target: error} if error is not None else {}
        errors = self.router.run_all(work, deadline)
        return {target: error for (target, _), error in zip(work, errors, strict=True) if error is not None}

    def _reading(self, batch: Sequence[GetSlot]) -> Operation:
        def operation(session: Session, deadline: Deadline) -> None:
            # Rooms decide how many entries share a frame. Entries of a namespace are mostly of one size, often far
            # below its block_bytes: what came last is the guess, and the few that are longer are asked for again.
            limit_bytes = session.entry_max_bytes
            guess_bytes = min(self._entry_bytes_seen or limit_bytes, limit_bytes)
            for slot in batch:
                if slot.taker is not None:
                    slot.room_bytes = min(slot.taker.room_bytes, limit_bytes)
                    continue
                slot.room_is_guess = slot.buffer is None and guess_bytes < limit_bytes
                slot.room_bytes = guess_bytes if slot.buffer is None else min(slot.buffer.nbytes, limit_bytes)
            session.get([slot for slot in batch if slot.result is None], deadline)
            longer = [slot for slot in batch if slot.result is None]
            for slot in longer:
                slot.room_is_guess, slot.room_bytes = False, limit_bytes
            if longer:
                session.get(longer, deadline)

        return operation

    def _delete_damaged(self, gets: GetsByTarget, deadline: Deadline) -> None:
        """Delete what failed its checksum, so that the block can be computed and stored anew (I7).

        Best effort: nodes do not sum DRAM on every get, and keep the first bytes of a key. A reader may not delete.
        """
        for target, batch in gets.items():
            damaged = [slot.key for slot in batch if isinstance(slot.result, Miss) and _is_damaged(slot.result.cause)]
            if damaged:
                self.delete({target: damaged}, deadline)

    def _note_sizes(self, slots: Sequence[GetSlot]) -> None:
        """Remember how long entries are, for the next guess; a batch of much shorter ones lowers it."""
        longest_bytes = max((slot.result.size_bytes for slot in slots if isinstance(slot.result, Hit)), default=0)
        if longest_bytes > self._entry_bytes_seen or 0 < longest_bytes < self._entry_bytes_seen // 4:
            self._entry_bytes_seen = longest_bytes


def _all_of(batches: Mapping[Target, Sequence[SlotT]]) -> Sequence[SlotT]:
    """The slots of every node, in one sequence."""
    if len(batches) == 1:
        [slots] = batches.values()
        return slots
    return [slot for batch in batches.values() for slot in batch]


def first_failure(failures: Failures) -> SalternError | None:
    """Why an answer may be incomplete, or None."""
    return next(iter(failures.values()), None)


def _cause(error: SalternError | None) -> SalternError:
    """Why a slot has no result."""
    return error or InternalError("the transport left an entry without a result")


def _too_large(size_bytes: int, limit_bytes: int) -> EntryTooLargeError:
    return EntryTooLargeError(
        f"an entry of {size_bytes} bytes is above the limit of {limit_bytes}",
        hint="store smaller blocks",
        metadata={"limit_bytes": str(limit_bytes)},
    )


def _is_damaged(cause: SalternError | None) -> bool:
    """Whether an entry failed the check on this side; one that failed on the node's is gone already."""
    return isinstance(cause, DataLossError) and cause.reason == DataLossError.default_reason
