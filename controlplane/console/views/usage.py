"""What a tenant holds against its quota, and what the cache did for it over a period."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Final

from controlplane.console.views import texts
from controlplane.console.views.charts import Chart, Slot, bar_chart, ratio_chart
from saltern.admin.v1.quotas_pb2 import Tier
from saltern.admin.v1.usage_pb2 import ListUsageRecordsRequest, SsdActivity, TierUsage, Usage, UsageRecord
from saltern.hit_rate import wanted_in

_METER_WIDTH: Final = 1000
#: Above so much of the limit a tier is shown as nearly full: the node's soft mark.
_NEAR_FULL: Final = 0.9
_SERIES_MAX: Final = 5
_OTHERS: Final = "other"

#: Why entries left, and what to do where it is too many of them.
CAUSES: Final[Mapping[str, tuple[str, str]]] = {
    "soft-mark": ("Making room ahead", "Written past 90 % of the limit; the coldest entries leave in the background."),
    "own-limit": ("At the own limit", "A put met the limit. A larger quota, or fewer one-off writes, keeps more."),
    "own-put": ("Pool full, own put", "The node was full and took an own entry. A larger reservation protects more."),
    "neighbour": ("Another tenant's put", "Held past the reservation, and another tenant needed the room."),
    "quota": ("Quota lowered", "The limit was set below use."),
    "namespace-limit": ("At a namespace's limit", "A namespace met the limit that it has of its own."),
}


@dataclass(frozen=True, slots=True)
class Period:
    """What a chart covers: ``slots`` hours or days, the present one last."""

    name: str
    label: str
    granularity: ListUsageRecordsRequest.Granularity.ValueType
    slot: timedelta
    slots: int
    slot_word: str

    def begin(self, now: datetime) -> datetime:
        """Start of the first slot."""
        return self._present(now) - self.slot * (self.slots - 1)

    def starts(self, now: datetime) -> list[datetime]:
        return [self.begin(now) + self.slot * index for index in range(self.slots)]

    def label_of(self, start: datetime) -> str:
        return f"{start:%b %-d}" if self.slot >= timedelta(days=1) else f"{start:%b %-d, %H:%M}"

    def _present(self, now: datetime) -> datetime:
        slot_s = int(self.slot.total_seconds())
        return datetime.fromtimestamp(int(now.timestamp()) // slot_s * slot_s, UTC)


_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)
PERIODS: Final = (
    Period("24h", "24 hours", ListUsageRecordsRequest.GRANULARITY_HOUR, _HOUR, 24, "Hour (UTC)"),
    Period("7d", "7 days", ListUsageRecordsRequest.GRANULARITY_HOUR, _HOUR, 168, "Hour (UTC)"),
    Period("31d", "31 days", ListUsageRecordsRequest.GRANULARITY_DAY, _DAY, 31, "Day (UTC)"),
)


def find_period(name: str | None) -> Period:
    """The period of that name; the first one for any other."""
    return next((period for period in PERIODS if period.name == name), PERIODS[0])


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier's meter; widths are of 1000. ``state``: ok, near or over."""

    name: str
    used: str
    limit: str
    reserved: str
    share: str
    entries: str
    lent: str
    borrowed: str
    used_width: float
    reserved_at: float
    state: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A headline: what it is, its number, and a word beside it."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class ReasonRow:
    """How often something happened, by why; ``help``: what that means."""

    name: str
    label: str
    help: str
    count: str
    size: str


@dataclass(frozen=True, slots=True)
class UsageView:
    tiers: tuple[TierView, ...]
    figures: tuple[Figure, ...]
    charts: tuple[Chart, ...]
    evictions: tuple[ReasonRow, ...]
    refusals: tuple[ReasonRow, ...]
    ssd: tuple[tuple[str, str], ...]
    reported: str
    is_silent: bool


def usage_view(usage: Usage, records: Sequence[UsageRecord], period: Period, now: datetime) -> UsageView:
    """The overview of a tenant; ``records``: of ``period``, in any order."""
    by_start = {record.start_time.seconds: record for record in records}
    found = [by_start.get(int(start.timestamp())) for start in period.starts(now)]
    reported = texts.to_datetime(usage.report_time)
    return UsageView(
        tiers=tuple(map(_tier, (tier for tier in usage.tiers if tier.limit_bytes or tier.used_bytes))),
        figures=_figures(records, period),
        charts=_charts(found, period, now),
        evictions=_eviction_rows(usage),
        refusals=tuple(
            ReasonRow(reason, reason, "", texts.count(number), "")
            for reason, number in _by_count(usage.refused_by_reason)
        ),
        ssd=_ssd_rows(usage.ssd) if usage.HasField("ssd") else (),
        reported=texts.ago(reported, now),
        is_silent=reported is None,
    )


def _tier(tier: TierUsage) -> TierView:
    whole = max(tier.limit_bytes, tier.used_bytes, 1)
    share = tier.used_bytes / tier.limit_bytes if tier.limit_bytes else inf
    return TierView(
        name=texts.enum_word(Tier, tier.tier, "TIER_").upper(),
        used=texts.size(tier.used_bytes),
        limit=texts.size(tier.limit_bytes),
        reserved=texts.size(tier.reserved_bytes),
        share=texts.ratio(tier.used_bytes, tier.limit_bytes),
        entries=texts.count(tier.entries),
        lent=texts.size(tier.lent_bytes),
        borrowed=texts.size(tier.borrowed_bytes),
        used_width=round(_METER_WIDTH * tier.used_bytes / whole, 1),
        reserved_at=round(_METER_WIDTH * tier.reserved_bytes / whole, 1),
        state="over" if share > 1 else "near" if share > _NEAR_FULL else "ok",
    )


def _figures(records: Sequence[UsageRecord], period: Period) -> tuple[Figure, ...]:
    hits = sum(record.hits for record in records)
    causes: Counter[str] = Counter()
    for record in records:
        causes.update(record.evictions_by_cause)
    refused = sum(record.puts_refused for record in records)
    stored = sum(record.puts_stored for record in records)
    neighbours = causes["neighbour"]
    within = f"in {period.label}"
    return (
        Figure("Hit rate", texts.ratio(hits, wanted_in(records)), f"{texts.short_count(hits)} hits {within}"),
        Figure(
            "Tokens saved",
            texts.short_count(sum(record.tokens_saved for record in records)),
            within,
        ),
        Figure(
            "Evicted",
            texts.short_count(sum(record.evictions for record in records)),
            f"{texts.short_count(neighbours)} of them for other tenants",
        ),
        Figure("Puts refused", texts.short_count(refused), f"of {texts.short_count(refused + stored)} puts"),
    )


def _charts(found: Sequence[UsageRecord | None], period: Period, now: datetime) -> tuple[Chart, ...]:
    labels = [period.label_of(start) for start in period.starts(now)]

    def slots(values: Sequence[tuple[int | float | None, ...]]) -> list[Slot]:
        return [Slot(label, of_slot) for label, of_slot in zip(labels, values, strict=True)]

    causes = _names(record.evictions_by_cause for record in found if record is not None)
    reasons = _names(record.puts_refused_by_reason for record in found if record is not None)
    word = period.slot_word
    return (
        ratio_chart(
            "hit-rate", "Hit rate", slots([(_hit_rate(record),) for record in found]), slot_word=word, series="Hit rate"
        ),
        bar_chart(
            "tokens-saved",
            "Tokens saved",
            slots([(None if record is None else record.tokens_saved,) for record in found]),
            ("Tokens",),
            lambda value: texts.short_count(int(value)),
            slot_word=word,
        ),
        bar_chart(
            "evictions",
            "Evictions by cause",
            slots([_parts(record and record.evictions_by_cause, causes) for record in found]),
            tuple(CAUSES[cause][0] if cause in CAUSES else cause for cause in causes),
            lambda value: texts.short_count(int(value)),
            slot_word=word,
        ),
        bar_chart(
            "refusals",
            "Puts refused by reason",
            slots([_parts(record and record.puts_refused_by_reason, reasons) for record in found]),
            tuple(reasons),
            lambda value: texts.short_count(int(value)),
            slot_word=word,
        ),
    )


def _hit_rate(record: UsageRecord | None) -> float | None:
    if record is None:
        return None
    wanted = wanted_in([record])
    return record.hits / wanted if wanted else None


def _names(counts: object) -> list[str]:
    """The most frequent names, and one for all others where there are more."""
    total: Counter[str] = Counter()
    for of_slot in counts:  # type: ignore[attr-defined]  # maps of messages
        total.update(of_slot)
    ranked = sorted((name for name in total if total[name]), key=lambda name: (-total[name], name))
    return ranked if len(ranked) <= _SERIES_MAX else [*ranked[: _SERIES_MAX - 1], _OTHERS]


def _parts(counts: Mapping[str, int] | None, names: Sequence[str]) -> tuple[int | None, ...]:
    if counts is None:
        return (None,) * len(names)
    named = [counts.get(name, 0) for name in names]
    if names and names[-1] == _OTHERS:
        named[-1] = sum(counts.values()) - sum(named[:-1])
    return tuple(named)


def _eviction_rows(usage: Usage) -> tuple[ReasonRow, ...]:
    return tuple(
        ReasonRow(
            cause,
            *CAUSES.get(cause, (cause, "")),
            texts.count(number),
            texts.size(usage.evicted_bytes_by_cause.get(cause, 0)),
        )
        for cause, number in _by_count(usage.evictions_by_cause)
    )


def _ssd_rows(ssd: SsdActivity) -> tuple[tuple[str, str], ...]:
    return (
        ("Read back", f"{texts.count(ssd.reads)} entries, {texts.size(ssd.read_bytes)}"),
        ("Not readable (each was a miss)", texts.count(ssd.read_failures)),
        ("Demoted from DRAM", f"{texts.count(ssd.demotions)} entries, {texts.size(ssd.demoted_bytes)}"),
        ("Not demoted", texts.count(ssd.demotions_dropped)),
        ("Evicted from SSD", texts.count(ssd.evictions)),
        ("Written to the device", texts.size(ssd.written_bytes)),
    )


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, number) for name, number in counts.items() if number), key=lambda item: (-item[1], item[0]))
