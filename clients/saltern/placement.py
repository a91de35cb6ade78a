"""Where a chain of blocks lives: on one node until it is found again, then on two. Pure rules, no I/O.

A node is chosen by rendezvous hashing (Thaler and Ravishankar, 1998): every client ranks the nodes by a hash of what
is placed and of the node's id, so that all agree without talking, and a node that comes or goes moves only its share.

======================  ===============================================================================================
what                    where
======================  ===============================================================================================
the *pair* of a chain   the two best nodes for its anchor; lookups and reads ask both, and no other
*anchor*                the caller's session if there is one, else the first block after the head, else the very first
*head*                  the first ``HEAD_TOKENS``: what prompts share. It is stored beside its tails: a head that many
                        chains share is on as many nodes as they are, and one that nobody shares costs nothing more
new blocks              on the first of the pair; on both once the chain was *found again* with its whole head
reads                   what both have is read from the node that this client has read less from lately
a plain key             on the best node for the key itself
======================  ===============================================================================================

The second copy does three things: a lost node takes little along, two nodes share the reads of a hot chain, and what is
never asked for again (scans, one-shot prompts) pays nothing for it. ``python -m saltern.bench.placement`` measures it
beside other rules on real traces (docs/performance.md). Nodes trust none of this: it decides where to ask, not who may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from saltern.errors import UnavailableError
from saltern.grant import NodeEndpoint
from saltern.keys import BlockHash, frame
from saltern.names import NamespaceId, TenantId

#: What prompts share (system prompt, tools) mostly fits in here; docs/performance.md has figures of shorter heads.
HEAD_TOKENS: Final = 4096
#: Where nobody said how many tokens a block has.
BLOCK_TOKENS_DEFAULT: Final = 16
#: Nodes of a chain.
PAIR_NODES: Final = 2
_SCORE_BYTES: Final = 8
#: Blocks read from one node, on average, after which what was read before counts half.
_READ_WINDOW_BLOCKS: Final = 4096


@dataclass(frozen=True, slots=True)
class Pair:
    """The nodes of a chain, best first: two, or one where there is no other."""

    asked: tuple[NodeEndpoint, ...]

    @property
    def writable(self) -> tuple[NodeEndpoint, ...]:
        """Those that take new blocks; all of them where none does (serving on is what cordoning does not end)."""
        return tuple(node for node in self.asked if not node.read_only) or self.asked


class Placement:
    """The rules over one set of nodes.

    Args:
        tenant, namespace: whose blocks; the same prompt of two tenants is not on the same nodes.
        nodes: that serve the namespace, in any order.
        block_tokens: tokens in one block; 0 where unknown.

    Raises:
        UnavailableError: there are no nodes.
    """

    def __init__(
        self, tenant: TenantId, namespace: NamespaceId, nodes: Sequence[NodeEndpoint], *, block_tokens: int
    ) -> None:
        if not nodes:
            raise UnavailableError(
                f"no live node serves namespace {namespace!r}",
                reason="NO_LIVE_NODE",
                hint="start a node, or look at `saltern node list`",
            )
        self.nodes = tuple(nodes)
        self.head_blocks = max(1, HEAD_TOKENS // (block_tokens or BLOCK_TOKENS_DEFAULT))
        #: One hash state for each node, so that ranking costs one short update each.
        self._states = [
            (hashlib.blake2b(frame(tenant, namespace, node.node_id), digest_size=_SCORE_BYTES), node) for node in nodes
        ]
        self._homes = [(state, node) for state, node in self._states if not node.read_only] or self._states

    def home_of(self, key: bytes) -> NodeEndpoint:
        """The node of a plain key: one that takes new blocks, if any does."""
        if len(self._homes) == 1:
            return self._homes[0][1]
        return max(self._homes, key=lambda scored: _score(scored[0], key))[1]

    def pair_of(self, anchor: bytes) -> Pair:
        """The nodes of the chains that have this anchor."""
        if len(self._states) == 1:
            return Pair(self.nodes)
        ranked = sorted(self._states, key=lambda scored: _score(scored[0], anchor), reverse=True)
        best, second = ranked[0][1], ranked[1][1]
        if best.read_only and second.read_only:
            # Both are being emptied: the best still has what is old, and the best of the others takes what is new.
            second = next((node for _, node in ranked if not node.read_only), second)
        return Pair((best, second))

    def anchor_of(self, block_hashes: Sequence[BlockHash], session: str = "") -> bytes:
        """What decides where a chain is.

        Args:
            block_hashes: at least one, head first.
            session: of the caller: every chain of it, short or long, is on the same two nodes.
        """
        if session:
            return frame("session", session)
        return frame("block", block_hashes[self.head_blocks if len(block_hashes) > self.head_blocks else 0])


class ReadLoad:
    """What one client has read from each node lately, in blocks.

    Old reads fade, so that a node that joins is not sent everything until it has caught up with the others. Threads may
    lose a count to each other, which costs nothing but evenness.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, float] = {}

    def lightest(self, node_ids: Iterable[str]) -> str:
        """The node that was read least from; the first of equals."""
        return min(node_ids, key=lambda node_id: self._blocks.get(node_id, 0.0))

    def note(self, node_id: str, blocks: int) -> None:
        self._blocks[node_id] = self._blocks.get(node_id, 0.0) + blocks
        if sum(self._blocks.values()) > _READ_WINDOW_BLOCKS * len(self._blocks):
            self._blocks = {known: count / 2 for known, count in self._blocks.items()}


def _score(state: hashlib.blake2b, what: bytes) -> bytes:
    scored = state.copy()
    scored.update(what)
    return scored.digest()
