"""What a completion costs, and where caching stops to pay: rules without I/O, each with its formula.

``relative cost = (1 + extra cost) / (ratio of completions)``: of completions that met the target, beside engines
without a cache. The store, its network and its operation are in the numerator; requests that came late are in neither
part. A time to first token is no throughput: a ratio of such times is never used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from saltern.replay.prefill import TimeModel, prefill_flops
from saltern.replay.profiles import HardwareProfile, ModelProfile
from saltern.replay.results import BreakEven, Column, ColumnResult, CostResult, SensitivityCell
from saltern.replay.setup import ReplaySetup

_GIB: Final = 2**30
_HOUR_S: Final = 3600.0
#: The grid: factors on the extra cost, and ratios of completions around the one found.
EXTRA_COSTS: Final = (0.05, 0.10, 0.25, 0.50, 1.00)
COMPLETIONS_RATIOS: Final = (0.90, 1.00, 1.10, 1.25, 1.50, 2.00, 3.00)
#: The prefix for which break-even points are told, where the traffic gives none.
PREFIX_TOKENS: Final = 8192


def relative_cost(extra_cost: float, completions_ratio: float) -> float:
    """Cost of a completion over that without a cache: 1.25 / 2 = 0.625."""
    return (1 + extra_cost) / completions_ratio


def sensitivity(
    extra_costs: Iterable[float] = EXTRA_COSTS, completions_ratios: Sequence[float] = COMPLETIONS_RATIOS
) -> list[SensitivityCell]:
    """The relative cost of every pair, row by row."""
    return [
        SensitivityCell(extra_cost=extra, completions_ratio=ratio, relative_cost=relative_cost(extra, ratio))
        for extra in extra_costs
        for ratio in completions_ratios
    ]


# ---- what machines cost


def engines_usd_per_hour(setup: ReplaySetup) -> float:
    return setup.engines * setup.hardware.gpus * setup.hardware.gpu_usd_per_hour


def store_usd_per_hour(setup: ReplaySetup) -> float:
    """Memory, nodes and operation of the store; its network is paid for by the byte."""
    hardware = setup.hardware
    memory = setup.node_bytes / _GIB * hardware.dram_usd_per_gib_hour
    memory += setup.node_ssd_bytes / _GIB * hardware.ssd_usd_per_gib_hour
    return setup.nodes * (memory + hardware.node_usd_per_hour) + hardware.operations_usd_per_hour


def network_usd(setup: ReplaySetup, moved_bytes: float) -> float:
    return moved_bytes / _GIB * setup.hardware.network_usd_per_gib


def column_usd(setup: ReplaySetup, result: ColumnResult) -> float:
    """What all machines of a column cost over the recorded length of the traffic."""
    hours = result.recorded_s / _HOUR_S
    engines = engines_usd_per_hour(setup) * hours
    if result.column is Column.NO_CACHE:
        return engines
    return engines + store_usd_per_hour(setup) * hours + network_usd(setup, result.moved_bytes)


def extra_cost(setup: ReplaySetup, result: ColumnResult) -> float | None:
    """Of the store, as a share of what the engines cost; None where those cost nothing."""
    engines = engines_usd_per_hour(setup) * result.recorded_s / _HOUR_S
    return (column_usd(setup, result) - engines) / engines if engines else None


# ---- where it stops to pay


def break_even_bandwidth_bytes_per_s(model: ModelProfile, prefix_tokens: int, flops_per_s: float) -> float:
    """Below it, reading the cache of a prefix takes longer than computing the prefix.

    ``kv bytes(p) / (flops(p) / G)``: Mooncake (FAST'25, section 3) asks ``B / G > 2 d s / (gqa (a p d + b d^2))``,
    which is the same, with G the peak of all GPUs: 6 GB/s on 8 x A800 and 19 GB/s on 8 x H800 for LLaMA3-70B at 8,192
    tokens.
    """
    return prefix_tokens * model.kv_bytes_per_token * flops_per_s / prefill_flops(model, prefix_tokens)


def break_even_hold_s(
    model: ModelProfile, hardware: HardwareProfile, prefix_tokens: int, usd_per_byte_s: float
) -> float | None:
    """How long a prefix may be kept until its next use for less than engines cost that compute it instead of reading.

    None where memory costs nothing; 0 where reading takes as long as computing.
    """
    if not usd_per_byte_s:
        return None
    size_bytes = prefix_tokens * model.kv_bytes_per_token
    compute_s = TimeModel(model, hardware).prefill_s(prefix_tokens)
    saved_s = compute_s - 2 * hardware.latency_s - size_bytes / hardware.link_bytes_per_s
    engine_usd_per_s = hardware.gpus * hardware.gpu_usd_per_hour / _HOUR_S
    return max(0.0, saved_s * engine_usd_per_s / (size_bytes * usd_per_byte_s))


def break_even_hit_rate(setup: ReplaySetup, without: ColumnResult, result: ColumnResult) -> float | None:
    """The hit rate at which the engine time that hits set free costs as much as the store.

    From the engine time that this column's hits did set free, beside the same requests ``without`` a cache, taken to
    be in proportion to the hit rate. It says that the time is free, not that somebody uses it. None where the columns
    served other requests, nothing was set free or engines cost nothing; above 1 it cannot pay.
    """
    is_comparable = without.complete and result.complete and without.requests == result.requests
    freed_s = without.prefill_s - result.prefill_s - result.transfer_s
    usd_per_engine_s = setup.hardware.gpus * setup.hardware.gpu_usd_per_hour / _HOUR_S
    if not is_comparable or freed_s <= 0 or not usd_per_engine_s or not result.hit_rate:
        return None
    hours = result.recorded_s / _HOUR_S
    store_usd = store_usd_per_hour(setup) * hours + network_usd(setup, result.moved_bytes)
    return result.hit_rate * store_usd / (freed_s * usd_per_engine_s)


def break_even(
    setup: ReplaySetup, without: ColumnResult, result: ColumnResult, prefix_tokens: int = PREFIX_TOKENS
) -> BreakEven:
    """All of it for one column."""
    model, hardware = setup.model, setup.hardware
    tiers = {"dram": hardware.dram_usd_per_byte_s, "ssd": hardware.ssd_usd_per_byte_s}
    holds = {
        tier: hold
        for tier, price in tiers.items()
        if (hold := break_even_hold_s(model, hardware, prefix_tokens, price)) is not None
    }
    return BreakEven(
        prefix_tokens=prefix_tokens,
        bandwidth_bytes_per_s=break_even_bandwidth_bytes_per_s(
            model, prefix_tokens, hardware.peak_flops_per_s * hardware.efficiency
        ),
        hold_s=holds,
        hit_rate=break_even_hit_rate(setup, without, result),
    )


# ---- the sentence


def judge(setup: ReplaySetup, without: ColumnResult, result: ColumnResult) -> CostResult:
    """Whether a column pays beside ``without``, the column without a cache of the same replay."""
    extra = extra_cost(setup, result)
    ratio = result.within_slo / without.within_slo if without.within_slo else None
    relative = None if extra is None or not ratio else relative_cost(extra, ratio)
    return CostResult(
        column=result.column,
        extra_cost=extra or 0.0,
        completions_ratio=ratio,
        relative_cost=relative,
        pays=None if relative is None else relative < 1,
        verdict=_verdict(setup, without, result, extra, ratio),
        sensitivity=sensitivity(),
        break_even=break_even(setup, without, result),
    )


def _verdict(
    setup: ReplaySetup, without: ColumnResult, result: ColumnResult, extra: float | None, ratio: float | None
) -> str:
    name = f"{result.column} beside no-cache"
    if extra is None:
        return f"{name}: not known, engines have no price in profile {setup.hardware.name or 'of the setup'!r}"
    if ratio is None:
        return (
            f"{name}: not known, since without a cache no request met the target ({result.within_slo:,} of "
            f"{result.requests:,} did with it); choose a looser target or more engines, so that both sides have some"
        )
    if not ratio:
        return (
            f"{name}: does not pay: no request met the target with the cache, and {without.within_slo:,} did without; "
            "no price changes that"
        )
    relative = relative_cost(extra, ratio)
    said = (
        f"a completion within the target costs {relative:.1%} of one without: (1 + {extra:.3f}) / {ratio:.3f}, from "
        f"{result.within_slo:,} and {without.within_slo:,} completions"
    )
    if relative < 1:
        factor = f"{(ratio - 1) / extra:.2g} times what is assumed" if extra else "anything at all"
        return (
            f"{name}: pays: {said}. It flips if the store costs more than {factor} ({ratio - 1:.1%} of the engines), "
            f"or if completions within the target fall below {1 + extra:.3f} times those without"
        )
    if ratio > 1:
        return (
            f"{name}: does not pay: {said}. It flips if the store costs less than {(ratio - 1) / extra:.2g} times what "
            f"is assumed ({ratio - 1:.1%} of the engines)"
        )
    return (
        f"{name}: does not pay: {said}. No price of the store changes that: it flips only if more than {1 + extra:.3f} "
        f"times as many requests meet the target, which needs more load, a tighter target, or more hits"
    )
