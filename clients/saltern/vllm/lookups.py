"""Lookups beside the scheduler: started when a request arrives, mostly answered by the time that it is scheduled.

A lookup is one batched question for every block of a prompt and every rank. It ends by its deadline, and whatever
goes wrong is a miss (I10): the scheduler waits for none longer than it chooses to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import TYPE_CHECKING, Final

import msgspec

from saltern.errors import SalternError
from saltern.results import is_trust_error
from saltern.vllm.fingerprint import Binding
from saltern.vllm.identity import Adapter
from saltern.vllm.layout import ChainLayout
from saltern.vllm.stats import Tally
from saltern.vllm.tenancy import Ticket

if TYPE_CHECKING:
    from saltern.client import Client

logger = logging.getLogger(__name__)

_THREADS: Final = 4
#: A lookup that waits for a thread for this many deadlines is given up.
_PATIENCE_DEADLINES: Final = 2.0
#: An adapter that is seen for the first time is read once; until then its requests wait, for this long at most.
_ADAPTER_WAIT_S: Final = 5.0


class Found(msgspec.Struct, frozen=True):
    """What a lookup has found out.

    Attributes:
        blocks: whole blocks that can be loaded, from the first on.
        chain_blocks: length of the chain that was asked for.
        is_certain: whether the cache has answered; if not, there may be more.
        copies_wanted: blocks that are worth storing again once computed or loaded.
    """

    blocks: int
    chain_blocks: int
    is_certain: bool
    copies_wanted: tuple[int, ...] = ()


NOTHING: Final = Found(0, 0, is_certain=False)


class PendingLookup:
    """A lookup that runs.

    Attributes:
        bindings: of the request's chain; empty until they are known, and for good where the cache cannot be used.
    """

    def __init__(self, give_up_after_s: float) -> None:
        self.bindings: tuple[Binding, ...] = ()
        self._future: Future[Found] = Future()
        self._give_up_at_s = time.monotonic() + give_up_after_s

    def poll(self, wait_s: float) -> Found | None:
        """What was found, or None while that is open; waits up to ``wait_s`` for it."""
        if not self._future.done():
            if time.monotonic() >= self._give_up_at_s:
                return NOTHING
            if wait_s <= 0:
                return None
        try:
            return self._future.result(timeout=wait_s)
        except TimeoutError:
            return None

    def settle(self, found: Found) -> None:
        self._future.set_result(found)


class Lookups:
    """Runs lookups in threads of its own.

    Args:
        client_of: the client of a ticket, or None for a miss.
        bindings_of: the bindings with an adapter, or of the base model; empty where there are none (yet).
        layout: of the chains.
        deadline_ms: of one lookup.
    """

    def __init__(
        self,
        client_of: Callable[[Ticket], Client | None],
        bindings_of: Callable[[Adapter | None], tuple[Binding, ...]],
        layout: ChainLayout,
        tally: Tally,
        *,
        deadline_ms: float,
    ) -> None:
        self._client_of = client_of
        self._bindings_of = bindings_of
        self._layout = layout
        self._tally = tally
        self._deadline_ms = deadline_ms
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="saltern-lookup")

    def start(self, ticket: Ticket, block_hashes: Sequence[bytes], adapter: Adapter | None) -> PendingLookup:
        """Look a chain up.

        Args:
            block_hashes: the engine's, head first.
            adapter: the request's, or None.
        """
        patience_s = _PATIENCE_DEADLINES * self._deadline_ms / 1000 + (_ADAPTER_WAIT_S if adapter else 0.0)
        pending = PendingLookup(patience_s)
        self._threads.submit(self._run, pending, ticket, list(block_hashes), adapter)
        return pending

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, pending: PendingLookup, ticket: Ticket, block_hashes: list[bytes], adapter: Adapter | None) -> None:
        found = NOTHING
        try:
            bindings, client = self._bindings_of(adapter), self._client_of(ticket)
            if bindings and client is not None:
                found, is_trusted = self._look(client, block_hashes, bindings)
                pending.bindings = bindings if is_trusted else ()
            else:
                self._tally.add(unused_requests=1)
        except SalternError as error:
            logger.info("lookup not made: %s", error)  # the client was closed: its tenant had to make room
        except Exception:
            logger.exception("lookup failed unexpectedly")  # a miss all the same (I10)
        pending.settle(found)

    def _look(self, client: Client, block_hashes: list[bytes], bindings: Sequence[bytes]) -> tuple[Found, bool]:
        """What the cache has of a chain, and whether it trusts this client: if not, nothing need be stored either."""
        if not block_hashes:
            return NOTHING, True
        started_s = time.monotonic()
        layout = self._layout
        answer = client.chain(layout.hashes(block_hashes, bindings)).lookup(deadline_ms=self._deadline_ms)
        self._tally.took("lookup_seconds", time.monotonic() - started_s)
        blocks = layout.blocks_in(answer.prefix)
        self._tally.add(
            lookup_requests=1,
            lookup_blocks=len(block_hashes),
            lookup_hit_blocks=blocks,
            lookup_failed=int(answer.error is not None),
        )
        wanted = sorted({position // layout.entries_per_block for position in answer.copies_wanted})
        found = Found(
            blocks,
            len(block_hashes),
            is_certain=answer.error is None,
            copies_wanted=tuple(block for block in wanted if block < blocks),
        )
        return found, answer.error is None or not is_trust_error(answer.error)
