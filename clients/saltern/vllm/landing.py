"""From the transport into the engine's pages: how the entries of a load get where they belong.

:class:`HotLanding` is for pages in host memory: each entry is copied from the transport's memory straight into its
pages by the thread that has received it and compared its checksum, while it is in that core's cache and the node sends
the next one. :class:`StagedLanding` is for pages on a device, which copies well only from memory that was pinned:
entries are read into the staging area, and while a batch of them is copied on the next one comes.

In both a page is written only with bytes whose checksum has matched (I7).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from saltern.results import Hit
from saltern.transport.memory import address_of
from saltern.vllm.pages import Move, Pages
from saltern.vllm.staging import StagingArea
from saltern.vllm.stats import Tally

if TYPE_CHECKING:
    from saltern.chain import Chain

logger = logging.getLogger(__name__)

#: Of one get, which a deadline is for; the node sends the next frame meanwhile, so that only its end is waited for.
_HOT_BATCH_BYTES: Final = 64 * 1024 * 1024
#: Of one get: enough for the transport's full speed, little enough that copying overlaps with the next.
_STAGED_BATCH_BYTES: Final = 16 * 1024 * 1024
#: Waiting for room to load into, in load deadlines: another load has it for one deadline at most.
_ROOM_DEADLINES: Final = 2.0


class Wanted(NamedTuple):
    """One entry to load: which block of the job, where it is in the chain, and which page it is for."""

    block: int
    position: int
    group: int
    block_id: int


class Landing(Protocol):
    """Brings entries into pages. Thread-safe."""

    def land(self, chain: Chain, wanted: Sequence[Wanted]) -> int:
        """Load entries in order; returns how many are in their pages whole, from the first one on.

        Raises:
            SalternError: the client was closed.
        """

    def close(self) -> None:
        """Let go of threads; no load is in flight any more."""


class HotLanding:
    """Straight from the transport into pages in host memory.

    Args:
        deadline_ms: of each batch.
    """

    def __init__(self, pages: Pages, tally: Tally, *, deadline_ms: float) -> None:
        self._pages = pages
        self._tally = tally
        self._deadline_ms = deadline_ms
        self._room_bytes = max(pages.entry_bytes)
        self._batch_entries = max(1, _HOT_BATCH_BYTES // self._room_bytes)

    def land(self, chain: Chain, wanted: Sequence[Wanted]) -> int:
        came = 0
        while came < len(wanted):
            batch = wanted[came : came + self._batch_entries]
            landed = self._land_batch(chain, batch)
            came += landed
            if landed < len(batch):
                break
        return came

    def close(self) -> None:
        """The threads are the loads' own."""

    def _land_batch(self, chain: Chain, batch: Sequence[Wanted]) -> int:
        by_position = {one.position: one for one in batch}
        landed: set[int] = set()

        def take(position: int, payload: memoryview) -> None:
            one = by_position[position]
            if payload.nbytes != self._pages.entry_bytes[one.group]:
                return  # of another layout
            try:
                self._pages.copy_in([Move(one.group, one.block_id, address_of(payload))])
            except Exception:
                logger.exception("block not copied in")  # what `take` raises would end the call around it
            else:
                landed.add(position)

        chain.get_each(by_position, take, room_bytes=self._room_bytes, deadline_ms=self._deadline_ms)
        whole = [one.position in landed for one in batch]
        came = whole.index(False) if False in whole else len(batch)
        self._tally.add(load_bytes=sum(self._pages.entry_bytes[one.group] for one in batch[:came]))
        return came


class StagedLanding:
    """Through a staging area that the pages' device was told of.

    Args:
        deadline_ms: of each batch.
        threads: loads at the same time.
    """

    def __init__(self, pages: Pages, staging: StagingArea, tally: Tally, *, deadline_ms: float, threads: int) -> None:
        self._pages = pages
        self._staging = staging
        self._tally = tally
        self._deadline_ms = deadline_ms
        self._batch_entries = max(1, _STAGED_BATCH_BYTES // max(pages.entry_bytes))
        self._copiers = ThreadPoolExecutor(max(1, threads), thread_name_prefix="saltern-copy")

    def land(self, chain: Chain, wanted: Sequence[Wanted]) -> int:
        came, copies = 0, []
        try:
            while came < len(wanted):
                batch = self._staged(wanted[came : came + self._batch_entries])
                moves = self._get(chain, batch)
                came += len(moves)
                if came == len(wanted) or not moves:
                    self._copy_in(moves, batch)
                else:
                    copies.append(self._copiers.submit(self._copy_in, moves, batch))
                if len(moves) < len(batch) or not batch:
                    break
        finally:
            wait(copies)
        for copy in copies:
            copy.result()
        return came

    def close(self) -> None:
        self._copiers.shutdown(wait=True)

    def _staged(self, wanted: Sequence[Wanted]) -> list[tuple[Wanted, int]]:
        """Entries with a slot for each, as many as there is room for; none if none comes free in time."""
        slots = self._staging.take(len(wanted), wait_s=_ROOM_DEADLINES * self._deadline_ms / 1000)
        return list(zip(wanted, slots, strict=False))

    def _get(self, chain: Chain, batch: list[tuple[Wanted, int]]) -> list[Move]:
        """Read a batch into its slots; returns where to copy those that came, up to the first that did not."""
        entry_bytes = self._pages.entry_bytes
        try:
            views = [self._staging.view(slot, entry_bytes[one.group]) for one, slot in batch]
            results = chain.get_into([one.position for one, _ in batch], views, deadline_ms=self._deadline_ms)
        except BaseException:
            self._staging.give_back([slot for _, slot in batch])
            raise
        moves = []
        for (one, slot), result in zip(batch, results, strict=True):
            # The SDK has compared the checksum (I7); another length is of another layout.
            if not isinstance(result, Hit) or result.size_bytes != entry_bytes[one.group]:
                break
            moves.append(Move(one.group, one.block_id, self._staging.address_of(slot)))
        return moves

    def _copy_in(self, moves: list[Move], batch: list[tuple[Wanted, int]]) -> None:
        try:
            self._pages.copy_in(moves)
            self._tally.add(load_bytes=sum(self._pages.entry_bytes[move.group] for move in moves))
        finally:
            self._staging.give_back([slot for _, slot in batch])
