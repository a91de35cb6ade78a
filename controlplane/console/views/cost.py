"""What a month of a tenant's usage costs, by the deployment's price file (``saltern.billing.prices``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from controlplane.console.views import texts
from controlplane.console.views.charts import Chart, Slot, bar_chart
from controlplane.console.views.usage import Figure
from saltern.admin.v1.usage_pb2 import UsageRecord
from saltern.billing.prices import Prices

_MONTH: Final = re.compile(r"(20[0-9]{2})-(0[1-9]|1[0-2])", re.ASCII)
_MONTHS_SHOWN: Final = 13
_GIB_HOUR: Final = 2**30 * 3600


@dataclass(frozen=True, slots=True)
class Month:
    """A calendar month, UTC."""

    year: int
    month: int

    @property
    def name(self) -> str:
        """``2026-11``."""
        return f"{self.year}-{self.month:02}"

    @property
    def label(self) -> str:
        return f"{self.begin:%B %Y}"

    @property
    def begin(self) -> datetime:
        return datetime(self.year, self.month, 1, tzinfo=UTC)

    @property
    def end(self) -> datetime:
        """The first moment after it."""
        return self.later(1).begin

    def later(self, months: int) -> Month:
        index = self.year * 12 + self.month - 1 + months
        return Month(index // 12, index % 12 + 1)


def find_month(name: str | None, now: datetime) -> Month:
    """The month of that name; the present one for any other."""
    match = _MONTH.fullmatch(name or "")
    return Month(int(match[1]), int(match[2])) if match else Month(now.year, now.month)


def months_until(now: datetime) -> list[Month]:
    """The present month and a year before it, newest first: what a form offers."""
    present = Month(now.year, now.month)
    return [present.later(-number) for number in range(_MONTHS_SHOWN)]


@dataclass(frozen=True, slots=True)
class DayRow:
    day: str
    dram: str
    ssd: str
    moved: str
    cost: str
    saved: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class CostView:
    """``currency``: empty where the deployment has no prices; then amounts are empty too."""

    currency: str
    figures: tuple[Figure, ...]
    chart: Chart | None
    rows: tuple[DayRow, ...]


def cost_view(records: Sequence[UsageRecord], prices: Prices | None) -> CostView:
    """The days of a month, oldest first."""
    if prices is None:
        rows = tuple(_row(record, {}) for record in records)
        return CostView("", _volumes(records), None, rows)
    priced = [(record, prices.columns(record)) for record in records]
    total = sum((_amount(costs["cost"]) for _, costs in priced), Decimal(0))
    saved = sum((_amount(costs["tokens_saved_value"]) for _, costs in priced), Decimal(0))
    tokens = sum(record.tokens_saved for record in records)
    slots = [Slot(_day(record), (float(_amount(costs["cost"])),)) for record, costs in priced]
    figures = (
        Figure("Cost", _money(total, prices.currency), "storage and transfer"),
        Figure(
            "Worth of tokens saved",
            _money(saved, prices.currency) if prices.prefill_per_million_tokens is not None else texts.NOTHING,
            f"{texts.short_count(tokens)} tokens at the price of prefill",
        ),
        *_volumes(records),
    )
    chart = bar_chart(
        "cost", "Cost by day", slots, (prices.currency,), lambda value: f"{value:,.2f}", slot_word="Day (UTC)"
    )
    return CostView(prices.currency, figures, chart, tuple(_row(record, costs) for record, costs in priced))


def _volumes(records: Sequence[UsageRecord]) -> tuple[Figure, ...]:
    dram = sum(int(record.dram_byte_seconds or 0) for record in records)
    moved = sum(record.read_bytes + record.stored_bytes for record in records)
    return (
        Figure("Held in DRAM", f"{dram / _GIB_HOUR:,.0f}", "GiB times hours"),
        Figure("Moved", texts.size(moved), "read and stored"),
    )


def _row(record: UsageRecord, costs: dict[str, str]) -> DayRow:
    return DayRow(
        day=_day(record),
        dram=f"{int(record.dram_byte_seconds or 0) / _GIB_HOUR:,.2f}",
        ssd=f"{int(record.ssd_byte_seconds or 0) / _GIB_HOUR:,.2f}",
        moved=texts.size(record.read_bytes + record.stored_bytes),
        cost=_two_digits(costs.get("cost", "")),
        saved=_two_digits(costs.get("tokens_saved_value", "")),
        is_open=record.is_open,
    )


def _day(record: UsageRecord) -> str:
    return f"{datetime.fromtimestamp(record.start_time.seconds, UTC):%b %-d}"


def _amount(text: str) -> Decimal:
    return Decimal(text or 0)


def _two_digits(text: str) -> str:
    return f"{Decimal(text):,.2f}" if text else ""


def _money(amount: Decimal, currency: str) -> str:
    return f"{amount:,.2f} {currency}"
