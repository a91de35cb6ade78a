"""How the blocks of one prompt become the entries of one chain. Pure rules, no I/O.

An *entry* holds one block of one KV cache group as one rank has it: all layers of the group that the rank holds, one
after the other. The entries of a block lie next to each other in the chain, so that one lookup answers for every
rank, a block that lacks a part ends the prefix, and all of a block is on the same nodes::

    position:      0            1            2            3            4        ...
    entry:     block 0,g0,s0  block 0,g0,s1  block 0,g1,s0  block 0,g1,s1  block 1,g0,s0

*Shards* of a group are the parts that differ between ranks: one for each pipeline stage and tensor-parallel rank,
except that ranks which hold the same bytes (MLA) share one shard, which the first of them stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from saltern.keys import BlockHash

#: A block id of vLLM that stands for "not held": out of a sliding window.
NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True)
class Ranks:
    """The parallel shape of an engine.

    Attributes:
        tensor, pipeline: numbers of ranks.
        replicas: consecutive tensor-parallel ranks that hold the same bytes (MLA: all of them), else 1.
    """

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1

    @property
    def shards(self) -> int:
        """Parts of a block that differ."""
        return self.pipeline * max(1, self.tensor // self.replicas)

    def shard_of(self, rank: int) -> int:
        """The part that a rank (pipeline-major, as vLLM numbers them) holds."""
        stage, tensor_rank = divmod(rank, self.tensor)
        return stage * max(1, self.tensor // self.replicas) + tensor_rank // self.replicas

    def stores(self, rank: int) -> bool:
        """Whether this rank is the one that stores its shard."""
        return rank % self.tensor % self.replicas == 0


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """Where the entries of a block are in the chain.

    Attributes:
        block_tokens: tokens in one block of the engine.
        groups: KV cache groups.
        shards: parts of each.
    """

    block_tokens: int
    groups: int = 1
    shards: int = 1

    @property
    def entries_per_block(self) -> int:
        return self.groups * self.shards

    @property
    def tokens_per_entry(self) -> int:
        """What the namespace's ``block_tokens`` must be, so that hits are counted in the engine's own tokens."""
        return max(1, self.block_tokens // self.entries_per_block)

    def position(self, block: int, group: int, shard: int) -> int:
        return block * self.entries_per_block + group * self.shards + shard

    def blocks_in(self, entries: int) -> int:
        """How many whole blocks a prefix of so many entries has."""
        return entries // self.entries_per_block

    def hashes(self, block_hashes: Sequence[bytes], bindings: Sequence[bytes]) -> list[BlockHash]:
        """What the entries of these blocks are named by: binding and engine hash side by side, chain order.

        Both have a fixed length (32 bytes each), so no two pairs share an encoding.
        """
        if len(bindings) == 1:
            binding = bindings[0]
            return [BlockHash(binding + block_hash) for block_hash in block_hashes]
        return [BlockHash(binding + block_hash) for block_hash in block_hashes for binding in bindings]
