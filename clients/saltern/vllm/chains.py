"""What a worker knows of the chains of requests: their hashes, whose they are, and whether they have a gap."""

from __future__ import annotations

from saltern.keys import BlockHash
from saltern.vllm.layout import ChainLayout
from saltern.vllm.metadata import ChainUpdate
from saltern.vllm.tenancy import Ticket


class WorkerChain:
    """One request's chain, growing.

    Attributes:
        ticket: whose it is.
        reused_entries: of them, how many the cache had when the request came; None where nobody knows.
        gap: first position that was not stored, so that nothing behind it need be; None where there is none.
    """

    __slots__ = ("_bindings", "_block_hashes", "_entry_hashes", "gap", "layout", "reused_entries", "ticket")

    def __init__(self, ticket: Ticket, bindings: tuple[bytes, ...], layout: ChainLayout, reused: int | None) -> None:
        self.ticket = ticket
        self.layout = layout
        self.reused_entries = None if reused is None else reused * layout.entries_per_block
        self.gap: int | None = None
        self._bindings = bindings
        self._block_hashes = 0
        self._entry_hashes: list[BlockHash] = []

    @property
    def blocks(self) -> int:
        """How many block hashes are known."""
        return self._block_hashes

    def lose(self, position: int) -> None:
        """Note that an entry is not stored: nothing behind it could be found."""
        self.gap = position if self.gap is None else min(self.gap, position)

    def is_found(self, position: int) -> bool:
        """Whether an entry at this position could be found, as far as known."""
        return self.gap is None or position < self.gap

    def extend(self, block_hashes: tuple[bytes, ...]) -> None:
        self._entry_hashes += self.layout.hashes(block_hashes, self._bindings)
        self._block_hashes += len(block_hashes)

    def hashes(self, blocks: int | None = None) -> list[BlockHash]:
        """What the entries of the first ``blocks`` blocks (all by default) are named by."""
        if blocks is None or blocks >= self._block_hashes:
            return list(self._entry_hashes)
        return self._entry_hashes[: blocks * self.layout.entries_per_block]


class WorkerChains:
    """The chains of all requests that the scheduler has told of. Used by the engine's thread alone."""

    def __init__(self, layout: ChainLayout) -> None:
        self._layout = layout
        self._chains: dict[str, WorkerChain] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def get(self, request_id: str) -> WorkerChain | None:
        return self._chains.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a chain; jobs in flight keep theirs."""
        self._chains.pop(request_id, None)

    def update(self, update: ChainUpdate) -> None:
        """Begin or extend a chain; an update that does not fit on what is there ends the chain: a miss."""
        if update.start == 0 and update.ticket is not None:
            chain = WorkerChain(update.ticket, update.bindings, self._layout, update.reused_blocks)
            self._chains[update.request_id] = chain
            chain.extend(update.block_hashes)
            return
        known = self._chains.get(update.request_id)
        if known is not None and known.blocks == update.start:
            known.extend(update.block_hashes)
        else:
            self.forget(update.request_id)
