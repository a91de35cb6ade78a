"""``saltern usage`` as tables: what is held on each tier, what the cache did, and for one tenant why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from saltern.cli.charts import sparkline
from saltern.cli.failure import say
from saltern.cli.render import Table, bar, enum_word, local_time, ratio_text
from saltern.cli.settings import Settings
from saltern.hit_rate import wanted_in, wanted_so_far
from saltern.sizes import format_size

if TYPE_CHECKING:
    from saltern.admin.v1.usage_pb2 import Usage, UsageRecord

#: Causes of evictions that the tenant's own puts and limit are behind.
_OWN: Final = ("own-limit", "own-put", "soft-mark", "namespace-limit")
_NEIGHBOUR: Final = "neighbour"
_QUOTA: Final = "quota"


def print_usages(settings: Settings, usages: list[Usage]) -> None:
    """Two tables, a row or more for each of ``usages``: by tier, and by what happened."""
    held = Table(
        "TENANT", "TIER", "USE", "USED", "RESERVED", "LIMIT", "LENT", "BORROWED", "ENTRIES",
        right=("USED", "RESERVED", "LIMIT", "LENT", "BORROWED", "ENTRIES"),
    )  # fmt: skip
    counts = ("HIT RATE", "GET", "PUT", "REFUSED", "EVICTED", "BY OWN", "BY NEIGHBOURS", "BY QUOTA", "TAKEN")
    happened = Table("TENANT", *counts, "REPORTED", right=counts)
    for item in usages:
        name = item.tenant.removeprefix("tenants/")
        for index, row in enumerate(_tier_rows(item)):
            held.add(name if index == 0 else " ", *row)
        causes = item.evictions_by_cause
        happened.add(
            name,
            ratio_text(item.get_hits, wanted_so_far(item)),
            format_size(item.get_bytes),
            format_size(item.put_bytes),
            item.puts_refused,
            item.evictions,
            sum(causes.get(cause, 0) for cause in _OWN),
            causes.get(_NEIGHBOUR, 0),
            causes.get(_QUOTA, 0),
            item.taken_entries,
            local_time(item.report_time) or "never",
        )
    held.print(settings)
    if usages:
        say()
        happened.print(settings)


def print_day(hours: Sequence[UsageRecord | None]) -> None:
    """The last 24 hours as lines of small bars, the present hour last; nothing where nothing was used."""
    found = [record for record in hours if record is not None]
    if not found:
        return
    hits = sum(record.hits for record in found)
    tokens = [None if record is None else record.tokens_saved for record in hours]
    rates = [record and _rate(record) for record in hours]
    held = [None if record is None else int(record.dram_byte_seconds or 0) / 3600 for record in hours]
    refused = [None if record is None else record.puts_refused for record in hours]
    lines = (
        ("tokens saved", sparkline(tokens), f"{sum(record.tokens_saved for record in found):,} in 24 h"),
        ("hit rate", sparkline(rates, top=1.0), f"{ratio_text(hits, wanted_in(found))} in 24 h"),
        (
            "held in DRAM",
            sparkline(held),
            f"{format_size(round(max(value or 0 for value in held)))} at most, hour's mean",
        ),
        ("puts refused", sparkline(refused), f"{sum(record.puts_refused for record in found):,} in 24 h"),
    )
    say()
    for name, bars, words in lines:
        say(f"{name:<12}  {bars}  {words}")


def _rate(record: UsageRecord) -> float | None:
    wanted = wanted_in([record])
    return record.hits / wanted if wanted else None


def print_reasons(settings: Settings, item: Usage) -> None:
    """One table of why: what left and by whom, what was refused, what SSD took; nothing where nothing happened."""
    table = Table("WHAT", "WHY", "COUNT", "BYTES", right=("COUNT", "BYTES"))
    rows = list(_reason_rows(item))
    for row in rows:
        table.add(*row)
    if rows:
        say()
        table.print(settings)


def _tier_rows(item: Usage) -> Iterator[tuple[object, ...]]:
    from saltern.admin.v1.quotas_pb2 import Tier

    shown = [tier for tier in item.tiers if tier.limit_bytes or tier.used_bytes]
    for tier in shown:
        yield (
            enum_word(Tier, tier.tier, "TIER_"),
            bar(tier.used_bytes, tier.limit_bytes, tier.reserved_bytes),
            format_size(tier.used_bytes),
            format_size(tier.reserved_bytes),
            format_size(tier.limit_bytes),
            format_size(tier.lent_bytes),
            format_size(tier.borrowed_bytes),
            tier.entries,
        )
    if not shown:
        yield ("", "no quota", "", "", "", "", "", "")


def _reason_rows(item: Usage) -> Iterator[tuple[object, ...]]:
    for cause, count in _largest_first(item.evictions_by_cause):
        yield "evicted", cause, count, format_size(item.evicted_bytes_by_cause.get(cause, 0))
    if item.taken_entries:
        yield "taken from others", "", item.taken_entries, format_size(item.taken_bytes)
    for reason, count in _largest_first(item.refused_by_reason):
        yield "put refused", reason, count, ""
    ssd = item.ssd
    if ssd.reads:
        yield "read from SSD", "", ssd.reads, format_size(ssd.read_bytes)
    if ssd.read_failures:
        yield "not readable on SSD", "", ssd.read_failures, ""
    if ssd.demotions:
        yield "demoted to SSD", "", ssd.demotions, format_size(ssd.demoted_bytes)
    for reason, count in _largest_first(item.demotions_dropped_by_reason):
        yield "not demoted", reason, count, ""
    if ssd.relocations:
        yield "kept in a reclaim", "", ssd.relocations, ""
    if ssd.evictions:
        yield "evicted from SSD", "", ssd.evictions, ""
    if ssd.lost:
        yield "lost on SSD", "", ssd.lost, ""
    if ssd.written_bytes:
        yield "written to SSD", "", "", format_size(ssd.written_bytes)


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Names that happened, the most frequent first; ties by name, so that two runs print the same."""
    return sorted(((name, count) for name, count in counts.items() if count), key=lambda item: (-item[1], item[0]))
