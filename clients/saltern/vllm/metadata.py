"""What the scheduler tells the workers in each step.

Block hashes of a request are sent once, as they come to be known; jobs name the request and say how far. Metadata
reaches every worker in the order of the steps, so both sides agree without answering each other.
"""

from __future__ import annotations

import msgspec

from saltern.vllm.tenancy import Ticket

#: Block ids of each KV cache group, aligned with the blocks of a job.
BlockIds = tuple[tuple[int, ...], ...]


class ChainUpdate(msgspec.Struct, frozen=True, array_like=True):
    """News of a request's chain.

    Attributes:
        request_id: whose.
        start: how many block hashes the workers have already; 0 begins a chain, also one of an id that is used again.
        block_hashes: the engine's, from ``start`` on.
        ticket, bindings, reused_blocks: only where ``start`` is 0: see :class:`~saltern.vllm.tenancy.Ticket`,
            :func:`~saltern.vllm.fingerprint.bindings_of` and ``Client.chain``.
    """

    request_id: str
    start: int
    block_hashes: tuple[bytes, ...]
    ticket: Ticket | None = None
    bindings: tuple[bytes, ...] = ()
    reused_blocks: int | None = None


class LoadJob(msgspec.Struct, frozen=True, array_like=True):
    """Read blocks of a request's chain into the engine's cache.

    Attributes:
        chain_blocks: length of the chain that was looked up, which decides where it is.
        first_block: the first block to load.
        block_ids: where they go, by group; the null block stands for "not needed".
    """

    request_id: str
    chain_blocks: int
    first_block: int
    block_ids: BlockIds


class SaveJob(msgspec.Struct, frozen=True, array_like=True):
    """Store blocks of a request's chain once the step has computed them.

    Attributes:
        blocks: which ones, ascending.
        block_ids: where they are, by group.
    """

    request_id: str
    blocks: tuple[int, ...]
    block_ids: BlockIds


class StepWork(msgspec.Struct, frozen=True, array_like=True):
    """All that a step asks of the workers.

    Attributes:
        forgotten: requests whose chains end; comes before ``chains``.
        chains: news of chains; comes before ``loads`` and ``saves``.
    """

    forgotten: tuple[str, ...] = ()
    chains: tuple[ChainUpdate, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
