"""Regions that clients describe, and batches cut into chains of work requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.remote_region import ChainLimits, RemoteRegion, plan_chains
from saltern.errors import InvalidArgumentError
from saltern.keys import BlockKey
from saltern.wire import REGION_MAX_BYTES

LIMITS = ChainLimits(requests_max=4, bytes_max=1000, message_bytes=300)


@pytest.mark.parametrize(
    ("address", "size_bytes", "remote_key"),
    [
        (2**64 - 4096, 4097, 1),
        (-1, 1, 1),
        (2**64, 1, 1),
        (0, 0, 1),
        (0, REGION_MAX_BYTES + 1, 1),
        (0, 1, -1),
        (0, 1, 2**32),
    ],
)
def test_i3_a_region_that_cannot_be_is_refused(address: int, size_bytes: int, remote_key: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RemoteRegion(address, size_bytes, remote_key)
    assert caught.value.reason == "REGION_OUT_OF_RANGE"


def test_a_region_may_end_where_addresses_do_and_have_key_0() -> None:
    region = RemoteRegion(2**64 - 4096, 4096, 0)
    region.check([0, 4095], [4096, 1])


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 4097), (4096, 1), (2**64 - 1, 1), (2**63, 2**63)])
def test_i3_nothing_outside_the_region_is_reached(offset: int, size: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RemoteRegion(4096, 4096, 7).check([0, offset], [1, size])
    assert caught.value.reason == "OUT_OF_REGION"


@given(st.lists(st.tuples(st.integers(1, 2500), st.integers(0, 5)), max_size=60))
def test_chains_cover_a_batch_in_order_within_their_limits(entries: list[tuple[int, int]]) -> None:
    sizes, keys = [size for size, _ in entries], [BlockKey(bytes([number]) * 32) for _, number in entries]
    chains = list(plan_chains(LIMITS, sizes, keys))
    assert [index for chain in chains for index in range(chain.start, chain.stop)] == list(range(len(entries)))
    for chain in chains:
        part = sizes[chain]
        assert part and len(set(keys[chain])) == len(part), "a key twice in one chain"
        if len(part) > 1:
            assert sum(part) <= LIMITS.bytes_max
            assert sum(LIMITS.requests_of(size) for size in part) <= LIMITS.requests_max
    assert len(list(plan_chains(LIMITS, sizes))) <= len(chains)
