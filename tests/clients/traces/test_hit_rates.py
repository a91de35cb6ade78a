"""Reference hit rates take memory for what a trace has of distinct blocks and for its numbers, and for no more."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest

from saltern.traces.hit_rates import Accesses, Policy, hit_rate

_PROMPTS, _BLOCKS, _BLOCK_TOKENS = 50, 4, 10


def drawn(requests: int) -> Accesses:
    """As many requests for the same 50 prompts of 4 blocks."""
    chance = random.Random(1)
    input_tokens, ends, blocks = array("q"), array("q"), array("I")
    for _ in range(requests):
        first = chance.randrange(_PROMPTS) * _BLOCKS
        blocks.extend(range(first, first + _BLOCKS))
        ends.append(len(blocks))
        input_tokens.append(_BLOCKS * _BLOCK_TOKENS)
    return Accesses(_BLOCK_TOKENS, _PROMPTS * _BLOCKS, input_tokens, ends, blocks)


def peak_bytes(requests: int, policy: Policy, capacity_blocks: int) -> int:
    """That working out a rate takes beside the trace's own numbers."""
    accesses = drawn(requests)
    tracemalloc.start()
    try:
        assert hit_rate(accesses, policy, capacity_blocks) > 0.1
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


#: When a block is needed next is 4 of them; an entry of a heap for each access would be 50 to 110.
_BYTES_AN_ACCESS_MAX = 12


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("capacity_blocks", [60, 200])
def test_four_times_the_requests_take_a_number_for_each_access(policy: Policy, capacity_blocks: int) -> None:
    few, many = peak_bytes(1500, policy, capacity_blocks), peak_bytes(6000, policy, capacity_blocks)
    assert (many - few) / (4500 * _BLOCKS) < _BYTES_AN_ACCESS_MAX
