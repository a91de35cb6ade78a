"""The SSD tier of the simulated engine: what memory gives up is found there, in the time that a device takes."""

from __future__ import annotations

import pytest

from saltern.errors import InvalidArgumentError
from saltern.replay.profiles import HardwareProfile
from saltern.replay.results import Column, ColumnResult
from saltern.replay.rows import all_rows
from saltern.replay.setup import ReplaySetup, TenantQuota, Use
from saltern.traces.request import Trace
from tests.dataplane.replay.test_simulation import (
    BLOCK_MEMORY_BYTES,
    BLOCK_TOKENS,
    INSTANT,
    MODEL,
    replay,
    request,
    trace_of,
)


def setup_of(blocks: int, ssd_blocks: int, hardware: HardwareProfile = INSTANT, **more: object) -> ReplaySetup:
    return ReplaySetup(
        model=MODEL,
        hardware=hardware,
        node_bytes=blocks * BLOCK_MEMORY_BYTES,
        node_ssd_bytes=ssd_blocks * BLOCK_MEMORY_BYTES,
        **more,  # type: ignore[arg-type]
    )


def twice(blocks: int) -> Trace:
    """Each block by itself, and all of them once more."""
    return trace_of([request(float(number), number % blocks) for number in range(2 * blocks)])


def test_what_memory_gave_up_is_found_on_ssd_up_to_what_it_holds() -> None:
    without, enough, little = (
        replay(twice(40), setup_of(4, ssd), Column.SHARED)[0].hit_tokens // BLOCK_TOKENS for ssd in (0, 60, 20)
    )
    assert (without, enough) == (0, 40)
    assert 0 <= little < 20, "the oldest gave way before they came again"


def test_hits_are_told_by_tier_and_promoted_blocks_are_not_written_again() -> None:
    (result,) = replay(twice(40), setup_of(4, 60), Column.SHARED)
    ssd = result.ssd
    assert ssd is not None
    assert ssd.hit_tokens == result.tenants[""].ssd_hit_tokens == 40 * BLOCK_TOKENS
    assert ssd.read_bytes == 40 * BLOCK_TOKENS
    assert ssd.written_bytes == 40 * BLOCK_TOKENS, "each once: what comes back to memory stays on SSD"
    assert ssd.resident_bytes == 40 * BLOCK_TOKENS
    assert ssd.dropped == 0
    rows = {row.key: row.value(result) for row in all_rows(_report(result))}
    assert rows["ssd_hit_tokens"] == 40 * BLOCK_TOKENS


def _report(result: ColumnResult):  # type: ignore[no-untyped-def]
    from saltern.replay.results import EngineKind, ReplayReport, TraceFacts

    facts = TraceFacts("t", "test", "0", "absolute", "recorded", "", BLOCK_TOKENS)
    return ReplayReport(engine=EngineKind.SIMULATED, setup=setup_of(1, 1), trace=facts, columns=[result])


def test_reading_takes_as_long_as_the_slower_of_device_and_link() -> None:
    # A block of 10 bytes takes 1 s over the link and 5 s from the device.
    machine = HardwareProfile(
        flops_per_s=1e9, link_bytes_per_s=10, latency_s=0.0, ssd_read_bytes_per_s=2, ssd_write_bytes_per_s=1e9
    )
    trace = trace_of([*(request(100.0 * n, n) for n in range(4)), request(1000.0, 0), request(2000.0, 0)])
    (result,) = replay(trace, setup_of(2, 30, machine), Column.SHARED)
    assert result.hit_tokens == 2 * BLOCK_TOKENS
    assert result.transfer_s == pytest.approx(5.0 + 1.0), "from SSD; then from memory, where it was put back"
    assert result.ssd is not None
    assert result.ssd.read_s == pytest.approx(5.0)


def test_a_device_that_cannot_keep_up_drops_and_says_so() -> None:
    slow = HardwareProfile(flops_per_s=1e30, link_bytes_per_s=1e30, latency_s=0.0, ssd_write_bytes_per_s=1e-3)
    model = MODEL.__class__(linear_flops_per_token=1.0, attention_flops_per_pair=0.0, kv_bytes_per_token=2**24)
    trace = trace_of([request(number * 1e-3, number) for number in range(60)])
    setup = ReplaySetup(model=model, hardware=slow, node_bytes=4 * 10 * 2**24, node_ssd_bytes=100 * 10 * 2**24)
    (result,) = replay(trace, setup, Column.SHARED)
    assert result.ssd is not None
    assert set(result.ssd.dropped_by_reason) == {"no-staging"}
    assert result.ssd.dropped + result.ssd.written_bytes // (10 * 2**24) == 56


def test_a_restart_loses_memory_and_keeps_ssd_but_a_lost_node_loses_both() -> None:
    trace = twice(40)
    setup = setup_of(4, 60, restart_s=0.0)
    restarted, lost = replay(trace, setup, Column.AFTER_RESTART, Column.NODE_LOST)
    assert restarted.hit_tokens == 36 * BLOCK_TOKENS, "all but the four that memory alone had"
    assert lost.hit_tokens == 0


def test_warm_counts_its_own_writes() -> None:
    cold, warm = replay(twice(40), setup_of(4, 60), Column.COLD, Column.WARM)
    assert cold.ssd is not None
    assert warm.ssd is not None
    assert (cold.ssd.written_bytes, warm.ssd.written_bytes) == (40 * BLOCK_TOKENS, 0)
    assert warm.hit_rate == 1.0


def test_tenants_have_their_own_part_of_ssd() -> None:
    trace = trace_of(
        [
            *(request(float(n), n, tenant="a") for n in range(200)),
            *(request(1000.0 + n, n, tenant="b") for n in range(2000)),
            *(request(4000.0 + n, n, tenant="a") for n in range(200)),
        ]
    )
    reserved = {"a": TenantQuota(ssd_reserved_bytes=300 * BLOCK_MEMORY_BYTES)}
    with_part, without = (
        replay(trace, setup_of(4, 600, quotas=quotas), Column.SHARED)[0].tenants["a"].hit_tokens
        for quotas in (reserved, {})
    )
    assert with_part == 200 * BLOCK_TOKENS
    assert without < with_part / 2


def test_ssd_has_no_order_of_reference_rates() -> None:
    with pytest.raises(InvalidArgumentError, match="SSD tier"):
        setup_of(4, 60, use=Use.CHAIN).checked()
    with pytest.raises(InvalidArgumentError, match="reservations"):
        setup_of(4, 60, quotas={"a": TenantQuota(ssd_reserved_bytes=61 * BLOCK_MEMORY_BYTES)}).checked()
