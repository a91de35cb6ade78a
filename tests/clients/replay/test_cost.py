"""Cost and break-even against figures that others published, and the sentence that is printed."""

from __future__ import annotations

import pytest

from saltern.replay import cost
from saltern.replay.prefill import TimeModel, prefill_flops
from saltern.replay.profiles import HardwareProfile, ModelProfile, builtin_profiles
from saltern.replay.results import Column, ColumnResult
from saltern.replay.setup import ReplaySetup

PROFILES = builtin_profiles()
LLAMA_70B = PROFILES.model("llama-3-70b")


def column(name: Column, within: int, *, requests: int = 100, prefill_s: float = 0.0, **more: float) -> ColumnResult:
    return ColumnResult(
        column=name,
        complete=True,
        requests=requests,
        within_slo=within,
        recorded_s=3600.0,
        prefill_s=prefill_s,
        **more,  # type: ignore[arg-type]
    )


def setup_of(extra_cost: float) -> ReplaySetup:
    """Engines for one dollar in an hour, and a store for ``extra_cost`` dollars."""
    hardware = HardwareProfile(
        flops_per_s=1e15,
        link_bytes_per_s=1e9,
        gpu_usd_per_hour=1.0,
        dram_usd_per_gib_hour=0.0,
        operations_usd_per_hour=extra_cost,
        name="test",
    )
    return ReplaySetup(model=LLAMA_70B, hardware=hardware, node_bytes=2**30)


def test_a_quarter_more_for_twice_the_completions_is_five_eighths() -> None:
    assert cost.relative_cost(0.25, 2.0) == 0.625
    found = cost.judge(setup_of(0.25), column(Column.NO_CACHE, 40), column(Column.SHARED, 80))
    assert found.relative_cost == 0.625
    assert found.pays
    assert "62.5%" in found.verdict
    assert "pays" in found.verdict and "does not pay" not in found.verdict
    assert "4 times what is assumed (100.0% of the engines)" in found.verdict
    assert "fall below 1.250 times" in found.verdict


@pytest.mark.parametrize(("hardware", "gb_per_s", "exact"), [("8xa800", 6, 5.86), ("8xh800", 19, 18.57)])
def test_break_even_bandwidth_is_what_mooncake_published(hardware: str, gb_per_s: int, exact: float) -> None:
    """Mooncake, FAST'25, section 3: LLaMA3-70B, 8K prefix, 8 x A800 and 8 x H800; G is their peak."""
    peak_flops_per_s = PROFILES.machine(hardware).peak_flops_per_s
    bytes_per_s = cost.break_even_bandwidth_bytes_per_s(LLAMA_70B, 8192, peak_flops_per_s)
    assert round(bytes_per_s / 1e9) == gb_per_s
    assert bytes_per_s / 1e9 == pytest.approx(exact, abs=0.01)


def test_at_the_break_even_bandwidth_reading_takes_as_long_as_computing() -> None:
    flops_per_s = 1e15
    bytes_per_s = cost.break_even_bandwidth_bytes_per_s(LLAMA_70B, 4096, flops_per_s)
    reading_s = 4096 * LLAMA_70B.kv_bytes_per_token / bytes_per_s
    assert reading_s == pytest.approx(prefill_flops(LLAMA_70B, 4096) / flops_per_s)


def test_what_is_cached_is_not_computed_again() -> None:
    whole, front = prefill_flops(LLAMA_70B, 10_000), prefill_flops(LLAMA_70B, 6_000)
    assert prefill_flops(LLAMA_70B, 10_000, 6_000) == pytest.approx(whole - front)
    times = TimeModel(LLAMA_70B, PROFILES.machine("8xh100"))
    assert times.prefill_s(10_000, 10_000) > 0, "the last token is always computed"
    assert times.prefill_s(10_000) > times.prefill_s(10_000, 6_000)
    assert (times.decode_s(0), times.decode_s(1)) == (0.0, 0.0)


def test_held_for_the_break_even_time_memory_costs_what_computing_does() -> None:
    model = ModelProfile(linear_flops_per_token=1e9, attention_flops_per_pair=0.0, kv_bytes_per_token=1000)
    hardware = HardwareProfile(
        flops_per_s=1e12, efficiency=0.5, link_bytes_per_s=1e9, latency_s=0.0, gpu_usd_per_hour=3.6
    )
    # 1000 tokens: 2 s of a GPU at 0.001 USD/s, less 0.001 s of reading 1 MB.
    hold_s = cost.break_even_hold_s(model, hardware, 1000, usd_per_byte_s=1e-12)
    assert hold_s == pytest.approx(1.999 * 0.001 / (1e6 * 1e-12))
    slow = HardwareProfile(flops_per_s=1e18, link_bytes_per_s=1.0, gpu_usd_per_hour=3.6)
    assert cost.break_even_hold_s(model, slow, 1000, usd_per_byte_s=1e-12) == 0.0
    assert cost.break_even_hold_s(model, hardware, 1000, usd_per_byte_s=0.0) is None


def test_at_the_break_even_hit_rate_freed_engine_time_costs_what_the_store_does() -> None:
    without = column(Column.NO_CACHE, 50, prefill_s=3600.0)
    shared = column(Column.SHARED, 80, prefill_s=1700.0, transfer_s=100.0, hit_rate=0.5)
    # 1800 s of an engine that costs a dollar an hour: half a dollar, twice what the store costs.
    assert cost.break_even_hit_rate(setup_of(0.25), without, shared) == pytest.approx(0.25)
    other = column(Column.SHARED, 80, requests=99, prefill_s=1700.0, hit_rate=0.5)
    assert cost.break_even_hit_rate(setup_of(0.25), without, other) is None, "other requests are another experiment"


def test_more_completions_at_too_high_a_price_do_not_pay() -> None:
    found = cost.judge(setup_of(1.0), column(Column.NO_CACHE, 40), column(Column.SHARED, 60))
    assert found.pays is False
    assert "does not pay" in found.verdict
    assert "0.5 times what is assumed (50.0% of the engines)" in found.verdict


def test_no_price_helps_where_completions_are_no_more() -> None:
    found = cost.judge(setup_of(0.1), column(Column.NO_CACHE, 80), column(Column.SHARED, 80))
    assert found.pays is False
    assert "No price of the store changes that" in found.verdict


def test_nothing_is_said_where_there_is_nothing_to_compare() -> None:
    found = cost.judge(setup_of(0.1), column(Column.NO_CACHE, 0), column(Column.SHARED, 80))
    assert (found.pays, found.relative_cost) == (None, None)
    assert "not known" in found.verdict
    nothing = cost.judge(setup_of(0.1), column(Column.NO_CACHE, 10), column(Column.SHARED, 0))
    assert "does not pay" in nothing.verdict


def test_no_sentence_speaks_of_savings_or_throughput() -> None:
    for within in (0, 40, 80, 200):
        for extra in (0.0, 0.1, 5.0):
            verdict = cost.judge(setup_of(extra), column(Column.NO_CACHE, 80), column(Column.SHARED, within)).verdict
            assert not {"saving", "savings", "throughput"} & set(verdict.lower().split())


def test_the_grid_holds_every_pair() -> None:
    grid = cost.sensitivity((0.25,), (1.0, 2.0))
    assert [(cell.completions_ratio, cell.relative_cost) for cell in grid] == [(1.0, 1.25), (2.0, 0.625)]
