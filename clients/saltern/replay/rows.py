"""A report as rows: the same ones for the terminal, CSV and HTML, each with what it is and how to read it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from saltern.replay.measures import Measures
from saltern.replay.results import Column, ColumnResult, ReplayReport, SsdResult, TenantResult
from saltern.spreadsheets import text_cell

Value = float | int | None


class Unit(StrEnum):
    COUNT = "count"
    RATE = "rate"
    SECONDS = "seconds"
    BYTES = "bytes"
    PER_S = "per second"
    USD = "USD"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every column.

    Attributes:
        key: its name in CSV.
        label: its name for people.
        value: of one column; None where it is not known.
    """

    key: str
    label: str
    unit: Unit
    value: Callable[[ColumnResult], Value]


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One figure of every tenant in one column."""

    key: str
    label: str
    unit: Unit
    value: Callable[[TenantResult], Value]


def _cached(value: Callable[[ColumnResult], Value]) -> Callable[[ColumnResult], Value]:
    """What has no meaning without a cache is not known there."""
    return lambda result: None if result.column is Column.NO_CACHE else value(result)


ROWS: Final = (
    Row("completions", "completions", Unit.COUNT, lambda r: r.requests),
    Row("shed", "turned away (queue full)", Unit.COUNT, lambda r: r.shed),
    Row("within_slo", "completions within target", Unit.COUNT, lambda r: r.within_slo),
    Row("goodput_per_s", "goodput, within target", Unit.PER_S, lambda r: r.goodput_per_s),
    Row("prompt_tokens", "prompt tokens", Unit.COUNT, lambda r: r.prompt_tokens),
    Row("hit_tokens", "prefill tokens skipped", Unit.COUNT, _cached(lambda r: r.hit_tokens)),
    Row("engine_hit_tokens", "skipped by engines' own cache", Unit.COUNT, lambda r: r.engine_hit_tokens),
    Row("hit_rate", "hit rate", Unit.RATE, _cached(lambda r: r.hit_rate)),
    Row("share_of_infinite", "  share of an infinite cache's", Unit.RATE, lambda r: r.share_of_infinite),
    Row("share_of_opt", "  share of OPT's", Unit.RATE, lambda r: r.share_of_opt),
    Row("ttft_p50_s", "TTFT p50", Unit.SECONDS, lambda r: r.ttft.p50_s),
    Row("ttft_p95_s", "TTFT p95", Unit.SECONDS, lambda r: r.ttft.p95_s),
    Row("ttft_p99_s", "TTFT p99", Unit.SECONDS, lambda r: r.ttft.p99_s),
    Row("end_to_end_p50_s", "end to end p50", Unit.SECONDS, lambda r: r.end_to_end.p50_s),
    Row("end_to_end_p95_s", "end to end p95", Unit.SECONDS, lambda r: r.end_to_end.p95_s),
    Row("end_to_end_p99_s", "end to end p99", Unit.SECONDS, lambda r: r.end_to_end.p99_s),
    Row("queue_s", "waiting for an engine, mean", Unit.SECONDS, lambda r: _mean(r.queue_s, r)),
    Row("transfer_s", "transfer, mean", Unit.SECONDS, _cached(lambda r: _mean(r.transfer_s, r))),
    Row("prefill_s", "prefill, mean", Unit.SECONDS, lambda r: _mean(r.prefill_s, r)),
    Row("read_bytes", "read from nodes", Unit.BYTES, _cached(lambda r: r.read_bytes)),
    Row("written_bytes", "written to nodes", Unit.BYTES, _cached(lambda r: r.written_bytes)),
    Row("read_s", "  time of reads", Unit.SECONDS, _cached(lambda r: r.read_s)),
    Row("written_s", "  time of writes", Unit.SECONDS, _cached(lambda r: r.written_s)),
    Row("evictions", "evictions", Unit.COUNT, _cached(lambda r: sum(r.evictions_by_cause.values()))),
    Row("min_rho", "least rho of a tenant", Unit.RATIO, lambda r: r.min_rho),
    Row("cost_per_completion_usd", "cost per completion in target", Unit.USD, lambda r: r.cost_per_completion_usd),
    Row("relative_cost", "  beside no-cache", Unit.RATIO, lambda r: r.relative_cost),
)


def _of_ssd(value: Callable[[SsdResult], Value]) -> Callable[[ColumnResult], Value]:
    return lambda result: None if result.ssd is None else value(result.ssd)


#: Where nodes have an SSD tier.
SSD_ROWS: Final = (
    Row("ssd_hit_tokens", "prefill tokens skipped, from SSD", Unit.COUNT, _of_ssd(lambda s: s.hit_tokens)),
    Row("ssd_read_bytes", "read from SSD", Unit.BYTES, _of_ssd(lambda s: s.read_bytes)),
    Row("ssd_written_bytes", "written to SSD", Unit.BYTES, _of_ssd(lambda s: s.written_bytes)),
    Row("ssd_read_s", "  devices busy with reads", Unit.SECONDS, _of_ssd(lambda s: s.read_s)),
    Row("ssd_written_s", "  devices busy with writes", Unit.SECONDS, _of_ssd(lambda s: s.written_s)),
    Row("ssd_dropped", "  not taken by SSD", Unit.COUNT, _of_ssd(lambda s: s.dropped)),
    Row("ssd_evictions", "  evicted from SSD", Unit.COUNT, _of_ssd(lambda s: s.evictions)),
    Row("ssd_resident_bytes", "  on SSD at the end", Unit.BYTES, _of_ssd(lambda s: s.resident_bytes)),
)


def _measured(value: Callable[[ColumnResult, Measures], Value]) -> Callable[[ColumnResult], Value]:
    return lambda result: None if result.measures is None else value(result, result.measures)


#: Where real nodes served.
MEASURED_ROWS: Final = (
    Row("wall_s", "measuring took", Unit.SECONDS, _measured(lambda _, m: m.wall_s)),
    Row("driver_cpu_s", "CPU of the driver", Unit.SECONDS, _measured(lambda r, _: r.driver_cpu_s)),
    Row("node_cpu_s", "CPU of the nodes", Unit.SECONDS, _cached(_measured(lambda _, m: m.node_cpu_s))),
    Row("driver_share", "  driver's share", Unit.RATE, _cached(_measured(lambda r, m: m.driver_share(r.driver_cpu_s)))),
    Row("driver_busy", "  driver on a CPU", Unit.RATE, _measured(lambda r, m: m.driver_busy(r.driver_cpu_s))),
    Row(
        "failed_blocks",
        "blocks without an answer",
        Unit.COUNT,
        _cached(_measured(lambda _, m: m.failed_blocks)),
    ),
    Row("wrong_blocks", "blocks with wrong bytes", Unit.COUNT, _cached(_measured(lambda _, m: m.wrong_blocks))),
    Row("unfinished_calls", "calls not finished", Unit.COUNT, _cached(_measured(lambda _, m: m.unfinished_calls))),
    Row("restart_s", "restart took", Unit.SECONDS, _measured(lambda _, m: m.restart_s)),
    Row("detection_s", "loss found out after", Unit.SECONDS, _measured(lambda _, m: m.detection_s)),
)

TENANT_ROWS: Final = (
    TenantRow("requests", "requests", Unit.COUNT, lambda t: t.requests),
    TenantRow("prompt_tokens", "prompt tokens", Unit.COUNT, lambda t: t.prompt_tokens),
    TenantRow("hit_rate", "hit rate", Unit.RATE, lambda t: t.hit_rate),
    TenantRow("alone_hit_rate", "alone", Unit.RATE, lambda t: t.alone_hit_rate),
    TenantRow("rho", "rho", Unit.RATIO, lambda t: t.rho),
    TenantRow("slowdown", "slowdown", Unit.RATIO, lambda t: t.slowdown),
    TenantRow("occupancy_share", "share of memory", Unit.RATE, lambda t: t.occupancy_share),
    TenantRow("ttft_p95_s", "TTFT p95", Unit.SECONDS, lambda t: t.ttft.p95_s),
    TenantRow("within_slo", "within target", Unit.COUNT, lambda t: t.within_slo),
)


def _mean(total_s: float, result: ColumnResult) -> float | None:
    return total_s / result.requests if result.requests else None


def eviction_rows(*reports: ReplayReport) -> list[Row]:
    """Evictions by cause, for the causes that there were."""
    causes = sorted({cause for report in reports for result in report.columns for cause in result.evictions_by_cause})
    return [
        Row(f"evictions_{cause}", f"  {cause}", Unit.COUNT, _cached(partial(_evicted_for, cause))) for cause in causes
    ]


def _evicted_for(cause: str, result: ColumnResult) -> int:
    return result.evictions_by_cause.get(cause, 0)


def all_rows(*reports: ReplayReport) -> list[Row]:
    """The rows of a report, or of several beside each other: the causes of evictions stand below their sum."""
    at = next(number for number, row in enumerate(ROWS) if row.key == "evictions") + 1
    has_ssd = any(result.ssd is not None for report in reports for result in report.columns)
    is_measured = any(result.measures is not None for report in reports for result in report.columns)
    return [
        *ROWS[:at],
        *eviction_rows(*reports),
        *(SSD_ROWS if has_ssd else ()),
        *ROWS[at:],
        *(MEASURED_ROWS if is_measured else ()),
    ]


def cell(value: Value, unit: Unit) -> str:
    """A figure for people; what is not known is a dash, and never a zero."""
    if value is None:
        return "-"
    match unit:
        case Unit.COUNT:
            return f"{value:,.0f}"
        case Unit.RATE:
            return f"{value:.4f}"
        case Unit.SECONDS:
            return f"{value:,.3f} s" if value < 1000 else f"{value:,.0f} s"
        case Unit.BYTES:
            return _size(float(value))
        case Unit.USD:
            return f"{value:.5f} USD"
        case Unit.PER_S | Unit.RATIO:
            return f"{value:.3f}"


def change_cell(value: Value, unit: Unit) -> str:
    """A difference of two figures, with its sign."""
    if value is None:
        return "-"
    return "0" if not value else f"{'+' if value > 0 else '-'}{cell(abs(value), unit)}"


def percent_cell(relative: float | None) -> str:
    """A change as a share of what it was, with its sign."""
    if relative is None:
        return "-"
    return f"{relative:+.1%}" if relative else "0"


def _size(value: float) -> str:
    for name in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {name}"
        value /= 1000
    return f"{value:,.3g} PB"


def to_csv(report: ReplayReport) -> str:
    """One line for each figure: engine, column, tenant (empty for all), what it is, unit, value (empty: not known)."""
    text = io.StringIO(newline="")
    lines = csv.writer(text)  # RFC 4180: with its line end, CR and LF in names are quoted too
    lines.writerow(["engine", "trace_sha256", "column", "complete", "tenant", "figure", "unit", "value"])
    for result in report.columns:
        head = [str(report.engine), report.trace.sha256, str(result.column), str(result.complete).lower()]
        for tenant, figure, unit, value in _figures(report, result):
            lines.writerow([*head, text_cell(tenant), figure, str(unit), "" if value is None else value])
    return text.getvalue()


def _figures(report: ReplayReport, result: ColumnResult) -> Iterator[tuple[str, str, Unit, Value]]:
    for row in all_rows(report):
        yield "", row.key, row.unit, row.value(result)
    for name, tenant in result.tenants.items():
        for tenant_row in TENANT_ROWS:
            yield name, tenant_row.key, tenant_row.unit, tenant_row.value(tenant)
        for taker, count in tenant.evicted_by.items():
            yield name, f"evicted_by:{taker}", Unit.COUNT, count
