"""Dividing cache among tenants: nobody could hit more with as much, and sizes become machines."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from saltern.replay.capacity import Divider, concave_hull
from saltern.replay.profiles import HardwareProfile, builtin_profiles
from saltern.replay.setup import ReplaySetup
from saltern.replay.sizing import BUSY_MAX, Traffic, round_size, size
from saltern.traces.reuse import HitCurve


def curve(*hits: float, accesses: int = 1000, tokens: int = 1000) -> HitCurve:
    found = array("d", (0.0, *hits))
    return HitCurve(10, tokens, accesses, len(hits), 1.0, found)


SMOOTH = curve(100, 150, 180, 190, 195)
CLIFF = curve(0, 0, 0, 200, 200, 200)
NOTHING = curve(0, 0, 0)


def test_a_hull_is_concave_above_its_curve_and_touches_it() -> None:
    for one in (SMOOTH, CLIFF, curve(1, 5, 6, 20, 21, 21)):
        corners = concave_hull(one)
        gains = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(corners)]
        assert gains == sorted(gains, reverse=True)
        assert all(one.hits[blocks] == tokens for blocks, tokens in corners)
    assert concave_hull(CLIFF) == [(0, 0.0), (4, 200.0)]
    assert concave_hull(NOTHING) == [(0, 0.0)]


def test_the_next_block_goes_to_whoever_gains_most() -> None:
    divider = Divider({"smooth": SMOOTH, "cliff": CLIFF, "scan": NOTHING})
    assert divider.of_blocks(1) == {"smooth": 1, "cliff": 0, "scan": 0}
    assert divider.of_blocks(6) == {"smooth": 2, "cliff": 4, "scan": 0}
    assert divider.hit_tokens(divider.of_blocks(6)) == 350
    assert divider.blocks_max == 9
    assert divider.of_blocks(18) == {"smooth": 10, "cliff": 8, "scan": 0}, "beyond use it is divided alike"


def test_the_fewest_blocks_for_so_many_hits() -> None:
    divider = Divider({"smooth": SMOOTH, "cliff": CLIFF})
    assert divider.for_hits(100) == {"smooth": 1, "cliff": 0}
    assert divider.for_hits(340) == {"smooth": 2, "cliff": 4}
    assert divider.for_hits(395) == {"smooth": 5, "cliff": 4}
    assert divider.for_hits(396) is None
    assert divider.best_hit_tokens == 395


def test_no_division_of_as_many_blocks_hits_more_at_a_corner() -> None:
    curves = {"a": SMOOTH, "b": curve(60, 110, 150, 180, 200)}
    divider = Divider(curves)
    for total in range(11):
        best = max(curves["a"].hit_tokens(first) + curves["b"].hit_tokens(total - first) for first in range(total + 1))
        assert divider.hit_tokens(divider.of_blocks(total)) == pytest.approx(best)


PROFILES = builtin_profiles()
BLOCK_BYTES = 4096
#: A block each second is what half of a link, or of a device, carries.
MACHINE = HardwareProfile(
    flops_per_s=1e15,
    link_bytes_per_s=1e12,
    ssd_read_bytes_per_s=BLOCK_BYTES / BUSY_MAX,
    ssd_write_bytes_per_s=1e12,
    name="m",
)


def base(**more: object) -> ReplaySetup:
    found = {"model": PROFILES.model("qwen3-8b"), "hardware": MACHINE, "node_bytes": 100 * BLOCK_BYTES * 256, **more}
    return ReplaySetup(**found)  # type: ignore[arg-type]


def traffic(recorded_s: float = 1e9) -> Traffic:
    together = curve(*(float(10 * blocks) for blocks in range(1, 101)), accesses=500)
    return Traffic(together, Divider({"a": together}), recorded_s, 10, BLOCK_BYTES * 256)


def test_nodes_follow_from_memory_and_reservations_from_the_division() -> None:
    sizing = size(base(node_bytes=30 * BLOCK_BYTES * 256), traffic(), {"a": 100})
    setup = sizing.setup.checked()
    assert (setup.nodes, sizing.reason, setup.node_ssd_bytes) == (4, "memory", 0)
    assert setup.quotas["a"].reserved_bytes == 100 * BLOCK_BYTES * 256
    assert setup.capacity_bytes >= 100 * BLOCK_BYTES * 256
    assert sizing.blocks == 100


def test_with_ssd_memory_is_as_little_as_the_device_allows() -> None:
    with_ssd = base(node_ssd_bytes=1000 * BLOCK_BYTES * 256)
    idle = size(with_ssd, traffic(), {"a": 100})
    assert (idle.dram, idle.ssd) == ({"a": 5}, {"a": 95})
    assert idle.usd_per_hour < size(base(), traffic(), {"a": 100}).usd_per_hour
    # 100 blocks are hit in all, as many as are read a second from SSD at most, less what memory holds.
    busy = size(with_ssd, traffic(recorded_s=256.0 * 100 * 0.5), {"a": 100})
    assert busy.setup.nodes == 1
    assert busy.dram["a"] == 50


def test_sizes_are_such_as_one_would_order() -> None:
    for wanted in (1, 2**20, 2**20 + 1, 10**9, 123_456_789_012):
        found = round_size(wanted)
        assert wanted <= found <= wanted * 1.07 + 2**20
        assert found % 2**20 == 0
